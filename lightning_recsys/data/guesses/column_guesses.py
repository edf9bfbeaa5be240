"""The kind of one column of an unknown table, guessed from its own values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.data.guesses.sniffing import is_number
from lightning_recsys.data.tables.columns import (
    NUMBER,
    are_lists,
    date_numbers,
    parse_numbers,
    parse_times,
    split_lists,
)
from lightning_recsys.data.tables.features import Categorical, Dense, MultiValued, Vector

DateOrder: TypeAlias = Literal["day_first", "month_first"]

MISSING = ("", "?", "NA", "N/A", "NULL", "null", "None", "nan", "NaN", "\\N")
_NO_VALUE = frozenset({None, *MISSING})
_ID_NAME = re.compile(r"(^|[_ .-])(id|user|item|movie|product|zip|code)$|[a-z]I[dD]$", re.IGNORECASE)
_TIME_NAME = re.compile(r"time|date|hour|(^|_)ts$", re.IGNORECASE)
_INDEX_NAME = re.compile(r"|Unnamed: ?\d+|index|__index_level_\d+__|column_1", re.IGNORECASE)
_LIST_SEPARATORS = ("|", ";", ",", "^", " ")
_GAPS = 5  # whole numbers of a span so many times as wide as they are many are taken for ids
_LARGE_NUMBER = 1000  # from which on
ALMOST = 0.95  # share of the rows from which on other values are strays
_FEW_STRAYS = 3  # different words among numbers
_FEW_NUMBERS = 10  # a number with no more distinct values than that is a category
_LARGE_SAMPLE = 100  # rows that it takes to tell that a column never repeats
_SKEWED = 100  # largest value over the typical one, from which on a logarithm helps


@dataclass(frozen=True)
class Sample:
    """A column in the sample, ``None`` where a Parquet file has no value; its type there; how dates stand."""

    name: str
    column: Sequence[str | None]
    kind: pa.DataType | None = None
    dates: DateOrder | None = None

    @cached_property
    def values(self) -> list[str]:
        """Those that are not missing."""
        return [value for value in self.column if value not in _NO_VALUE]  # type: ignore[misc]

    @property
    def num_missing(self) -> int:
        """Number of rows without a value."""
        return len(self.column) - len(self.values)

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each value is there."""
        return Counter(self.values)

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """The number of each different value, in the order of ``counts``; NaN where it is none."""
        words = pa.array(self.counts, pa.string())
        numbers = np.full(len(words), np.nan)
        found = np.asarray(pc.match_substring_regex(words, NUMBER))
        numbers[found] = list(map(float, words.filter(found).to_pylist()))
        return numbers

    @cached_property
    def sorted_numbers(self) -> NDArray[np.float64]:
        """The numbers of all rows that have one."""
        repeated = np.repeat(self.numbers, list(self.counts.values()))
        return np.sort(repeated[~np.isnan(repeated)])

    @property
    def is_numeric(self) -> bool:
        """Whether all are numbers; so if there are none."""
        return not np.isnan(self.numbers).any()

    @property
    def is_whole(self) -> bool:
        """Whether all are whole numbers."""
        return bool(self.counts) and self.is_numeric and not self.has_fractions

    @cached_property
    def has_fractions(self) -> bool:
        """Whether a number among the values has a fraction, as no id has."""
        return bool((np.floor(self.numbers) < self.numbers).any())

    @cached_property
    def are_dates(self) -> bool:
        """Whether all are dates such as 20260131."""
        return not np.isnan(date_numbers(self.numbers)).any()

    @cached_property
    def strays(self) -> list[str]:
        """The words among numbers, if they are so rare that they may stand for missing ones."""
        words = [word for word, number in zip(self.counts, self.numbers, strict=True) if np.isnan(number)]
        few = sum(self.counts[word] for word in words) <= (1 - ALMOST) * len(self.values)
        return words if few and len(words) <= _FEW_STRAYS else []

    @cached_property
    def codes(self) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        """Which value each row has, -1 where it has none; and the values as increasing numbers, if they are some.

        Times count as numbers, and strays as missing.
        """
        coded = pa.array(self.column, pa.string()).dictionary_encode()
        words, places = coded.dictionary, coded.indices.fill_null(-1).to_numpy()
        there = np.asarray(pc.invert(pc.is_in(words, value_set=pa.array(MISSING))))
        if self.is_time:
            numbers, bad = parse_times(words, dates=self.dates)
        elif self.counts and (self.is_numeric or self.strays):
            numbers, bad = parse_numbers(words)
        else:
            renamed = np.where(there, np.cumsum(there) - 1, -1)
            return np.append(renamed, -1)[places], None
        there &= ~bad & ~np.isnan(numbers)
        distinct, ranks = np.unique(numbers[there], return_inverse=True)
        renamed = np.full(len(words) + 1, -1)
        renamed[:-1][there] = ranks
        return renamed[places], distinct

    def share(self, fits: Iterable[bool]) -> float:
        """Share of the values, of which it is known for each distinct one whether it fits."""
        fitting = sum(count for count, good in zip(self.counts.values(), fits, strict=True) if good)
        return fitting / max(len(self.values), 1)

    def times(self, dates: DateOrder | None) -> float:
        """Share of the values that are times with words for it, if dates are read so."""
        _, bad = parse_times(pa.array(self.counts, pa.string()), dates=dates)
        return self.share(~bad & np.isnan(self.numbers))

    @cached_property
    def is_time(self) -> bool:
        """Whether the values are times: in words, or in numbers that are large enough."""
        if not self.is_numeric:
            return self.times(self.dates) >= ALMOST
        if len(self.counts) <= _FEW_NUMBERS:
            return False
        first, last = self.sorted_numbers[[0, -1]]
        # Dates such as 20261231, and seconds since 1970, need no telling name; milliseconds do.
        return (
            self.are_dates
            or (first > 8e8 and last < 2.5e9)
            or (first > 1e7 and _TIME_NAME.search(self.name) is not None)
        )

    @cached_property
    def may_be_ids(self) -> bool:
        """Whether the values are whole numbers, more than a few, that come often enough to have rates of their own."""
        numbers = self.is_numeric or bool(self.strays)
        often = _FEW_NUMBERS < len(self.counts) <= len(self.values) / 2
        return numbers and often and not self.has_fractions and not self.is_time

    @property
    def never_repeats(self) -> bool:
        """Whether the values are many, and hardly one of them comes twice."""
        return len(self.values) >= _LARGE_SAMPLE and len(self.counts) > 0.99 * len(self.values)


