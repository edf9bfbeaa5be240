"""From a request, a dict of raw values, to numbers and ids: what was learned in training, as a part of a version."""

# Shape suffixes: B rows of a request, N the same, I dense features.

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.preparation import SchemaRules
from lightning_recsys.data.preparation.encoding import Encoding, embedded
from lightning_recsys.data.raw import TabularFormat
from lightning_recsys.data.raw.cleaning import clean
from lightning_recsys.data.raw.columns import Bags, RawColumns, RowJudge
from lightning_recsys.data.raw.derived import derive
from lightning_recsys.data.tables.columns import split_lists
from lightning_recsys.data.tables.features import LARGEST, Categorical, Dense, Input, MultiValued, Vector
from lightning_recsys.data.tables.schema import Schema, feature_name
from lightning_recsys.data.tables.schema_parts import Split
from lightning_recsys.data.tables.words import mixed_words, typed_array
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.embeddings.int64_ids import as_int64s

DENSE = "dense"  # the key of numeric features where they have no names of their own
_LISTS = frozenset((list, tuple))
_NO_COLUMN = (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError)  # the last is of half a character
_BAGS = pa.list_(pa.string())
_NO_TOP: dict[str, Any] = {"comment": None, "skip_lines": 0}  # a request has no lines above its rows
log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too
_Timed = TypeVar("_Timed", Dense, Categorical)

Row = Mapping[str, Any]
_NO_IDS = np.empty(0, dtype=np.int64)
Encoded = tuple[Tensor, SparseFeatures]


class RequestEncoder(ABC):
    """Turns rows of a request into what a model takes."""

    @abstractmethod
    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Numeric features, float32 ``[B, I]``, and ids.

        Raises:
            ValueError: a row lacks a feature or has a value that cannot be one; the message names row and feature.
        """

    @abstractmethod
    def example(self) -> dict[str, Any]:
        """A row that can be encoded."""

    @abstractmethod
    def to_files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The plain values, and the tensors; :func:`encoder_from` takes both."""


def _in_seconds(feature: _Timed, *, is_time: bool) -> _Timed:
    """The feature with the unit that training has read its times in."""
    return dataclasses.replace(feature, unit="s") if is_time and feature.unit is None else feature


