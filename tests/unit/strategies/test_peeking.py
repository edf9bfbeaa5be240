"""Loaders that tell the next batch: everything else about them stays as it was."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass
from typing import ClassVar

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.types import _Stateful
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_recsys.data.loader import BatchLoader
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.sparse_features import find
from lightning_recsys.strategies.common.look_ahead import BYTES_PER_ID, LookAhead, PeekableLoader, copy_batch, peekable


class Numbers:
    """Rows that are their own numbers."""

    def __len__(self):
        return 10

    def take(self, rows):
        return rows.tolist()


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def batch_loader(**arguments) -> BatchLoader:
    return BatchLoader(Numbers(), batch_size=2, shuffle="rows", seed=3, **arguments)


# --- The loader ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [batch_loader, lambda: DataLoader(range(10), batch_size=2), lambda: [4, 5, 6]])
@pytest.mark.parametrize("peeks", ["never", "always", "sometimes"])
def test_iteration_when_peeked_at_then_serves_the_same_batches_in_every_epoch(make, peeks):
    plain, loader = make(), peekable(make())
    assert len(loader) == len(plain)
    for _ in range(2):
        expected, seen = list(plain), []
        for number, batch in enumerate(loader):
            seen.append(batch)
            if peeks == "always" or (peeks == "sometimes" and number % 2):
                following = loader.peek()
                assert str(loader.peek()) == str(following), "looking twice takes nothing"
                assert str(following) == str(expected[number + 1] if number + 1 < len(expected) else None)
            assert str(loader.current) == str(batch)
        assert str(seen) == str(expected)


def test_position_when_peeked_at_then_is_that_of_the_batches_served():
    loader, twin = peekable(batch_loader()), batch_loader()
    peeked, plain = iter(loader), iter(twin)
    for _ in range(5):
        next(peeked), next(plain)
        loader.peek()
        assert loader.state_dict() == twin.state_dict()


@pytest.mark.parametrize("served", [1, 3, 5])
def test_training_when_resumed_from_a_peeked_loader_then_goes_on_with_the_very_next_batch(served):
    loader = peekable(batch_loader())
    batches, expected = iter(loader), list(batch_loader()) + list(iter(batch_loader()))
    for _ in range(served):
        next(batches)
        loader.peek()
    resumed = peekable(batch_loader())
    resumed.load_state_dict(copy.deepcopy(loader.state_dict()))
    following = next(iter(resumed))
    epochs = batch_loader()
    expected = [*epochs, *epochs]
    assert following == expected[served]


def test_state_when_no_batch_was_served_then_is_the_loaders_own():
    assert peekable(batch_loader()).state_dict() == batch_loader().state_dict()


def test_loader_when_it_has_no_state_or_no_length_then_pretends_to_none():
    loader = peekable(DataLoader(Endless(), batch_size=2))
    assert isinstance(peekable(batch_loader()), _Stateful)
    assert not isinstance(loader, _Stateful)
    with pytest.raises(TypeError):
        len(loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_attributes_when_read_or_set_then_are_the_loaders():
    inner = DataLoader(range(4), batch_size=2)
    loader = peekable(inner)
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    assert (loader.sampler, loader.dataset) == (inner.sampler, range(4))
    assert not hasattr(peekable([1]), "sampler")
    assert copy.copy(loader).batch_size == 2


def test_shorter_loader_of_a_cycle_when_at_its_end_then_begins_again():
    loaders = {"long": peekable([1, 2, 3]), "short": peekable([7, 8])}
    seen, following = [], []
    for batch, _, _ in CombinedLoader(loaders, "max_size_cycle"):
        seen.append(batch)
        following.append({name: loader.peek() for name, loader in loaders.items()})
    assert seen == [{"long": 1, "short": 7}, {"long": 2, "short": 8}, {"long": 3, "short": 7}]
    assert following == [{"long": 2, "short": 8}, {"long": 3, "short": None}, {"long": None, "short": 8}]


def test_error_when_a_batch_ahead_raises_then_comes_in_its_place():
    def batches():
        yield 1
        raise OSError("no such file")

    class Failing:
        def __iter__(self):
            return batches()

    loader = peekable(Failing())
    served = iter(loader)
    assert loader.peek() == 1
    assert loader.peek(5) is None
    assert next(served) == 1
    with pytest.raises(OSError, match="no such file"):
        next(served)


@dataclass(frozen=True)
class Pair:
    one: object
    other: object


@pytest.mark.parametrize("window", [0, 1, 3])
def test_batches_when_the_loader_writes_each_into_the_memory_of_the_last_then_those_before_stay(window):
    buffer, label = torch.zeros(2, dtype=torch.int64), torch.zeros(1)

    class Refilling:
        def __iter__(self):
            for number in range(6):
                buffer.fill_(number)
                label.fill_(number)
                yield {
                    "sparse": SparseFeatures(("x",), buffer),
                    "again": buffer,
                    "rest": Pair(label, [b"bytes", number]),
                }

    seen, loader = [], peekable(Refilling())
    for batch in loader:
        for ahead in range(window):
            loader.peek(ahead)
        again = batch["again"]
        assert again is batch["sparse"].values, "what is one tensor in a batch is one in its copy"
        seen.append((again.tolist(), batch["rest"].one.item(), batch["rest"].other))
    assert seen == [([number] * 2, number, [b"bytes", number]) for number in range(6)]


def test_batches_when_they_come_from_loader_workers_then_those_that_wait_hold_no_file(monkeypatch):
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    # The loader leaves a handler for a signal behind, which would say that a worker died.
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", True)
    loader = peekable(DataLoader(TensorDataset(torch.arange(200), torch.rand(200)), num_workers=1))
    batches = iter(loader)
    next(batches)
    before = num_open()
    loader.peek(60)
    assert num_open() <= before + 10, "two tensors in each of 60 batches, each of which had a descriptor of its own"
    assert loader.waiting_bytes >= 61 * 12
    assert [batch[0].item() for batch in batches] == list(range(1, 200))
    assert loader.waiting_bytes == 0


def test_batches_when_they_cannot_be_copied_then_none_is_looked_at(caplog):
    log = logging.getLogger("pytorch_lightning.lightning_recsys.strategies.common.look_ahead")
    log.addHandler(caplog.handler)
    loader = peekable([lambda: 1, lambda: 2])
    with caplog.at_level(logging.INFO, log.name):
        batches = iter(loader)
        assert next(batches)() == 1
    log.removeHandler(caplog.handler)
    assert "Coming batches are not looked at, as a batch cannot be copied: " in caplog.text
    assert loader.peek() is None
    assert next(batches)() == 2


def test_find_when_nested_then_finds_all():
    sparse = [SparseFeatures((name,), torch.tensor([1])) for name in "abc"]
    tree = {"x": [sparse[0], Pair(sparse[1], 3)], "y": ({"z": sparse[2]}, None)}
    assert [found.keys for found in find(tree, SparseFeatures)] == [("a",), ("b",), ("c",)]


# --- Who hears of it -------------------------------------------------------------------------------------------------


class Recording(EmbeddingBagCollection):
    """Knows what was looked up and announced."""

    def __init__(self, *features: str) -> None:
        super().__init__([EmbeddingBagConfig("t", 100, 2, features)])
        self.log: list[str] = []

    def forward(self, sparse):
        self.log.append(f"look up {sparse.values.tolist()}")
        return super().forward(sparse)

    def prefetch(self, sparse):
        self.resolve(sparse)
        self.log.append(f"announce {sparse.values.tolist()}")

    def announce(self, sparse, *, ahead):
        self.resolve(sparse)
        self.log.append(f"foretell {sparse.values.tolist()} after {ahead}")


class Model(pl.LightningModule):
    """Looks every batch up, and trains nothing but rows."""

    def __init__(self, *features: str) -> None:
        super().__init__()
        self.rows = Recording(*(features or ("x",)))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    options: ClassVar = {}

    def on_train_start(self):
        self.ahead = LookAhead(self.trainer, [self.rows], **self.options)

    def on_train_end(self):
        self.ahead.close()

    def training_step(self, batch, batch_idx):
        return sum(self.rows(x).sum() for x in find(batch, SparseFeatures)) + self.bias

    def validation_step(self, batch, batch_idx):
        self.rows(batch)

    def configure_optimizers(self):
        return torch.optim.SGD([self.bias], lr=0.1)


class Foretells(Model):
    options: ClassVar = {"num_batches": 3, "prefetch": False}


class Ids:
    """Batches of one id each."""

    def __init__(self, *ids: int, name: str = "x") -> None:
        self.batches = [SparseFeatures((name,), torch.tensor([i])) for i in ids]

    def __iter__(self):
        return iter(self.batches)


class CountedIds(Ids):
    def __len__(self):
        return len(self.batches)


def train(model: Model, loaders, **arguments) -> list[str]:
    settings = {"max_epochs": 1, "limit_val_batches": 0, **arguments}
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )
    trainer.fit(model, loaders, CountedIds(90))
    return model.rows.log


@pytest.mark.parametrize("kind", [CountedIds, Ids], ids=["with a length", "without"])
def test_next_batch_when_training_then_is_announced_after_each_lookup_but_the_last(kind):
    log = train(Model(), peekable(kind(1, 2, 3)))
    assert log == ["look up [1]", "announce [2]", "look up [2]", "announce [3]", "look up [3]"]


def test_batches_when_limited_then_nothing_is_announced_that_will_not_be_trained_on():
    log = train(Model(), peekable(CountedIds(1, 2, 3)), limit_train_batches=2, max_epochs=2)
    assert log == ["look up [1]", "announce [2]", "look up [2]"] * 2


def test_validation_when_it_looks_up_then_nothing_is_announced():
    log = train(Model(), peekable(CountedIds(1, 2, 3)), limit_val_batches=1, val_check_interval=1)
    assert [x for x in log if x != "look up [90]"] == train(Model(), peekable(CountedIds(1, 2, 3)))


def test_parts_of_a_batch_when_several_could_be_meant_then_nothing_is_announced():
    log = train(Model(), {"a": peekable(CountedIds(1, 2)), "b": peekable(CountedIds(3, 4))})
    assert log == ["look up [1]", "look up [3]", "look up [2]", "look up [4]"]


def test_ids_when_wrong_then_their_own_lookup_says_so():
    with pytest.raises(IndexError, match="id 100 is outside"):
        train(model := Model(), peekable(CountedIds(1, 100)))
    assert model.rows.log == ["look up [1]", "look up [100]"]


class Shifts(Model):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return SparseFeatures(batch.keys, batch.values + 10)


def test_batches_when_a_hook_changes_them_then_nothing_is_announced():
    assert train(Shifts(), peekable(CountedIds(1, 2))) == ["look up [11]", "look up [12]"]


def test_loader_when_wrapped_then_is_what_the_trainer_gives():
    trainer = pl.Trainer(accelerator="cpu", barebones=True, max_steps=1, num_sanity_val_steps=0)
    loader = peekable(CountedIds(1, 2))
    trainer.fit(Model(), loader, CountedIds(90))
    assert list(find(trainer.train_dataloader, PeekableLoader)) == [loader]


# --- Who hears of those after it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CountedIds, Ids], ids=["with a length", "without"])
def test_coming_batches_when_training_then_each_is_foretold_once_as_far_as_the_window_goes(kind):
    log = train(Foretells(), peekable(kind(1, 2, 3, 4, 5, 6)), max_epochs=2)
    expected = ["look up [1]", *(f"foretell [{i}] after {i - 2}" for i in (2, 3, 4))]
    expected += ["look up [2]", "foretell [5] after 2", "look up [3]", "foretell [6] after 2"]
    assert log == [*expected, "look up [4]", "look up [5]", "look up [6]"] * 2


def test_coming_batches_when_there_are_many_then_few_are_looked_at_in_one_step(monkeypatch):
    monkeypatch.setattr("lightning_recsys.strategies.common.look_ahead._MORE", 2)
    log = train(Foretells(), peekable(CountedIds(1, 2, 3, 4, 5)))
    assert log[:6] == ["look up [1]", *(f"foretell [{i}] after {i - 2}" for i in (2, 3)), "look up [2]", *log[4:6]]
    assert log[4:6] == ["foretell [4] after 1", "foretell [5] after 2"]


class FewBytes(Model):
    options: ClassVar = {"num_batches": 9, "num_bytes": 1100, "prefetch": False}


def test_coming_batches_when_they_take_much_memory_then_few_wait():
    loader = peekable(CountedIds(*range(1, 9)))
    most = 0

    class Watches(FewBytes):
        def on_train_batch_end(self, *_):
            nonlocal most
            most = max(most, len(loader._batches._peeked))

    log = train(Watches(), loader)
    assert sum("foretell" in line for line in log) == 7, "each in its turn"
    one = copy_batch(loader.batches[0])[1] + BYTES_PER_ID
    assert most == -(-1100 // one) < 7


class Tensors(CountedIds):
    """Batches without ids that a collection could be told of; knows how many were taken."""

    def __iter__(self):
        self.taken = 0
        for batch in self.batches:
            self.taken += 1
            yield self.make(batch.values)


class Plain(Tensors):
    make = staticmethod(lambda values: values)


class TwoTowers(Tensors):
    make = staticmethod(lambda values: [SparseFeatures(("x",), values), SparseFeatures(("x",), values + 1)])


@pytest.mark.parametrize("kind", [Plain, TwoTowers])
def test_batches_when_they_cannot_be_foretold_then_no_more_are_taken_ahead(kind):
    loader, ahead = kind(*range(1, 30)), []

    class Watches(Foretells):
        options: ClassVar = {"num_batches": 20}

        def training_step(self, batch, batch_idx):
            parts = [SparseFeatures(("x",), batch)] if isinstance(batch, torch.Tensor) else batch
            return sum(self.rows(x).sum() for x in parts) + self.bias

        def on_train_batch_end(self, outputs, batch, batch_idx):
            ahead.append(loader.taken - batch_idx - 1)

    log = train(Watches(), peekable(loader), max_epochs=2)
    assert all(line.startswith("look up") for line in log)
    assert ahead == ([1] + [0] * 28) * 2


def test_coming_batches_when_limited_then_none_is_foretold_that_will_not_be_trained_on():
    loader = peekable(batches := batch_loader())
    loader._source.rows.take = lambda rows: SparseFeatures(("x",), rows)
    log = train(Foretells(), loader, limit_train_batches=3, max_epochs=2)
    assert sum("foretell" in line for line in log) == 4
    assert batches.state_dict()["batch"] == 3


def test_coming_batches_when_one_is_wrong_then_its_own_lookup_says_so():
    with pytest.raises(IndexError, match="id 100 is outside"):
        train(model := Foretells(), peekable(CountedIds(1, 2, 100, 3)))
    assert [line for line in model.rows.log if "look" in line] == ["look up [1]", "look up [2]", "look up [100]"]
    assert not any("[3]" in line for line in model.rows.log), "behind a batch that cannot be foretold none is looked at"


def test_coming_batches_when_there_are_several_loaders_then_only_the_next_is_foretold():
    loaders = {"a": peekable(CountedIds(1, 2, 3, 4)), "b": peekable([5, 6, 7, 8])}
    log = train(Foretells(), loaders)
    assert log[:3] == ["look up [1]", "foretell [2] after 0", "look up [2]"]


@pytest.mark.parametrize("served", [1, 3, 5])
def test_position_when_peeked_at_far_ahead_then_is_that_of_the_batches_served(served):
    loader, twin = peekable(batch_loader()), batch_loader()
    peeked, plain = iter(loader), iter(twin)
    for step in range(served):
        assert next(peeked) == next(plain)
        loader.peek(step % 3 + 1)
        assert loader.peek(9) is None
        assert loader.state_dict() == twin.state_dict()