@dataclass(frozen=True)
class Guess:
    """Where in the schema a column belongs, with which options, and why; of a number that is ids as well, theirs."""

    key: str
    options: Any
    reason: str
    ids: Categorical | None = None


def guess_column(sample: Sample) -> Guess:
    """Where a column belongs, as far as its name and its values tell."""
    num_values = len(sample.counts)
    values = f"{num_values} different values in the sample"
    if sample.kind is not None and pa.types.is_nested(sample.kind):
        return _guess_nested(sample, sample.kind)
    if (why := _useless(sample)) is not None:
        return Guess("ignore", None, why)
    if sample.is_time:
        return Guess("time", None, f"looks like the time of the row{_features_of_time(sample)}")
    named_id = (
        _ID_NAME.search(sample.name) is not None and not sample.has_fractions
    )  # bids and what is paid end so, too
    if (sample.is_numeric or sample.strays) and num_values > _FEW_NUMBERS and not named_id:
        return _guess_number(sample)
    if (listed := _guess_listed(sample)) is not None:
        return listed
    if sample.never_repeats and (sample.name.lower().endswith("id") or not _ID_NAME.search(sample.name)):
        # Long lists differ in every row although each of their values comes often; sentences do, too.
        bag = _guess_bag(sample, separators=_LIST_SEPARATORS[:-1], times=10.0)
        return bag or Guess("ignore", None, "different in every row of the sample")
    if (bag := _guess_bag(sample)) is not None:
        return bag
    if num_values > 0.3 * len(sample.values) and len(sample.values) >= _LARGE_SAMPLE:
        return Guess("categorical", Categorical(min_count=2), f"{values}: the rare ones share an id")
    return Guess("categorical", Categorical(), values)


def _useless(sample: Sample) -> str | None:
    """Why no feature is made of a column, if that can be told without a look at its values one by one."""
    num_values = len(sample.counts)
    if not sample.name:
        return "it has no name"
    if num_values < 2 and not (num_values and sample.num_missing):
        return "the same in every row of the sample" if num_values else "empty in the sample"
    if _INDEX_NAME.fullmatch(sample.name) and _counts_rows(sample):
        return "counts the rows, as pandas writes its index"
    if sample.num_missing and sample.is_time:
        return f"a time that some rows lack{_features_of_time(sample)}"
    return None


def _guess_listed(sample: Sample) -> Guess | None:
    """Texts that are lists in brackets: of numbers, as long in every row, a vector; of others, bags."""
    texts = pa.array(sample.values, pa.string())
    if not len(texts) or pc.mean(are_lists(texts)).as_py() < ALMOST:
        return None
    separator = "," if any("," in value for value in sample.values) else " "
    lists = [[item.strip() for item in items if item.strip()] for items in split_lists(texts, separator).to_pylist()]
    items = [item for found in lists for item in found]
    if not items:
        return Guess("ignore", None, "lists without anything in them")
    if all(map(is_number, items)) and not all(re.fullmatch(r"[+-]?\d+", item) for item in items):
        return _guess_vector(list(map(len, lists)))
    if len(items) >= _LARGE_SAMPLE and len(set(items)) > 0.99 * len(items):
        return Guess("ignore", None, "lists, each of other values")
    return Guess("multi_valued", MultiValued(separator=separator), f"lists of {len(set(items))} different values")


