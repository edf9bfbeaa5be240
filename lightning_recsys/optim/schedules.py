"""Learning-rate schedules over a whole run, of dense part and rows alike: each group's own rate is the highest one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR


@dataclass(frozen=True)
class _Cosine:
    """The factor at a step; an object of a module, so that schedulers can be copied and saved."""

    total_steps: int
    final: float

    def __call__(self, step: int) -> float:
        share = min(step / self.total_steps, 1.0)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2


def cosine(optimizer: Optimizer, *, total_steps: int, final: float = 0.0) -> LambdaLR:
    r"""From each group's rate down to a share of it, along half a wave.

    .. math:: \eta_t = \eta_0 \left(f + (1 - f)\, \tfrac12 (1 + \cos(\pi t / T))\right)

    ``torch``'s own ends at one absolute rate, and rows and dense part have rates of different size.

    Args:
        optimizer: The optimizer whose learning rates are driven.
        total_steps: ``T``, steps of the run; a longer one stays at the last rate.
        final: ``f``, the share of the rate at the end, in ``[0, 1]``.

    Raises:
        ValueError: ``final`` is out of range.
    """
    if not 0 <= final <= 1:
        raise ValueError(f"optim.scheduler.final must be in [0, 1], got {final}. 0 ends at no rate at all.")
    return LambdaLR(optimizer, _Cosine(total_steps, final))


def one_cycle(
    optimizer: Optimizer, *, total_steps: int, warmup: float = 0.3, start: float = 0.04, final: float = 0.0001
) -> OneCycleLR:
    """``torch``'s ``OneCycleLR``: up to each group's own rate, then down below where it started.

    Args:
        optimizer: The optimizer whose learning rates are driven.
        total_steps: Number of steps of the run.
        warmup: Share of the steps that the rate rises, in ``[0, 1]``.
        start: Rate at the start, as a share of the group's, above 0.
        final: Rate at the end, as a share of that at the start, above 0.
    """
    return OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=total_steps,
        pct_start=warmup,
        div_factor=1 / start,
        final_div_factor=1 / final,
        cycle_momentum=False,  # asynchronous strategies keep Adam's betas as they are
    )
