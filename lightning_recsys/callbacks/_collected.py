"""A metric that gets its batches many at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_recsys.metrics import NormalizedEntropy

MOST_BATCHES = 64
MOST_EXAMPLES = 16_384


class CollectedEntropy:
    """Keeps copies of a few batches and gives them to the metric together.

    A single update takes some thirty operators on small tensors. Between two training steps their code has left the
    processor's cache, and they take 300 microseconds; copying a batch takes 15. Nothing about the result changes, for
    the metric can only be reached through :meth:`metric`, which hands over what was collected.

    Args:
        metric: Normalized entropy that takes logits (``from_logits=True``).

    >>> entropy = CollectedEntropy(NormalizedEntropy(from_logits=True))
    >>> entropy.add(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0]))
    >>> entropy.metric().compute()
    tensor(1., dtype=torch.float64)
    """

    def __init__(self, metric: NormalizedEntropy) -> None:
        self._metric = metric
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._examples = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Raises:
            ValueError: the shapes differ; or a label of this batch or of one before it, as yet unseen by the metric, is
                not 0 or 1.
        """
        if logits.shape != labels.shape:
            self._metric.update(logits, labels)  # says what is wrong
        self._logits.append((logits.detach() if logits.requires_grad else logits).clone())
        self._labels.append(labels.clone())
        self._examples += labels.numel()
        if self._examples >= MOST_EXAMPLES or len(self._labels) >= MOST_BATCHES:
            self.metric()

    def metric(self) -> NormalizedEntropy:
        """The metric, up to date.

        Raises:
            ValueError: a label was not 0 or 1.
        """
        if self._labels:
            logits, labels = self._logits, self._labels
            self.forget()
            try:
                self._metric.update(_joined(logits), _joined(labels), sizes=[batch.numel() for batch in labels])
            except ValueError as error:
                raise ValueError(f"{error} It is in one of the last {len(labels)} batches.") from error
        return self._metric

    def forget(self) -> None:
        """Drop what the metric has not seen yet."""
        self._logits, self._labels, self._examples = [], [], 0


def _joined(batches: list[Tensor]) -> Tensor:
    return torch.cat([batch.flatten() for batch in batches])
