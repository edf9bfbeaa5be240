"""How this package compiles its loops over rows, and how they ask for rows before they need them."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import os
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic, overload

from lightning_recsys.compiled.one_compiler import compile_once

# A data loader forks its processes while other threads of a worker compile. Who is forked meanwhile would find the
# compiler's lock taken by a thread that it does not have, and wait for ever once it compiles or loads something itself.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)

# Sums may be reordered and fused (they are short, and FBGEMM does the same); NaN and infinity keep their meaning.
compile_loop = compile_once(numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}))


# A step is rounded before it is taken from the row, and not fused with that: so whoever takes the same step from the
# same row later, as the server of a cached row does, comes to the same bits.
compile_rule = compile_once(numba.njit(nogil=True, error_model="numpy"))


# For what loops do with each key or row, rounded as rules are. A call with many arrays, which the compiler may leave as
# one, takes longer than most of what these functions do.
compile_inline = compile_once(numba.njit(nogil=True, error_model="numpy", forceinline=True))


AHEAD = 32
"""How many rows before its use a loop asks for a row: on one thread, 4 hid half of the waiting and 32 nearly all."""


SOON = AHEAD // 2
"""The same for what is found through something that was asked for ``AHEAD`` of its use."""


_LINE_BITS = 512  # of a cache line on x86 and most of ARM; a wrong guess costs a little time only


def _prefetch_call(typing_context, array, position):  # noqa: ANN001, ANN202
    """Ask for the cache line of an element of a contiguous array, counted in elements, for reading and writing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte_pointer)
        builder.call(function, [address, number(1), number(3), number(1)])  # will be written, keep, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


prefetch: Any = intrinsic(_prefetch_call)


def _numbers_per_line(array):  # noqa: ANN001, ANN202
    """How many numbers of an array are in a cache line; in a loop the overload below stands in its place."""
    raise NotImplementedError


@overload(_numbers_per_line, inline="always")
def _constant_per_line(array):  # noqa: ANN001, ANN202
    count = _LINE_BITS // array.dtype.bitwidth  # known when a loop is compiled, as `array.itemsize` is not
    return lambda array: count


@compile_loop
def prefetch_row(rows, row):  # noqa: ANN001, ANN201
    """Ask for a row of a contiguous ``[R, D]``; any number is allowed, a wrong one only wastes the effort."""
    for d in range(0, rows.shape[1], _numbers_per_line(rows)):
        prefetch(rows, row * rows.shape[1] + d)
