"""Normalized entropy as a metric."""

# Shape suffixes: K batches.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.metrics._binary_metric import BinaryMetric
from lightning_recsys.metrics.functional.normalized_entropy import (
    _normalized_entropy_compute,
    _normalized_entropy_sums,
    _one_class_message,
)

SLOTS_PER_WINDOW = 128
"""Resolution of the window: it is up to 1/128, or one update, longer than asked."""


class NormalizedEntropy(BinaryMetric):
    r"""Cross entropy divided by the entropy of the labels' base rate, over all examples and over the latest.

    .. math:: \mathrm{NE} = \frac{\frac1N \sum_i \left(y_i \ln p_i + (1-y_i) \ln(1-p_i)\right)}
        {p \ln p + (1-p) \ln(1-p)}, \qquad p = \frac1N \sum_i y_i

    1 is what a constant prediction of the base rate scores; lower is better. Labels of one class have no entropy:
    the value is then NaN, and :meth:`compute` says so once.

    All sums are float64 and part of ``state_dict``, so that a resumed run goes on where it stopped.

    The window is a ring of slots of sums. An update goes into the newest slot, or opens a new one once that holds
    ``window_size / 128`` examples; the value is read from the newest slots that together hold at least
    ``window_size`` examples. Time and memory do not depend on the window's length. Over processes the slots are
    summed newest to newest, so ``window_size`` counts the examples of all processes together.

    Args:
        window_size: Examples in the window, over all processes; ``None`` for no window.
        from_logits: ``preds`` are logits; the cross entropy is then exact where probabilities round to 0 or 1.
        kwargs: Further arguments of :class:`torchmetrics.Metric`.

    As input to ``update`` and ``forward``:

    - ``preds``: probabilities in [0, 1], or logits; any shape and floating dtype.
    - ``target``: labels, 0 or 1, same shape.
    - ``weight``: non-negative example weights, same shape; 1 where absent.

    As output of ``compute``: the lifetime value, scalar, float64.

    Raises:
        ValueError: ``window_size`` is less than 1.

    Communication: at ``compute``, one gather of each state; none at ``update``, :meth:`lifetime` and :meth:`window`.
    Reference: He et al. 2014, Practical Lessons from Predicting Clicks on Ads at Facebook, equation 1.
    Differs from the paper: nothing. Probabilities are clipped to [1e-12, 1 - 1e-12].

    >>> metric = NormalizedEntropy(window_size=2)
    >>> metric.update(torch.tensor([0.2, 0.3]), torch.tensor([1.0, 0.0]))
    >>> metric.compute()
    tensor(1.4183, dtype=torch.float64)
    >>> metric.update(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
    >>> metric.window()
    tensor(1., dtype=torch.float64)
    """

    higher_is_better = False
    full_state_update = True  # forward() must not add a window of one update to the slots as if it were a sum
    plot_lower_bound = 0.0

    cross_entropy_sum: Tensor
    positive_sum: Tensor
    weight_sum: Tensor
    window_sums: Tensor

    def __init__(self, window_size: int | None = None, *, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(from_logits=from_logits, **kwargs)
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size must be at least 1 example, or None for no window, got {window_size}.")
        self.window_size = window_size
        for name in ("cross_entropy_sum", "positive_sum", "weight_sum"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum", persistent=True)
        if window_size is not None:
            # Oldest slot first; columns: cross entropy, positives, weight, examples.
            # One slot more than fills a window, because the newest is filling up.
            slots = torch.zeros(SLOTS_PER_WINDOW + 1, 4, dtype=torch.float64)
            self.add_state("window_sums", slots, dist_reduce_fx="sum", persistent=True)

    def update(
        self,
        preds: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Add a batch of predictions, their labels and, optionally, weights; or several batches at once.

        Args:
            preds: Predicted probabilities of the examples, or logits with ``from_logits=True``.
            target: Labels of the examples, 0 or 1.
            weight: Weights of the examples; by default 1 for each.
            sizes: Examples of each of several batches that lie behind each other. The result is that of one update for
                each, at a fraction of the time.

        Raises:
            ValueError: the shapes differ, a value is not what the class asks for, or ``sizes`` do not add up.
        """
        sums_K3 = _normalized_entropy_sums(preds, target, weight, from_logits=self.from_logits, sizes=sizes)
        cross_entropy_sum, positive_sum, weight_sum = sums_K3.sum(0)
        self.cross_entropy_sum = self.cross_entropy_sum + cross_entropy_sum
        self.positive_sum = self.positive_sum + positive_sum
        self.weight_sum = self.weight_sum + weight_sum
        if self.window_size is not None:
            self._update_window(sums_K3, sizes or [target.numel()], self.window_size)

    def _update_window(self, sums_K3: Tensor, sizes: Sequence[int], window_size: int) -> None:
        held, slot, slot_of_batch = self.window_sums[-1, 3].item(), SLOTS_PER_WINDOW, []
        for size in sizes:
            if held >= window_size / SLOTS_PER_WINDOW:
                held, slot = 0, slot + 1
            held += size
            slot_of_batch.append(slot)
        opened = self.window_sums.new_zeros(slot - SLOTS_PER_WINDOW, 4)
        rows_K4 = torch.cat((sums_K3, sums_K3.new_tensor(sizes).unsqueeze(1)), 1)
        slots = torch.cat((self.window_sums, opened))
        slots.index_add_(0, torch.tensor(slot_of_batch, device=slots.device), rows_K4)
        self.window_sums = slots[-SLOTS_PER_WINDOW - 1 :].clone()

    def compute(self) -> Tensor:
        """The lifetime value over all processes; NaN, with one warning, where the labels are of one class."""
        if message := _one_class_message(self.positive_sum, self.weight_sum):
            self._warn_once(message)
        return self.lifetime()

    def lifetime(self) -> Tensor:
        """The value over all examples of this process, or of all processes inside ``sync_context()``."""
        return _normalized_entropy_compute(self.cross_entropy_sum, self.positive_sum, self.weight_sum)

    def window(self) -> Tensor:
        """The value over the window, of this process or of all processes inside ``sync_context()``.

        Raises:
            ValueError: the metric was built without a window.
        """
        if self.window_size is None:
            raise ValueError("NormalizedEntropy has no window: give it a window_size, in examples.")
        counts = self.window_sums[:, 3]
        newer = counts.flip(0).cumsum(0).flip(0) - counts
        sums = self.window_sums[newer < self.window_size].sum(0)
        return _normalized_entropy_compute(sums[0], sums[1], sums[2])
