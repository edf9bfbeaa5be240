"""Modules that look embeddings up."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.embeddings.substitution import SubstituteModule

Lookup = EmbeddingBagCollection | SubstituteModule


def is_lookup(module: nn.Module) -> TypeGuard[Lookup]:
    """Whether a module looks up rows that a strategy can keep in stores: trainers do that, whatever else they do."""
    return isinstance(module, Lookup)


def trains_rows(lookup: Lookup) -> bool:
    """Whether gradients of what was looked up go anywhere."""
    return (lookup if isinstance(lookup, EmbeddingBagCollection) else lookup.collection).trainable
