"""Prepared rows: each comes once, on one rank, in every epoch and after every resumption; damage is found and named."""

from __future__ import annotations

import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from prepared_folder import write_folder
from torch.utils.data import SequentialSampler

from lightning_recsys.data import BatchLoader, PreparedDataModule
from lightning_recsys.data.prepared import Manifest
from lightning_recsys.data.prepared.stream import StreamRequest, prefetched, read_packs

UNEVEN = [5, 1, 17, 2, 30, 9]  # rows of the shards, 64 in all


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "rows", train=UNEVEN, validation=(3, 8))


def module(folder, **options) -> PreparedDataModule:
    data = PreparedDataModule(root=folder, **{"batch_size": 4, "shuffle_window": 20, **options})
    data.setup()
    return data


def loaders(folder, *, world_size: int = 1, **options) -> list[BatchLoader]:
    """A loader for each rank, as each rank's process would make it."""
    made = []
    for rank in range(world_size):
        data = module(folder, **options)
        source = data._source("train", "rows")
        options_of_all = {"batch_size": data.batch_size, "seed": data.seed, "drop_last": data.drop_last}
        shuffle = "rows" if data.shuffle_window else None
        made.append(BatchLoader(source, shuffle=shuffle, rank=rank, world_size=world_size, **options_of_all))
    return made


def numbers(batch) -> list[int]:
    return batch.sparse.values[: len(batch)].tolist()


def epoch_of(ranks: list[BatchLoader]) -> list[list[list[int]]]:
    """For each step, the rows of each rank."""
    steps = [[numbers(batch) for batch in step] for step in zip(*ranks, strict=True)]
    assert all(len(loader) >= len(steps) for loader in ranks)
    return steps


def flat(steps) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(steps)))


def test_batch_when_read_then_every_column_is_the_row_s_own(folder):
    data = module(folder)
    assert (data.num_dense, data.fields) == (2, {"row": 1_000_000, "small": 7})
    for batch in data.train_dataloader():
        row, small = batch.sparse.values.view(2, -1)
        assert batch.sparse.values.dtype == torch.int64
        assert batch.sparse.is_single_hot
        assert batch.dense.tolist() == [[n, -n] for n in row.tolist()]
        assert batch.labels.tolist() == (row % 2).tolist()
        assert small.tolist() == (row % 7).tolist()


@pytest.mark.parametrize("bags", [False, True])
def test_small_batches_when_read_in_packs_then_are_those_read_one_by_one(tmp_path, monkeypatch, bags):
    rows = module(write_folder(tmp_path, train=[100] * 5, bags=bags)).rows("train")
    request = StreamRequest(3, rank=1, world_size=2, window=150)
    packs = list(read_packs(request, rows))
    monkeypatch.setattr("lightning_recsys.data.prepared.stream._PACK_ROWS", 1)
    alone = list(read_packs(request, rows))
    assert max(map(len, packs)) > 20
    assert max(map(len, alone)) == 1
    for batch, (same,) in zip(chain.from_iterable(packs), alone, strict=True):
        assert torch.equal(batch.sparse.values, same.sparse.values)
        assert torch.equal(batch.dense, same.dense)
        assert torch.equal(batch.labels, same.labels)
        assert batch.sparse.values.is_contiguous()
        assert batch.dense.is_contiguous()


def test_batch_when_features_are_bags_then_ids_lengths_and_weights_belong_to_the_row(tmp_path):
    data = module(write_folder(tmp_path, train=UNEVEN, bags=True), shuffle_window=10, batch_size=7)
    seen = []
    for batch in data.train_dataloader():
        row, small, tags = batch.sparse.bag_lengths().view(3, -1).tolist()
        assert set(row) == set(small) == {1}
        parts = batch.sparse.values.split([len(batch), len(batch), sum(tags)])
        weights = batch.sparse.weights.split([2 * len(batch), sum(tags)])
        assert tags == [n % 4 for n in parts[0].tolist()]
        expected = torch.repeat_interleave(parts[0], parts[0] % 4)
        assert parts[2].tolist() == (expected % 50).tolist()
        assert weights[1].tolist() == expected.tolist()
        assert weights[0].tolist() == [1.0] * 2 * len(batch)
        seen += parts[0].tolist()
    assert sorted(seen) == list(range(64))


