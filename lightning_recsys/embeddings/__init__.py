"""Embedding tables: what models call, the backend that holds the rows, and the kernels that serve it.

What models call is imported when it is first asked for: it brings torch's compiler, which servers do without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_recsys.embeddings.backend import Backend, LocalBackend, TableBackend
from lightning_recsys.embeddings.config import EmbeddingBagConfig, PoolingType, RowDtype
from lightning_recsys.embeddings.kernels import KernelName
from lightning_recsys.embeddings.read_only import ReadOnlyRows
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.embeddings.ticket import Ticket

if TYPE_CHECKING:
    from lightning_recsys.embeddings.collection import EmbeddingBagCollection, EmbeddingOptions

__all__ = [
    "Backend",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingOptions",
    "KernelName",
    "LocalBackend",
    "PoolingType",
    "ReadOnlyRows",
    "RowDtype",
    "SparseFeatures",
    "TableBackend",
    "Ticket",
]


if not TYPE_CHECKING:  # which would make a type checker believe in every name

    def __getattr__(name: str) -> Any:
        if name == "collection":
            return import_module(f"{__name__}.collection")
        if name not in ("EmbeddingBagCollection", "EmbeddingOptions"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.collection"), name)
