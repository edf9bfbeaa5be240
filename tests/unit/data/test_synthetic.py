"""The synthetic data module: shapes, exactness of rows, sharding, arguments, and a trainer that resumes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_recsys.data import Batch, BatchLoader, SyntheticDataModule
from lightning_recsys.data.generated.teacher import SyntheticClicks

SMALL = {
    "train_rows": 100,
    "val_rows": 50,
    "test_rows": 70,
    "batch_size": 32,
    "cardinalities": (5, 1000, 30),
    "num_dense": 2,
}


def join(batches: list[Batch]) -> tuple[torch.Tensor, ...]:
    """Dense, labels, and the ids of single-hot features as one matrix, of all rows in order."""
    ids = [batch.sparse.values.view(len(batch.sparse.keys), -1) for batch in batches]
    return torch.cat([b.dense for b in batches]), torch.cat([b.labels for b in batches]), torch.cat(ids, 1)


def test_batches_when_all_features_are_single_hot_then_take_the_fast_path():
    data = SyntheticDataModule(**SMALL)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.dense.shape == (32, 2)
    assert batch.dense.dtype == batch.labels.dtype == torch.float32
    assert batch.dense.is_contiguous()
    assert batch.sparse.is_single_hot
    assert batch.sparse.keys == ("c0", "c1", "c2")
    assert batch.sparse.batch_size == 32
    assert set(batch.labels.tolist()) == {0.0, 1.0}
    assert data.fields == {"c0": 5, "c1": 1000, "c2": 30}
    for ids, cardinality in zip(batch.sparse.values.view(3, 32), data.fields.values(), strict=True):
        assert ids.min() >= 0
        assert ids.max() < cardinality


def test_batches_when_some_features_are_multi_hot_then_bags_have_any_length_up_to_the_largest():
    data = SyntheticDataModule(**SMALL | {"train_rows": 2000, "batch_size": 2000, "multi_hot": {"c1": 4}})
    (batch,) = data.train_dataloader()
    single, bags, other = batch.sparse.bag_lengths().view(3, 2000)
    assert (single == 1).all()
    assert (other == 1).all()
    assert sorted(set(bags.tolist())) == [0, 1, 2, 3, 4]
    # 2000 draws of five equally likely lengths: deviation of a count is sqrt(2000 * 0.16) = 18; five of them.
    assert (torch.bincount(bags) - 400).abs().max() < 90
    start, end = batch.sparse.feature_bounds()[1:3]
    assert end - start == bags.sum()
    assert batch.sparse.values[start:end].max() < 1000


def test_rows_when_taken_in_any_order_or_grouping_then_are_the_same():
    data = SyntheticDataModule(**SMALL | {"multi_hot": {"c2": 3}})
    rows = data.rows("train")
    together = rows.take(torch.tensor([7, 99, 0]))
    for place, row in enumerate((7, 99, 0)):
        alone = rows.take(torch.tensor([row]))
        assert torch.equal(alone.dense[0], together.dense[place])
        assert alone.labels[0] == together.labels[place]
        offsets = together.sparse.bag_offsets()
        expected = [together.sparse.values[offsets[f * 3 + place] : offsets[f * 3 + place + 1]] for f in range(3)]
        assert torch.equal(alone.sparse.values, torch.cat(expected))


def test_splits_and_worlds_when_compared_then_hold_different_rows():
    def first_dense(split: str, **options) -> tuple[float, ...]:
        return tuple(SyntheticDataModule(**SMALL | options).rows(split).take(torch.arange(5)).dense[:, 0].tolist())

    draws = {first_dense("train"), first_dense("validation"), first_dense("test"), first_dense("train", world_seed=1)}
    assert len(draws) == 4
    assert first_dense("train") == first_dense("train", seed=5)  # the order's seed leaves the world alone


def test_rows_when_sent_to_another_process_then_are_the_same():
    data = SyntheticDataModule(**SMALL)
    copy = pickle.loads(pickle.dumps(data))
    for ours, theirs in zip(data.val_dataloader(), copy.val_dataloader(), strict=True):
        assert torch.equal(ours.sparse.values, theirs.sparse.values)
        assert torch.equal(ours.labels, theirs.labels)


def test_training_order_when_epochs_pass_then_changes_and_evaluation_order_does_not():
    data = SyntheticDataModule(**SMALL)
    train, test = data.train_dataloader(), data.test_dataloader()
    first, second = (join(list(train)) for _ in range(2))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0].sort(0).values, second[0].sort(0).values)
    first, second = (join(list(test)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert len(first[0]) == 70


def test_ids_when_a_feature_has_a_billion_of_them_then_reach_far_and_cost_no_memory():
    data = SyntheticDataModule(**SMALL | {"cardinalities": (1_000_000_000,), "zipf_exponent": 0.5})
    ids = data.rows("train").take(torch.arange(1000)).sparse.values
    assert ids.max() > 900_000_000  # P(id < n) is near sqrt(n / 1e9): missing the last tenth 1000 times has 1e-23
    assert ids.max() < 1_000_000_000
    assert ids.unique().numel() > 990


def test_module_when_splits_are_empty_or_there_are_no_dense_features_then_says_so_by_their_absence():
    data = SyntheticDataModule(**SMALL | {"val_rows": 0, "test_rows": 0, "num_dense": 0})
    assert data.val_dataloader() == []
    assert data.best_normalized_entropy is None
    assert next(iter(data.train_dataloader())).dense.shape == (32, 0)


def test_module_when_all_features_are_multi_hot_then_bags_do():
    data = SyntheticDataModule(**SMALL | {"multi_hot": {"c0": 2, "c1": 2, "c2": 2}})
    batch = next(iter(data.train_dataloader()))
    assert batch.sparse.bag_lengths().max() == 2
    assert batch.sparse.batch_size == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_rows": -1}, r"data\.train_rows must be at least 0, got -1"),
        ({"cardinalities": (3, 0)}, r"data\.cardinalities must be one or more positive numbers, got \[3, 0\]"),
        ({"cardinalities": ()}, r"data\.cardinalities must be one or more positive numbers, got \[\]"),
        ({"multi_hot": {"x": 2}}, r"data\.multi_hot must be about features among c0, c1, c2, got 'x'"),
        ({"multi_hot": {"c1": 0}}, r"data\.multi_hot\.c1 must be at least 1, got 0"),
        ({"num_dense": -1}, r"data\.num_dense must be at least 0, got -1"),
        ({"zipf_exponent": -0.1}, r"data\.zipf_exponent must be at least 0, got -0\.1"),
        ({"base_rate": 1.0}, r"data\.base_rate must be between 0 and 1, got 1\.0"),
        ({"signal": -1.0}, r"data\.signal must be at least 0, got -1\.0"),
        ({"interaction_share": 1.5}, r"data\.interaction_share must be from 0 to 1, got 1\.5"),
    ],
)
def test_module_when_an_argument_is_out_of_range_then_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        SyntheticDataModule(**SMALL | options)


class Recorder(pl.LightningModule):
    """Trains one number, and remembers the sum of the first dense feature of every batch it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append(float(batch.dense[:, 0].double().sum()))
        return self.weight**2

    def validation_step(self, batch: Batch, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(pl.Callback):
    """Saves after a step, or at the end of the first epoch, as ``ModelCheckpoint`` does, and keeps no state."""

    def __init__(self, path, *, step: int | None = None) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_) -> None:
        if self.step is None:
            trainer.save_checkpoint(self.path)


