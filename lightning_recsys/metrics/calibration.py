"""Calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_recsys.metrics._binary_metric import BinaryMetric
from lightning_recsys.metrics.functional._inputs import check_inputs


class Calibration(BinaryMetric):
    r"""Predicted clicks per real click: 1 is calibrated, more predicts too many.

    .. math:: \frac{\sum_i p_i}{\sum_i y_i}

    Args:
        from_logits: Whether ``preds`` are logits instead of probabilities.
        kwargs: Further arguments of :class:`torchmetrics.Metric`.

    As input to ``update`` and ``forward``:

    - ``preds``: probabilities in [0, 1], or logits; any shape and floating dtype.
    - ``target``: labels, 0 or 1, same shape.

    As output of ``compute``: scalar, float64. NaN, with one warning, where there is no positive label.

    >>> metric = Calibration()
    >>> metric.update(torch.tensor([0.2, 0.4]), torch.tensor([1.0, 0.0]))
    >>> metric.compute()
    tensor(0.6000, dtype=torch.float64)
    """

    higher_is_better = None  # neither: the best value is 1
    plot_lower_bound = 0.0

    prediction_sum: Tensor
    positive_sum: Tensor

    def __init__(self, *, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(from_logits=from_logits, **kwargs)
        self.add_state("prediction_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("positive_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of predictions and their labels."""
        check_inputs(preds, target, from_logits=self.from_logits)
        preds = preds.double()
        self.prediction_sum = self.prediction_sum + (preds.sigmoid() if self.from_logits else preds).sum()
        self.positive_sum = self.positive_sum + target.double().sum()

    def compute(self) -> Tensor:
        """The ratio over all processes."""
        if self.positive_sum > 0:
            return self.prediction_sum / self.positive_sum
        self._warn_once(
            "Calibration needs a positive label, got none; its value is NaN. Evaluate on more examples, or check the "
            "rule that makes the labels."
        )
        return self.prediction_sum.new_full((), torch.nan)