@pytest.mark.parametrize("window", [0, 1, 20, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 100])
def test_epoch_when_ranks_share_uneven_shards_then_each_row_comes_once_and_counts_agree(
    folder, window, world_size, batch_size
):
    ranks = loaders(folder, world_size=world_size, shuffle_window=window, batch_size=batch_size)
    steps = epoch_of(ranks)
    assert len(steps) == len(ranks[0])
    assert sorted(flat(steps)) == list(range(64))
    assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)


def test_epoch_when_there_are_several_then_each_has_every_row_in_another_order_and_the_seed_decides(folder):
    def epochs(seed):
        (loader,) = loaders(folder, seed=seed)
        return [tuple(flat(epoch_of([loader]))) for _ in range(3)]

    first, again, other = epochs(0), epochs(0), epochs(1)
    assert first == again
    assert len({*first, *other, tuple(range(64))}) == 7


def test_order_when_ranks_and_batch_sizes_differ_then_is_the_same(folder):
    one = flat(epoch_of(loaders(folder, batch_size=8)))
    assert flat(epoch_of(loaders(folder, batch_size=4, world_size=2))) == one
    assert flat(epoch_of(loaders(folder, batch_size=100))) == one


def test_order_when_shuffled_then_windows_mix_shards_and_rows(tmp_path):
    order = flat(epoch_of(loaders(write_folder(tmp_path, train=[10] * 20), shuffle_window=50, batch_size=10)))
    for start in range(0, 200, 50):
        window = order[start : start + 50]
        shards = {row // 10 for row in window}
        assert len(shards) == 5  # whole row groups
        assert sorted(shards) != list(range(min(shards), min(shards) + 5))  # from all over the files
        assert sum(abs(a - b) == 1 for a, b in pairwise(window)) < 10


def test_order_when_not_shuffled_then_is_that_of_the_files(folder):
    (loader,) = loaders(folder, shuffle_window=0)
    assert flat(epoch_of([loader])) == flat(epoch_of([loader])) == list(range(64))
    assert isinstance(loader.sampler, SequentialSampler)
    (shuffled,) = loaders(folder)
    assert shuffled.sampler is shuffled


def test_row_groups_when_a_shard_has_several_then_all_rows_come(tmp_path):
    data = module(write_folder(tmp_path, train=[70_000, 10]), shuffle_window=30_000, batch_size=5000)
    assert data.rows("train").group_rows.tolist() == [32_768, 32_768, 4_464, 10]
    rows = np.concatenate([batch.sparse.values[: len(batch)].numpy() for batch in data.train_dataloader()])
    assert np.array_equal(np.sort(rows), np.arange(70_010))


def test_drop_last_when_rows_do_not_fill_a_step_then_they_are_left_out(folder):
    steps = epoch_of(loaders(folder, world_size=3, batch_size=5, drop_last=True))
    assert [len(rows) for step in steps for rows in step] == [5] * 12
    assert len(set(flat(steps))) == 60


@pytest.mark.parametrize(("before", "after"), [((1, 4), (1, 4)), ((1, 4), (2, 4)), ((2, 3), (1, 5)), ((3, 4), (2, 7))])
def test_resume_when_workers_and_batch_sizes_change_then_no_row_is_lost_or_seen_twice(folder, before, after):
    def make(shape):
        return loaders(folder, world_size=shape[0], batch_size=shape[1])

    order = [flat(epoch_of([loader])) for loader in make((1, 64)) for _ in range(2)]
    for stop in range(len(make(before)[0]) + 1):
        old, served = make(before), []
        iterators = [iter(loader) for loader in old]
        for _ in range(stop):
            served.append([numbers(next(iterator)) for iterator in iterators])
        states = [loader.state_dict() for loader in old]
        assert states == states[:1] * before[0]  # rank 0's serves for all
        new = make(after)
        for loader in new:
            loader.load_state_dict(states[0])
        assert new[0].state_dict()["row"] == len(flat(served))
        if stop < len(old[0]):
            rest = epoch_of(new)
            assert len(new[0]) != 0
            assert flat(served) + flat(rest) == order[0]
        assert flat(epoch_of(new)) == order[1]


def test_length_when_resumed_then_counts_the_batches_before(folder):
    (old,) = loaders(folder, batch_size=4)  # 16 batches
    iterator = iter(old)
    for _ in range(6):
        next(iterator)
    new = loaders(folder, batch_size=4, world_size=2)  # 8 batches
    new[0].load_state_dict(old.state_dict())
    assert len(new[0]) == 6 + 5
    new[0].set_epoch(0)
    assert len(new[0]) == 6 + 5
    new[0].set_epoch(1)
    assert len(new[0]) == 8


def test_resume_when_fewer_rows_are_left_than_ranks_then_raises(folder):
    (old,) = loaders(folder, batch_size=62)
    next(iter(old))
    new = loaders(folder, world_size=5)[0]
    new.load_state_dict(old.state_dict())
    with pytest.raises(ValueError, match=r"inside epoch 0 with 2 rows left, too few for 5 ranks.*at most 2 workers"):
        next(iter(new))


def test_resume_when_inside_an_epoch_of_another_order_then_raises(folder):
    (old,) = loaders(folder)
    next(iter(old))
    (new,) = loaders(folder, seed=1)
    new.load_state_dict(old.state_dict())
    with pytest.raises(ValueError, match=r"inside epoch 0, after row 4 .*'seed': 0.*'seed': 1.*Resume with the same"):
        next(iter(new))
    state = {**old.state_dict(), "finished": True}
    new.load_state_dict(state)  # at the end of an epoch the order does not matter
    assert len(flat(epoch_of([new]))) == 64


def test_set_epoch_when_it_is_the_next_then_order_is_that_epoch_s(folder):
    (free,), (told,) = loaders(folder), loaders(folder)
    epochs = [flat(epoch_of([free])) for _ in range(3)]
    told.set_epoch(2)
    assert flat(epoch_of([told])) == epochs[2]


def test_loader_when_there_are_too_few_rows_then_raises(folder):
    with pytest.raises(ValueError, match=r"64 rows are too few for 65 ranks: at least 65 are needed"):
        loaders(folder, world_size=65)
    with pytest.raises(ValueError, match=r"2 ranks with data.batch_size=40 and drop_last: at least 80"):
        loaders(folder, world_size=2, batch_size=40, drop_last=True)


def test_evaluation_when_iterated_then_rows_come_in_order_and_a_missing_split_is_empty(folder):
    data = module(folder)
    assert flat([[numbers(batch) for batch in data.val_dataloader()]]) == list(range(64, 75))
    assert data.test_dataloader() == []


def test_take_when_rows_are_named_then_those_come(folder):
    assert numbers(module(folder).rows("train").take(torch.tensor([63, 0, 5, 5, 6]))) == [63, 0, 5, 5, 6]


def test_module_when_pickled_then_reads_the_same(folder):
    data = module(folder)
    next(iter(data.train_dataloader()))
    copy = pickle.loads(pickle.dumps(data))
    assert flat(epoch_of([copy.train_dataloader()])) == flat(epoch_of([module(folder).train_dataloader()]))


# --- damage ----------------------------------------------------------------------------------------------------------


def test_shard_when_truncated_then_setup_names_it(folder):
    path = folder / "train/4.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} has \d+ bytes where \d+ were written"):
        module(folder)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is missing"):
        module(folder)


