"""No compression: float32 as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_recsys.compression.codec import ArraySpec, Codec, Shape


@dataclass(frozen=True)
class Uncompressed(Codec):
    """Float32, 4 bytes an element.

    >>> Uncompressed().encoded_bytes((128, 16))
    8192
    """

    name = "none"
    changes_values = False

    def layout(self, shape: Shape) -> list[ArraySpec]:  # noqa: D102 - inherited
        return [(torch.float32, shape)]

    def encode(self, tensor: Tensor, residual: Tensor | None = None) -> list[Tensor]:  # noqa: D102 - inherited
        return [tensor.contiguous()]

    def _decode(self, arrays: Sequence[Tensor], shape: Shape) -> Tensor:
        return arrays[0]
