"""The mean over workers of what each of them has of its own, such as the running values of normalisations."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def take_mean(
    tensors: Iterable[Tensor],
    *,
    counts: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> bool:
    """Put the mean over the ranks that count in the place of tensors; all ranks call this together.

    Of a rank that has died nobody brings anything: the mean is one of so many as do.

    Args:
        tensors: Floating-point tensors, of the same sizes on all ranks.
        counts: Whether this rank's tensors count.
        dtype: In which the mean is taken. Default: each tensor's own.
        device: Where ranks can talk. Default: where the tensors are.

    Returns:
        Whether any rank counts. Where none does tensors stay as they are.

    Communication: an all-reduce for each type of tensors.
    """
    tensors, somebody_counts = list(tensors), True
    for kind in dict.fromkeys(x.dtype for x in tensors):
        own = [x for x in tensors if x.dtype == kind]
        total = torch.cat([x.reshape(-1).to(device=device, dtype=dtype) for x in (*own, own[0].new_ones(1))])
        dist.all_reduce(total if counts else total.zero_())
        if not total[-1]:
            somebody_counts = False
            continue
        mean = total[:-1].div_(total[-1])
        for tensor, values in zip(own, torch.split(mean, [x.numel() for x in own]), strict=True):
            tensor.copy_(values.view(tensor.shape))
    return somebody_counts


def meet_buffers(module: nn.Module) -> None:
    """Give all ranks the same buffers: the mean over ranks of floating-point ones, rank 0's of all others.

    Running values of a normalisation each follow one worker's batches, so their mean is what all the data say. The mean
    is taken in double precision: a constant that all ranks have comes out with the same bits.

    Communication: that of :func:`take_mean`, and a broadcast of each of the other buffers; all ranks call this
    together.
    """
    buffers = [x for x in module.buffers() if x.numel()]
    take_mean([x for x in buffers if x.is_floating_point()], dtype=torch.float64)
    for buffer in buffers:
        if not buffer.is_floating_point():
            dist.broadcast(buffer, src=0)
