"""Normalized entropy as functions."""

# Shape suffixes: K batches, N examples.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics.utilities import rank_zero_warn

from lightning_recsys.metrics.functional._inputs import check_inputs, cross_entropy


def _normalized_entropy_sums(
    preds: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    from_logits: bool,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sums over each of K batches that lie behind each other: cross entropy, positive labels, weights; float64 [K, 3].

    Without ``sizes`` all of it is one batch.
    """
    check_inputs(preds, target, weight, from_logits=from_logits)
    sizes = [target.numel()] if sizes is None else list(sizes)
    if sum(sizes) != target.numel():
        raise ValueError(f"sizes must add up to the {target.numel()} examples, got {sizes}.")
    labels = target.flatten().double()
    losses = cross_entropy(preds.flatten(), labels, from_logits=from_logits)
    weights = torch.ones_like(labels) if weight is None else weight.flatten().double()
    columns_3N = torch.stack((losses * weights, labels * weights, weights))
    lengths_3K = torch.tensor(sizes, device=columns_3N.device).expand(3, -1)
    sums_3K: Tensor = torch.segment_reduce(columns_3N, "sum", lengths=lengths_3K, axis=1)
    return sums_3K.t()


def _normalized_entropy_compute(cross_entropy_sum: Tensor, positive_sum: Tensor, weight_sum: Tensor) -> Tensor:
    """Normalized entropy from the sums; NaN where the labels have no entropy."""
    rate = positive_sum / weight_sum
    entropy = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))
    return torch.where(entropy > 0, cross_entropy_sum / weight_sum / entropy, torch.nan)


def _one_class_message(positive_sum: Tensor, weight_sum: Tensor) -> str | None:
    """The sentence for the user where normalized entropy is undefined, else ``None``."""
    positives, total = positive_sum.item(), weight_sum.item()
    if 0 < positives < total:
        return None
    return (
        f"Normalized entropy needs labels of both classes, got {positives:g} positive of {total:g}; "
        "its value is NaN. Evaluate on more examples, or check the rule that makes the labels."
    )


def normalized_entropy(
    preds: Tensor, target: Tensor, *, weight: Tensor | None = None, from_logits: bool = False
) -> Tensor:
    r"""Cross entropy divided by the entropy of the labels' base rate.

    .. math:: \mathrm{NE} = \frac{\frac1N \sum_i \left(y_i \ln p_i + (1-y_i) \ln(1-p_i)\right)}
        {p \ln p + (1-p) \ln(1-p)}, \qquad p = \frac1N \sum_i y_i

    1 is what a constant prediction of the base rate scores; lower is better.

    Args:
        preds: Probabilities in [0, 1], or logits with ``from_logits``; any shape and floating dtype.
        target: Labels, 0 or 1, same shape.
        weight: Non-negative example weights, same shape; 1 where absent.
        from_logits: ``preds`` are logits.

    Returns:
        Scalar, float64. NaN with a warning where the labels are of one class only.

    Raises:
        ValueError: the shapes differ, or ``preds`` are not probabilities without ``from_logits``.

    Reference: He et al. 2014, Practical Lessons from Predicting Clicks on Ads at Facebook, equation 1.
    Differs from the paper: nothing. Probabilities are clipped to [1e-12, 1 - 1e-12].

    >>> normalized_entropy(torch.tensor([0.2, 0.3]), torch.tensor([1.0, 0.0]))
    tensor(1.4183, dtype=torch.float64)
    """
    (sums,) = _normalized_entropy_sums(preds, target, weight, from_logits=from_logits)
    if message := _one_class_message(sums[1], sums[2]):
        rank_zero_warn(message, UserWarning)
    return _normalized_entropy_compute(sums[0], sums[1], sums[2])
