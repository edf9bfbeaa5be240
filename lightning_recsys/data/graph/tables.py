"""Tables of nodes and edges: their rows in memory, with the place of each in its file for messages."""

# Shape suffixes: N rows.

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.files import find_files
from lightning_recsys.data.graph.csr import Ids
from lightning_recsys.data.guesses.feature_guesses import guess_features
from lightning_recsys.data.guesses.sniffing import sniff
from lightning_recsys.data.preparation.source import ordered_map
from lightning_recsys.data.raw.cleaning import Column, concatenate
from lightning_recsys.data.raw.table_file import TableFile
from lightning_recsys.data.tables.features import Dense, Input
from lightning_recsys.data.tables.reading import kind_of, read_header
from lightning_recsys.data.tables.record_files import open_records
from lightning_recsys.data.tables.schema import FEATURES, FORMAT_KEYS, Schema
from lightning_recsys.typed_yaml import check_keys, convert

T = TypeVar("T")

TableOptions: TypeAlias = str | Mapping[str, Any]
"""A table: the path of its file, or ``files`` and what its columns are."""

_NO_LABEL = "\0"  # a schema has to name one; here no column is read as a click
_KEY = "\0key"  # and a category: the first of the columns that refer to nodes
_NUMBER = "\0number"  # the weights of edges
_WHOLE_NUMBER = r"^(0|-?[1-9]\d{0,17})$"  # as integers of 64 bits are written
_LOOK = 1000  # rows that tell how a file is written
_FEATURE_KEYS = (*FEATURES, "defaults")


@dataclass(frozen=True)
class TableRows:
    """All rows of a table.

    Args:
        where: What the table is called in the configuration, for messages.
        paths: Its files, in the order in which their rows follow each other.
        starts: How many rows there are before each file.
        rows_N: Number of each row in its file, from 1.
        columns: The values of each column that was read, by its name.
        schema: What its features are.
        kinds: The types of the columns of a Parquet file.
    """

    where: str
    paths: tuple[Path, ...]
    starts: NDArray[np.int64]
    rows_N: NDArray[np.int64]
    columns: Mapping[Input, Column]
    schema: Schema
    kinds: Mapping[str, pa.DataType]

    def __len__(self) -> int:
        return len(self.rows_N)

    def words(self, column: str) -> pa.DictionaryArray:
        """A column that was read as words, each distinct one once; null where one is missing."""
        words: pa.DictionaryArray = self.columns[Input(column, "key")]
        return words

    def numbers(self, column: str) -> NDArray[np.float64]:
        """A column that was read as numbers, NaN where one is missing."""
        return np.asarray(self.columns[Input(column, "number")], np.float64)

    def times(self, column: str) -> NDArray[np.float64]:
        """A column that was read as times: numbers as they are, else seconds since 1970."""
        return np.asarray(self.columns[Input(column, "time")], np.float64)

    def refuse(self, wrong_N: NDArray[np.bool_], column: str, problem: str) -> None:
        """Raise ``ValueError`` that names file, row and column if any row is marked.

        Args:
            wrong_N: Marks the bad rows.
            column: The column that is wrong.
            problem: What is wrong, in words that may hold ``{value}`` for the word there.
        """
        if len(found := np.flatnonzero(wrong_N)):
            first = int(found[0])
            is_word = Input(column, "key") in self.columns
            value = repr(self.words(column)[first].as_py()) if is_word else f"{self.numbers(column)[first]:g}"
            more = f" {len(found) - 1:,} more rows are like this." if len(found) > 1 else ""
            raise ValueError(f"{self.place(first)}, column {column!r}: {problem.format(value=value)}.{more}")

    def place(self, row: int) -> str:
        """File and row."""
        file = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"{self.paths[file]}, row {self.rows_N[row]}"


