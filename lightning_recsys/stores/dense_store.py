"""One flat vector in mapped files, such as the centre of elastic averaging; no lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.optim import RowOptimizer, RowSWAP, RowWiseAdagrad
from lightning_recsys.optim.swap import PERIOD, discount_state_, stands_still
from lightning_recsys.stores.checks import check_values
from lightning_recsys.stores.folders import counters
from lightning_recsys.stores.folders.mapped_arrays import MappedArrays, Shapes
from lightning_recsys.stores.interfaces import VALUES, DenseStore
from lightning_recsys.stores.plain import (
    optimizer_from_plain,
    optimizer_to_plain,
    optional_from_plain,
    optional_to_plain,
)
from lightning_recsys.stores.versions import (
    CHANGE,
    VERSION,
    StalenessHistogram,
    advance,
    count_staleness,
)
from lightning_recsys.sync import StalenessNormalization

KIND = "dense"
STEP = "step"  # the pushes that the store has counted
_COUNTERS = "counters"  # versions of the parts, then the step; a server's journal keeps this array at every push


class MappedDenseStore(DenseStore):
    """A vector that all processes of the machine map and change in place.

    Args:
        folder: The folder that :meth:`create` made.

    Attributes:
        arrays: The mapped files of the store.
        values: The vector itself, float32 ``[size]``. Who writes to it writes for everybody.
        state: The rule's state, by name; empty without a rule.
        optimizer: The rule of :meth:`push_gradient`, or ``None``.
        normalization: What stale gradients count; ``None``: as much as others.

    Raises:
        FileNotFoundError: there is no such folder.
        RuntimeError: a file of the folder is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._open(MappedArrays(folder))

    def _open(self, arrays: MappedArrays) -> None:
        self.arrays = arrays
        self.size = self.values.numel()
        self.parts = tuple(arrays.meta["parts"])
        self._bounds = [*pairwise(accumulate(self.parts, initial=0))]
        self.normalization = optional_from_plain(StalenessNormalization, arrays.meta["normalization"])
        self._observed = StalenessHistogram()
        self._has_changes = self.normalization is not None and self.normalization.uses_changes
        plain = arrays.meta["optimizer"]
        self.optimizer = None if plain is None else optimizer_from_plain(plain)
        self._rule = self.optimizer.inner if isinstance(self.optimizer, RowSWAP) else self.optimizer
        self._state_names = () if self.optimizer is None else tuple(self.optimizer.initial_state(torch.zeros(1, 1)))

    @classmethod
    def create(
        cls,
        folder: Path,
        initial: Tensor,
        *,
        optimizer: RowOptimizer | None = None,
        normalization: StalenessNormalization | None = None,
        parts: Sequence[int] = (),
    ) -> MappedDenseStore:
        """Make the files of a vector; arguments as :meth:`Stores.create_dense_store` has them.

        Raises:
            FileExistsError: the folder is there already.
            OSError: there is no room for it.
            ValueError: the parts do not make up the vector.
            TypeError: ``initial`` is not flat, float32 and at least one element long, or the rule is one for rows
                or none of :mod:`lightning_recsys.optim`.
        """
        if initial.dim() != 1 or initial.dtype != torch.float32 or not initial.numel():
            raise TypeError(
                "a dense store holds a flat float32 tensor of at least one element, got "
                f"{initial.dtype} of shape {list(initial.shape)}."
            )
        parts = tuple(parts) or (initial.numel(),)
        if min(parts) < 1 or sum(parts) != initial.numel():
            raise ValueError(
                f"the parts of a vector of {initial.numel()} elements have at least one each and that many together,"
                f" got {list(parts)!s:.200}."
            )
        meta = {
            "kind": KIND,
            "optimizer": optimizer and optimizer_to_plain(optimizer),
            "normalization": optional_to_plain(normalization),
            "parts": list(parts),
        }
        if isinstance(optimizer.inner if isinstance(optimizer, RowSWAP) else optimizer, RowWiseAdagrad):
            raise TypeError("RowWiseAdagrad keeps one number per row, and a dense store has no rows: use RowAdagrad.")
        state = _initial_state(optimizer, initial.detach(), len(parts))
        shapes: Shapes = {
            VALUES: ("float32", tuple(initial.shape)),
            **{name: ("float32", tuple(tensor.shape)) for name, tensor in state.items()},
            _COUNTERS: ("int64", (len(parts) + 1,)),
        }
        if normalization is not None and normalization.uses_changes:
            shapes = {**shapes, CHANGE: ("float32", (len(parts),))}

        def fill(arrays: MappedArrays) -> None:
            for name, tensor in {VALUES: initial.detach(), **state}.items():
                arrays[name].copy_(tensor)

        store = cls.__new__(cls)
        store._open(MappedArrays.create(folder, meta, shapes, fill))
        return store

    @property
    def values(self) -> Tensor:  # noqa: D102 - in the class
        return self.arrays[VALUES]

    @property
    def state(self) -> dict[str, Tensor]:  # noqa: D102 - in the class
        return {name: self.arrays[name] for name in self._state_names}

    @property
    def _versions(self) -> Tensor:
        return self.arrays[_COUNTERS][:-1]

    @property
    def _step(self) -> Tensor:
        return self.arrays[_COUNTERS][-1:]

    def elastic_average(self, local: Tensor, *, alpha: float) -> Tensor:  # noqa: D102 - inherited
        self.values.lerp_(self._checked(local), alpha)
        advance(np.arange(len(self.parts)), None, self._versions)
        return self.values

    @property
    def observed(self) -> StalenessHistogram:  # noqa: D102 - inherited
        return self._observed

    def begin_versioned_pull(self) -> Callable[[], tuple[Tensor, Tensor]]:  # noqa: D102 - inherited
        versions = self._versions.clone()  # first, as for rows: never newer than the values
        values = self.pull()
        return lambda: (values, versions)

    def push_gradient(  # noqa: D102 - inherited
        self,
        gradient: Tensor,
        *,
        lr: float,
        versions: Tensor | None = None,
        trained: Tensor | None = None,
        step: int | None = None,
    ) -> Callable[[], int]:
        number, _ = self.train(gradient, lr=lr, versions=versions, trained=trained, step=step)
        return lambda: number

    def train(
        self, gradient: Tensor, *, lr: float, versions: Tensor | None, trained: Tensor | None, step: int | None
    ) -> tuple[int, Tensor]:
        """Do as :meth:`push_gradient`.

        Returns:
            The number of the push, and how often each staleness occurred among the parts, int64 ``[K, 2]``.
        """
        # Every part is counted before any is changed: the version is what a part's gradient is multiplied by, and what
        # its rule takes for the number of its steps.
        self.check_gradient(gradient, versions, trained)
        gradient = gradient.detach()
        parts = np.arange(len(self.parts)) if trained is None else np.flatnonzero(trained.numpy())
        places = torch.from_numpy(parts)
        if step is None:
            step = counters.add(self.arrays[_COUNTERS], len(self.parts))
        staleness, steps = advance(parts, None if versions is None else versions[places], self._versions)
        changes = self.arrays[CHANGE] if self._has_changes else None
        if self.normalization is not None and self.normalization.rule != "identity":
            factors = torch.ones(len(self.parts))
            factors[places] = self.normalization.factor(staleness, None if changes is None else changes[places])
            gradient = gradient * factors.repeat_interleave(torch.tensor(self.parts))
        before = None if changes is None else self.pull()
        if isinstance(self.optimizer, RowSWAP):
            self._catch_up(self.optimizer, parts, lr=lr, step=step)
        for first, last, updates in self._stretches(parts.tolist(), steps.tolist()):
            self._apply(gradient, first, last, lr=lr, step=updates)
        if changes is not None and before is not None:
            moved = self.values - before
            for part in parts.tolist():
                first, stop = self._bounds[part]
                changes[part] = moved[first:stop].square().mean().sqrt()
        counts = count_staleness(staleness)
        self._observed.add(counts)
        return step, counts

    def _stretches(self, parts: Sequence[int], steps: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """First part, last part and steps of what can be updated at once: neighbours with the same number of steps."""
        numbered = zip(parts, steps, range(len(parts)), strict=True)
        for (step, _), run in groupby(numbered, key=lambda x: (x[1], x[0] - x[2])):
            members = [part for part, *_ in run]
            yield members[0], members[-1], step

    def _apply(self, gradient: Tensor, first_part: int, last_part: int, *, lr: float, step: int) -> None:
        assert self._rule is not None
        first, stop = self._bounds[first_part][0], self._bounds[last_part][1]
        values = self.values[first:stop].unsqueeze(0)  # the stretch as a single row
        grads = self._rule.decayed(values, gradient[first:stop].unsqueeze(0))
        self._rule.update_(values, grads, self._state_of(first, stop), lr=lr, step=step)

    def _state_of(self, first: int, stop: int) -> dict[str, Tensor]:
        """A stretch of the rule's state, as that of a single row."""
        return {name: x[first:stop].unsqueeze(0) for name, x in self.state.items() if name != PERIOD}

    def _catch_up(self, swap: RowSWAP, places: NDArray[np.int64], *, lr: float, step: int) -> None:
        """Discount the state of parts for the periods that they missed."""
        if stands_still(swap.inner, lr):
            return
        for parts, factors in swap.claim(places, self.arrays[PERIOD], step=step):
            for part, factor in zip(parts.tolist(), factors, strict=True):
                discount_state_(swap.inner, self._state_of(*self._bounds[part]), factor.view(1), lr=lr)

    def read(self, name: str) -> Tensor:  # noqa: D102 - inherited
        return self._named(name).clone()

    def write(self, name: str, values: Tensor) -> None:  # noqa: D102 - inherited
        target = self._named(name)
        check_values(name, values, target.shape, target.dtype)
        target.copy_(values.detach())

    def _named(self, name: str) -> Tensor:
        if name in (VERSION, STEP):
            return self._versions if name == VERSION else self._step
        if name not in self.written:
            raise ValueError(f"{self.arrays.folder.name!r} has {[*self.written, VERSION, STEP]}, got {name!r:.100}.")
        return self.arrays[name]

    @property
    def written(self) -> tuple[str, ...]:
        """The arrays that an update writes to, its counters aside."""
        return (VALUES, *self._state_names, *([CHANGE] if self._has_changes else []))

    def check_gradient(self, gradient: Tensor, versions: Tensor | None, trained: Tensor | None) -> None:
        """Refuse a push that does not fit, before anything is changed.

        Raises:
            RuntimeError: the store has no update rule.
            ValueError: the gradient has another size, or there is not one version or mark for each part.
        """
        if self.optimizer is None:
            raise RuntimeError(
                f"{self.arrays.folder.name!r} has no update rule: create it with optimizer=... to push gradients."
            )
        self._checked(gradient)
        wanted = (("versions", versions, torch.int64), ("trained", trained, torch.bool))
        for name, tensor, dtype in wanted:
            if tensor is not None and (tensor.shape != (len(self.parts),) or tensor.dtype != dtype):
                raise ValueError(
                    f"{self.arrays.folder.name!r} has {len(self.parts)} parts: {name} must be {dtype} of shape"
                    f" {[len(self.parts)]}, got {tensor.dtype} of shape {list(tensor.shape)}."
                )

    def flush(self) -> None:
        """Every update is in the store when its call returns: nothing to wait for."""

    def _checked(self, vector: Tensor) -> Tensor:
        if vector.shape != (self.size,):
            raise ValueError(
                f"{self.arrays.folder.name!r} holds {self.size} elements, got a tensor of shape {list(vector.shape)}."
            )
        return vector.detach()

    def close(self) -> None:  # noqa: D102 - inherited
        self.arrays.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, here or in another process, is the same vector.
        return type(self), (self.arrays.folder,)


def _initial_state(optimizer: RowOptimizer | None, values: Tensor, num_parts: int) -> dict[str, Tensor]:
    """The state of the vector as a single row; what a row has one number of, each part has one of."""
    if optimizer is None:
        return {}
    state = optimizer.initial_state(values.unsqueeze(0))
    return {name: x.squeeze(0) if x.dim() > 1 else x.expand(num_parts) for name, x in state.items()}
