"""Buffers of a model, such as the statistics of normalisations, where each worker has its own while it trains."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def meet_buffers(module: nn.Module) -> None:
    """Give all ranks the same buffers: the mean over ranks of floating-point ones, rank 0's of all others.

    Running values of a normalisation each follow one worker's batches, so their mean is what all the data say. The mean
    is taken in double precision: a constant that all ranks have comes out with the same bits.

    Communication: one all-reduce or broadcast for each buffer; all ranks call this together.
    """
    for buffer in module.buffers():
        if buffer.is_floating_point() and buffer.numel():
            total = buffer.to(torch.float64)
            dist.all_reduce(total)
            buffer.copy_(total.div_(dist.get_world_size()))
        else:
            dist.broadcast(buffer, src=0)