def train(root, *, ckpt_path=None, callbacks=(), **options) -> list[float]:
    recorder = Recorder()
    trainer = pl.Trainer(
        default_root_dir=root, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    data = SyntheticDataModule(**SMALL | {"train_rows": 200})
    trainer.fit(recorder, datamodule=data, ckpt_path=ckpt_path)
    return recorder.seen


@pytest.mark.parametrize("stop", [1, 3, 7, 9, 14])
def test_fit_when_resumed_inside_or_after_an_epoch_then_batches_go_on_where_they_stopped(tmp_path, stop):
    whole = train(tmp_path, max_epochs=3)
    assert len({tuple(whole[epoch : epoch + 7]) for epoch in (0, 7, 14)}) == 3
    path = tmp_path / "stopped.ckpt"
    before = train(tmp_path, max_steps=stop, callbacks=[SaveAfter(path, step=stop)])
    after = train(tmp_path, max_epochs=3, max_steps=-1, ckpt_path=path)
    assert before + after == whole


def test_fit_when_epochs_are_cut_short_and_resumed_then_the_next_epoch_starts_at_its_beginning(tmp_path):
    whole = train(tmp_path, max_epochs=3, limit_train_batches=2)
    path = tmp_path / "stopped.ckpt"
    before = train(tmp_path, max_epochs=1, limit_train_batches=2, callbacks=[SaveAfter(path)])
    after = train(tmp_path, max_epochs=3, limit_train_batches=2, ckpt_path=path)
    assert before + after == whole


def test_fit_when_overfitting_then_the_same_batches_come_each_epoch(tmp_path):
    seen = train(tmp_path, max_epochs=3, overfit_batches=2, limit_val_batches=0)
    assert seen[:2] == seen[2:4] == seen[4:]


def test_shares_when_two_ranks_take_the_rows_then_they_make_up_the_batches_of_one():
    data = SyntheticDataModule(**SMALL | {"batch_size": 16})

    def attach(rank: int, world_size: int) -> SyntheticDataModule:
        copy = pickle.loads(pickle.dumps(data))
        copy.trainer = SimpleNamespace(
            overfit_batches=0, distributed_sampler_kwargs={"num_replicas": world_size, "rank": rank}
        )
        return copy

    shares = [list(attach(rank, 2).train_dataloader()) for rank in (0, 1)]
    whole = list(SyntheticDataModule(**SMALL).train_dataloader())
    assert [len(share) for share in shares] == [len(whole)] * 2
    for parts, batch in zip(zip(*shares, strict=True), whole, strict=True):
        for ours, theirs in zip(join(list(parts)), join([batch]), strict=True):
            assert torch.equal(ours, theirs)


def test_probabilities_when_labels_are_drawn_then_depend_on_the_row_only():
    data = SyntheticDataModule(**SMALL)
    several = data.clicks.probabilities("train", np.arange(50))
    alone = [data.clicks.probabilities("train", np.array([row]))[0] for row in range(0, 50, 7)]
    assert alone == several[::7].tolist()


class OneByOne:
    """Rows of which each batch is made by itself."""

    def __init__(self, rows) -> None:
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def take(self, rows):
        return self._rows.take(rows)


@pytest.mark.parametrize("batch_size", [1, 3, 16, 300])
@pytest.mark.parametrize("options", [{}, {"multi_hot": {"c2": 3}}, {"num_dense": 0}], ids=str)
@pytest.mark.parametrize("shuffle", ["batches", "rows", None])
def test_batches_when_small_ones_are_made_together_then_each_is_the_same_bit_for_bit(
    batch_size, options, shuffle, monkeypatch
):
    rows = SyntheticDataModule(**SMALL | options | {"train_rows": 1503}).rows("train")
    settings = {"batch_size": batch_size, "shuffle": shuffle, "seed": 4, "rank": 1, "world_size": 2}
    alone, together = BatchLoader(OneByOne(rows), **settings), BatchLoader(rows, **settings)
    next(iter(alone))
    together.load_state_dict(alone.state_dict())  # goes on in the midst of an epoch
    alone.load_state_dict(alone.state_dict())
    expected, taken, take = list(alone), [], SyntheticClicks.take
    monkeypatch.setattr(SyntheticClicks, "take", lambda *args: taken.append(len(args[2])) or take(*args))
    found = list(together)
    assert len(found) == len(expected) == len(together) - 1
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.dense, other.dense)
        assert torch.equal(one.labels, other.labels)
        assert one.sparse.keys == other.sparse.keys
        assert torch.equal(one.sparse.values, other.sparse.values)
        assert torch.equal(one.sparse.bag_offsets(), other.sparse.bag_offsets())
    joint = batch_size < 300 and "multi_hot" not in options
    assert len(taken) <= 4 if joint else len(taken) == len(found)
