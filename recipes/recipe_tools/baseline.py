"""A baseline beside the result: logistic regression on the same rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_recsys.data import Batch, TabularDataModule
from lightning_recsys.metrics import NormalizedEntropy, StreamingAUROC

IDS = 2_000_000  # of the training rows that it learns from, and of the test rows at a time: about a second
ITERATIONS = 30  # of L-BFGS; more hardly change the AUC


def logistic_regression(datamodule: TabularDataModule) -> dict[str, float] | None:
    """Fit logistic regression to the training rows, and measure it on the test rows.

    Each id and each numeric feature has a weight, with a penalty of half its square, as in scikit-learn; all rows count
    in every step. Rows have two million ids at most, or numbers where they have
    no ids: of more rows, some are taken, evenly spread.

    Returns:
        ``auc`` and ``ne`` on the test rows, and ``share`` of the training rows that it was fitted to. ``None`` where
        there are no test rows.
    """
    train, test = datamodule.rows("train"), datamodule.rows("test")
    if train is None or test is None or not len(test):
        return None
    fields, sizes = list(datamodule.fields), torch.tensor(list(datamodule.fields.values()), dtype=torch.int64)
    at_once = IDS // (len(sizes) or datamodule.num_dense)  # a number takes the place of an id where there are no ids
    count = min(len(train), at_once)
    taken = torch.linspace(0, len(train) - 1, count, dtype=torch.float64).round().long()
    rows = _Rows(train.take(taken).select(fields), sizes)
    weights = _fit(rows, num_weights=int(sizes.sum()) + datamodule.num_dense + 1)
    auc, ne = StreamingAUROC(), NormalizedEntropy()
    for start in range(0, len(test), at_once):
        part = _Rows(test.take(torch.arange(start, min(start + at_once, len(test)))).select(fields), sizes)
        predictions = torch.sigmoid(part.logits(weights))
        auc.update(predictions, part.batch.labels)
        ne.update(predictions, part.batch.labels)
    return {"auc": float(auc.compute()), "ne": float(ne.compute()), "share": count / len(train)}


class _Rows:
    """Rows as a sparse matrix ``X``, whose columns are the ids of all features, the numbers, and ones.

    Args:
        batch: The rows, with their features and labels.
        sizes: Number of ids of each feature.
    """

    def __init__(self, batch: Batch, sizes: Tensor) -> None:
        self.batch, self.num_ids = batch, int(sizes.sum())
        self.columns = batch.sparse.rows_from(torch.cumsum(sizes, 0) - sizes)
        self.rows = torch.arange(len(batch)).repeat(len(sizes)).repeat_interleave(batch.sparse.bag_lengths())

    def logits(self, weights: Tensor) -> Tensor:
        """``X w``, of one row each."""
        ids, numbers = weights[: self.num_ids], weights[self.num_ids : -1]
        sums = torch.bincount(self.rows, ids[self.columns], minlength=len(self.batch))
        return sums + self.batch.dense @ numbers + weights[-1]

    def gradient(self, errors: Tensor) -> Tensor:
        """``X^T e``, for one error each row."""
        ids = torch.bincount(self.columns, errors[self.rows], minlength=self.num_ids)
        return torch.cat([ids, errors @ self.batch.dense, errors.sum().unsqueeze(0)])


def _fit(rows: _Rows, *, num_weights: int) -> Tensor:
    """The weights of the least log loss and penalty, by L-BFGS; the last is the bias, which has no penalty."""
    weights, labels = torch.zeros(num_weights), rows.batch.labels
    penalized = torch.ones(num_weights)
    penalized[-1] = 0
    optimizer = torch.optim.LBFGS([weights], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> float:
        logits = rows.logits(weights)
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        gradient = rows.gradient(torch.sigmoid(logits) - labels) + penalized * weights
        weights.grad = gradient / len(labels)
        return float(loss + penalized @ weights.square() / 2) / len(labels)

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weights
