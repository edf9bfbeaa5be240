"""Graphs from a table of nodes and a table of edges."""

# Shape suffixes: N nodes, C dense features.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.graph.csr import CSRGraph, Ids
from lightning_recsys.data.graph.nodes import UNLABELED, Bags, NodeData
from lightning_recsys.data.graph.tables import (
    TableOptions,
    TableRows,
    column_names,
    edge_weights,
    is_feature,
    look_up,
    own_features,
    own_ids,
    read_table,
    table_files,
    table_options,
    used_words,
)
from lightning_recsys.data.options import Split
from lightning_recsys.data.preparation.encoding import FIRST_ID
from lightning_recsys.data.preparation.schema_rules import SchemaRules
from lightning_recsys.data.preparation.vocabulary import count_values
from lightning_recsys.data.raw import RawColumns, TabularFormat
from lightning_recsys.data.raw.columns import Bags as RawBags
from lightning_recsys.data.raw.derived import derive
from lightning_recsys.data.raw.kernels import KeyTable, hash_values, one_chunk
from lightning_recsys.data.tables.schema import feature_name

_IDS = ("id", "node", "node_id", "user", "user_id", "item", "item_id")
_ENDS = (("source", "target"), ("src", "dst"), ("from", "to"), ("citing", "cited"))
_SPLITS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class NodeTable:
    """The rows of a table of nodes, each with an id of its own.

    Args:
        rows: All of its columns, as they were read.
        ids: The nodes' ids as words, one for each row.
        own_ids: The same with the type that they have in the table.
        bags: The sparse features by their names, with the ids of each row.
        dense: The numeric ones, float32 ``[N, C]``; ``None`` where there are none.
        name: What messages call it.
    """

    rows: TableRows
    ids: pa.StringArray
    own_ids: pa.Array
    bags: Mapping[str, Bags]
    dense: NDArray[np.float32] | None
    name: str

    def __len__(self) -> int:
        return len(self.ids)


def read_node_table(
    options: TableOptions,
    *,
    where: str,
    root: Path,
    id_names: Sequence[str] = (),
    keys: Sequence[str] = (),
    time: str | None = None,
) -> NodeTable:
    """Read a table of nodes with its features.

    Args:
        options: Its path, or a mapping; see :class:`~lightning_recsys.data.graph.NodeDataModule`.
        where: What to call it in messages.
        root: Where relative paths start.
        id_names: What the column of ids may be called where the options do not say; else ``id``, ``node`` and so on,
            or the first column.
        keys: Further columns that are read as words.
        time: A column that is read as times.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: it has no rows, a column is missing, a node has no id or that of another one, or a row is damaged;
            the message names file, row and column.
    """
    given = table_options(options, where, ["id", "label", "split", "time"], features=True)
    column = given.get("id") or _named((*id_names, *_IDS), column_names(given, where, root))
    rows = read_table(given, where=where, root=root, keys=[column, *keys], time=time, features=True)
    words = rows.words(column)
    rows.refuse(np.asarray(words.is_null()), column, "the id is missing: each node must have one of its own")
    codes = words.indices.to_numpy()
    _, firsts = np.unique(codes, return_index=True)
    if len(firsts) < len(rows):
        again = np.ones(len(rows), np.bool_)
        again[firsts] = False
        first = rows.place(int(np.flatnonzero(codes == codes[np.flatnonzero(again)[0]])[0]))
        rows.refuse(again, column, f"{{value}} is the id of {first}, too: each node must have a row of its own")
    ids = words.dictionary.take(words.indices)
    bags, dense = encode(rows)
    name = ", ".join(map(str, rows.paths))
    return NodeTable(rows, ids, own_ids(ids, rows.kinds.get(column)), bags, dense, name)


def encode(rows: TableRows) -> tuple[dict[str, Bags], NDArray[np.float32] | None]:
    """The features of all rows: vocabularies, means and deviations are those of all of them.

    Returns:
        The sparse features by name, and the numeric ones, float32 ``[N, C]``, ``None`` where there are none.
    """
    schema = own_features(rows.schema)
    made: Mapping[str, Any] = derive(rows.columns, schema)
    named, rules = TabularFormat(schema=schema, labelled=False), SchemaRules()
    bags = {}
    for name in filter(is_feature, schema.categorical):
        values, count = made[name], np.ones(len(rows), np.int64)
        bags[feature_name(name)] = _encoded(name, RawBags(values, count), schema.categorical[name], named)
    for name, feature in schema.multi_valued.items():
        bags[feature_name(name)] = _encoded(name, made[name], feature, named)
    if not schema.numeric:
        return bags, None
    numbers = np.stack([made[name] for name in schema.numeric])
    columns = RawColumns(rows.rows_N, np.zeros(len(rows), np.float32), numbers, {})
    return bags, np.ascontiguousarray(rules.dense_features(columns, rules.summary(columns, named), named).T)


