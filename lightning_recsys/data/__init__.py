"""Rows for training and evaluation."""

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.guessing import guess_schema
from lightning_recsys.data.loader import BatchLoader
from lightning_recsys.data.module import CTRDataModule
from lightning_recsys.data.prepared import PreparedDataModule
from lightning_recsys.data.schema import Schema
from lightning_recsys.data.synthetic import SyntheticDataModule
from lightning_recsys.data.tabular import TabularDataModule

__all__ = [
    "Batch",
    "BatchLoader",
    "CTRDataModule",
    "PreparedDataModule",
    "Schema",
    "SyntheticDataModule",
    "TabularDataModule",
    "guess_schema",
]
