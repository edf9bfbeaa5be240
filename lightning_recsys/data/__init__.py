"""Rows for training and evaluation."""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.generated.synthetic import SyntheticDataModule
from lightning_recsys.data.loader import BatchLoader
from lightning_recsys.data.module import CTRDataModule
from lightning_recsys.data.prepared import PreparedDataModule

if TYPE_CHECKING:
    from lightning_recsys.data.tables.guessing import guess_schema
    from lightning_recsys.data.tables.schema import Schema
    from lightning_recsys.data.tabular import TabularDataModule

# What reads tables is imported when it is first asked for: it brings Arrow's functions, 10 MiB in every worker.
_OF_TABLES = {"Schema": "tables.schema", "TabularDataModule": "tabular", "guess_schema": "tables.guessing"}


if not TYPE_CHECKING:  # which would make a type checker believe in every name

    def __getattr__(name: str) -> object:
        if name not in _OF_TABLES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_OF_TABLES[name]}"), name)


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
