"""The checks that all metrics of this package make of their inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

PROBABILITY_FLOOR = 1e-12
"""Probabilities are clipped to ``[floor, 1 - floor]``, so that a wrong 0 or 1 costs 27.6 nats and not infinity."""


def check_inputs(
    preds: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    from_logits: bool,
) -> None:
    """Refuse inputs that would broadcast, and logits where probabilities are expected.

    Raises:
        ValueError: the shapes differ, a label is NaN or outside [0, 1], a weight is negative or
            no finite number, or ``preds`` leaves [0, 1] without ``from_logits``.
    """
    if preds.shape != target.shape:
        raise ValueError(
            f"preds and target must have the same shape, got {tuple(preds.shape)} and {tuple(target.shape)}. "
            "Squeeze a trailing dimension of 1 before the update."
        )
    if target.numel():
        low, high = torch.stack(target.aminmax()).tolist()  # one wait for an accelerator
        if not (low >= 0 and high <= 1):  # NaN is neither
            raise ValueError(f"target must be labels 0 or 1, got values from {low:.4g} to {high:.4g}.")
    if weight is not None:
        if weight.shape != target.shape:
            raise ValueError(
                f"weight must have the shape of target, got {tuple(weight.shape)} and {tuple(target.shape)}."
            )
        if weight.numel():
            low, high = torch.stack(weight.aminmax()).tolist()
            if not (low >= 0 and high < math.inf):
                raise ValueError(f"weight must be finite and at least 0, got values from {low:.4g} to {high:.4g}.")
    if not from_logits and bool(((preds < 0) | (preds > 1)).any()):
        low, high = preds.min().item(), preds.max().item()
        raise ValueError(
            f"preds must be probabilities in [0, 1], got values from {low:.4g} to {high:.4g}. "
            "Use from_logits=True where they are logits."
        )


def cross_entropy(preds: Tensor, target: Tensor, *, from_logits: bool) -> Tensor:
    """Binary cross entropy of each example in nats, in float64 whatever the inputs are.

    Args:
        preds: Probabilities, or logits with ``from_logits``; any floating dtype.
        target: Labels in [0, 1], float64, same shape.
        from_logits: Work from logits, where nothing saturates: a probability that was rounded to 1 has lost its loss.

    Returns:
        Float64, same shape.
    """
    preds = preds.double()
    if from_logits:
        return binary_cross_entropy_with_logits(preds, target, reduction="none")
    preds = preds.clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    # Not torch's binary_cross_entropy, which refuses to run under autocast.
    losses: Tensor = -(torch.xlogy(target, preds) + torch.special.xlog1py(1 - target, -preds))
    return losses
