"""Area under the ROC curve from a histogram."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lightning_recsys.metrics._binary_metric import BinaryMetric
from lightning_recsys.metrics.functional._inputs import check_inputs

BLOCK_WIDTH = 32.0
"""Logits that a block of bins spans; the middle one's are from -16 to 16, probabilities from 1.1e-7 to 1 - 1.1e-7."""
NUM_BLOCKS = 65
"""They span logits from -1040 to 1040, beyond every float64 between 0 and 1; the middle one is block 32."""
_NAN_BLOCK = NUM_BLOCKS  # whose first bin counts predictions that are NaN
_MIDDLE = NUM_BLOCKS // 2
_LARGE_ERROR = 1e-3


class StreamingAUROC(BinaryMetric):
    r"""Area under the ROC curve: how often a positive example is scored above a negative one, ties counting half.

    Positives and negatives are counted in bins of equal width in logit space, so that click-through rates near 0
    are told apart as finely as those near 0.5: with 65 536 bins two probabilities fall into different bins when
    their odds differ by 0.05 %. Bins come in blocks of 32 units of the logit, and a block is there as soon as a score
    falls into it: logits around -30 are told apart as finely as those around 0. The counts are exact integers, 1 MiB
    for each block whatever the number of examples, and add up over processes. With :math:`n_b` negatives and
    :math:`p_b` positives in bin :math:`b`,

    .. math:: \mathrm{AUC} = \frac{\sum_b p_b \left(\sum_{a<b} n_a + \frac12 n_b\right)}{\sum_b p_b \sum_b n_b},
        \qquad |\mathrm{AUC} - \mathrm{exact}| \le \frac{\sum_b p_b n_b}{2 \sum_b p_b \sum_b n_b},

    because only pairs within one bin can be ordered wrongly, each by at most a half. :meth:`error_bound` is the
    right side for the data seen. Equal predictions share a bin, so a constant predictor scores exactly 0.5.

    Args:
        num_bins: Bins of a block, over 32 units of the logit. Logits beyond 1040, and probabilities of 0 and 1, fall
            into the outermost bins.
        from_logits: Whether ``preds`` are logits instead of probabilities.
        kwargs: Further arguments of :class:`torchmetrics.Metric`.

    As input to ``update`` and ``forward``:

    - ``preds``: probabilities in [0, 1], or logits; any shape and floating dtype.
    - ``target``: labels, 0 or 1, same shape. Soft labels are refused.

    As output of ``compute``: scalar, float64. NaN, with one warning, where the labels are of one class only or a
    prediction was NaN. One warning, too, where :meth:`error_bound` is above 0.001.

    Raises:
        ValueError: ``num_bins`` is less than 2.

    Communication: at ``compute``, one gather of the counts and one of the blocks' numbers.

    >>> metric = StreamingAUROC()
    >>> metric.update(torch.tensor([0.01, 0.02, 0.03, 0.04]), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    >>> metric.compute()
    tensor(0.7500, dtype=torch.float64)
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    blocks: list[Tensor] | Tensor
    counts: list[Tensor] | Tensor

    def __init__(self, num_bins: int = 65536, *, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(from_logits=from_logits, **kwargs)
        if num_bins < 2:
            raise ValueError(f"num_bins must be at least 2, got {num_bins}. 65536 is the usual choice.")
        self.num_bins = num_bins
        # Each a list of one tensor, but in the hands of torchmetrics, which appends those of other processes: the
        # number of each block, ascending, and [block, negatives and positives, bin].
        self.add_state("blocks", [], dist_reduce_fx="cat")
        self.add_state("counts", [], dist_reduce_fx="cat")
        self._keep(self._no_blocks(), self._no_counts())

    def reset(self) -> None:
        """Forget all examples."""
        super().reset()
        self._keep(self._no_blocks(), self._no_counts())

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of predictions and their labels.

        Raises:
            ValueError: the shapes differ, a label is neither 0 nor 1, or ``preds`` are not what the class asks for.
        """
        check_inputs(preds, target, from_logits=self.from_logits)
        if not preds.numel():
            return
        positive = target > 0.5
        if not torch.equal(target, positive.to(target.dtype)):
            raise ValueError(
                "target must be labels 0 or 1, got values between: positives and negatives have no order with soft"
                " labels. Log loss and normalized entropy take them."
            )
        # float64, because a logit rounded to float32 could put a lower probability above a higher one.
        logits = preds.double() if self.from_logits else preds.double().logit()
        bins = (logits + BLOCK_WIDTH * NUM_BLOCKS / 2).mul_(self.num_bins / BLOCK_WIDTH)
        bins = bins.clamp_(0, NUM_BLOCKS * self.num_bins - 1).nan_to_num_(nan=_NAN_BLOCK * self.num_bins).long()
        starts = self._starts(bins)
        index = (bins + starts + positive * self.num_bins).flatten()
        (counts,) = self.counts
        if counts.is_inference() and not torch.is_inference_mode_enabled():
            self.counts = [
                counts := counts.clone()
            ]  # reset() ran in inference mode; such a tensor refuses the next line
        counts.view(-1).index_add_(0, index, torch.ones_like(index))

    def _starts(self, bins: Tensor) -> Tensor | int:
        """How much further than its number a bin's negatives lie in the counts, which get all missing blocks."""
        low, high = (end.item() // self.num_bins for end in bins.aminmax())
        (blocks,), (counts,) = self.blocks, self.counts
        known = blocks.tolist()
        if low == high and low in known:  # all but always
            return int((2 * known.index(low) - low) * self.num_bins)
        of_bins = bins // self.num_bins
        seen: Tensor = torch.unique(of_bins)
        if not set(seen.tolist()) <= set(known):
            empty = counts.new_zeros(len(seen), 2, self.num_bins)
            blocks, counts = self._joined(torch.cat((blocks, seen)), torch.cat((counts, empty)))
            self._keep(blocks, counts)
        starts: Tensor = (2 * torch.searchsorted(blocks, of_bins) - of_bins) * self.num_bins
        return starts

    def compute(self) -> Tensor:
        """The area over all processes."""
        blocks, counts = self._joined(dim_zero_cat(self.blocks), dim_zero_cat(self.counts))
        negatives, positives = counts.double().transpose(0, 1).reshape(2, -1)
        if _NAN_BLOCK in blocks.tolist():
            self._warn_once("AUC is NaN: some predictions are NaN. The model may have diverged.")
            return torch.full_like(negatives[0], torch.nan)
        num_pairs = negatives.sum() * positives.sum()
        if num_pairs == 0:
            self._warn_once(
                f"AUC needs labels of both classes, got {positives.sum():g} positive of {counts.sum():g}; its "
                "value is NaN. Evaluate on more examples, or check the rule that makes the labels."
            )
        elif (bound := _error_bound(negatives, positives).item()) > _LARGE_ERROR:
            self._warn_once(
                f"AUC may be off by up to {bound:.2g}: the model scores many positives and negatives alike, with logits"
                f" less than {BLOCK_WIDTH / self.num_bins:.2g} apart, and such pairs count half. It may have learned"
                " hardly anything yet; where scores are meant to be so close, StreamingAUROC(num_bins=...) takes more"
                f" bins than {self.num_bins}."
            )
        area: Tensor = (positives * (negatives.cumsum(0) - negatives / 2)).sum() / num_pairs
        return area

    def error_bound(self) -> Tensor:
        """The largest error of the area, for the counts of this process.

        Returns:
            Scalar, float64. Inside ``sync_context()`` it is that of all processes.
        """
        _, counts = self._joined(dim_zero_cat(self.blocks), dim_zero_cat(self.counts))
        negatives, positives = counts.double().transpose(0, 1).reshape(2, -1)
        return _error_bound(negatives, positives)

    def _joined(self, blocks: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The same with each block once, in ascending order."""
        numbers, rows = torch.unique(blocks, return_inverse=True)
        if len(numbers) == len(blocks) and torch.equal(numbers, blocks):
            return blocks, counts
        return numbers, counts.new_zeros(len(numbers), 2, self.num_bins).index_add_(0, rows, counts)

    def _keep(self, blocks: Tensor, counts: Tensor) -> None:
        self.blocks, self.counts = [blocks], [counts]

    def _no_blocks(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64, device=self.device)

    def _no_counts(self) -> Tensor:
        return torch.zeros(0, 2, self.num_bins, dtype=torch.int64, device=self.device)

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        # What `forward` and `merge_state` call: without this the lists would grow by a tensor with every batch.
        super()._reduce_states(incoming_state)
        self._keep(*self._joined(dim_zero_cat(self.blocks), dim_zero_cat(self.counts)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        kept = state_dict.get(f"{prefix}counts")
        if kept is not None:
            earlier = isinstance(kept, Tensor)  # of a version that had the middle block only, and a column for NaN
            found = kept.shape[1] - 1 if earlier else kept[0].shape[2]
            if found != self.num_bins:
                raise ValueError(
                    f"{prefix}counts: the state has {found} bins in a block, but num_bins={self.num_bins}; make the"
                    f" metric with num_bins={found} to go on with it."
                )
            if earlier:
                blocks, counts = torch.tensor([_MIDDLE], device=kept.device), kept[None, :, :-1]
                if kept[:, -1].any():
                    nan = torch.zeros_like(counts)
                    nan[0, :, 0] = kept[:, -1]
                    blocks, counts = torch.cat((blocks, blocks.new_tensor([_NAN_BLOCK]))), torch.cat((counts, nan))
                state_dict[f"{prefix}blocks"], state_dict[f"{prefix}counts"] = [blocks], [counts.contiguous()]
        super()._load_from_state_dict(state_dict, prefix, *args)


def _error_bound(negatives: Tensor, positives: Tensor) -> Tensor:
    bound: Tensor = (negatives * positives).sum() / (2 * negatives.sum() * positives.sum())
    return bound
