"""A worker's cache of embedding rows that live elsewhere: which rows it holds, and the rows themselves."""

from lightning_recsys.embeddings.cache.index import BatchPlan, CacheIndex, CachePolicy
from lightning_recsys.embeddings.cache.row_cache import RowCache, RowUpdates
from lightning_recsys.embeddings.cache.shared_index import SharedIndex

__all__ = ["BatchPlan", "CacheIndex", "CachePolicy", "RowCache", "RowUpdates", "SharedIndex"]
