"""One flat vector in mapped files, such as the centre of elastic averaging; no lock."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.optim import RowOptimizer, RowWiseAdagrad
from lightning_recsys.stores import counters
from lightning_recsys.stores.interfaces import DenseStore
from lightning_recsys.stores.mapped_arrays import MappedArrays, Shapes
from lightning_recsys.stores.plain import optimizer_from_plain, optimizer_to_plain

KIND = "dense"
_VERSION = 0
_BLOCK = 4096  # elements that stay in the fastest cache between two loops over them


@compile_loop
def _move(values, local, answer, alpha):  # noqa: ANN001, ANN202
    """Move ``values`` towards ``local`` and tell where they went, with one pass over memory."""
    rest = np.float32(1) - alpha
    for start in range(0, values.shape[0], _BLOCK):
        block, towards = values[start : start + _BLOCK], local[start : start + _BLOCK]
        if alpha < np.float32(0.5):  # the line through two points, from the one that is nearer
            for i in range(block.shape[0]):
                block[i] += alpha * (towards[i] - block[i])
        else:
            for i in range(block.shape[0]):
                block[i] = towards[i] - rest * (towards[i] - block[i])
        told = answer[start : start + _BLOCK]  # may be the memory of `towards`
        for i in range(block.shape[0]):
            told[i] = block[i]


class MappedDenseStore(DenseStore):
    """A vector that all processes of the machine map and change in place.

    Args:
        folder: As :meth:`create` left it.

    Attributes:
        values: The vector itself, float32 ``[size]``. Who writes to it writes for everybody.
        state: The rule's state, by name; empty without a rule.
        optimizer: The rule of :meth:`push_gradient`, or ``None``.

    Raises:
        FileNotFoundError: there is no such folder.
        RuntimeError: a file of the folder is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._open(MappedArrays(folder))

    def _open(self, arrays: MappedArrays) -> None:
        self._arrays = arrays
        self.size = self.values.numel()
        plain = arrays.meta["optimizer"]
        self.optimizer = None if plain is None else optimizer_from_plain(plain)
        self._state_names = tuple(_initial_state(self.optimizer, torch.zeros(1)))

    @classmethod
    def create(cls, folder: Path, initial: Tensor, *, optimizer: RowOptimizer | None = None) -> MappedDenseStore:
        """Make the files of a vector.

        Raises:
            FileExistsError: the folder is there already.
            OSError: there is no room for it.
            TypeError: ``initial`` is not flat, float32 and at least one element long, or the rule is one for rows
                or none of :mod:`lightning_recsys.optim`.
        """
        if initial.dim() != 1 or initial.dtype != torch.float32 or not initial.numel():
            raise TypeError(
                "a dense store holds a flat float32 tensor of at least one element, got "
                f"{initial.dtype} of shape {list(initial.shape)}."
            )
        meta = {"kind": KIND, "optimizer": optimizer and optimizer_to_plain(optimizer)}
        if isinstance(optimizer, RowWiseAdagrad):
            raise TypeError("RowWiseAdagrad keeps one number per row, and a dense store has no rows: use Adagrad.")
        state = _initial_state(optimizer, initial.detach())
        shapes: Shapes = {
            "values": ("float32", tuple(initial.shape)),
            **{name: ("float32", tuple(tensor.shape)) for name, tensor in state.items()},
            "counters": ("int64", (1,)),
        }

        def fill(arrays: MappedArrays) -> None:
            for name, tensor in {"values": initial.detach(), **state}.items():
                arrays[name].copy_(tensor)

        store = cls.__new__(cls)
        store._open(MappedArrays.create(folder, meta, shapes, fill))
        return store

    @property
    def values(self) -> Tensor:  # noqa: D102 - in the class
        return self._arrays["values"]

    @property
    def state(self) -> dict[str, Tensor]:  # noqa: D102 - in the class
        return {name: self._arrays[name] for name in self._state_names}

    def pull(self) -> Tensor:  # noqa: D102 - inherited
        return self.values.clone()

    def assign(self, values: Tensor) -> None:  # noqa: D102 - inherited
        self.values.copy_(self._checked(values))

    def elastic_average(self, local: Tensor, *, alpha: float, out: Tensor | None = None) -> Tensor:
        """As inherited; the answer is written to ``out``, which may be ``local`` itself."""
        local = self._checked(local)
        answer = torch.empty_like(local) if out is None else out
        _move(self.values.numpy(), local.numpy(), answer.numpy(), np.float32(alpha))
        self._add_version()
        return answer

    def push_gradient(self, gradient: Tensor, *, lr: float) -> int:  # noqa: D102 - inherited
        if self.optimizer is None:
            raise RuntimeError(
                f"{self._arrays.folder.name!r} has no update rule: create it with optimizer=... to push gradients."
            )
        gradient, version = self._checked(gradient), self._add_version()
        self.optimizer.update_(  # the vector as a single row
            self.values.unsqueeze(0),
            gradient.unsqueeze(0),
            {name: tensor.unsqueeze(0) for name, tensor in self.state.items()},
            lr=lr,
            step=version,
        )
        return version

    @property
    def version(self) -> int:  # noqa: D102 - inherited
        return int(self._arrays["counters"][_VERSION])

    def _add_version(self) -> int:
        return counters.add(self._arrays["counters"], _VERSION)

    def _checked(self, vector: Tensor) -> Tensor:
        if vector.shape != (self.size,):
            raise ValueError(
                f"{self._arrays.folder.name!r} holds {self.size} elements, got a tensor of shape {list(vector.shape)}."
            )
        return vector.detach()

    def close(self) -> None:  # noqa: D102 - inherited
        self._arrays.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, here or in another process, is the same vector.
        return type(self), (self._arrays.folder,)


def _initial_state(optimizer: RowOptimizer | None, values: Tensor) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    return {name: tensor.squeeze(0) for name, tensor in optimizer.initial_state(values.unsqueeze(0)).items()}
