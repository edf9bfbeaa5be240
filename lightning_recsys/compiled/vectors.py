"""Stretches of float32 arrays, copied and added in vector registers by compiled loops; bfloat16 is widened on the way.

A loop over the elements of a row cannot be trusted with that: the compiler does not know that the two arrays share no
memory, so where it unrolls the loop it moves one number at a time, and where it does not it asks for every row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.extending import intrinsic

_FLOATS = 16  # of the widest register; the compiler splits what is wider than the machine's


def vector_width(dim: int) -> int:
    """How many elements at a time go through a row of ``dim`` without a rest.

    >>> [vector_width(dim) for dim in (1, 8, 12, 128)]
    [1, 8, 4, 16]
    """
    return math.gcd(dim, _FLOATS)


def _require_rows(target: Any, source: Any) -> None:
    for array, allowed in ((target, (types.float32,)), (source, (types.float32, types.uint16))):
        if array.dtype not in allowed or array.layout != "C":
            raise TypingError(
                f"vectors move through contiguous arrays of float32, or from bfloat16's bits, got {array}"
            )


def _address(context: Any, builder: Any, kind: Any, array: Any, position: Any, element: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [position]), element.as_pointer())


def _load(builder: Any, context: Any, kind: Any, array: Any, position: Any, count: int) -> Any:
    """``count`` numbers of a row as a vector of float32, which a bfloat16 is the upper half of."""
    vector = ir.VectorType(ir.FloatType(), count)
    if kind.dtype == types.float32:
        return builder.load(_address(context, builder, kind, array, position, vector), align=4)
    halves = builder.load(
        _address(context, builder, kind, array, position, ir.VectorType(ir.IntType(16), count)), align=2
    )
    words = ir.VectorType(ir.IntType(32), count)
    return builder.bitcast(builder.shl(builder.zext(halves, words), ir.Constant(words, [16] * count)), vector)


def _copy_call(typing_context, target, i, source, j, count):  # noqa: ANN001, ANN202
    _require_rows(target, source)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, kinds = ir.IntType(8), signature.args
        if kinds[2].dtype != types.float32:
            vector = ir.VectorType(ir.FloatType(), count.literal_value)
            found = _load(builder, context, kinds[2], arguments[2], arguments[3], vector.count)
            builder.store(found, _address(context, builder, kinds[0], arguments[0], arguments[1], vector), align=4)
            return context.get_dummy_value()
        to = _address(context, builder, kinds[0], arguments[0], arguments[1], byte)
        start = _address(context, builder, kinds[2], arguments[2], arguments[3], byte)
        cgutils.raw_memcpy(builder, to, start, ir.Constant(ir.IntType(64), count.literal_value), 4, align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, count), generate


def _scaled_call(*, add: bool) -> Callable[..., Any]:
    def call(typing_context, target, i, source, j, weight, count):  # noqa: ANN001, ANN202
        _require_rows(target, source)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector, kinds = ir.VectorType(ir.FloatType(), count.literal_value), signature.args
            to = _address(context, builder, kinds[0], arguments[0], arguments[1], vector)
            weights = ir.Constant(vector, ir.Undefined)
            for lane in range(vector.count):
                weights = builder.insert_element(weights, arguments[4], ir.Constant(ir.IntType(32), lane))
            found = _load(builder, context, kinds[2], arguments[2], arguments[3], vector.count)
            result = builder.fmul(weights, found)
            if add:
                result = builder.fadd(builder.load(to, align=4), result)
            builder.store(result, to, align=4)
            return context.get_dummy_value()

        return types.void(target, types.intp, source, types.intp, types.float32, count), generate

    return call


# All take contiguous float32 arrays, which share no memory, with positions counted in elements, and are called from
# loops with a ``count`` that the compiler knows. The source may be an array of bfloat16's bits, as uint16.

copy_floats: Any = intrinsic(prefer_literal=True)(_copy_call)
"""``copy_floats(target, i, source, j, count)``: ``target[i:i + count] = source[j:j + count]``."""

scale_floats: Any = intrinsic(prefer_literal=True)(_scaled_call(add=False))
"""``scale_floats(target, i, source, j, weight, count)``: ``target[i:i + count] = weight * source[j:j + count]``."""

add_floats: Any = intrinsic(prefer_literal=True)(_scaled_call(add=True))
"""``add_floats(target, i, source, j, weight, count)``: ``target[i:i + count] += weight * source[j:j + count]``."""
