"""Rows in fewer bytes: bfloat16, or 8 bits with a scale for each row, in whole words of 4 bytes.

A packed row is ``W`` words. ``bf16`` has two numbers in a word. ``int8`` has the scale as a float32 in the first word,
then four numbers in a word, each to be multiplied by it; the largest of a row is 127. The rest of the last word is 0.
"""

# Shape suffixes: U rows, D embedding dim, W words of a row, N ids, B batch, F features.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compiled.loops import AHEAD, compile_loop, prefetch

RowFormat = Literal["float32", "bf16", "int8"]
ROW_FORMATS: tuple[RowFormat, ...] = ("float32", "bf16", "int8")
_WORD = 4  # bytes
_LARGEST = 127


def check_row_format(row_format: str) -> None:
    """Refuse what is no format.

    Raises:
        ValueError: the name is none of the formats.
    """
    if row_format not in ROW_FORMATS:
        raise ValueError(f"rows must be one of {', '.join(ROW_FORMATS)}, got {row_format!r}.")


def num_words(dim: int, row_format: RowFormat) -> int:
    """``W``.

    >>> [num_words(16, row_format) for row_format in ROW_FORMATS]
    [16, 8, 5]
    """
    if row_format == "float32":
        return dim
    return -(-2 * dim // _WORD) if row_format == "bf16" else 1 + -(-dim // _WORD)


def pack_rows(rows_UD: Tensor, row_format: RowFormat) -> Tensor:
    """Rows as they are stored: float32 ``[U, D]``, or words, int32 ``[U, W]``. They must be finite, and so they stay.

    >>> pack_rows(torch.tensor([[1.0, -2.0]]), "int8").view(torch.int8)[:, 4:]
    tensor([[  64, -127,    0,    0]], dtype=torch.int8)
    """
    if row_format == "float32":
        return rows_UD
    words_UW = torch.zeros(len(rows_UD), num_words(rows_UD.shape[1], row_format), dtype=torch.int32)
    if row_format == "bf16":
        largest = torch.finfo(torch.bfloat16).max  # what is above it would be rounded to infinity
        words_UW.view(torch.bfloat16)[:, : rows_UD.shape[1]] = rows_UD.clamp(-largest, largest).bfloat16()
        return words_UW
    scale_U = rows_UD.abs().amax(1) / _LARGEST
    words_UW.view(torch.float32)[:, 0] = scale_U
    numbers_UD = (rows_UD / scale_U.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
    words_UW.view(torch.int8)[:, _WORD : _WORD + rows_UD.shape[1]] = numbers_UD.clamp(-_LARGEST, _LARGEST).to(
        torch.int8
    )
    return words_UW


@cache
def sum_packed_for(row_format: RowFormat) -> Callable[..., None]:
    """Weighted sums of packed rows.

    Its arguments are those of :func:`~lightning_recsys.serving.rows.lookups.sum_bags_for`.
    Places are counted in words. The anchor is seen as numbers of 1 and 2 bytes as well, from the same address on.
    """
    is_bf16 = row_format == "bf16"

    @compile_loop
    def sum_packed(places, offsets, weights, anchor, bytes_there, halves_there, out):  # noqa: ANN001, ANN202
        batch_size, num_features, dim = out.shape
        last = places.shape[0] - 1
        for f in range(num_features):
            for b in range(batch_size):
                bag = f * batch_size + b
                first, behind = (offsets[bag], offsets[bag + 1]) if offsets.shape[0] else (bag, bag + 1)
                for position in range(first, behind):
                    prefetch(anchor, places[min(position + AHEAD, last)])
                    weight = weights[position] if weights.shape[0] else np.float32(1)
                    place = places[position]  # indices are unsigned: a negative one would count from an array's end
                    if is_bf16:
                        for d in range(dim):
                            bits = np.uint32(halves_there[np.uint64(2 * place + d)]) << np.uint32(16)
                            out[b, f, d] += weight * np.uint32(bits).view(np.float32)
                    else:
                        scale = weight * anchor[np.uint64(place)]
                        for d in range(dim):
                            out[b, f, d] += scale * np.float32(bytes_there[np.uint64(4 * place + 4 + d)])

    loop = cast(Any, sum_packed)

    def run(places: Any, offsets: Any, weights: Any, anchor: Any, out: Any) -> None:
        loop(places, offsets, weights, anchor, anchor.view(np.int8), anchor.view(np.uint16), out)

    return run
