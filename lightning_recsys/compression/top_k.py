"""The largest values of a gradient; the rest is left out, or added to the next one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compression.codec import ArraySpec, Codec, FrameError, Shape, refuse_not_finite


@dataclass(frozen=True)
class TopK(Codec):
    r"""The ``fraction`` of a gradient's elements that are largest in size, in bfloat16, and a bit for each element.

    Of equal sizes the first are taken, so equal gradients are sent equally everywhere. With ``error_feedback`` what is
    not sent, the rounding of what is sent included, stays in the residual :math:`e` and is added to the next gradient:

    .. math:: p_t = g_t + e_t, \qquad \hat g_t = \mathrm{top}_k(p_t), \qquad e_{t+1} = p_t - \hat g_t

    so the sum of all that is sent differs from the sum of all gradients by the last residual alone. Without it the
    rest is left out for good.

    Bits say which elements come, not numbers: they take 1/32 of the tensor whatever the fraction, need no order and
    cannot name an element twice. Below a fraction of 1/32 numbers would take less.

    Only for gradients: an activation that is left out would be another activation, and no later batch makes up for it.

    Args:
        fraction: Of the elements, above 0 and at most 1; at least one element is sent. At 0.1 a tensor takes 8 % of its
            bytes.
        error_feedback: Whether a :class:`.Sender` keeps what it has not sent and adds it to the next gradient.
            Gradients of activations have a row for each example, so what an example was not sent is added to another
            example of the next batch: sums over the batch are made up for, and single rows are not.

    Raises:
        ValueError: ``fraction`` is none.

    Reference: Karimireddy et al. 2019, Error Feedback Fixes SignSGD, Algorithm 2; Huang et al. 2021, section 4.2.

    >>> residual = torch.zeros(4)
    >>> frames = TopK(fraction=0.25).encode(torch.tensor([1.0, -4.0, 2.0, 0.0]), residual)
    >>> TopK(fraction=0.25).decode(frames, (4,)), residual
    (tensor([ 0., -4.,  0.,  0.]), tensor([1., 0., 2., 0.]))
    """

    fraction: float = 0.1
    error_feedback: bool = True

    name = "topk"
    carries = ("gradients",)

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"topk's fraction must be in (0, 1], got {self.fraction}. 0.1 is the usual choice.")

    @property
    def keeps_residual(self) -> bool:  # noqa: D102 - inherited
        return self.error_feedback

    def layout(self, shape: Shape) -> list[ArraySpec]:  # noqa: D102 - inherited
        size = math.prod(shape)
        return [(torch.uint8, ((size + 7) // 8,)), (torch.bfloat16, (self._kept(size),))]

    def _kept(self, size: int) -> int:
        return min(size, math.ceil(self.fraction * size))

    def encode(self, tensor: Tensor, residual: Tensor | None = None) -> list[Tensor]:  # noqa: D102 - inherited
        from lightning_recsys.compression.top_k_loops import take_largest  # numba, which takes a while to import

        whole = tensor.clone(memory_format=torch.contiguous_format) if residual is None else residual.add_(tensor)
        unsent = whole.view(-1)
        kept = self._kept(unsent.numel())
        bits = np.zeros((unsent.numel() + 7) // 8, dtype=np.uint8)
        values = torch.empty(kept, dtype=torch.bfloat16)
        if not unsent.isfinite().all():
            whole.zero_()
            raise refuse_not_finite(self.name)
        take_largest(unsent.numpy(), unsent.view(torch.uint32).numpy(), bits, values.view(torch.uint16).numpy())
        return [torch.from_numpy(bits), values]

    def _decode(self, arrays: Sequence[Tensor], shape: Shape) -> Tensor:
        bits, values = arrays
        size = math.prod(shape)
        chosen = np.unpackbits(bits.numpy())
        if np.count_nonzero(chosen) != values.numel() or chosen[size:].any():
            raise FrameError(f"{values.numel()} values of topk come with as many bits among the first {size}")
        if not values.isfinite().all():
            raise FrameError("values of topk must be finite")
        return (
            torch.zeros(size)
            .masked_scatter_(torch.from_numpy(chosen[:size]).view(torch.bool), values.float())
            .view(shape)
        )
