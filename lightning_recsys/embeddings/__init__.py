"""Embedding tables: what models call, and the kernels that serve it."""

from lightning_recsys.embeddings.config import EmbeddingBagConfig, PoolingType
from lightning_recsys.embeddings.sparse_features import SparseFeatures

__all__ = ["EmbeddingBagConfig", "PoolingType", "SparseFeatures"]
