"""A look at what a run will train on, before it begins and without taking anything from it."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.embeddings.sparse_features import find


def sample_features(trainer: pl.Trainer, count: int) -> list[SparseFeatures]:
    """The features of a few of the trainer's training batches; none where only an iteration could give them.

    Samplers, readers and random generators stay where they are, and ``train_dataloader()`` is not called: the data
    module's ``sample_batches`` is, or the first rows of the dataset of a ``DataLoader`` given to ``fit`` are taken.

    Args:
        trainer: The trainer that is about to fit.
        count: Number of batches to take.
    """
    with isolate_rng():
        return list(find(sample_batches(trainer, count), SparseFeatures))


def sample_batches(trainer: pl.Trainer, count: int) -> list[Any]:
    """A few of the trainer's training batches, as :func:`sample_features` finds them."""
    source: Any = trainer.fit_loop._data_source.instance
    if not hasattr(source, "sample_batches") and not isinstance(source, DataLoader):
        return []
    with isolate_rng():
        return _of_loader(source, count) if isinstance(source, DataLoader) else list(source.sample_batches(count))


def _of_loader(loader: DataLoader[Any], count: int) -> list[Any]:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return []
    dataset: Any = loader.dataset
    starts = range(0, min(count * loader.batch_size, len(dataset)), loader.batch_size)
    rows = [range(start, min(start + loader.batch_size, len(dataset))) for start in starts]
    return [loader.collate_fn([dataset[row] for row in batch]) for batch in rows]
