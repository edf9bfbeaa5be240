"""The examples that a virtual cluster trains on and is judged by: batches of a loader, metrics on another's first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from lightning_recsys.data import Batch
from lightning_recsys.metrics import NormalizedEntropy, StreamingAUROC


def batches(loader: Iterable[Batch], examples: int) -> Iterator[Batch]:
    """So many examples, in as many epochs as that takes; batches stay whole.

    Args:
        loader: Gives the batches of one epoch each time that it is iterated over.
        examples: Number of examples to give, at least.
    """
    dealt = 0
    while True:  # an epoch
        for batch in loader:
            if dealt >= examples:
                return
            yield batch
            dealt += len(batch.labels)


def count_batches(loader: Sized, examples: int, *, batch_size: int, rows: int) -> int:
    """Number of batches that :func:`batches` gives.

    Args:
        loader: The loader; its length is that of an epoch.
        examples: As for :func:`batches`.
        batch_size: Examples of each batch but the last one of an epoch, which may have fewer.
        rows: Rows of the loader, of which those may be left out that do not fill a batch.

    >>> count_batches(range(3), 12, batch_size=4, rows=10), count_batches(range(2), 12, batch_size=4, rows=10)
    (4, 3)
    """
    epochs, rest = divmod(examples, min(rows, len(loader) * batch_size))
    return epochs * len(loader) + -(-rest // batch_size)


def evaluate(task: Any, loader: Iterable[Batch], *, examples: int) -> dict[str, float]:
    """Normalized entropy and AUC on the first rows.

    Args:
        task: Makes logits of batches.
        loader: Its first batch is evaluated in any case.
        examples: No further batch is begun once so many were.
    """
    metrics = {"val/ne": NormalizedEntropy(from_logits=True), "val/auc": StreamingAUROC(from_logits=True)}
    seen = 0
    task.eval()
    with torch.no_grad():
        for batch in loader:
            if seen and seen + len(batch.labels) > examples:
                break
            logits = task(batch)
            for metric in metrics.values():
                metric.update(logits, batch.labels)
            seen += len(batch.labels)
    task.train()
    return {name: float(metric.compute()) for name, metric in metrics.items()}