@pytest.mark.parametrize("place", ["page", "footer"])
def test_shard_when_a_bit_is_flipped_then_reading_names_it(folder, place):
    path = folder / "train/4.parquet"
    content = bytearray(path.read_bytes())
    position = content.index(np.float32(30).tobytes()) if place == "page" else len(content) - 200
    content[position] ^= 0xFF if place == "footer" else 1
    if place == "footer":
        content[-8:-4] = b"\xff\xff\xff\x7f"  # length of the footer
    path.write_bytes(content)
    data = module(folder)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is damaged: .*Prepare the rows again"):
        list(data.train_dataloader())


def test_shard_when_replaced_by_one_with_other_rows_then_reading_names_it(folder):
    path = folder / "train/4.parquet"
    other = folder / "train/2.parquet"
    manifest = Manifest.load(folder)
    size = other.stat().st_size
    path.write_bytes(other.read_bytes())
    text = (
        (folder / "manifest.json")
        .read_text()
        .replace(f'"bytes": {manifest.splits["train"][4].bytes}', f'"bytes": {size}')
    )
    (folder / "manifest.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"4.parquet is damaged: row group 0 has 17 rows where the manifest expects 30"
    ):
        list(module(folder).train_dataloader())


def test_folder_when_there_is_no_manifest_then_says_that_preparation_has_not_ended(tmp_path):
    with pytest.raises(ValueError, match=r"holds no manifest.json.*has not ended.*goes on where it was stopped"):
        module(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "does not describe prepared rows"),
        ('{"format": "lightning_recsys.prepared", "format_version": 99}', "format version 99.*reads up to 1"),
    ],
)
def test_manifest_when_unreadable_then_says_why(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"data.batch_size must be at least 1, got 0"),
        ({"shuffle_window": -1}, r"data.shuffle_window must be at least 0, got -1"),
        ({"prefetch_batches": 0}, r"data.prefetch_batches must be at least 1, got 0"),
        ({"reader": "magic"}, r"data.reader must be local or shared, got 'magic'"),
    ],
)
def test_module_when_an_option_is_out_of_range_then_raises(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        PreparedDataModule(root=tmp_path, **options)


# --- the background thread: tests/conftest.py fails whatever leaves one behind ----------------------------------------


def test_prefetching_when_abandoned_then_the_thread_ends():
    made = []

    def endless():
        while True:
            made.append(len(made))
            yield len(made)

    iterator = prefetched(endless(), depth=3)
    assert [next(iterator), next(iterator)] == [1, 2]
    iterator.close()
    assert 2 <= len(made) <= 7


def test_prefetching_when_the_source_fails_then_its_error_comes_after_the_items():
    def failing():
        yield 1
        raise OSError("disk")

    iterator = prefetched(failing(), depth=5)
    assert next(iterator) == 1
    with pytest.raises(OSError, match="disk"):
        next(iterator)


def test_rows_when_several_threads_read_them_then_each_gets_its_own(tmp_path):
    data = module(write_folder(tmp_path, train=[200] * 20), batch_size=50, shuffle_window=400)
    loaders = [data.train_dataloader() for _ in range(4)]
    for _ in range(5):
        epochs = list(zip(*loaders, strict=True))
        for batches in zip(*epochs, strict=True):
            assert sorted(flat([[numbers(batch) for batch in batches]])) == list(range(4000))


def test_rows_when_several_threads_read_windows_then_no_file_is_closed_under_another(tmp_path):
    rows = module(write_folder(tmp_path, train=[3000] * 8)).rows("train")

    def read(thread: int) -> bool:
        groups = np.random.default_rng(thread).integers(0, 8, 60)
        return all(rows.window(np.array([g])).labels_W.sum() == 1500 and _first(rows, g) == 3000 * g for g in groups)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))


