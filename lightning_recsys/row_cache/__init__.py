"""HET's worker side: copies of embedding rows that live in stores, and when they may be used."""

from lightning_recsys.row_cache.backend import CachedBackend
from lightning_recsys.row_cache.copies import RowCache, RowUpdates
from lightning_recsys.row_cache.index import BatchPlan, CacheIndex, CachePolicy
from lightning_recsys.row_cache.shared_index import SharedIndex

__all__ = ["BatchPlan", "CacheIndex", "CachePolicy", "CachedBackend", "RowCache", "RowUpdates", "SharedIndex"]
