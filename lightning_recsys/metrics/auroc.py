"""Area under the ROC curve from a histogram."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_recsys.metrics._binary_metric import BinaryMetric
from lightning_recsys.metrics.functional._inputs import check_inputs

LOGIT_RANGE = 16.0
"""The bins span logits from -16 to 16, probabilities from 1.1e-7 to 1 - 1.1e-7; the outer bins hold the rest."""


class StreamingAUROC(BinaryMetric):
    r"""Area under the ROC curve: how often a positive example is scored above a negative one, ties counting half.

    Positives and negatives are counted in bins of equal width in logit space, so that click-through rates near 0
    are told apart as finely as those near 0.5: with 65 536 bins two probabilities fall into different bins when
    their odds differ by 0.05 %. The counts are exact integers, 1 MiB in all whatever the number of examples, and
    add up over processes. With :math:`n_b` negatives and :math:`p_b` positives in bin :math:`b`,

    .. math:: \mathrm{AUC} = \frac{\sum_b p_b \left(\sum_{a<b} n_a + \frac12 n_b\right)}{\sum_b p_b \sum_b n_b},
        \qquad |\mathrm{AUC} - \mathrm{exact}| \le \frac{\sum_b p_b n_b}{2 \sum_b p_b \sum_b n_b},

    because only pairs within one bin can be ordered wrongly, each by at most a half. :meth:`error_bound` is the
    right side for the data seen. Equal predictions share a bin, so a constant predictor scores exactly 0.5.

    Args:
        num_bins: Bins over the logits from -16 to 16; scores beyond fall into the outer bins.
        from_logits: Whether ``preds`` are logits instead of probabilities.
        kwargs: Further arguments of :class:`torchmetrics.Metric`.

    As input to ``update`` and ``forward``:

    - ``preds``: probabilities in [0, 1], or logits; any shape and floating dtype.
    - ``target``: labels, 0 or 1, same shape.

    As output of ``compute``: scalar, float64. NaN, with one warning, where the labels are of one class only or a
    prediction was NaN.

    Raises:
        ValueError: ``num_bins`` is less than 2.

    Communication: at ``compute``, one gather of the counts.

    >>> metric = StreamingAUROC()
    >>> metric.update(torch.tensor([0.01, 0.02, 0.02, 0.03]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    >>> metric.compute()
    tensor(0.8750, dtype=torch.float64)
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    counts: Tensor

    def __init__(self, num_bins: int = 65536, *, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(from_logits=from_logits, **kwargs)
        if num_bins < 2:
            raise ValueError(f"num_bins must be at least 2, got {num_bins}. 65536 is the usual choice.")
        self.num_bins = num_bins
        # Negatives, then positives; the column after the last bin counts NaN predictions.
        self.add_state("counts", torch.zeros(2, num_bins + 1, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of predictions and their labels."""
        check_inputs(preds, target, from_logits=self.from_logits)
        # float64, because a logit rounded to float32 could put a lower probability above a higher one.
        logits = preds.double() if self.from_logits else preds.double().logit()
        bins = ((logits + LOGIT_RANGE) * (self.num_bins / (2 * LOGIT_RANGE))).clamp(0, self.num_bins - 1)
        bins = bins.nan_to_num(nan=self.num_bins).long()
        index = (bins + (target > 0.5) * (self.num_bins + 1)).flatten()
        if self.counts.is_inference() and not torch.is_inference_mode_enabled():
            self.counts = self.counts.clone()  # reset() ran in inference mode; such a tensor refuses the next line
        self.counts.view(-1).index_add_(0, index, torch.ones_like(index))

    def compute(self) -> Tensor:
        """The area over all processes."""
        negatives, positives = self.counts.double()
        if negatives[-1] + positives[-1] > 0:
            self._warn_once("AUC is NaN: some predictions are NaN. The model may have diverged.")
            return torch.full_like(negatives[0], torch.nan)
        num_pairs = negatives.sum() * positives.sum()
        if num_pairs == 0:
            self._warn_once(
                f"AUC needs labels of both classes, got {positives.sum():g} positive of {self.counts.sum():g}; its "
                "value is NaN. Evaluate on more examples, or check the rule that makes the labels."
            )
        area: Tensor = (positives * (negatives.cumsum(0) - negatives / 2)).sum() / num_pairs
        return area

    def error_bound(self) -> Tensor:
        """How far the area can be from the exact one for the counts of this process.

        Returns:
            Scalar, float64. Inside ``sync_context()`` it is that of all processes.
        """
        negatives, positives = self.counts.double()
        bound: Tensor = (negatives * positives).sum() / (2 * negatives.sum() * positives.sum())
        return bound
