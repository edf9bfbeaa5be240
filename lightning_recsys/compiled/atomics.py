"""Reads that write in one indivisible step, for loops over memory that other threads and processes write to as well."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


def _atomic_add_call(typing_context, array, position, amount):  # noqa: ANN001, ANN202
    """Add to an element of a contiguous int64 array in one indivisible step; returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), arguments[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


atomic_add: Any = intrinsic(_atomic_add_call)


def _compare_and_swap_call(typing_context, array, position, expected, new):  # noqa: ANN001, ANN202
    """Write an element of a contiguous float32 array if it has the expected bits; returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)  # processors compare and swap words, not floats
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), word.as_pointer())
        old, value = (builder.bitcast(x, word) for x in arguments[2:])
        found = builder.extract_value(builder.cmpxchg(place, old, value, "seq_cst"), 0)
        return builder.bitcast(found, ir.FloatType())

    return types.float32(array, types.intp, types.float32, types.float32), generate


compare_and_swap: Any = intrinsic(_compare_and_swap_call)