class SchemaEncoder(RequestEncoder):
    """Follows the schema of a table, with the vocabularies and statistics of the training rows.

    A row has a value for each column that a feature is made from, those of side tables included; ``None`` is a missing
    one. Others, such as a label, are ignored.

    Args:
        schema: The schema that says what the columns mean.
        encoding: The vocabularies and statistics of the training rows.
    """

    def __init__(self, schema: Schema, encoding: Encoding) -> None:
        # Where the training rows lay, and who joined them, is no business of those who serve. Whether numbers are times
        # or dates was judged by the training rows; a few rows of a request would be judged by chance. Of how a file is
        # written only counts what its values mean.
        self._schema = dataclasses.replace(
            schema,
            dense={name: _in_seconds(x, is_time=x.age_at is not None) for name, x in schema.dense.items()},
            categorical={name: _in_seconds(x, is_time=x.transform != "none") for name, x in schema.categorical.items()},
            files={"train": ("-",)},
            table=dataclasses.replace(schema.usual_format("requests", in_file=False), **_NO_TOP),
            formats={},
            joins=(),
            comments={},
            time=None,
            split=Split(),
        )
        self._encoding = encoding
        self._format = TabularFormat(schema=self._schema)
        self._rules = SchemaRules(given=encoding)
        self._summary_IK, self._tables = encoding.summary_IK, encoding.key_tables()
        self._columns: dict[str, list[Input]] = {}
        for source, key in self._schema.inputs():
            if key != "label":
                self._columns.setdefault(source.column, []).append(source)
        self._features = tuple(map(feature_name, embedded(schema)))

    def encode(self, rows: Sequence[Row]) -> Encoded:  # noqa: D102 - inherited
        columns = {name: pa.chunked_array([self._column(rows, name)]) for name in self._columns}
        judge = _Judge(np.arange(len(rows)))
        cleaned = clean(Path("request"), columns, self._schema, self._schema.table, judge)
        made: Mapping[str, Any] = derive(cleaned, self._schema)
        dense = [made[name] for name in self._schema.numeric]
        raw = RawColumns(
            np.arange(len(rows)),
            np.zeros(len(rows), dtype=np.float32),
            np.stack(dense) if dense else np.empty((0, len(rows))),
            {},
        )
        dense_IN = self._rules.dense_features(raw, self._summary_IK, self._format)
        found = [self._ids(name, made[name], len(rows)) for name in embedded(self._schema)]
        values = torch.from_numpy(np.concatenate([_NO_IDS, *(ids.astype(np.int64, copy=False) for ids, _ in found)]))
        lengths = None
        if self._schema.multi_valued:
            lengths = torch.from_numpy(np.concatenate([lengths for _, lengths in found]))
        return torch.from_numpy(np.ascontiguousarray(dense_IN.T)), SparseFeatures(self._features, values, lengths)

    def _ids(self, feature: str, made: Any, num_rows: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        name = feature_name(feature)
        values, lengths = made, np.ones(num_rows, dtype=np.int64)
        if isinstance(made, Bags):
            values, lengths = made.values, made.lengths_N
        values = pa.DictionaryArray.from_arrays(values.indices, values.dictionary.cast(pa.binary()))
        return self._rules.look_up(name, values, self._tables.get(name), self._format), lengths

    def _column(self, rows: Sequence[Row], name: str) -> pa.Array:
        for number, row in enumerate(rows):
            if name not in row:
                raise ValueError(f"row {number} has no {name!r}; null stands for a missing value.")
        values = [row[name] for row in rows]
        given = {type(value) for value in values} - {type(None)}
        read = {source.parse for source in self._columns[name]}
        separator = self._separator(name)
        if given & _LISTS and not any(source.takes_lists for source in self._columns[name]):
            number, found = next((number, value) for number, value in enumerate(values) if type(value) in _LISTS)
            raise ValueError(f"row {number}: {name!r} takes one value a row, got {found!r:.80}.")
        try:
            return self._as_array(values, separator, only_numbers=read == {"number"})
        except _NO_COLUMN as error:
            for number, value in enumerate(values):
                try:
                    self._as_array([value], separator, only_numbers=read == {"number"})
                except _NO_COLUMN as why:
                    raise ValueError(f"row {number}: {name!r} takes no {value!r:.80} ({why!s:.120}).") from error
            raise ValueError(f"{name!r} has values that do not go together ({error!s:.120}).") from error

    def _as_array(self, values: list[Any], separator: str | None, *, only_numbers: bool) -> pa.Array:
        """Values of a column; what one becomes does not depend on those beside it."""
        given, decimal = set(map(type, values)) - {type(None)}, self._schema.table.decimal
        if only_numbers and bool in given:
            values, given = [int(x) if isinstance(x, bool) else x for x in values], given - {bool} | {int}
        if only_numbers and given <= {int, float}:
            return pa.array([None if value is None else float(value) for value in values], pa.float64())
        if separator is not None and given & _LISTS:
            bags = [_items(separator, value, decimal) for value in values]
            items = list(chain.from_iterable(bag for bag in bags if bag is not None))
            if any(isinstance(item, list | tuple) for item in items):
                raise TypeError("they are nested")
            words = iter(mixed_words(items, decimal=decimal))
            return pa.array([None if bag is None else list(islice(words, len(bag))) for bag in bags], _BAGS)
        if len(given) > 1:
            return pa.array(mixed_words(values, decimal=decimal), pa.string())
        array = typed_array(values) if given else pa.array(values, pa.string())
        if pa.types.is_nested(array.type.value_type if pa.types.is_list(array.type) else array.type):
            raise TypeError("they are nested")
        return array

    def _separator(self, column: str) -> str | None:
        """The separator between the values of a column of bags; ``None`` of any other."""
        for source in self._columns[column]:
            if isinstance(source.by, MultiValued) and source.by.ngrams is None:
                return source.by.separator
        return None

    def example(self) -> dict[str, Any]:  # noqa: D102 - inherited
        row: dict[str, Any] = {}
        for column, sources in self._columns.items():
            source = sources[0]
            match source.parse, source.by:
                case "number", _:
                    row[column] = 0.0
                case "moment", _:
                    row[column] = "2026-01-01"
                case "vector", Vector() as vector:
                    row[column] = [0.0] * vector.width
                case _:
                    row[column] = self._frequent(column)
        return row

    def _frequent(self, column: str) -> Any:
        """The most frequent value of a column of words that the training rows had, where a vocabulary knows it."""
        for name, feature in embedded(self._schema).items():
            known = self._encoding.vocabularies.get(name, ())
            if (feature.column or name) == column and len(known) and not getattr(feature, "cross", ()):
                plain = isinstance(feature, MultiValued) and feature.ngrams is None
                return [known[0].as_py()] if plain else known[0].as_py()
        return None

    def to_files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:  # noqa: D102 - inherited
        state = self._encoding.state_dict()
        tensors = {
            f"{number}.{part}": tensor
            for number, parts in enumerate(state["vocabularies"].values())
            for part, tensor in parts.items()
        }
        plain = {"kind": "schema", "schema": self._schema.to_yaml(), "statistics": state["statistics"]}
        return plain | {"format": state["format"], "vocabularies": list(state["vocabularies"])}, tensors

    @classmethod
    def from_files(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SchemaEncoder:
        """The inverse of :meth:`to_files`."""
        given = yaml.safe_load(plain["schema"])  # of an earlier version it may have marks that are none any more
        schema = Schema.from_dict({key: value for key, value in given.items() if key not in _NO_TOP})
        vocabularies = {
            name: {part: tensors[f"{number}.{part}"] for part in ("bytes", "offsets")}
            for number, name in enumerate(plain["vocabularies"])
        }
        state = {"format": plain.get("format", 1), "vocabularies": vocabularies, "statistics": plain["statistics"]}
        return cls(schema, Encoding.from_state_dict(schema, state))


def _items(separator: str, value: Any, decimal: str) -> Any:
    """The items of a bag, which is a list or a text."""
    if value is None or isinstance(value, list | tuple):
        return value
    return split_lists(pa.array(mixed_words([value], decimal=decimal), pa.string()), separator)[0].as_py()


class IdEncoder(RequestEncoder):
    """Takes ids as they are, of data that come as such: generated, or prepared beforehand.

    A row has an id, or a list of ids, for each feature, and under ``dense`` its numeric features in the order of the
    training batches.

    Args:
        features: The features, with how many ids each has.
        num_dense: Number of numeric features of the model.
    """

    def __init__(self, features: Mapping[str, int], num_dense: int) -> None:
        self._features, self._num_dense = dict(features), num_dense
        # A feature of 2**63 ids and more takes every int64 but -1, which marks a place without a row.
        counts = self._features.values()
        self._lowest_F = as_int64s(0 if count < 2**63 else -(2**63) for count in counts)
        self._highest_F = as_int64s(min(count, 2**63) - 1 for count in counts)

    def encode(self, rows: Sequence[Row]) -> Encoded:  # noqa: D102 - inherited
        given = [row.get(name) for name in self._features for row in rows]
        ids = self._ids(given, slice(None))
        if ids is None:
            raise self._wrong_id(given, len(rows))
        dense = [row.get(DENSE, []) for row in rows]
        numbers_BI = self._numbers(dense)
        if numbers_BI is None:
            number = next(number for number, one in enumerate(dense) if self._numbers([one]) is None)
            raise ValueError(
                f"row {number}: {DENSE!r} takes {self._num_dense} finite numbers, got {dense[number]!r:.80}."
            )
        return torch.from_numpy(numbers_BI), SparseFeatures(tuple(self._features), *ids)

    def _ids(self, given: Sequence[Any], features: slice) -> tuple[Tensor, Tensor | None] | None:
        """Ids of as many rows of each of these features, and the lengths of bags that are lists; ``None`` if wrong."""
        lowest, highest = self._lowest_F[features], self._highest_F[features]
        values, lengths, num_ids = given, None, len(given) // max(len(lowest), 1)
        kinds = set(map(type, given))
        if kinds & _LISTS:
            bags = [value if isinstance(value, list | tuple) else (value,) for value in given]
            values = list(chain.from_iterable(bags))
            lengths = np.fromiter(map(len, bags), dtype=np.int64, count=len(bags))
            num_ids = lengths.reshape(len(lowest), -1).sum(1)
            kinds = set(map(type, values))
        if not kinds <= {int}:  # a bool is none, either
            return None
        try:
            ids = np.array(values, dtype=np.int64)
        except OverflowError:
            return None
        if not ((ids >= np.repeat(lowest, num_ids)) & (ids <= np.repeat(highest, num_ids)) & (ids != -1)).all():
            return None
        lists = lengths is not None and (lengths != 1).any()
        return torch.from_numpy(ids), torch.from_numpy(lengths) if lists else None

    def _wrong_id(self, given: Sequence[Any], num_rows: int) -> ValueError:
        """The first of the features and its first row with ids that cannot be."""
        for number, (name, count) in enumerate(self._features.items()):
            column, feature = given[number * num_rows : (number + 1) * num_rows], slice(number, number + 1)
            if self._ids(column, feature) is None:
                row = next(row for row, value in enumerate(column) if self._ids([value], feature) is None)
                return ValueError(f"row {row}: {name!r} takes ids in [0, {count}), got {column[row]!r:.80}.")
        raise AssertionError("each column is right, and all together are not")

    def _numbers(self, dense: Sequence[Any]) -> NDArray[np.float32] | None:
        """Numeric features, ``[B, I]``; ``None`` if one is wrong."""
        if not _LISTS.issuperset(map(type, dense)) or {self._num_dense} != set(map(len, dense)):
            return None
        if not {int, float}.issuperset(map(type, chain.from_iterable(dense))):
            return None
        try:
            numbers_BI = np.array(dense, dtype=np.float64).reshape(len(dense), self._num_dense)
        except OverflowError:
            return None
        return numbers_BI.astype(np.float32) if (np.abs(numbers_BI) <= LARGEST).all() else None

    def example(self) -> dict[str, Any]:  # noqa: D102 - inherited
        return {DENSE: [0.0] * self._num_dense, **dict.fromkeys(self._features, 0)}

    def to_files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:  # noqa: D102 - inherited
        return {"kind": "ids", "features": self._features, "num_dense": self._num_dense}, {}

    @classmethod
    def from_files(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> IdEncoder:
        """The inverse of :meth:`to_files`."""
        return cls({str(name): int(count) for name, count in plain["features"].items()}, int(plain["num_dense"]))


_KINDS: dict[str, type[SchemaEncoder] | type[IdEncoder]] = {"schema": SchemaEncoder, "ids": IdEncoder}


def encoder_from(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RequestEncoder:
    """The encoder of a version.

    Raises:
        ValueError: the files hold no encoder.
    """
    try:
        return _KINDS[plain["kind"]].from_files(plain, tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the encoder is none ({type(error).__name__}: {error!s:.120})") from error


def encoder_of(datamodule: object, features: Mapping[str, int], num_dense: int) -> RequestEncoder:
    """How rows of these data are encoded.

    Args:
        datamodule: The data module of a run; a table's has a schema, with what was learned.
        features: The model's features, with how many ids each has: of rows that are ids already.
        num_dense: The model's numeric features.
    """
    schema = getattr(datamodule, "schema", None)
    if isinstance(schema, Schema):
        return SchemaEncoder(schema, datamodule.encoding)  # type: ignore[attr-defined]
    return IdEncoder(features, num_dense)


def warn_of_weights(features: Sequence[str]) -> None:
    """Say that training has weights of ids, if it has, which requests cannot give.

    Args:
        features: The features whose ids have weights.
    """
    if features:
        log.warning(
            "Ids of %s have weights in training, and those of requests have none: each counts 1. Scores of rows whose"
            " weights are others are not those of the model.",
            list(features),
        )


class _Judge(RowJudge):
    """Refuses a request with a row that makes no sense."""

    def flag(self, bad: NDArray[np.bool_], *, column: str, problem: str, values: pa.Array | pa.ChunkedArray) -> None:
        """See the base class."""
        for row in np.flatnonzero(bad).tolist():
            raise ValueError(f"row {row}: {column!r} {problem}, got {values[row].as_py()!r:.80}.")
