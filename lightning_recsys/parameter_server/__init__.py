"""Stores of embedding rows and dense vectors, and the servers that offer them to other machines."""

from lightning_recsys.parameter_server.backend import StoreBackend, table_costs
from lightning_recsys.parameter_server.interfaces import DenseStore, EmbeddingStore, Stores
from lightning_recsys.parameter_server.mapped import MappedStores

__all__ = ["DenseStore", "EmbeddingStore", "MappedStores", "StoreBackend", "Stores", "table_costs"]
