"""Versions of rows, and how far they last moved, in checkpoints: each worker saves and loads a share of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from lightning_recsys.checkpoints import read_extras
from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.versions import tag_arrays
from lightning_recsys.sync import StalenessNormalization

KEY = "row_tags"  # in what a rank adds to a folder checkpoint

Share = dict[str, dict[str, dict[str, Any]]]  # by collection and table: the first row, or the ids; and each tag


def read_share(
    collections: Mapping[str, EmbeddingBagCollection],
    normalization: StalenessNormalization,
    *,
    rank: int,
    num_ranks: int,
) -> Share:
    """The tags of this rank's share of all rows: 8 bytes a row, 12 where the staleness rule asks for changes."""
    share: Share = {}
    names = tag_arrays(normalization, 0).keys()
    for path, backend in _backends(collections):
        tables = share[path] = {}
        if (dynamic := backend.dynamic) is not None:
            for table, all_ids in dynamic.live_ids().items():
                ids = all_ids[rank::num_ranks].clone()
                tables[table] = {"ids": ids} | {name: dynamic.read(table, name, ids) for name in names}
            continue
        for table, rows in ((x.name, x.num_embeddings) for x in backend.layout.tables):
            first, stop = rows * rank // num_ranks, rows * (rank + 1) // num_ranks
            tags = {name: backend.read_rows(table, name, first, stop - first) for name in names}
            tables[table] = {"first": first} | tags
    return share


def write_shares(
    collections: Mapping[str, EmbeddingBagCollection], normalization: StalenessNormalization, shares: Sequence[Share]
) -> None:
    """The reverse of :func:`read_share`, for tags that both runs have; what was saved otherwise begins at 0."""
    backends = dict(_backends(collections))
    for path, tables in (x for share in shares for x in share.items() if x[0] in backends):
        backend, dynamic = backends[path], backends[path].dynamic
        for table, kept in tables.items():
            for name in kept.keys() & tag_arrays(normalization, 0).keys():
                if dynamic is not None and "ids" in kept:
                    dynamic.write(table, name, kept["ids"], kept[name])
                elif dynamic is None and "first" in kept:
                    backend.write_rows(table, name, kept["first"], kept[name])


def load_shares(path: str | os.PathLike[str], *, rank: int, num_ranks: int, weights_only: bool) -> list[Share]:
    """The shares of a checkpoint that this rank brings back, whatever number of ranks saved them."""
    shares: list[Share] = []
    for index in count(rank, num_ranks):
        extras = read_extras(path, index, weights_only=weights_only)
        if extras is None:
            break
        shares += [extras[KEY]] if KEY in extras else []
    return shares


def _backends(collections: Mapping[str, EmbeddingBagCollection]) -> Iterator[tuple[str, StoreBackend]]:
    for path, collection in collections.items():
        if isinstance(collection.embedding_bags, StoreBackend):
            yield path, collection.embedding_bags
