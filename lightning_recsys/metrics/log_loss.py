"""Log loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_recsys.metrics._binary_metric import BinaryMetric
from lightning_recsys.metrics.functional._inputs import check_inputs, cross_entropy


class LogLoss(BinaryMetric):
    r"""Mean binary cross entropy in nats.

    .. math:: -\frac1N \sum_i \left(y_i \ln p_i + (1-y_i) \ln(1-p_i)\right)

    Args:
        from_logits: ``preds`` are logits; the value is then exact where probabilities round to 0 or 1.
        kwargs: Further arguments of :class:`torchmetrics.Metric`.

    As input to ``update`` and ``forward``:

    - ``preds``: probabilities in [0, 1], or logits; any shape and floating dtype.
    - ``target``: labels, 0 or 1, same shape.

    As output of ``compute``: scalar, float64. Probabilities are clipped to [1e-12, 1 - 1e-12].

    >>> metric = LogLoss()
    >>> metric.update(torch.tensor([0.2, 0.3]), torch.tensor([1.0, 0.0]))
    >>> metric.compute()
    tensor(0.9831, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    cross_entropy_sum: Tensor
    num_examples: Tensor

    def __init__(self, *, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(from_logits=from_logits, **kwargs)
        self.add_state("cross_entropy_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_examples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of predictions and their labels."""
        check_inputs(preds, target, from_logits=self.from_logits)
        losses = cross_entropy(preds, target.double(), from_logits=self.from_logits)
        self.cross_entropy_sum = self.cross_entropy_sum + losses.sum()
        self.num_examples = self.num_examples + target.numel()

    def compute(self) -> Tensor:
        """The mean over all processes."""
        return self.cross_entropy_sum / self.num_examples
