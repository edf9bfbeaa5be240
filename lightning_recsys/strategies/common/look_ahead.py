"""Training batches before they come, so that their rows can travel early and those that are needed soonest stay."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.types import _Stateful
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures
from lightning_recsys.embeddings.sparse_features import find

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

BYTES_PER_ID = 50
"""The bytes that a cache keeps for each id of an announced batch, about."""

_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
_OWN = ("_loader", "_batches")

_MORE = 4
"""Batches that are looked at in one step at most, so that the first steps need not wait for all."""


class PeekableLoader:
    """A loader that can tell what it will serve, and is otherwise the loader itself.

    Whatever is asked of it or set on it (length, sampler, data set) is the loader's own. Batches are copies: a loader
    may write the next one into the memory of the last, and batches of loader workers would hold a file descriptor for
    each tensor while they wait.

    Args:
        loader: The loader that ``train_dataloader`` returned.

    >>> loader = peekable([10, 20])
    >>> batches = iter(loader)
    >>> next(batches), loader.peek(), loader.current, next(batches), loader.peek(), len(loader)
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
    def current(self) -> Any:
        """The batch that was handed out last; ``None`` before the first."""
        return None if self._batches is None else self._batches.current

    @property
    def waiting_bytes(self) -> int:
        """The bytes of the batches that were looked at and are still to be handed out."""
        return 0 if self._batches is None else self._batches.waiting_bytes

    def peek(self, ahead: int = 0) -> Any:
        """The batch that the running iteration will serve after ``ahead`` others.

        ``None`` where it has no such, or where its batches cannot be copied.
        """
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
    """The same for a loader whose position a checkpoint holds: that of the batches handed out, not peeked at."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's, as it was before batches that were peeked at and have not been handed out."""
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


def unwrapped(loader: Any) -> Any:
    """The loader itself, whether or not it can tell what comes next."""
    return loader._loader if isinstance(loader, PeekableLoader) else loader


class _Batches:
    """One iteration over a loader.

    Attributes:
        current: The batch that was handed out last.
        waiting_bytes: Bytes of the batches that were peeked at and not handed out.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator = iter(loader)
        self._peeked: deque[tuple[Any, int]] = deque()  # with their bytes
        self._states: deque[dict[str, Any]] = deque()  # the loader's from before each peek, were it in vain
        self._end: Exception | None = None  # what comes behind the batches peeked at
        self._copies = True  # batches can be copied, so that a later one leaves them alone
        self.current: Any = None
        self.waiting_bytes = 0

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
            self.current, num_bytes = self._peeked.popleft()
            self.waiting_bytes -= num_bytes
        elif self._end is not None:
            raise self._end
        else:
            self.current, _ = self._draw()
        return self.current

    def peek(self, ahead: int) -> Any:
        while self._copies and len(self._peeked) <= ahead and self._end is None:
            if isinstance(self._loader, _Stateful):
                self._states.append(copy.deepcopy(self._loader.state_dict()))
            try:
                self._peeked.append(self._draw())
                self.waiting_bytes += self._peeked[-1][1]
            except Exception as end:  # an error is one when its batch comes
                self._end = end
        return self._peeked[ahead][0] if ahead < len(self._peeked) else None

    def _draw(self) -> tuple[Any, int]:
        """The iterator's next batch with its bytes; a copy unless one turned out not to be possible."""
        batch = next(self._iterator)
        if not self._copies:
            return batch, 0
        try:
            return copy_batch(batch)
        except Exception as error:  # whatever pickling a stranger's object may raise
            self._copies = False
            log.info("Coming batches are not looked at, as a batch cannot be copied: %s", error)
            return batch, 0


def copy_batch(batch: Any) -> tuple[Any, int]:
    """A copy that shares no memory with a batch, and the bytes that it takes.

    Tensors are cloned, into memory of this process where they were in shared memory; all else is pickled.

    Raises:
        Exception: whatever pickling raises for what it cannot do.

    >>> import torch
    >>> ids = torch.arange(100)
    >>> copied, num_bytes = copy_batch({"ids": ids})
    >>> torch.equal(copied["ids"], ids), copied["ids"].data_ptr() == ids.data_ptr(), 800 <= num_bytes < 1000
    (True, False, True)
    """
    clones: list[Tensor] = []
    of: dict[int, int] = {}  # the place of a tensor that comes again

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, Tensor):
                return None
            if id(value) not in of:
                of[id(value)] = len(clones)
                clones.append(_clone(value))
            return of[id(value)]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: int) -> Tensor:
            return clones[place]

    written = io.BytesIO()
    Pickler(written, pickle.HIGHEST_PROTOCOL).dump(batch)
    num_bytes = written.tell() + sum(clone.nbytes for clone in clones)
    written.seek(0)
    return Unpickler(written).load(), num_bytes


def _clone(tensor: Tensor) -> Tensor:
    clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return clone.pin_memory() if tensor.is_pinned() else clone


