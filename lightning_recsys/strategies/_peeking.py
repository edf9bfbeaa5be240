"""The next training batch one step early, so that its rows can travel while the present one computes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import pytorch_lightning as pl
from lightning_fabric.utilities.types import _Stateful
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures

T = TypeVar("T")

_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
_OWN = ("_loader", "_batches")


class PeekableLoader:
    """A loader that can tell what it will serve next, and is otherwise the loader itself.

    Whatever is asked of it or set on it (length, sampler, data set) is the loader's own.

    Args:
        loader: What ``train_dataloader`` returned.

    >>> loader = peekable([10, 20])
    >>> batches = iter(loader)
    >>> next(batches), loader.peek(), loader.served, next(batches), loader.peek(), len(loader)
    (10, 20, 10, 20, None, 2)
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: _Batches | None = None

    def __iter__(self) -> Iterator[Any]:
        self._batches = _Batches(self._loader)
        return self._batches

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def served(self) -> Any:
        """The batch that was served last; ``None`` before the first."""
        return None if self._batches is None else self._batches.served

    def peek(self) -> Any:
        """The batch that the running iteration will serve next; ``None`` where it has no other."""
        return None if self._batches is None else self._batches.peek()

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not made yet, as while it is copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)


class StatefulPeekableLoader(PeekableLoader):
    """The same for a loader whose position a checkpoint holds: that of the batches served, not of those peeked at."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's, as it was before a batch that was peeked at and has not been served."""
        before = None if self._batches is None else self._batches.before
        state: dict[str, Any] = self._loader.state_dict() if before is None else before
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The loader's, for the next iteration."""
        self._batches = None
        self._loader.load_state_dict(state_dict)


def peekable(loader: Any) -> PeekableLoader:
    """The loader, able to tell what comes next."""
    return (StatefulPeekableLoader if isinstance(loader, _Stateful) else PeekableLoader)(loader)


class _Batches:
    """One iteration over a loader.

    Attributes:
        served: The batch that was served last.
        before: The state of the loader from before a batch that was peeked at; ``None`` where it has none, or where
            nothing was peeked at since a batch was served.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator = iter(loader)
        self._peeked: list[Any] = []  # at most one
        self._at_end = False
        self.served: Any = None
        self.before: dict[str, Any] | None = None

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        self.before = None
        if self._at_end:
            raise StopIteration
        self.served = self._peeked.pop() if self._peeked else next(self._iterator)
        return self.served

    def peek(self) -> Any:
        if not self._peeked and not self._at_end:
            if isinstance(self._loader, _Stateful):
                self.before = copy.deepcopy(self._loader.state_dict())
            try:
                self._peeked.append(next(self._iterator))
            except StopIteration:
                self._at_end = True
        return self._peeked[0] if self._peeked else None


class LookAhead:
    """Announces the next batch to collections, to each when it has looked up what it needs of the present one.

    A batch's ids are taken as the loader gives them. Nothing is announced where the model or its data module changes
    batches in a hook before or after their transfer, where several parts of a batch could be meant, and behind the
    last batch of an epoch.

    Args:
        trainer: Which trains on loaders that are :func:`peekable`.
        collections: Whose lookups to wait for.
    """

    def __init__(self, trainer: pl.Trainer, collections: Iterable[EmbeddingBagCollection]) -> None:
        self._trainer = trainer
        self._hooks = [collection.register_forward_hook(self._after_lookup) for collection in collections]
        self._announced: set[EmbeddingBagCollection] = set()
        owners = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]  # set by a connector
        self._sees_batches = not any(
            is_overridden(hook, owner, parent)
            for owner, parent in zip(owners, (pl.LightningModule, pl.LightningDataModule), strict=True)
            for hook in _HOOKS
            if owner is not None
        )

    def begin_batch(self) -> None:
        """A training batch begins: each collection is to hear of the one after it."""
        self._announced.clear()

    def close(self) -> None:
        """Announce nothing more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _after_lookup(self, collection: EmbeddingBagCollection, arguments: Any, pooled_BFD: Tensor) -> None:
        if not pooled_BFD.requires_grad or collection in self._announced:  # an evaluation, or not the first lookup
            return
        self._announced.add(collection)
        wanted = set(collection.feature_names)
        suitable = [x for x in find(self._next_batches(), SparseFeatures) if wanted <= set(x.keys)]
        if len(suitable) == 1:
            with suppress(IndexError, KeyError, ValueError):  # its own lookup will say what is wrong with it, if it is
                collection.prefetch(suitable[0])

    def _next_batches(self) -> list[Any]:
        if self._trainer.is_last_batch or not self._sees_batches:
            return []
        loaders = find(self._trainer.train_dataloader, PeekableLoader)
        if self._trainer.num_training_batches == math.inf:  # where there is no length, Lightning is one batch ahead
            return [loader.served for loader in loaders]
        return [loader.peek() for loader in loaders]


def find(tree: Any, kind: type[T]) -> Iterator[T]:
    """All objects of a type in nested mappings, sequences and dataclasses.

    >>> list(find({"a": [1, "x"], "b": (2.0, {"c": 3})}, int))
    [1, 3]
    """
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from find(value, kind)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from find(value, kind)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from find(getattr(tree, field.name), kind)
