"""Counters in mapped memory that many processes add to, and no addition is lost."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from lightning_recsys.compiled.loops import compile_loop


def _atomic_add_call(typing_context, array, position, amount):  # noqa: ANN001, ANN202
    """Add to an element of a contiguous int64 array in one indivisible step; returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), arguments[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


atomic_add: Any = intrinsic(_atomic_add_call)


@compile_loop
def _add(counters, position, amount):  # noqa: ANN001, ANN202
    return atomic_add(counters, position, amount) + amount


def add(counters: Tensor, position: int, amount: int = 1) -> int:
    """Add to one of many counters (int64 ``[K]``, perhaps mapped by other processes too); returns the new value.

    >>> import torch
    >>> counters = torch.zeros(2, dtype=torch.int64)
    >>> add(counters, 1), add(counters, 1, 5), counters.tolist()
    (1, 6, [0, 6])
    """
    return int(_add(counters.numpy(), position, amount))
