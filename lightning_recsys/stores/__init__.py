"""Stores of embedding rows and dense vectors in mapped files of this machine, and what any store offers."""

from lightning_recsys.stores.backend import StoreBackend, table_costs
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.interfaces import DenseStore, DynamicEmbeddingStore, EmbeddingStore, Stores
from lightning_recsys.stores.mapped import MappedStores

__all__ = [
    "DenseStore",
    "DynamicEmbeddingStore",
    "DynamicRows",
    "EmbeddingStore",
    "MappedStores",
    "StoreBackend",
    "Stores",
    "table_costs",
]