class LookAhead:
    """Announces coming batches to collections, to each when it has looked up what it needs of the present one.

    A batch's ids are taken as the loader gives them. Nothing is announced where the model or its data module changes
    batches in a hook before or after their transfer, where no part of a batch or several could be meant, and behind the
    last batch of an epoch. A collection that cannot be told of a batch hears no more in that epoch, and for it no
    further batch is taken from the loader. Of several loaders, only the next batch is.

    Args:
        trainer: The trainer, whose loaders are :func:`peekable`.
        collections: Collections that are told of coming batches, each when it has looked up what it needs of the
            present one.
        prefetch: Whether the rows of the next batch are fetched while the present one is trained.
        num_batches: Look further, at up to so many batches, so that a collection keeps the rows which are needed
            soonest.
        num_bytes: Only the next batch is looked at once those that wait, and what caches note of them, take so many
            bytes.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        collections: Iterable[EmbeddingBagCollection],
        *,
        prefetch: bool = True,
        num_batches: int = 0,
        num_bytes: int = 1 << 27,
    ) -> None:
        self._trainer = trainer  # the run's, whose loaders are peeked at
        self._prefetch, self._num_batches, self._num_bytes = prefetch, num_batches, num_bytes  # as given
        # What each collection will look up, next batch first.
        self._coming: dict[EmbeddingBagCollection, deque[SparseFeatures]] = {x: deque() for x in collections}

        # A function, so that a copy of the model has no copy of the trainer.
        def announce(collection: EmbeddingBagCollection, _: Any, pooled_BFD: Tensor) -> None:
            self._after_lookup(collection, pooled_BFD)

        # After each collection's lookup, until `close`.
        self._hooks = [collection.register_forward_hook(announce) for collection in self._coming]
        self._looked_up: set[EmbeddingBagCollection] = set()  # what it needs of the present batch
        self._blind: set[EmbeddingBagCollection] = set()  # could not be told of a batch of this epoch
        self._num_ids = 0  # of all batches that collections were told of and have not looked up
        self._num_begun = -1  # batches of the run, up to the present one; -1 before the first one
        self._batch_idx = -1  # of the present batch in its epoch
        # No hook changes batches between the loader and the model, so what the loader gives is what is looked up.
        owners = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]  # set by a connector
        self._sees_batches = not any(
            is_overridden(hook, owner, parent)
            for owner, parent in zip(owners, (pl.LightningModule, pl.LightningDataModule), strict=True)
            for hook in _HOOKS
            if owner is not None
        )

    def close(self) -> None:
        """Announce nothing more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _after_lookup(self, collection: EmbeddingBagCollection, pooled_BFD: Tensor) -> None:
        # A copy of the model has other collections; lookups of an evaluation have no gradients.
        if collection not in self._coming or not pooled_BFD.requires_grad:
            return
        self._follow_batches()
        if collection in self._looked_up:
            return
        self._looked_up.add(collection)
        if self._trainer.is_last_batch or not self._sees_batches:
            return
        loaders = list(find(self._trainer.train_dataloader, PeekableLoader))
        coming = self._coming[collection]
        for _ in range(_MORE):
            if collection in self._blind or self._is_far_enough(coming, loaders):
                break
            batches = self._batches_at(len(coming), loaders)
            if all(batch is None for batch in batches):
                break
            sparse = self._announce(collection, batches, ahead=len(coming))
            if sparse is None:
                self._blind.add(collection)
            else:
                coming.append(sparse)
                self._num_ids += sparse.values.numel()
        if self._prefetch and coming:
            with suppress(IndexError, KeyError, ValueError):
                collection.prefetch(coming[0])

    def _follow_batches(self) -> None:
        """Where this is the first lookup of a batch, what was foretold of it has come; an epoch begins anew."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if progress.total.ready == self._num_begun:
            return
        goes_on = progress.total.ready == self._num_begun + 1 and progress.current.ready > 1
        if not goes_on:
            self._blind.clear()
            self._num_ids = 0
        for coming in self._coming.values():
            if not goes_on:
                coming.clear()
            elif coming:
                self._num_ids -= coming.popleft().values.numel()
        self._num_begun = progress.total.ready
        self._batch_idx = progress.current.ready - 1
        self._looked_up.clear()

    def _is_far_enough(self, coming: deque[SparseFeatures], loaders: list[PeekableLoader]) -> bool:
        if not coming:
            return False
        if len(loaders) > 1 or len(coming) >= self._num_batches:
            return True
        return sum(loader.waiting_bytes for loader in loaders) + BYTES_PER_ID * self._num_ids >= self._num_bytes

    def _announce(self, collection: EmbeddingBagCollection, batches: list[Any], *, ahead: int) -> SparseFeatures | None:
        wanted = set(collection.feature_names)
        suitable = [x for x in find(batches, SparseFeatures) if wanted <= set(x.keys)]
        if len(suitable) != 1:
            return None
        try:
            if self._num_batches:
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
        return [loader.peek(ahead - 1) if ahead else loader.current for loader in loaders]
