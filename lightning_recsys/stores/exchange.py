"""The message of a worker that keeps copies of rows to a store: updates, rows it lacks, clocks to compare.

Every row of a store has a clock, an int32 that starts at 0 and counts the updates that the row has seen
(:mod:`lightning_recsys.sync.clocks`). Only exchanges move it: gradients that a store applies itself leave it alone.
"""

# Shape suffixes: P pushed rows, M fetched rows, C checked rows, D embedding dim.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.embeddings.sparse_features import all_below
from lightning_recsys.sync.clocks import ClockName

_MAX_STEPS = 2**31
_CLOCK_NAMES = get_args(ClockName)
_NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")
_NO_CLOCKS = torch.empty(0, dtype=torch.int32, device="cpu")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowExchange:
    """Pushes, then fetches, then clock checks; a store does them in this order, so the later ones see the pushes.

    Rows are named by their place in the store, as everywhere (``layout.table_starts[table] + id``), and each of the
    three lists names a row at most once. All tensors are on the CPU, and stay as they are until the answer is there.

    Args:
        fetch_rows: Rows to get with their state and clocks, int64 ``[M]``.
        push_rows: Rows to update, int64 ``[P]``.
        push_clocks: What each pushed row's clock hears, int32 ``[P]``, at least 0. ``clock="max"``: the worker's own
            clock ``c_c``, and the store's becomes ``max(c_g, c_c)``. ``clock="sum"``: the number of updates that the
            push sums up, and the store's becomes ``c_g + number``. Both stop at ``2**31 - 1``.
        updates: What is *subtracted* from ``weight`` (``[P, D]``) and *added* to each state of the store's rule, under
            its name and in its shape per row; float32. All of them where P is above 0, else none.
        push_counts: How many updates each pushed row's push sums up, at least 1, int32 ``[P]``: what a store that makes
            rows counts for their admission. Empty: as many as ``push_clocks`` says with ``clock="sum"``, else one each.
        copies: What the worker has of the pushed rows, with the updates made, as ``updates`` in shape; or nothing. A
            row that the store has forgotten (it expired) is made as its copy is, as its update alone would leave
            nothing of what it had learned before.
        num_steps: By how much the store's ``step`` grows.
        check_rows: Rows whose copies may be too old, int64 ``[C]``.
        check_clocks: The worker's clocks ``c_c`` of these rows, int32 ``[C]``.
        staleness: ``s``: a copy is stale where the store's clock is above ``c_c + s``. ``None``: never.
        clock: How pushes move the store's clocks, ``"max"`` (the paper) or ``"sum"``.
    """

    fetch_rows: Tensor = _NO_ROWS
    push_rows: Tensor = _NO_ROWS
    push_clocks: Tensor = _NO_CLOCKS
    updates: Mapping[str, Tensor] = field(default_factory=dict)
    push_counts: Tensor = _NO_CLOCKS
    copies: Mapping[str, Tensor] = field(default_factory=dict)
    num_steps: int = 0
    check_rows: Tensor = _NO_ROWS
    check_clocks: Tensor = _NO_CLOCKS
    staleness: int | None = None
    clock: ClockName = "max"

    @property
    def changes_rows(self) -> bool:
        """Whether it changes the store, if only its ``step``: a server then does it once, however often it comes."""
        return self.push_rows.numel() > 0 or self.num_steps > 0

    @property
    def updates_per_push(self) -> Tensor:
        """How many updates each push counts as when rows are admitted, int32 ``[P]``, at least 1."""
        if self.push_counts.numel():
            return self.push_counts
        return self.push_clocks.clamp(min=1) if self.clock == "sum" else torch.ones_like(self.push_clocks)

    def check(self, num_rows: int, row_shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse what a store cannot do, before it does any of it.

        Args:
            num_rows: Rows of the store.
            row_shapes: Shape of what one row has of ``weight`` and of each state.

        Raises:
            ValueError: a shape, a dtype, a name or a number is wrong.
            IndexError: a row is not in the store.
        """
        if self.clock not in _CLOCK_NAMES:
            raise ValueError(f"clock must be one of {list(_CLOCK_NAMES)}, got {self.clock!r:.100}")
        if self.staleness is not None and not 0 <= self.staleness < 2**62:
            raise ValueError(f"staleness must be None or from 0 to 2**62, got {self.staleness}")
        if not 0 <= self.num_steps < _MAX_STEPS:
            raise ValueError(f"num_steps must be in [0, {_MAX_STEPS}), got {self.num_steps}")
        limit = np.array([num_rows], dtype=np.uint64).view(np.int64)
        for name, rows in (("push", self.push_rows), ("fetch", self.fetch_rows), ("check", self.check_rows)):
            _check_array(f"{name}_rows", rows, torch.int64, (rows.numel(),))
            if not all_below(rows.contiguous().numpy(), np.array([0, rows.numel()]), limit):
                raise IndexError(f"{name}_rows must be in [0, {num_rows}), got {int(rows.min())} to {int(rows.max())}")
        _check_array("check_clocks", self.check_clocks, torch.int32, (self.check_rows.numel(),))
        self._check_pushes(row_shapes if self.push_rows.numel() else {})

    def _check_pushes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        pushed = self.push_rows.numel()
        _check_counts("push_clocks", self.push_clocks, pushed)
        if self.push_counts.numel():
            _check_counts("push_counts", self.push_counts, pushed, lowest=1)
        kinds = {"updates": self.updates} | ({"copies": self.copies} if self.copies else {})
        for kind, arrays in kinds.items():
            if arrays.keys() != expected.keys():
                raise ValueError(f"{kind} of {pushed} rows must be of {sorted(expected)}, got {sorted(arrays)!s:.200}")
            for name, shape in expected.items():
                _check_array(f"{kind}[{name!r}]", arrays[name], torch.float32, (pushed, *shape))

    def bytes_by_kind(
        self,
        num_rows: int,
        row_shapes: Mapping[str, tuple[int, ...]],
        *,
        weight_bytes: int = 4,
        gradient_bytes: int = 4,
    ) -> dict[str, int]:
        """Bytes that cross the network for it and for its answer, as :func:`bytes_by_kind` has them.

        Args:
            num_rows: Rows of the store.
            row_shapes: Shape of what one row has of ``weight`` and of each state.
            weight_bytes: Bytes of an element of ``weight`` as it travels.
            gradient_bytes: The same of an update of it, and of a copy that is pushed.

        >>> exchange = RowExchange(fetch_rows=torch.tensor([3, 5]))
        >>> exchange.bytes_by_kind(1_000_000, {"weight": (16,), "sum": ()})
        {'rows': 144, 'clocks': 8, 'gradients': 0}
        """
        pushed, fetched, checked = (x.numel() for x in (self.push_rows, self.fetch_rows, self.check_rows))
        sizes = {"pushed": pushed, "fetched": fetched, "checked": checked, "counted": self.push_counts.numel()}
        sizes["copied"] = pushed if self.copies else 0
        widths = {"weight_bytes": weight_bytes, "gradient_bytes": gradient_bytes}
        return bytes_by_kind(num_rows, row_shapes, **sizes, **widths)


@dataclass(frozen=True, slots=True, eq=False)
class RowValues:
    """A store's answer to a :class:`RowExchange`, in the order of its rows.

    Args:
        values: ``weight`` (float32 ``[M, D]``) and each state of the fetched rows.
        clocks: Clocks of the fetched rows, int32 ``[M]``.
        stale: Which checked copies are too old, bool ``[C]``.
    """

    values: dict[str, Tensor]
    clocks: Tensor
    stale: Tensor


def bytes_by_kind(
    num_rows: int,
    row_shapes: Mapping[str, tuple[int, ...]],
    *,
    pushed: int,
    fetched: int,
    checked: int,
    counted: int = 0,
    copied: int = 0,
    weight_bytes: int = 4,
    gradient_bytes: int = 4,
) -> dict[str, int]:
    """Bytes that cross the network for an exchange and its answer, headers aside.

    Args:
        num_rows: Rows of the store, of which the size of a row's number on the wire depends.
        row_shapes: Shape of what one row has of ``weight`` and of each state.
        pushed: Rows that take updates.
        fetched: Rows that come.
        checked: Copies whose clocks are compared.
        counted: Pushed rows that say how many updates they sum up.
        copied: Pushed rows that come with their copies.
        weight_bytes: Bytes of an element of ``weight`` as it travels; those of states are float32.
        gradient_bytes: The same of an update of it, and of a copy that is pushed.

    Returns:
        ``rows`` (numbers out, rows and state back), ``clocks`` (all clocks and counts, numbers of checked rows, one bit
        back for each of them) and ``gradients`` (numbers, updates and copies).
    """
    number = row_dtype(num_rows).itemsize
    state = 4 * sum(math.prod(shape) for name, shape in row_shapes.items() if name != "weight")
    row, update = (state + size * math.prod(row_shapes["weight"]) for size in (weight_bytes, gradient_bytes))
    clocks = pushed + checked + fetched + counted
    return {
        "rows": fetched * (number + row),
        "clocks": 4 * clocks + checked * number + -(-checked // 8),
        "gradients": pushed * (number + update) + copied * update,
    }


def row_dtype(num_rows: int) -> torch.dtype:
    """How a row's number travels: in 4 bytes where the store's rows can be counted in them."""
    return torch.int32 if num_rows <= 2**31 else torch.int64


def _check_counts(name: str, clocks: Tensor, size: int, *, lowest: int = 0) -> None:
    _check_array(name, clocks, torch.int32, (size,))
    if size and int(clocks.min()) < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {int(clocks.min())}")


def _check_array(name: str, array: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.is_cpu:
        got = f"{array.dtype} of shape {list(array.shape)} on {array.device}"
        raise ValueError(f"{name} must be {dtype} of shape {list(shape)} on the CPU, got {got}")
