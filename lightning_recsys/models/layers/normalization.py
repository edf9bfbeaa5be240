"""Normalisation of hidden layers: over the batch, by the statistics of one worker alone, or none."""

# Shape suffixes: B batch, H width of a layer.

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

Normalization = Literal["none", "batch", "local"]


class LocalNormalization(nn.Module):
    r"""Each feature divided by its mean over this worker's batch, with a trained scale and offset.

    .. math:: y = \alpha \frac{x}{E(x)} - \beta

    Workers never synchronise their means: each normalises by its own data, as training without waiting needs it. In
    evaluation the running mean of training stands for :math:`E(x)`; strategies of this package put the workers' mean
    of the running values into checkpoints.

    A mean near zero would blow its feature up, and flip its sign from one batch to the next. So where :math:`|E(x)|` is
    below :math:`f = \text{guard} \cdot E(|x|)`, the factor :math:`1 / E(x)` becomes :math:`E(x) / f^2`: equal at the
    border, continuous, and 0 at a mean of 0. Inputs without negative values never come there.

    Args:
        width: Features ``H``.
        guard: Share of the mean magnitude below which a mean counts as near zero, in ``(0, 1]``.
        momentum: Weight of a new batch in the running values, in ``(0, 1]``.

    Shape:
        - input and output: ``[B, H]``.

    Raises:
        ValueError: ``width`` is below 1, or ``guard`` or ``momentum`` is out of range.

    Communication: none.
    Reference: Liu and Zhao, Asynchronous SGD for Extreme-Scale Recommender Systems, equations 9 and 10;
    Algorithm 1 puts the layer between the linear part and the activation.
    Differs from the paper: the guard. Both factors start at 1, which is equation 9.
    """

    running_mean: Tensor
    running_magnitude: Tensor
    num_batches_tracked: Tensor

    def __init__(self, width: int, *, guard: float = 0.5, momentum: float = 0.1) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"the width of a layer must be at least 1, got {width}.")
        for name, value in (("guard", guard), ("momentum", momentum)):
            if not 0 < value <= 1:
                raise ValueError(f"LocalNormalization.{name} must be in (0, 1], got {value}.")
        self.guard, self.momentum = guard, momentum
        self.alpha = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.ones(width))
        self.register_buffer("running_mean", torch.ones(width))
        self.register_buffer("running_magnitude", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x_BH: Tensor) -> Tensor:
        """Normalised features; see the class for shapes."""
        if self.training and x_BH.shape[0]:
            mean, magnitude = x_BH.mean(0), x_BH.abs().mean(0)
            self._remember(mean.detach(), magnitude.detach())
        else:
            mean, magnitude = self.running_mean, self.running_magnitude
        tiny = torch.finfo(x_BH.dtype).tiny ** 0.5  # its square is a number still
        floor = (self.guard * magnitude).clamp(min=tiny)
        far = mean.abs() >= floor
        # The branch that is not taken gets a harmless value, for its gradient is multiplied by 0 and must be finite.
        factor = torch.where(far, 1 / torch.where(far, mean, floor), mean / floor.square())
        return x_BH * (self.alpha * factor) - self.beta

    def extra_repr(self) -> str:
        """The text that ``print`` shows."""
        return f"{self.alpha.numel()}, guard={self.guard}, momentum={self.momentum}"

    @torch.no_grad()
    def _remember(self, mean: Tensor, magnitude: Tensor) -> None:
        """A moving average that starts as a plain one, so that it forgets its start at the first batch."""
        self.num_batches_tracked += 1
        weight = 1 / torch.clamp(self.num_batches_tracked, max=1 / self.momentum)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight.to(self.running_mean.dtype))
        self.running_magnitude.lerp_(magnitude.to(self.running_mean.dtype), weight.to(self.running_mean.dtype))


def make_normalization(kind: Normalization, width: int) -> list[nn.Module]:
    """The layer that normalises ``width`` features, or no layer.

    Raises:
        ValueError: ``kind`` is not one of ``none``, ``batch``, ``local``.
    """
    if kind not in get_args(Normalization):
        raise ValueError(f"model.normalization must be one of {list(get_args(Normalization))}, got {kind!r}.")
    match kind:
        case "batch":
            return [nn.BatchNorm1d(width)]
        case "local":
            return [LocalNormalization(width)]
    return []
