"""The batches of a worker's shard, of an iterator that gives tables as Ray's do."""

import pyarrow as pa
import pytest
import torch

pytest.importorskip("ray", reason="the extra lightning-recsys[ray] is not installed")

from ray.train import ScalingConfig

from lightning_recsys.data import BatchLoader
from lightning_recsys.ray import EncodedDatasets, fit, fitting
from lightning_recsys.ray.module import Shard
from lightning_recsys.strategies import DESStrategy, ShadowSyncStrategy


class Iterator:
    """Rows as Ray gives them to one of some workers, or to each."""

    def __init__(self, rows, num_parts=1):
        self.rows, self.asked = rows, []
        if num_parts > 1:
            self.world_size = lambda: num_parts

    def iter_batches(self, *, batch_format, batch_size, prefetch_batches, **shuffling):
        self.asked.append(shuffling)
        table = pa.table(
            {
                "label": pa.array([row % 2 for row in self.rows], pa.float32()),
                "number": pa.array(self.rows, pa.float32()),
                "shop": pa.array([row % 5 for row in self.rows], pa.int32()),
                "tags": pa.array([list(range(row % 3)) for row in self.rows], pa.list_(pa.int64())),
            }
        )
        for start in range(0, len(table), batch_size):
            yield table.slice(start, batch_size)


def shard(iterator, num_rows, **options):
    values = {"features": None, "shuffle_rows": 0, "prefetch_batches": 1} | options
    return Shard(iterator, num_rows, num_dense=1, names=("shop", "tags"), has_bags=True, **values)


def rows_of(batches):
    return [batch.dense[:, 0].long().tolist() for batch in batches]


@pytest.mark.parametrize("batch_size", [1, 4, 7, 100])
@pytest.mark.parametrize("start", [0, 8, 12])
def test_batches_when_each_worker_has_a_part_then_all_its_rows_come_from_any_position_on(batch_size, start):
    num_rows = 43  # of which Ray gives 21 to each of two workers
    source = shard(Iterator(list(range(100, 121)), 2), num_rows)
    loader = BatchLoader(source, batch_size=batch_size, rank=1, world_size=2)
    loader.load_state_dict(loader.state_dict() | {"epoch": 0, "row": start, "batch": 0, "finished": False})
    length = len(loader)
    found = rows_of(loader)
    assert [row for batch in found for row in batch] == list(range(100 + start // 2, 121))
    assert len(found) == length == -(-(21 - start // 2) // batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 100])
@pytest.mark.parametrize("start", [0, 10])
def test_batches_when_each_worker_has_all_rows_then_each_row_comes_to_one_of_them(batch_size, start):
    rows = []
    for rank in range(3):
        loader = BatchLoader(shard(Iterator(list(range(40))), 40), batch_size=batch_size, rank=rank, world_size=3)
        loader.load_state_dict(loader.state_dict() | {"epoch": 0, "row": start, "batch": 0, "finished": False})
        rows += [row for batch in rows_of(loader) for row in batch]
    assert sorted(rows) == list(range(start, 40))


def test_batch_then_it_has_the_ids_and_lists_of_its_rows():
    (first, second) = BatchLoader(shard(Iterator([5, 6, 7, 8]), 4), batch_size=3)
    assert first.labels.tolist() == [1, 0, 1]
    assert first.sparse.values.tolist() == [0, 1, 2, 0, 1, 0]  # shops 5 to 7, then tags of 5 (two), 6 (none), 7 (one)
    assert first.sparse.lengths.tolist() == [1, 1, 1, 2, 0, 1]
    assert second.sparse.select(["tags"]).values.tolist() == [0, 1]
    (chosen,) = BatchLoader(shard(Iterator([5, 6]), 2, features=("shop",)), batch_size=2)
    assert chosen.sparse.keys == ("shop",)
    assert chosen.sparse.values.tolist() == [0, 1]


def test_shuffling_then_each_epoch_has_a_seed_of_its_own_and_a_resume_has_that_of_its_epoch():
    iterator = Iterator(list(range(8)), 2)
    loader = BatchLoader(shard(iterator, 16, shuffle_rows=4), batch_size=4, shuffle="rows", world_size=2)
    list(loader)
    list(loader)
    again = BatchLoader(shard(iterator, 16, shuffle_rows=4), batch_size=4, shuffle="rows", world_size=2)
    again.load_state_dict(again.state_dict() | {"epoch": 1, "row": 8, "batch": 1, "finished": False})
    list(again)
    assert [asked["local_shuffle_buffer_size"] for asked in iterator.asked] == [4, 4, 4]
    first, second, resumed = (asked["local_shuffle_seed"] for asked in iterator.asked)
    assert first != second == resumed
    assert 0 <= first < 2**31


def test_batches_when_rows_are_fewer_than_were_counted_then_the_error_has_both_numbers():
    with pytest.raises(RuntimeError, match="has 8 rows of 9 "):
        list(BatchLoader(shard(Iterator(list(range(8))), 9), batch_size=3))


def test_batches_when_ray_has_dealt_rows_to_more_workers_than_the_strategy_then_refused_with_what_to_write():
    loader = BatchLoader(shard(Iterator(list(range(8)), 4), 32), batch_size=4, world_size=2)
    with pytest.raises(ValueError, match=r"4 workers.* to 2: .*data_config\(split=False\)"):
        list(loader)


def test_resume_when_there_are_other_workers_then_refused():
    loader = BatchLoader(shard(Iterator(list(range(8)), 2), 16), batch_size=2, world_size=2)
    next(iter(loader))
    state = loader.state_dict()
    assert state["row"] == 4
    other = BatchLoader(shard(Iterator(list(range(4)), 4), 16), batch_size=2, world_size=4)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'parts': 2.*'parts': 4"):
        list(other)


def test_resume_when_rows_are_shuffled_in_batches_of_another_size_then_refused():
    loaders = [
        BatchLoader(
            shard(Iterator(list(range(8)), 2), 16, shuffle_rows=4), batch_size=size, shuffle="rows", world_size=2
        )
        for size in (2, 4)
    ]
    next(iter(loaders[0]))
    loaders[1].load_state_dict(loaders[0].state_dict())
    with pytest.raises(ValueError, match=r"'batch_size': 2.*'batch_size': 4"):
        list(loaders[1])


def test_batch_then_it_owns_its_memory():
    (batch,) = BatchLoader(shard(Iterator([1, 2]), 2), batch_size=2)
    batch.labels.add_(1)  # of memory that cannot be written, torch would warn, and this might crash
    assert torch.equal(batch.labels, torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize(("strategy", "split"), [(ShadowSyncStrategy(), "all"), (DESStrategy(), [])])
def test_fit_when_processes_have_batches_in_common_then_each_gets_all_rows(strategy, split, monkeypatch):
    asked = {}

    class Trainer:
        def __init__(self, work, **arguments):
            asked.update(arguments)

        def fit(self):
            return None

    monkeypatch.setattr(fitting, "TorchTrainer", Trainer)
    rows = EncodedDatasets({"train": "rows of Ray"}, None, None, {})
    fit(print, strategy=strategy, scaling=ScalingConfig(num_workers=2), datasets=rows)
    assert asked["datasets"] == {"train": "rows of Ray"}
    assert asked["dataset_config"]._datasets_to_split == split
    assert asked["dataset_config"]._resolve_execution_options("train").preserve_order