def _guess_bag(sample: Sample, *, separators: Sequence[str] = _LIST_SEPARATORS, times: float = 1.0) -> Guess | None:
    """Words that a separator joins, of which there are fewer than of what they make together.

    Args:
        sample: The column's different values, with how often each comes.
        separators: What may join them.
        times: How often each word comes at least, on average.
    """
    for separator in separators:
        num_items = sum((value.count(separator) + 1) * count for value, count in sample.counts.items())
        several = 1.5 if separator == " " else 1.2  # names of two words are no lists
        if num_items > several * len(sample.values):
            items = {item for value in sample.counts for item in value.split(separator)}
            if several * len(items) < 1.2 * len(sample.counts) and times * len(items) <= num_items:
                why = f"lists of {len(items)} different values"
                return Guess("multi_valued", MultiValued(separator=separator), why)
    return None


def _guess_vector(widths: list[int]) -> Guess:
    """Lists of numbers, of so many each."""
    if len(set(widths)) > 1 or widths[0] == 1:
        return Guess("ignore", None, f"lists of numbers, {sum(widths) / len(widths):.3g} on average")
    return Guess("vectors", Vector(width=widths[0]), f"vectors of {widths[0]} numbers")


def _guess_nested(sample: Sample, kind: pa.DataType) -> Guess:
    """Lists, and what cannot be read, of a Parquet file."""
    if pa.types.is_map(kind) or pa.types.is_nested(getattr(kind, "value_type", kind)):
        return Guess("ignore", None, f"{kind} cannot be read")
    if not sample.values:
        return Guess("ignore", None, "empty in the sample")
    items = [item for value in sample.values for item in value.split("|")]
    if pa.types.is_floating(kind.value_type):
        return _guess_vector([value.count("|") + 1 for value in sample.values])
    return Guess("multi_valued", MultiValued(), f"lists of {len(set(items))} different values")


def _counts_rows(sample: Sample) -> bool:
    """Whether each value is the one before and 1."""
    try:
        numbers = [int(value) for value in sample.values]
    except ValueError:
        return False
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _guess_number(sample: Sample) -> Guess:
    if (ids := _looks_like_ids(sample)) is not None:
        return Guess("categorical", Categorical(), ids)
    if sample.never_repeats and not sample.has_fractions:
        return Guess("ignore", None, "a whole number of its own in every row of the sample")
    return guess_dense(sample)


def guess_dense(sample: Sample) -> Guess:
    """A column of numbers as a numeric feature."""
    numbers = sample.sorted_numbers
    span = f"from {numbers[0]:g} to {numbers[-1]:g}"
    if sample.strays:
        span += f"; {', '.join(map(repr, sample.strays))} taken for missing"
    if numbers[0] >= 0 and numbers[-1] > _SKEWED * (1 + np.median(numbers)):
        return Guess("dense", Dense(transform="log"), f"{span}, most of them small")
    return Guess("dense", Dense(), span)


def _looks_like_ids(sample: Sample) -> str | None:
    """Why whole numbers are taken for ids: each comes often, and most of those between them never do."""
    numbers = sample.sorted_numbers
    distinct, largest = len(sample.counts), numbers[-1]
    span = largest - numbers[0] + 1
    repeats = len(numbers) / distinct
    even = np.median(numbers) > largest / _SKEWED  # amounts have most values near zero
    is_round = not (numbers % 10).any()
    whole = not sample.has_fractions
    if whole and even and repeats >= 2 and largest >= _LARGE_NUMBER and span >= _GAPS * distinct and not is_round:
        return f"{distinct} different whole numbers with gaps, each {repeats:.0f} times on average: taken for ids"
    return None


def _features_of_time(sample: Sample) -> str:
    """How a time becomes features, of dates and of numbers whose unit is known."""
    if sample.are_dates:
        weekday = f"{{column: {sample.name}, transform: weekday, unit: yyyymmdd}}"
        return f", dates as YYYYMMDD; its weekday as a feature, under categorical: weekday: {weekday}"
    if sample.is_numeric and not ((sample.numbers > 8e8) & (sample.numbers < 2.5e9)).all():
        return ""
    return f"; its hour as a feature, under categorical: hour: {{column: {sample.name}, transform: hour}}"
