"""The columns of a table: labels, numbers, times, categories and bags, once every rule about good rows was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.raw.columns import Bags
from lightning_recsys.data.tables.columns import as_categories, parse_numbers, parse_times, plain_numbers
from lightning_recsys.data.tables.label import LabelRule
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import TableFormat

Numbers: TypeAlias = NDArray[np.float64]
Column: TypeAlias = Numbers | pa.DictionaryArray | Bags
"""Numbers with NaN where one is missing, categories with null, or bags."""


class RowJudge(Protocol):
    """Is told which rows make no sense; ``good`` says which do, shape ``[rows]``."""

    good: NDArray[np.bool_]

    def flag(self, bad: NDArray[np.bool_], *, column: str, problem: str, values: pa.ChunkedArray) -> None:
        """Mark rows as bad.

        Args:
            bad: Which rows; shape ``[rows]``.
            column: The column that makes them so.
            problem: What it must be, in words that ``, got <value>`` can follow.
            values: The column, to quote from.
        """
        ...


def clean(
    path: Path,
    values: Mapping[str, pa.ChunkedArray],
    schema: Schema,
    table: TableFormat,
    judge: RowJudge,
    *,
    keys: Sequence[str] = (),
) -> dict[str, Column]:
    """Parse the columns of some rows, and drop the rows that make no sense.

    Args:
        path: The file that they come from, for messages.
        values: The columns, each of which the schema speaks of.
        schema: What they mean.
        table: How the file is written.
        judge: Is told of bad rows.
        keys: Columns that refer to another table or are referred to: also kept as categories, named ``key:<name>``.
    """
    columns: dict[str, Column] = {}
    for name, column in values.items():
        parser = _Parser(path, table, judge, name, column)
        if name == schema.label.column:
            columns[name] = parser.label(LabelRule(schema.label.rule), strip=schema.label.strip)
        elif name in schema.dense:
            columns[name] = parser.numbers()
        elif name == schema.time:
            columns[name] = parser.times()
        elif name in schema.multi_valued:
            columns[name] = parser.bags(schema.multi_valued[name].separator)
        elif name in schema.categorical:
            columns[name] = parser.categories()
        if name in keys:
            columns[f"key:{name}"] = parser.categories()
    if judge.good.all():
        return columns
    kept = np.flatnonzero(judge.good)
    return {name: take(column, kept) for name, column in columns.items()}


def take(column: Column, rows: NDArray[np.int64]) -> Column:
    """Some rows of a column; -1 among them gives one where the value is missing."""
    if isinstance(column, Bags):
        return column.take(rows)
    if isinstance(column, np.ndarray):
        return np.append(column, np.nan)[rows]  # the last one is for -1
    return column.take(pa.array(rows, mask=rows < 0))


def concatenate(parts: Sequence[Column]) -> Column:
    """The rows of some columns of a kind, one after the other."""
    if isinstance(parts[0], Bags):
        bags = [part for part in parts if isinstance(part, Bags)]
        values = concatenate([part.values for part in bags])
        return Bags(values, np.concatenate([part.lengths_N for part in bags]))
    if isinstance(parts[0], np.ndarray):
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    return pa.chunked_array(parts).unify_dictionaries().combine_chunks()


def as_bags(column: pa.Array | pa.ChunkedArray, *, strip: bool, missing: Sequence[str]) -> Bags:
    """From lists of strings; missing and empty items are dropped, and a missing list is an empty bag.

    >>> bags = as_bags(pa.array([["b", "a"], None, ["a", "", "b"]]), strip=True, missing=[])
    >>> bags.lengths_N.tolist(), bags.values.to_pylist()
    ([2, 0, 2], ['b', 'a', 'a', 'b'])
    """
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    flat = pc.list_flatten(column)
    if isinstance(flat, pa.Array):
        flat = pa.chunked_array([flat])
    items = as_categories(flat, strip=strip, missing=[*missing, ""])
    present = np.asarray(items.indices.is_valid())
    before = np.concatenate([[0], np.cumsum(present)])
    ends = np.cumsum(lengths)
    return Bags(items.filter(pa.array(present)), before[ends] - before[ends - lengths])


@dataclass(frozen=True)
class _Parser:
    """One column of some rows of a file."""

    path: Path
    table: TableFormat
    judge: RowJudge
    name: str
    values: pa.ChunkedArray

    def label(self, rule: LabelRule, *, strip: str) -> Numbers:
        column = self.categories()
        words = pc.utf8_trim(column.dictionary, strip) if strip else column.dictionary
        labels: Numbers = np.append(rule.apply(words), np.nan)[_codes(column)]  # the last is for a missing label
        self._flag(np.isnan(labels), f"the label {rule.expected}")
        return labels

    def numbers(self) -> Numbers:
        if self._is_numeric():
            numbers = self._floats()
            missing = ~self._present() | (np.isnan(numbers) & ("nan" in map(str.lower, self.table.missing)))
            bad = ~np.isfinite(numbers) & ~missing
        else:
            numbers, bad = parse_numbers(plain_numbers(self._strings(), self.table))
        self._flag(bad, "must be a finite number (or listed under `missing`, if it stands for a missing one)")
        return np.where(np.isfinite(numbers), numbers, np.nan)

    def times(self) -> Numbers:
        numbers: Numbers
        if pa.types.is_temporal(self.values.type):
            times = pc.cast(pc.cast(self.values, pa.timestamp("us")), pa.int64())
            numbers = pc.fill_null(times, 0).to_numpy().astype(np.float64) / 1e6
            bad = ~self._present()
        elif self._is_numeric():
            numbers = self._floats()
            bad = ~np.isfinite(numbers)
        else:
            numbers, bad = parse_times(self._strings())
            bad = bad | np.isnan(numbers)
        self._flag(bad, "the time must be a number or ISO 8601, such as 2026-01-31 or 2026-01-31T23:59:59Z")
        return numbers

    def categories(self) -> pa.DictionaryArray:
        values = self.values if _is_string(self.values.type) else self._cast_to_strings()
        return as_categories(values, strip=self.table.strip, missing=self.table.missing)

    def bags(self, separator: str) -> Bags:
        strip, missing = self.table.strip, self.table.missing
        if pa.types.is_list(self.values.type) or pa.types.is_large_list(self.values.type):
            return as_bags(pc.cast(self.values, pa.list_(pa.string())), strip=strip, missing=missing)
        column = self.categories()  # each distinct text is cut into its items once
        distinct = as_bags(pc.split_pattern(column.dictionary, separator), strip=strip, missing=missing)
        return distinct.take(column.indices.fill_null(-1).to_numpy().astype(np.int64))

    def _floats(self) -> Numbers:
        numbers: Numbers = pc.cast(self.values, pa.float64(), safe=False).to_numpy()
        return numbers

    def _strings(self) -> pa.ChunkedArray:
        """Strings, null where one is missing."""
        words = self._cast_to_strings()
        words = pc.utf8_trim_whitespace(words) if self.table.strip else words
        missing = pc.is_in(words, value_set=pa.array(self.table.missing, pa.string()))
        return pc.if_else(missing, pa.scalar(None, pa.string()), words)

    def _cast_to_strings(self) -> pa.ChunkedArray:
        try:
            return pc.cast(self.values, pa.string())
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise ValueError(
                f"{self.path}, column {self.name!r} has type {self.values.type}, which does not fit its place in "
                "the schema. Lists belong under multi_valued; structures cannot be read."
            ) from error

    def _is_numeric(self) -> bool:
        kind = self.values.type
        return any(
            is_a(kind) for is_a in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
        )

    def _present(self) -> NDArray[np.bool_]:
        return np.asarray(self.values.is_valid())

    def _flag(self, bad: NDArray[np.bool_], problem: str) -> None:
        self.judge.flag(bad, column=self.name, problem=problem, values=self.values)


def _codes(column: pa.DictionaryArray) -> NDArray[np.int64]:
    """The position of each row's string, and behind the last one where it is missing."""
    codes: NDArray[np.int64] = column.indices.fill_null(len(column.dictionary)).to_numpy().astype(np.int64)
    return codes


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or (pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type)))