def _first(rows, group: int) -> int:
    return int(rows.window(np.array([group])).ids_FW[0, 0])


def test_setup_for_a_test_then_shards_of_other_splits_may_be_gone(tmp_path):
    folder = write_folder(tmp_path, train=[8], validation=(8,), test=(8,))
    (folder / "train" / "0.parquet").unlink()
    (folder / "validation" / "0.parquet").unlink()
    data = PreparedDataModule(root=folder, batch_size=4)
    data.setup("test")
    assert [numbers(batch) for batch in data.test_dataloader()] == [[16, 17, 18, 19], [20, 21, 22, 23]]
    with pytest.raises(ValueError, match="is missing"):
        data.setup("fit")


def test_prefetching_when_nobody_iterates_then_nothing_starts():
    before = threading.enumerate()
    items = iter([1])
    prefetched(items, depth=1)
    assert threading.enumerate() == before
    assert next(items) == 1, "nobody has taken it"


def test_samples_when_taken_then_are_the_first_rows_and_the_order_of_training_stays(folder):
    data = module(folder)
    expected, loader = epoch_of([data.train_dataloader()]), data.train_dataloader()
    assert [numbers(batch) for batch in data.sample_batches(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sum(map(len, data.sample_batches(100))) == sum(UNEVEN)
    assert epoch_of([loader]) == expected