def _encoded(name: str, values: RawBags, feature: Any, named: TabularFormat) -> Bags:
    words = pa.DictionaryArray.from_arrays(values.values.indices, values.values.dictionary.cast(pa.binary()))
    table, size = None, feature.hash_buckets and feature.hash_buckets + 1
    if size is None:
        counts = count_values(words)
        counts = counts.filter(pc.greater_equal(counts["count"], feature.min_count))
        counts = counts.sort_by([("count", "descending"), ("value", "ascending")])
        table, size = KeyTable(hash_values(one_chunk(counts["value"]))), len(counts) + FIRST_ID
    ids = SchemaRules().look_up(feature_name(name), words, table, named)
    offsets = np.concatenate([[0], np.cumsum(values.lengths_N)]).astype(np.int64)
    return Bags(offsets, ids.astype(np.int32 if size <= 1 << 31 else np.int64), size)


def read_node_tables(nodes: TableOptions, edges: TableOptions, *, root: Path) -> NodeData:
    """A graph from a table of nodes and one of edges; see :class:`~lightning_recsys.data.graph.NodeDataModule`.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a table is bad, an edge is to a node that has no row, or a weight is missing or negative; the
            message names file, row and column.
    """
    given = table_options(nodes, "data.nodes", ["id", "label", "split", "time"], features=True)
    if "label" not in given:
        names = ", ".join(column_names(given, "data.nodes", root))
        raise ValueError(f"data.nodes.label is missing: which column has the classes of the nodes? They are {names}.")
    keys = [given[key] for key in ("label", "split") if key in given]
    table = read_node_table(given, where="data.nodes", root=root, keys=keys, time=given.get("time"))
    labels, classes = _classes(table.rows.words(given["label"]))
    return NodeData(
        _read_edges(edges, table, root),
        labels,
        table.bags,
        table.dense,
        _splits(table.rows, given["split"], labels) if "split" in given else {},
        ids=table.own_ids,
        classes=classes,
        times=table.rows.times(given["time"]) if "time" in given else None,
    )


def node_table_files(nodes: TableOptions, edges: TableOptions, root: Path) -> list[Path]:
    """The files of both tables."""
    find = partial(table_files, root=root)
    return [*find(nodes, where="data.nodes"), *find(edges, where="data.edges")]


def _read_edges(options: TableOptions, table: NodeTable, root: Path) -> CSRGraph:
    given = table_options(options, "data.edges", ["source", "target", "weight", "undirected"], features=False)
    undirected = given.get("undirected", True)
    if not isinstance(undirected, bool):
        raise ValueError(f"data.edges.undirected must be true or false, got {undirected!r}.")
    ends = [given.get("source"), given.get("target")]
    if None in ends:
        names = column_names(given, "data.edges", root)
        if len(names) < 2:
            raise ValueError(
                f"data.edges: a table of edges needs two columns, for the ends; it has {', '.join(names)}."
            )
        found = next((pair for pair in _ENDS if {*pair} <= {*names}), names[:2])
        ends = [name or other for name, other in zip(ends, found, strict=True)]
    keys = [str(end) for end in ends]
    rows = read_table(given, where="data.edges", root=root, keys=keys, number=given.get("weight"))
    weights = edge_weights(rows, given.get("weight"))
    pairs = np.stack([look_up(rows, key, table.ids, table.name) for key in keys])
    del rows
    return CSRGraph.from_edge_index(pairs, num_nodes=len(table), undirected=undirected, weights=weights)


def _classes(words: pa.DictionaryArray) -> tuple[Ids, tuple[str, ...]]:
    """The class of each node, and what they are called; nodes without a word have none."""
    known = np.asarray(words.is_valid())
    places, names = used_words(words.filter(pa.array(known)))
    labels = np.full(len(words), UNLABELED, np.int64)
    labels[known] = places
    return labels, tuple(names.to_pylist())


def _splits(rows: TableRows, column: str, labels: Ids) -> dict[Split, Ids]:
    """The labelled nodes of each split that a column names; nodes without a word are in none."""
    words = rows.words(column)
    named = [_SPLITS.get((word or "").lower()) for word in words.dictionary.to_pylist()]
    codes = words.indices.fill_null(len(named)).to_numpy()
    unknown = np.array([name is None for name in named] + [False])[codes]
    rows.refuse(unknown, column, "a split is train, validation, test or nothing, got {value}")
    of_node = np.array([*map(str, named), ""])[codes]
    without = (of_node != "") & (labels == UNLABELED)
    rows.refuse(without, column, "the node is in the split {value} and has no label")
    return {
        name: np.flatnonzero(of_node == name) for name in dict.fromkeys(_SPLITS.values()) if (of_node == name).any()
    }


def _named(names: Sequence[str], columns: Sequence[str]) -> str:
    """The first of some names that is a column, else the first column."""
    return next((name for name in names if name in columns), columns[0])
