"""Numbers that loops compute with in float32, in arrays that keep them as float32 or as bfloat16.

A bfloat16 is the upper half of a float32, and lies in an array of uint16. A loop that is compiled for such an array
reads and writes it by the functions here; compiled for float32 they are plain reads and writes.

**Stochastic rounding.** A float32 that is written as bfloat16 becomes one of its two neighbours, the nearer one the
more probably, so that it is right on average: a step of training is mostly smaller than half the distance of
neighbours, and rounded to the nearest it would be lost each time. What is added to the half that falls off is a hash of
the update's number, the row and the column: whoever makes the same update of the same row comes to the same bits, as
replicas must.
(Gupta et al. 2015, "Deep learning with limited numerical precision"; Zhang et al. 2018, "Training with low-precision
embedding tables".)
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor

from lightning_recsys.compiled.hashing import GOLDEN, mix

_MIX, _GOLDEN, _WORD = 0x85EBCA6B, 0x9E3779B9, 0xFFFFFFFF
_NAN = 0x7FC0  # what NaN becomes: of its own bits those that say so may fall off


def as_loop_array(rows: Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU as loops take it: as it is, but for bfloat16, whose bits are uint16 to them."""
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


# Loops call these three by name. When a loop is compiled, Numba puts the overload for its array in their place, so that
# these bodies never run.


def number_at(rows, row, d):  # noqa: ANN001, ANN201
    """``rows[row, d]`` as float32; inside of loops only."""
    raise NotImplementedError


def put_number(rows, row, d, value, noise):  # noqa: ANN001, ANN201
    """``rows[row, d] = value``, stochastically rounded where rows are bfloat16; inside of loops only.

    Args:
        rows: ``[R, D]``, of float32 or of bfloat16's bits.
        row: Number of the row that is written to.
        d: Column of the number.
        value: What is to stand there, float32; on average it does.
        noise: The row's draw at this update, by :func:`noise_of`, uint32.
    """
    raise NotImplementedError


def noise_of(rows, row, update):  # noqa: ANN001, ANN201
    """The draw by which a row is rounded at an update; 0 where rows are float32. Inside of loops only.

    Args:
        rows: The array that is written to, whose dtype decides; ``[R, D]``.
        row: Number of the row, which with the update and the column makes the draw.
        update: Number of the update, int64; one that comes again rounds the same way.
    """
    raise NotImplementedError


# Numba adds uint32s as uint64s, and a loop over those does not go through vector registers.


def _widen_call(typing_context, half):  # noqa: ANN001, ANN202
    """The float32 of a bfloat16's bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return types.float32(types.uint16), generate


def _round_call(typing_context, value, noise, d):  # noqa: ANN001, ANN202
    """The bits of the bfloat16 that a float32 becomes, as number ``d`` of a row with such a noise."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        mixed = builder.add(arguments[1], builder.mul(builder.trunc(arguments[2], word), word(_GOLDEN)))
        mixed = builder.mul(builder.xor(mixed, builder.lshr(mixed, word(16))), word(_MIX))
        up = builder.lshr(builder.add(bits, builder.lshr(mixed, word(16))), word(16))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(builder.select(is_nan, word(_NAN), up), ir.IntType(16))

    return types.uint16(types.float32, types.uint32, types.int64), generate


_widen: Any = intrinsic(_widen_call)
_round: Any = intrinsic(_round_call)


@overload(number_at, inline="always")
def _number_at(rows, row, d):  # noqa: ANN001, ANN202
    if rows.dtype == types.uint16:
        return lambda rows, row, d: _widen(rows[row, d])
    return lambda rows, row, d: rows[row, d]


@overload(put_number, inline="always")
def _put_number(rows, row, d, value, noise):  # noqa: ANN001, ANN202
    def plain(rows, row, d, value, noise):  # noqa: ANN001, ANN202
        rows[row, d] = value

    def rounded(rows, row, d, value, noise):  # noqa: ANN001, ANN202
        rows[row, d] = _round(np.float32(value), noise, d)

    return rounded if rows.dtype == types.uint16 else plain


@overload(noise_of, inline="always")
def _noise_of(rows, row, update):  # noqa: ANN001, ANN202
    if rows.dtype == types.uint16:
        return lambda rows, row, update: np.uint32(mix(np.uint64(row) * GOLDEN + np.uint64(update)))
    return lambda rows, row, update: np.uint32(0)


def round_stochastically(values_UD: Tensor, rows_U: Tensor, update: int) -> Tensor:
    """Round rows as loops do that write them at this update, bit for bit: bfloat16 ``[U, D]``.

    Args:
        values_UD: Rows after the update, float32 ``[U, D]`` on any device.
        rows_U: The rows' numbers, int64.
        update: Number of the update.

    >>> ones = torch.full((1, 100_000), 1 + 2**-10)  # an eighth of the way from 1 to the next bfloat16
    >>> rounded = round_stochastically(ones, torch.tensor([7]), update=1).float()
    >>> rounded.unique().tolist(), round(rounded.mean().item(), 3)
    ([1.0, 1.0078125], 1.001)
    """
    noise_U = _mix(rows_U * _signed(int(GOLDEN)) + update) & _WORD
    columns_D = torch.arange(values_UD.shape[1], device=values_UD.device) * _GOLDEN
    mixed_UD = (noise_U.unsqueeze(1) + columns_D) & _WORD
    added_UD = (((mixed_UD ^ (mixed_UD >> 16)) * _MIX) & _WORD) >> 16
    bits = values_UD.contiguous().view(torch.int32)
    up = (bits + added_UD.to(torch.int32)) >> 16  # an arithmetic shift, of which the lower half stays
    halves = torch.where(values_UD.isnan(), _NAN, up)
    return halves.to(torch.int16).view(torch.bfloat16)


def _mix(bits: Tensor) -> Tensor:
    """:func:`~lightning_recsys.compiled.hashing.mix` on any device: int64, whose products wrap around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """The shift of an unsigned number to the right."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
