"""Bfloat16: the upper half of a float32, rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_recsys.compression.codec import ArraySpec, Codec, Shape


@dataclass(frozen=True)
class BFloat16(Codec):
    """2 bytes an element, rounded to the nearest with ties to even; the relative error is at most ``2**-8``.

    The range is that of float32: nothing overflows, except values above 3.39e38, and infinity and NaN stay.

    >>> BFloat16().decode(BFloat16().encode(torch.tensor([1.0, 1.01])), (2,))
    tensor([1.0000, 1.0078])
    """

    name = "bf16"

    def layout(self, shape: Shape) -> list[ArraySpec]:  # noqa: D102 - inherited
        return [(torch.bfloat16, shape)]

    def encode(self, tensor: Tensor, residual: Tensor | None = None) -> list[Tensor]:  # noqa: D102 - inherited
        return [tensor.to(torch.bfloat16, memory_format=torch.contiguous_format)]

    def _decode(self, arrays: Sequence[Tensor], shape: Shape) -> Tensor:
        return arrays[0].float()
