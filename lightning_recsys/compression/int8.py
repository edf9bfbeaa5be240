"""Eight bits an element, with a scale for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_recsys.compression.bfloat16 import BFloat16
from lightning_recsys.compression.codec import ArraySpec, Codec, FrameError, Shape, refuse_not_finite

LEVELS = 127
SMALLEST_ROW = 1e-30  # a row's largest value counts as this at least, so that its inverse is a float32
NARROW = 4  # rows up to so wide take no fewer bytes than in bfloat16, with their scale


@dataclass(frozen=True)
class Int8(Codec):
    """One byte an element and four for each row: ``round(127 x / m)`` and ``m / 127``, ``m`` the row's largest size.

    A row is what shares all indices but the last. The error is at most half a level, ``m / 254``. Rows of at most 4
    elements go in bfloat16, which takes no more bytes for them; so do tensors of one dimension.

    Only for activations: with gradients in 8 bits, models lose quality (Huang et al. 2021, section 4.2).

    >>> x = torch.tensor([[0.0, 1.0, -2.0, 3.0, 127.0]])
    >>> Int8().encode(x)
    [tensor([[  0,   1,  -2,   3, 127]], dtype=torch.int8), tensor([1.])]
    """

    name = "int8"
    carries = ("activations",)

    def layout(self, shape: Shape) -> list[ArraySpec]:  # noqa: D102 - inherited
        if _is_narrow(shape):
            return BFloat16().layout(shape)
        return [(torch.int8, shape), (torch.float32, (math.prod(shape[:-1]),))]

    def encode(self, tensor: Tensor, residual: Tensor | None = None) -> list[Tensor]:  # noqa: D102 - inherited
        if _is_narrow(tuple(tensor.shape)):
            return BFloat16().encode(tensor)
        rows = tensor.contiguous().view(-1, tensor.shape[-1])
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=SMALLEST_ROW)
        if not largest.isfinite().all():
            raise refuse_not_finite(self.name)
        levels = (rows * (LEVELS / largest)).round_().to(torch.int8)
        return [levels.view(tensor.shape), largest.div_(LEVELS).squeeze(1)]

    def _decode(self, arrays: Sequence[Tensor], shape: Shape) -> Tensor:
        if _is_narrow(shape):
            return BFloat16().decode(arrays, shape)
        levels, scales = arrays
        if not (scales.isfinite() & (scales >= 0)).all():
            raise FrameError("a row's scale in int8 must be finite and at least 0")
        return levels.view(-1, shape[-1]).float().mul_(scales.unsqueeze(1)).view(shape)


def _is_narrow(shape: Shape) -> bool:
    return len(shape) < 2 or shape[-1] <= NARROW or math.prod(shape) == 0
