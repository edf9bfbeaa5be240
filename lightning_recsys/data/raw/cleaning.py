"""The columns of a table: labels, numbers, times, categories and bags, once every rule about good rows was checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.guesses.sniffing import is_number
from lightning_recsys.data.raw.columns import Bags, RowJudge
from lightning_recsys.data.raw.kernels import one_chunk
from lightning_recsys.data.raw.ngrams import ngram_bags
from lightning_recsys.data.tables.columns import (
    GROUPED_BY_DOTS,
    as_categories,
    date_numbers,
    has_marks,
    parse_numbers,
    parse_times,
    plain_numbers,
    plain_words,
    split_lists,
)
from lightning_recsys.data.tables.features import LARGEST, Input, MultiValued, TimeUnit, Vector
from lightning_recsys.data.tables.label import LabelRule
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import TableFormat
from lightning_recsys.data.tables.words import as_words, float_words, present

Numbers: TypeAlias = NDArray[np.float64]
Column: TypeAlias = Numbers | pa.DictionaryArray | pa.StringArray | Bags
"""Numbers with NaN where one is missing (of vectors all of them, shape ``[rows, width]``), categories with null, texts,
or bags."""

_SECONDS = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_YEAR_2200 = 7_258_118_400.0


def clean(
    path: Path,
    values: Mapping[str, pa.ChunkedArray],
    schema: Schema,
    table: TableFormat,
    judge: RowJudge,
    *,
    keys: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> dict[Input, Column]:
    """Parse the columns of some rows, and drop the rows that make no sense.

    Args:
        path: The file that they come from, for messages.
        values: The columns, each of which the schema speaks of.
        schema: Says what becomes of each column; columns that it does not name are left out.
        table: The format in which the file is written.
        judge: Collects the rows that are bad, and why they are.
        keys: Columns that refer to another table or are referred to: also kept as categories.
        texts: Columns that are also kept as they stand in the file.
    """
    asked = [source for source, _ in schema.inputs()]
    parsers = {name: _Parser(path, table, judge, name, column) for name, column in values.items()}
    also = [Input(name, "key") for name in keys] + [Input(name, "text") for name in texts]
    sources = dict.fromkeys([*asked, *also])
    columns = {source: parsers[source.column].parse(source, schema) for source in sources if source.column in parsers}
    if judge.good.all():
        return columns
    kept = np.flatnonzero(judge.good)
    return {source: take(column, kept) for source, column in columns.items()}


def take(column: Column, rows: NDArray[np.int64]) -> Column:
    """Some rows of a column; -1 among them gives one where the value is missing."""
    if isinstance(column, Bags):
        return column.take(rows)
    if isinstance(column, np.ndarray):
        return np.concatenate([column, np.full((1, *column.shape[1:]), np.nan)])[rows]  # the last one is for -1
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


def as_bags(
    column: pa.Array | pa.ChunkedArray, *, strip: bool, missing: Sequence[str], written: TableFormat | None = None
) -> Bags:
    """From lists of strings; missing and empty items are dropped, and a missing list is an empty bag.

    Args:
        column: A list for each row, null where it is missing, whose items are of any type that words are made of.
        strip: Whether items are trimmed of white space.
        missing: Items that stand for a missing one.
        written: How numbers among items that are texts are written.

    >>> bags = as_bags(pa.array([["b", "a"], None, ["a", "", "b"]]), strip=True, missing=[])
    >>> bags.lengths_N.tolist(), bags.values.to_pylist()
    ([2, 0, 2], ['b', 'a', 'a', 'b'])
    """
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    flat = pc.list_flatten(column)
    if isinstance(flat, pa.Array):
        flat = pa.chunked_array([flat])
    written = written if _is_text(flat.type) else None
    items = as_categories(as_words(flat), strip=strip, missing=[*missing, ""], written=written)
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

    def parse(self, source: Input, schema: Schema) -> Column:
        """The column as the schema has it."""
        match source.parse, source.by:
            case "label", _:
                return self.label(LabelRule(schema.label.rule), strip=schema.label.strip)
            case "number", _:
                return self.numbers()
            case "text", _:
                return self.text()
            case "time", _:
                return self.times()
            case "moment", ("s" | "ms" | "us" | "yyyymmdd" | None) as unit:
                return self.moments(unit)
            case "bag", MultiValued() as feature:
                return self.bags(feature)
            case "vector", Vector() as feature:
                return self.vectors(feature.width)
        return self.categories

    def label(self, rule: LabelRule, *, strip: str) -> Numbers:
        column = self._texts
        words = pc.utf8_trim(column.dictionary, strip) if strip else column.dictionary
        if rule.compares_numbers and self._written is not None:
            words = plain_words(words, self._written)
        if pa.types.is_boolean(self.values.type) and not rule.compares_numbers:
            words = pc.if_else(pc.equal(words, "1"), "true", "false")  # as such rules call them
        labels: Numbers = np.append(rule.apply(words), np.nan)[_codes(column)]  # the last is for a missing label
        self._flag(np.isnan(labels), f"the label {rule.expected}")
        return labels

    def numbers(self) -> Numbers:
        if self._is_numeric():
            numbers = self._floats()
            missing = ~self._present() | self._stand_for_missing(numbers)
            bad = ~np.isfinite(numbers) & ~missing
            numbers = np.where(missing, np.nan, numbers)
        else:
            words = self._strings()
            if self.table.decimal == "," and self.table.thousands != ".":
                problem = "is a thousand or a fraction, where decimal is a comma: write thousands: '.' in the schema"
                self._flag(np.asarray(pc.fill_null(pc.match_substring_regex(words, GROUPED_BY_DOTS), False)), problem)
            if has_marks(self.table):
                words = present(plain_numbers(words, self.table), self.table.missing)
            numbers, bad = parse_numbers(words)
        stands_for_one = "(or listed under `missing`, if it stands for a missing one)"
        self._flag(bad, f"must be a finite number {stands_for_one}")
        self._flag(_too_large(numbers), f"must be within {LARGEST}, which is what features hold {stands_for_one}")
        return np.where(np.isfinite(numbers), numbers, np.nan)

    def _stand_for_missing(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Which numbers are those of a word under ``missing``, as -1 may be, or not a number where that has nan.

        A column in 32 bits has -9.9 as the number next to it in 32 bits.
        """
        words = {word.lower() for word in self.table.missing}
        stand = np.array([float(word) for word in words if is_number(word)])
        if pa.types.is_float32(self.values.type):
            stand = stand.astype(np.float32)
        found = np.isin(numbers, stand.astype(np.float64))
        return found | (np.isnan(numbers) & ("nan" in words))

    def times(self) -> Numbers:
        """Numbers as they are, or seconds since 1970; every row must have one."""
        numbers, bad, _ = self._read_times
        self._flag(bad | np.isnan(numbers), self._expected_time)
        return numbers

    def moments(self, unit: TimeUnit | None) -> Numbers:
        """Seconds since 1970, as which a unit makes numbers count as well; NaN where one is missing."""
        numbers, bad, is_number = self._read_times
        self._flag(bad, self._expected_time)
        if not is_number.any():
            return numbers
        dates = date_numbers(numbers)
        are_dates = is_number & ~np.isnan(dates)
        if unit == "yyyymmdd":
            self._flag(is_number & ~are_dates, "the time must be a date such as 20260131, with unit: yyyymmdd")
            return np.where(is_number, dates, numbers)
        if unit is None and 2 * are_dates.sum() > is_number.sum():
            self._flag(
                are_dates,
                "most numbers here are dates and would count as seconds since 1970: write unit: yyyymmdd in the schema,"
                " or unit: s if they are seconds",
            )
        numbers = np.where(is_number, numbers * _SECONDS[unit], numbers)
        late = is_number & (np.abs(np.nan_to_num(numbers)) > _YEAR_2200)
        self._flag(late, f"the time must be before the year 2200, with unit: {unit or 's'} (numbers count from 1970)")
        return numbers

    @cached_property
    def _read_times(self) -> tuple[Numbers, NDArray[np.bool_], NDArray[np.bool_]]:
        """Numbers as they are, or seconds since 1970, NaN where one is missing; which are bad; which are numbers.

        Read once, however many features are made of the column.
        """
        present = self._present()
        if pa.types.is_temporal(self.values.type):
            kind = self.values.type
            nanoseconds = pa.types.is_timestamp(kind) and kind.unit == "ns"  # whose fractions of microseconds go
            with self._fitting():
                times = pc.cast(pc.cast(self.values, pa.timestamp("us"), safe=not nanoseconds), pa.int64())
            numbers = np.where(present, pc.fill_null(times, 0).to_numpy().astype(np.float64) / 1e6, np.nan)
            return numbers, np.zeros_like(present), np.zeros_like(present)
        if self._is_numeric():
            numbers = self._floats()
            present &= ~self._stand_for_missing(numbers)
            return np.where(present, numbers, np.nan), present & ~np.isfinite(numbers), present
        words = self._strings()
        if has_marks(self.table):
            words = plain_words(words, self.table)
        return *parse_times(words, dates=self.table.dates), ~np.isnan(parse_numbers(words)[0])

    @property
    def _expected_time(self) -> str:
        dates = "day_first or month_first" if self.table.dates is None else self.table.dates
        return (
            "the time must be a number or ISO 8601, such as 2026-01-31 or 2026-01-31T23:59:59Z, or as 31.01.2026, or "
            f"with slashes where the schema says dates: {dates}"
        )

    @cached_property
    def categories(self) -> pa.DictionaryArray:
        """Each distinct value once, null where one is missing; texts of numbers as numbers are called."""
        return self._texts if self._written is None else self._coded(self._written)

    @property
    def _written(self) -> TableFormat | None:
        """How numbers are written; ``None`` where values are no texts, or texts have numbers as they are called."""
        return self.table if _is_text(self.values.type) and has_marks(self.table) else None

    @cached_property
    def _texts(self) -> pa.DictionaryArray:
        """The same, with texts of numbers as they are written."""
        return self._coded(None)

    def _coded(self, written: TableFormat | None) -> pa.DictionaryArray:
        with self._fitting():
            words = as_words(self.values)
        return as_categories(words, strip=self.table.strip, missing=self.table.missing, written=written)

    def text(self) -> pa.StringArray:
        """Strings as they stand in the file, but for white space around them; null where a Parquet file has none."""
        with self._fitting():
            floats = pa.types.is_floating(self.values.type)
            words = float_words(self.values) if floats else pc.cast(self.values, pa.string())
        return one_chunk(pc.utf8_trim_whitespace(words) if self.table.strip else words)

    def bags(self, feature: MultiValued) -> Bags:
        strip, missing = self.table.strip, self.table.missing
        if _is_list(self.values.type) and feature.ngrams is None:
            if pa.types.is_nested(self.values.type.value_type):
                raise self._wrong_type()
            with self._fitting():
                return as_bags(self.values, strip=strip, missing=missing, written=self.table)
        column = self._texts if feature.ngrams is None else self.categories
        # Each distinct text is cut into its items once.
        if feature.ngrams is not None:
            distinct = ngram_bags(column.dictionary, feature.ngrams, sizes=feature.sizes, limit=feature.limit)
        else:
            lists = split_lists(column.dictionary, feature.separator)
            distinct = as_bags(lists, strip=strip, missing=missing, written=self._written)
        return distinct.take(column.indices.fill_null(-1).to_numpy().astype(np.int64))

    def vectors(self, width: int) -> Numbers:
        """Shape ``[rows, width]``; all NaN where one is missing."""
        if _is_list(self.values.type):
            lists = pc.cast(self.values, pa.large_list(self.values.type.value_type))
        else:
            words = pc.utf8_trim(self._strings(), "[]()'\" \t\r\n")
            comma = self.table.decimal == ","  # then those between numbers have a space behind them
            between = r"\s*[;|]\s*|,?\s+" if comma else r"\s*[,;|]\s*|\s+"
            lists = pc.split_pattern_regex(words, pattern=rf"['\"]?(?:{between})['\"]?")
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
        present = np.asarray(lists.is_valid())
        flat = pc.list_flatten(lists)
        try:
            strings = pa.types.is_string(flat.type)
            numbers, bad = parse_numbers(plain_numbers(flat, self.table)) if strings else _finite(flat)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise ValueError(f"{self.path}, column {self.name!r} has type {self.values.type}: no numbers.") from error
        rows = np.repeat(np.arange(len(lengths)), lengths)
        wrong = present & (lengths != width)
        wrong[rows[bad | np.isnan(numbers) | _too_large(numbers)]] = True
        self._flag(wrong, f"must be a list of {width} finite numbers within {LARGEST} (or missing as a whole)")
        whole = present & ~wrong
        vectors = np.full((len(lengths), width), np.nan)
        vectors[whole] = numbers[whole[rows]].reshape(-1, width)
        return vectors

    def _floats(self) -> Numbers:
        numbers: Numbers = pc.cast(self.values, pa.float64(), safe=False).to_numpy()
        return numbers

    def _strings(self) -> pa.ChunkedArray:
        """Strings, null where one is missing."""
        with self._fitting():
            words = pc.cast(as_words(self.values), pa.string())
        return present(pc.utf8_trim_whitespace(words) if self.table.strip else words, self.table.missing)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise self._wrong_type() from error

    def _wrong_type(self) -> ValueError:
        return ValueError(
            f"{self.path}, column {self.name!r} has type {self.values.type}, which does not fit its place in the "
            "schema. Lists of words and numbers belong under multi_valued; a field b of a structure a is the column "
            "a.b; lists of lists or structures, and maps, cannot be read: leave the column out."
        )

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


def _finite(numbers: pa.ChunkedArray) -> tuple[Numbers, NDArray[np.bool_]]:
    """The column as float64, and which of its values are none or not finite."""
    floats: Numbers = pc.cast(numbers, pa.float64(), safe=False).to_numpy()
    return floats, ~np.isfinite(floats)


def _too_large(numbers: Numbers) -> NDArray[np.bool_]:
    """Which numbers features cannot hold; those that are not finite are told otherwise."""
    return np.isfinite(numbers) & (np.abs(numbers) > LARGEST)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