def read_table(
    options: TableOptions,
    *,
    where: str,
    root: Path,
    keys: Sequence[str],
    number: str | None = None,
    time: str | None = None,
    features: bool = False,
) -> TableRows:
    """Read a table whole.

    Args:
        options: Path of its file, or a mapping with ``files``, with keys of a schema that say how they are written
            (found out if there are none), and with those of its features.
        where: What to call it in messages.
        root: Where relative paths start.
        keys: Columns whose words tell nodes, classes or splits.
        number: A column to read as numbers.
        time: A column to read as times, which each row must have.
        features: Whether all other columns are features: those that the options name, else by a guess.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: it has no rows, a column is missing, or a row is damaged; the message names file, row and column.
    """
    given = {"files": options} if isinstance(options, str) else dict(options)
    paths = find_files(given["files"], name=f"{where}.files", root=root)
    schema = _schema(given, paths[0], where, keys=keys, number=number, time=time, features=features)
    sources = [Input(name, "key") for name in keys]
    sources += [source for source, _ in schema.inputs() if source.parse != "label"]
    wanted = list(dict.fromkeys(source.column for source in sources))
    parts: dict[Input, list[Column]] = {source: [] for source in dict.fromkeys(sources)}
    rows: list[NDArray[np.int64]] = []
    counts = []
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for path in paths:
            file, before = _open(path, schema, where, columns=wanted, keys=keys), len(rows)
            for columns, rows_N, bad in ordered_map(pool, file.rows, file.blocks(), ahead=4):
                if bad:
                    raise ValueError(f"{where}: {bad[0].describe(path)}")
                rows.append(rows_N)
                for source, found in parts.items():
                    found.append(columns[source])
            counts.append(sum(map(len, rows[before:])))
            if not counts[-1]:
                raise ValueError(f"{where}: {path} has no rows.")
    starts = np.cumsum([0, *counts[:-1]])
    whole = {source: concatenate(found) for source, found in parts.items()}
    return TableRows(where, tuple(paths), starts, np.concatenate(rows), whole, schema, _kinds(paths[0], schema))


def named_table(options: T) -> T | None:
    """A table that names files; ``None`` where it is a mapping that has none, as configurations have one to fill in."""
    return None if isinstance(options, Mapping) and not options.get("files") else options


def table_files(options: TableOptions, *, where: str, root: Path) -> list[Path]:
    """The files of a table.

    Raises:
        FileNotFoundError: one is not there.
    """
    return find_files(options if isinstance(options, str) else options["files"], name=f"{where}.files", root=root)


def table_options(options: TableOptions, where: str, allowed: Sequence[str], *, features: bool) -> dict[str, Any]:
    """A table's options as a mapping, whose keys are checked.

    Raises:
        ValueError: a key is unknown or has a value of another kind, or there are no ``files``.
    """
    given = {"files": options} if isinstance(options, str) else options
    check_keys(where, given, ["files", *allowed, *FORMAT_KEYS, *(_FEATURE_KEYS if features else ()), "ignore"])
    given = {key: value for key, value in given.items() if value is not None}
    if not given.get("files"):
        raise ValueError(f"{where}.files is missing: name the table's file.")
    for key in allowed:
        if key in given and not isinstance(given[key], bool):
            given[key] = convert(f"{where}.{key}", given[key], str)
    return given


def column_names(options: Mapping[str, Any], where: str, root: Path) -> list[str]:
    """The columns of a table's first file."""
    path = table_files(options, where=where, root=root)[0]
    return list(read_header(path, _written(options, path).table).names)


def own_ids(words: pa.StringArray, kind: pa.DataType | None) -> pa.Array:
    """Ids as their table has them: integers, or strings.

    Args:
        words: The ids as they stand in the table, one for each row.
        kind: The type of their column in a Parquet file; ``None`` for text, where whole numbers are integers.
    """
    if kind is None:
        is_whole = pc.all(pc.match_substring_regex(words, _WHOLE_NUMBER), min_count=0).as_py()
        return words.cast(pa.int64()) if is_whole else words
    return words.cast(kind) if pa.types.is_integer(kind) else words


def in_order(words: pa.Array) -> Ids:
    """Positions of distinct words in the order of their numbers where all are whole ones, else of the words."""
    is_whole = pc.all(pc.match_substring_regex(words, _WHOLE_NUMBER), min_count=0).as_py()
    order: Ids = pc.sort_indices(words.cast(pa.int64()) if is_whole else words).to_numpy().astype(np.int64)
    return order


def used_words(words: pa.DictionaryArray) -> tuple[Ids, pa.StringArray]:
    """A column without missing words as positions among its distinct words, in their order (:func:`in_order`)."""
    order = in_order(words.dictionary)
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return places[words.indices.to_numpy()], words.dictionary.take(pa.array(order))


