"""Rows for training and evaluation."""

from typing import TYPE_CHECKING

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.loader import BatchLoader
from lightning_recsys.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_recsys.data.generated.synthetic import SyntheticDataModule
    from lightning_recsys.data.guesses.guessing import guess_schema
    from lightning_recsys.data.module import CTRDataModule
    from lightning_recsys.data.prepared.module import PreparedDataModule
    from lightning_recsys.data.tables.schema import Schema
    from lightning_recsys.data.tabular import TabularDataModule

# Imported when first asked for. Data modules bring Lightning, which the process that reads for all does without.
# What reads tables brings Arrow's functions, 10 MiB in every worker.
_MODULES = {
    "CTRDataModule": "module",
    "PreparedDataModule": "prepared.module",
    "Schema": "tables.schema",
    "SyntheticDataModule": "generated.synthetic",
    "TabularDataModule": "tabular",
    "guess_schema": "guesses.guessing",
}


if not TYPE_CHECKING:  # which would make a type checker believe in every name
    __getattr__ = lazy_names(__name__, _MODULES)


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
