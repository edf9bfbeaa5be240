"""Training batches before they come, so that their rows can travel early and those that are needed soonest stay."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque
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

_MORE = 4
"""Batches that are looked at in one step at most, so that the first steps need not wait for all."""


class PeekableLoader:
    """A loader that can tell what it will serve, and is otherwise the loader itself.

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

    def peek(self, ahead: int = 0) -> Any:
        """The batch that the running iteration will serve after ``ahead`` others; ``None`` where it has no such."""
        return None if self._batches is None else self._batches.peek(ahead)

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
        """The loader's, as it was before batches that were peeked at and have not been served."""
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
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator = iter(loader)
        self._peeked: deque[Any] = deque()
        self._states: deque[dict[str, Any]] = deque()  # the loader's from before each peek, were it in vain
        self._end: Exception | None = None  # what comes behind the batches peeked at
        self.served: Any = None

    @property
    def before(self) -> dict[str, Any] | None:
        """The loader's state from before the batches peeked at; ``None`` where there are none, or it has no state."""
        return self._states[0] if self._states else None

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._states:
            self._states.popleft()
        if self._peeked:
            self.served = self._peeked.popleft()
        elif self._end is not None:
            raise self._end
        else:
            self.served = next(self._iterator)
        return self.served

    def peek(self, ahead: int) -> Any:
        while len(self._peeked) <= ahead and self._end is None:
            if isinstance(self._loader, _Stateful):
                self._states.append(copy.deepcopy(self._loader.state_dict()))
            try:
                self._peeked.append(next(self._iterator))
            except Exception as end:  # an error is one when its batch comes
                self._end = end
        return self._peeked[ahead] if ahead < len(self._peeked) else None


class LookAhead:
    """Announces coming batches to collections, to each when it has looked up what it needs of the present one.

    A batch's ids are taken as the loader gives them. Nothing is announced where the model or its data module changes
    batches in a hook before or after their transfer, where several parts of a batch could be meant, and behind the
    last batch of an epoch. Of several loaders, only the next batch is.

    Args:
        trainer: Which trains on loaders that are :func:`peekable`.
        collections: Whose lookups to wait for.
        prefetch: Have the next batch's rows fetched.
        num_ids: Look further, up to so many ids of a collection, so that it keeps the rows which are needed soonest.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        collections: Iterable[EmbeddingBagCollection],
        *,
        prefetch: bool = True,
        num_ids: int = 0,
    ) -> None:
        self._trainer = trainer
        self._prefetch, self._num_ids = prefetch, num_ids
        # What each collection will look up, next batch first; None where that is not known.
        self._coming: dict[EmbeddingBagCollection, deque[SparseFeatures | None]] = {x: deque() for x in collections}

        # A function, so that a copy of the model has no copy of the trainer.
        def announce(collection: EmbeddingBagCollection, _: Any, pooled_BFD: Tensor) -> None:
            self._after_lookup(collection, pooled_BFD)

        self._hooks = [collection.register_forward_hook(announce) for collection in self._coming]
        self._looked_up: set[EmbeddingBagCollection] = set()
        self._batch_idx = -1
        owners = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]  # set by a connector
        self._sees_batches = not any(
            is_overridden(hook, owner, parent)
            for owner, parent in zip(owners, (pl.LightningModule, pl.LightningDataModule), strict=True)
            for hook in _HOOKS
            if owner is not None
        )

    def begin_batch(self, batch_idx: int) -> None:
        """A training batch begins: each collection is to hear of those after it."""
        for coming in self._coming.values():
            if batch_idx != self._batch_idx + 1:  # another epoch
                coming.clear()
            elif coming:
                coming.popleft()
        self._batch_idx = batch_idx
        self._looked_up.clear()

    def close(self) -> None:
        """Announce nothing more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _after_lookup(self, collection: EmbeddingBagCollection, pooled_BFD: Tensor) -> None:
        if collection not in self._coming:  # of a copy of the model
            return
        if not pooled_BFD.requires_grad or collection in self._looked_up:  # an evaluation, or not the first lookup
            return
        self._looked_up.add(collection)
        if self._trainer.is_last_batch or not self._sees_batches:
            return
        loaders = list(find(self._trainer.train_dataloader, PeekableLoader))
        coming = self._coming[collection]
        num_ids = sum(0 if sparse is None else sparse.values.numel() for sparse in coming)
        for _ in range(_MORE):
            if coming and (len(loaders) > 1 or num_ids >= self._num_ids):
                break
            batches = self._batches_at(len(coming), loaders)
            if all(batch is None for batch in batches):
                break
            sparse = self._announce(collection, batches, ahead=len(coming))
            coming.append(sparse)
            num_ids += 0 if sparse is None else sparse.values.numel()
        if self._prefetch and coming and coming[0] is not None:
            with suppress(IndexError, KeyError, ValueError):
                collection.prefetch(coming[0])

    def _announce(self, collection: EmbeddingBagCollection, batches: list[Any], *, ahead: int) -> SparseFeatures | None:
        wanted = set(collection.feature_names)
        suitable = [x for x in find(batches, SparseFeatures) if wanted <= set(x.keys)]
        if len(suitable) != 1:
            return None
        try:
            if self._num_ids:
                collection.announce(suitable[0], ahead=ahead)
        except (IndexError, KeyError, ValueError):  # its own lookup will say what is wrong with it
            return None
        return suitable[0]

    def _batches_at(self, ahead: int, loaders: list[PeekableLoader]) -> list[Any]:
        """Each loader's batch that comes after ``ahead`` others, or ``None``."""
        last = self._trainer.num_training_batches
        if last != math.inf:
            return [loader.peek(ahead) if self._batch_idx + ahead + 1 < last else None for loader in loaders]
        # Where there is no length, Lightning is one batch ahead.
        return [loader.peek(ahead - 1) if ahead else loader.served for loader in loaders]


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
