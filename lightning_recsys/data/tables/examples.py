"""Clean rows: labels and features as whole columns, once every rule about good rows was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.tables.bad_rows import RowJudge
from lightning_recsys.data.tables.columns import Bags, Categories, parse_numbers, parse_times
from lightning_recsys.data.tables.label import LabelRule
from lightning_recsys.data.tables.reading import RawTable
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import TableFormat

Rows = NDArray[np.int64]
Numbers = NDArray[np.float64]
Column = Categories | Bags | Numbers


@dataclass(frozen=True)
class Examples:
    """Rows of clean columns, by name: numbers with NaN where one is missing, categories, or bags."""

    columns: Mapping[str, Column]
    num_rows: int

    def take(self, rows: Rows) -> Examples:
        """Some rows; -1 among them gives one where everything is missing."""
        return Examples({name: _take(column, rows) for name, column in self.columns.items()}, len(rows))

    def numbers(self, name: str) -> Numbers:
        """A column of numbers."""
        column = self.columns[name]
        assert isinstance(column, np.ndarray)
        return column

    def categories(self, name: str) -> Categories:
        """A column of categories."""
        column = self.columns[name]
        assert isinstance(column, Categories)
        return column

    def bags(self, name: str) -> Bags:
        """A column of bags."""
        column = self.columns[name]
        assert isinstance(column, Bags)
        return column

    @classmethod
    def concatenate(cls, parts: Sequence[Examples]) -> Examples:
        """The rows of several files, one after the other."""
        if len(parts) == 1:
            return parts[0]
        columns = {name: _concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
        return cls(columns, sum(part.num_rows for part in parts))


def clean(
    raw: RawTable, schema: Schema, table: TableFormat, bad_rows: RowJudge, *, keys: Sequence[str] = ()
) -> Examples:
    """Parse the columns of one file, and drop (or raise at) the rows that make no sense.

    Args:
        raw: The columns, each of which the schema speaks of.
        schema: What they mean.
        table: How the file is written.
        bad_rows: Judges the rows.
        keys: Columns that refer to another table or are referred to: also kept as categories, named ``key:<name>``.
    """
    columns: dict[str, Column] = {}
    for name, values in raw.columns.items():
        parser = _Parser(raw, table, bad_rows, name, values)
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
    bad_rows.report()
    examples = Examples(columns, len(raw))
    return examples if bad_rows.good.all() else examples.take(np.flatnonzero(bad_rows.good))


@dataclass(frozen=True)
class _Parser:
    """One column of one file."""

    raw: RawTable
    table: TableFormat
    bad_rows: RowJudge
    name: str
    values: pa.ChunkedArray

    def label(self, rule: LabelRule, *, strip: str) -> Numbers:
        column = self.categories()
        words = pc.utf8_trim(column.values, strip) if strip else column.values
        labels: Numbers = np.append(rule.apply(words), np.nan)[column.codes]  # the last one is for -1, a missing label
        self._flag(np.isnan(labels), f"the label {rule.expected}")
        return labels

    def numbers(self) -> Numbers:
        if self._is_numeric():
            numbers = self._floats()
            missing = ~self._present() | (np.isnan(numbers) & ("nan" in map(str.lower, self.table.missing)))
            bad = ~np.isfinite(numbers) & ~missing
        else:
            numbers, bad = parse_numbers(self._strings())
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

    def categories(self) -> Categories:
        values = self.values if _is_string(self.values.type) else self._cast_to_strings()
        return Categories.from_strings(values, strip=self.table.strip, missing=self.table.missing)

    def bags(self, separator: str) -> Bags:
        strip, missing = self.table.strip, self.table.missing
        if not pa.types.is_list(self.values.type) and not pa.types.is_large_list(self.values.type):
            return Bags.from_categories(self.categories(), separator=separator, strip=strip, missing=missing)
        words = pc.cast(self.values, pa.list_(pa.string()))
        return Bags.from_lists(words, strip=strip, missing=missing)

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
                f"{self.raw.path}, column {self.name!r} has type {self.values.type}, which does not fit its place in "
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
        self.bad_rows.flag(bad, column=self.name, problem=problem, values=self.values)


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or (pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type)))


def _take(column: Column, rows: Rows) -> Column:
    if isinstance(column, np.ndarray):
        return np.where(rows >= 0, column[rows], np.nan)
    return column.take(rows)


def _concatenate(parts: Sequence[Column]) -> Column:
    if isinstance(parts[0], Categories):
        return Categories.concatenate([part for part in parts if isinstance(part, Categories)])
    if isinstance(parts[0], Bags):
        return Bags.concatenate([part for part in parts if isinstance(part, Bags)])
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
