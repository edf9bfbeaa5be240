"""Rows for training and evaluation."""

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.loader import BatchLoader
from lightning_recsys.data.synthetic import SyntheticDataModule

__all__ = ["Batch", "BatchLoader", "SyntheticDataModule"]