def look_up(rows: TableRows, column: str, ids: pa.StringArray, table: str) -> Ids:
    """The position of each row's word among some ids.

    Raises:
        ValueError: a row has no word there, or one that is no id; the message names file, row and column.
    """
    words = rows.words(column)
    rows.refuse(np.asarray(words.is_null()), column, "the value is missing, which must name a node")
    places = pc.index_in(words.dictionary, value_set=ids).fill_null(-1).to_numpy().astype(np.int64)
    found: Ids = places[words.indices.to_numpy()]
    rows.refuse(found < 0, column, f"there is no node {{value}} in {table}")
    return found


def edge_weights(rows: TableRows, column: str | None) -> NDArray[np.float32] | None:
    """The weights of the rows of a table of edges, if they have some.

    Raises:
        ValueError: a row has none, or a negative one; the message names file, row and column.
    """
    if column is None:
        return None
    weights = rows.numbers(column)
    rows.refuse(np.isnan(weights), column, "the weight is missing: each edge must have one, or name no weight at all")
    rows.refuse(weights < 0, column, "a weight must be from 0 on, got {value}")
    return weights.astype(np.float32)


@dataclass(frozen=True)
class _Written:
    """How a file is written, and its features where nobody named any."""

    table: Any
    features: Mapping[str, Any]


def _written(given: Mapping[str, Any], path: Path, known: Sequence[str] | None = None, where: str = "") -> _Written:
    """The format by the options, else by the file's beginning. With ``known`` columns, the others' features as well."""
    named = any(key in given for key in FORMAT_KEYS)
    features: Mapping[str, Any] = {}
    table = None if named else sniff(path, _LOOK).table
    if known is not None:
        guessed = guess_features(path, known=known, told=where)
        features, table = guessed.features, guessed.table if table is not None else None
    if table is None:
        plain = {"files": "-", "label": _NO_LABEL, "categorical": {_KEY: None}}
        table = Schema.from_dict({**plain, **{key: given[key] for key in FORMAT_KEYS if key in given}}).table
    return _Written(table, features)


def _schema(
    given: Mapping[str, Any],
    path: Path,
    where: str,
    *,
    keys: Sequence[str],
    number: str | None,
    time: str | None,
    features: bool,
) -> Schema:
    named = {key: given[key] for key in _FEATURE_KEYS if key in given} if features else {}
    own = [name for name in (*keys, number, time) if name is not None]
    ignored = convert(f"{where}.ignore", given.get("ignore") or (), tuple[str, ...])
    written = _written(given, path, [*own, *ignored] if features and not named else None, where)
    try:
        schema = Schema.from_dict({"files": "-", "label": _NO_LABEL, "categorical": {_KEY: {"column": keys[0]}}})
        if named:
            plain = {"files": "-", "label": _NO_LABEL, **named}
            categorical = named.get("categorical") or {}
            if not isinstance(categorical, Mapping):
                categorical = dict.fromkeys([categorical] if isinstance(categorical, str) else categorical)
            schema = Schema.from_dict({**plain, "categorical": {**categorical, _KEY: {"column": keys[0]}}})
        elif written.features:
            parts = dict(written.features)
            parts["categorical"] = {**parts["categorical"], **schema.categorical}
            schema = replace(schema, **parts)
    except ValueError as error:
        raise ValueError(str(error).replace("schema.", f"{where}.")) from error
    dense = schema.dense if number is None else {**schema.dense, _NUMBER: Dense(column=number)}
    return replace(schema, table=written.table, time=time, dense=dense)


def _open(path: Path, schema: Schema, where: str, *, columns: Sequence[str], keys: Sequence[str]) -> TableFile:
    header = read_header(path, schema.table)
    for name in columns:
        if name not in header.columns:
            near = difflib.get_close_matches(name, header.columns, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}: {path} has no column {name!r}.{hint} It has {', '.join(header.columns)}.")
    return TableFile(path, schema.table, header, schema, columns=columns, keys=keys)


def _kinds(path: Path, schema: Schema) -> dict[str, pa.DataType]:
    if (kind := kind_of(path, schema.table)) in ("text", "json"):
        return {}
    with open_records(path, kind) as file:
        return {field.name: field.type for field in file.schema}


def own_features(schema: Schema) -> Schema:
    """The features of a table, without the columns that tell nodes and weights."""
    return replace(
        schema,
        dense={name: feature for name, feature in schema.dense.items() if name != _NUMBER},
        time=None,
    )


def is_feature(name: str) -> bool:
    """Whether a categorical feature of a table's schema is one, and not the column that tells its nodes."""
    return name != _KEY
