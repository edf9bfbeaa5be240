"""Stores of embedding rows and dense vectors, and the servers that offer them to other machines."""

from lightning_recsys.parameter_server.backend import StoreBackend, table_costs
from lightning_recsys.parameter_server.cached import CachedBackend
from lightning_recsys.parameter_server.connect import connect
from lightning_recsys.parameter_server.dynamic_rows import DynamicRows
from lightning_recsys.parameter_server.interfaces import DenseStore, DynamicEmbeddingStore, EmbeddingStore, Stores
from lightning_recsys.parameter_server.keys import ClientKeys, JobKeys, ServerKeys
from lightning_recsys.parameter_server.mapped import MappedStores
from lightning_recsys.parameter_server.server import serve
from lightning_recsys.parameter_server.substitution import Substitution, substitute_embeddings

__all__ = [
    "CachedBackend",
    "ClientKeys",
    "DenseStore",
    "DynamicEmbeddingStore",
    "DynamicRows",
    "EmbeddingStore",
    "JobKeys",
    "MappedStores",
    "ServerKeys",
    "StoreBackend",
    "Stores",
    "Substitution",
    "connect",
    "serve",
    "substitute_embeddings",
    "table_costs",
]
