"""Embedding tables: what models call, the backend that holds the rows, and the kernels that serve it."""

from lightning_recsys.embeddings.backend import Backend, LocalBackend, TableBackend
from lightning_recsys.embeddings.collection import EmbeddingBagCollection, EmbeddingOptions
from lightning_recsys.embeddings.config import EmbeddingBagConfig, PoolingType
from lightning_recsys.embeddings.kernels import KernelName
from lightning_recsys.embeddings.read_only import ReadOnlyRows
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.embeddings.ticket import Ticket

__all__ = [
    "Backend",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingOptions",
    "KernelName",
    "LocalBackend",
    "PoolingType",
    "ReadOnlyRows",
    "SparseFeatures",
    "TableBackend",
    "Ticket",
]
