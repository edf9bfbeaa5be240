"""Rows for training and evaluation."""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.loader import BatchLoader

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

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


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
