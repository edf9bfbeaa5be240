"""A first schema for an unknown file, with a remark on everything that was assumed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from lightning_recsys.data.files import find_files
from lightning_recsys.data.tables.columns import GROUPED_BY_DOTS, date_numbers, parse_times
from lightning_recsys.data.tables.features import Categorical, Dense, MultiValued, Vector
from lightning_recsys.data.tables.label import LabelRule
from lightning_recsys.data.tables.reading import read_header
from lightning_recsys.data.tables.schema import FEATURES, Schema, feature_name
from lightning_recsys.data.tables.schema_parts import Label, TableFormat
from lightning_recsys.data.tables.sniffing import is_number, sniff, told_apart

DateOrder: TypeAlias = Literal["day_first", "month_first"]

_MISSING = ("", "?", "NA", "N/A", "NULL", "null", "None", "nan", "NaN", "\\N")
_LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "converted", "purchase", "rating")
_POSITIVE = ("1", "true", "yes", "y", "click", "clicked", "positive")
_ID_NAME = re.compile(r"(^|[_ .-])(id|user|item|movie|product|zip|code)$|[a-z]I[dD]$", re.IGNORECASE)
_TIME_NAME = re.compile(r"time|date|hour|(^|_)ts$", re.IGNORECASE)
_INDEX_NAME = re.compile(r"|Unnamed: ?\d+|index|__index_level_\d+__|column_1")
_LIST_SEPARATORS = ("|", ";", ",", "^", " ")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_GAPS = 5  # whole numbers of a span so many times as wide as they are many are taken for ids
_LARGE_NUMBER = 1000  # from which on
_ALMOST = 0.95  # share of the rows from which on other values are strays
_LEFT_OUT = 0.05  # share of a numbering over several columns that may lie between two of them, unseen
_FEW_STRAYS = 3  # different words among numbers
_FEW_NUMBERS = 10  # a number with no more distinct values than that is a category
_LARGE_SAMPLE = 100  # rows that it takes to tell that a column never repeats
_SKEWED = 100  # largest value over the typical one, from which on a logarithm helps


@dataclass(frozen=True)
class _Sample:
    """The values of a column in the sample, without the missing ones; its type in a Parquet file; how dates stand."""

    name: str
    values: list[str]
    num_missing: int
    kind: pa.DataType | None = None
    dates: DateOrder | None = None

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(self.values)

    @cached_property
    def is_numeric(self) -> bool:
        return all(map(is_number, self.counts))

    @cached_property
    def is_whole(self) -> bool:
        """Whether all are whole numbers."""
        return bool(self.counts) and self.is_numeric and all(float(value).is_integer() for value in self.counts)

    @cached_property
    def are_dates(self) -> bool:
        """Whether all are dates such as 20260131."""
        return self.is_numeric and not np.isnan(date_numbers(np.array(list(map(float, self.counts))))).any()

    @cached_property
    def strays(self) -> list[str]:
        """The words among numbers, if they are so rare that they may stand for missing ones."""
        words = [word for word in self.counts if not is_number(word)]
        few = sum(self.counts[word] for word in words) <= (1 - _ALMOST) * len(self.values)
        return words if few and len(words) <= _FEW_STRAYS else []

    def share(self, fits: Iterable[bool]) -> float:
        """Share of the values, of which it is known for each distinct one whether it fits."""
        fitting = sum(count for count, good in zip(self.counts.values(), fits, strict=True) if good)
        return fitting / max(len(self.values), 1)

    def times(self, dates: DateOrder | None) -> float:
        """Share of the values that are times with words for it, if dates are read so."""
        _, bad = parse_times(pa.array(self.counts, pa.string()), dates=dates)
        return self.share(not wrong and not is_number(word) for word, wrong in zip(self.counts, bad, strict=True))

    @property
    def never_repeats(self) -> bool:
        return len(self.values) >= _LARGE_SAMPLE and len(self.counts) > 0.99 * len(self.values)


@dataclass(frozen=True)
class _Guess:
    """Where in the schema a column belongs, with which options, and why."""

    key: str
    options: Any
    reason: str


def guess_schema(
    path: str | Path | Sequence[str | Path],
    label: str | None = None,
    *,
    dates: DateOrder | None = None,
) -> Schema:
    """Guess what the columns of a table mean, from the first fifty thousand rows of its first file.

    Numbers become dense features, or categories where they are few or named like ids; words become categories, or bags
    where they are lists; what is constant, or different in every row, is ignored. ``to_yaml`` of the result writes all
    of it down with the reasons, ready to be corrected.

    Args:
        path: CSV, TSV or the like, or Parquet: a file, folder, glob or archive, or a list of them.
        label: The column that says what is a click; looked for if absent.
        dates: Whether ``01/02/2026`` is of February or of January; found out if absent and other dates of the sample
            tell.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is no table, or the files have different columns; there is no column ``label``, or none that
            looks like a label; or dates can be read in two ways.
    """
    patterns = [path] if isinstance(path, str | Path) else path
    first, *others = find_files(patterns)
    table, columns, kinds = sniff(first)
    _check_columns(first, others, table, list(columns))
    columns, marks = _plain_numbers(columns)
    missing = [token for token in _MISSING if any(token in column for column in columns.values())]
    samples = _samples(columns, kinds, dates)
    chosen = _find_label(first, samples, label)
    clicks = samples.pop(chosen)
    rule, reason = _label_rule(clicks)
    guesses = _guess_columns(samples)
    strays = [word for name, guess in guesses.items() if guess.key == "dense" for word in samples[name].strays]
    fitting = {chosen: clicks.share(~np.isnan(LabelRule(rule).apply(pa.array(clicks.counts))))}

    names = _feature_names(guesses, chosen)

    def of_kind(key: str) -> dict[str, Any]:
        return {
            names[column]: guess.options if names[column] == column else replace(guess.options, column=column)
            for column, guess in guesses.items()
            if guess.key == key
        }

    if not of_kind("categorical") and not of_kind("multi_valued"):
        dense = [column for column, guess in guesses.items() if guess.key == "dense"]
        few = sorted(dense, key=lambda column: len(samples[column].counts))[:3]
        hint = (
            f" Of its numbers {', '.join(few)} have the fewest values: write a schema that has one under" if few else ""
        )
        raise ValueError(
            f"{first}: no column looks like a category, of which models here need one at least.{hint}"
            f"{' categorical.' if few else ''}"
        )
    time = next(iter(of_kind("time")), None)
    return Schema(
        files={"train": tuple(str(Path(x).expanduser().absolute()) for x in patterns)},
        table=replace(table, **marks, dates=clicks.dates, missing=tuple(dict.fromkeys(["", *missing, *strays]))),
        label=Label(column=chosen, rule=rule),
        dense=of_kind("dense"),
        vectors=of_kind("vectors"),
        categorical=of_kind("categorical"),
        multi_valued=of_kind("multi_valued"),
        time=time,
        ignore=tuple(of_kind("ignore")),
        present={name: len(sample.values) / max(len(columns[name]), 1) for name, sample in samples.items()}
        | {chosen: len(clicks.values) / max(len(columns[chosen]), 1)},
        fitting=fitting | _fitting(samples, guesses),
        comments={name: guess.reason for column, guess in guesses.items() for name in (column, names[column])}
        | {f"schema.{key}": remark for key, remark in _remarks(first, has_time=time is not None).items()}
        | {"schema.label": reason},
    )


def _samples(
    columns: Mapping[str, Sequence[str | None]], kinds: Mapping[str, pa.DataType], dates: DateOrder | None
) -> dict[str, _Sample]:
    """The columns without their missing values; how dates are read is found out if it is not given.

    Raises:
        ValueError: dates can be read in two ways.
    """
    samples = {
        name: _Sample(name, values, len(column) - len(values), kinds.get(name))
        for name, column in columns.items()
        for values in [[x for x in column if x is not None and x not in _MISSING]]
    }
    dates = dates or _date_order(list(samples.values()))
    return {name: replace(sample, dates=dates) for name, sample in samples.items()}


def _guess_columns(samples: Mapping[str, _Sample]) -> dict[str, _Guess]:
    """Where each column belongs; one time at most, and a category at least, if any number could be one."""
    guesses = {name: _guess(sample) for name, sample in samples.items()}
    reason = "whole numbers of one numbering over several columns: taken for ids"
    guesses |= {
        name: _Guess("categorical", Categorical(), reason)
        for name in _numbered_together(samples)
        if guesses[name].key != "time"
    }
    if not any(guess.key in ("categorical", "multi_valued") for guess in guesses.values()):
        reason = "a number, taken for an id, because no other column is a category"
        guesses |= {
            name: _Guess("categorical", Categorical(), reason)
            for name, guess in guesses.items()
            if guess.key == "dense"
            and samples[name].is_whole
            and 2 * len(samples[name].counts) < len(samples[name].values)
        }
    times = [name for name, guess in guesses.items() if guess.key == "time"]
    return guesses | {name: _Guess("ignore", None, "a second time") for name in times[1:]}


def _feature_names(guesses: Mapping[str, _Guess], label: str) -> dict[str, str]:
    """A name for each column, as which it stands in the schema: its own, where no other feature has that already.

    No feature can be called ``label``, and dots in names become underscores.
    """
    features = [column for column, guess in guesses.items() if guess.key in FEATURES]
    others = list(dict.fromkeys(["label", label, *(column for column in guesses if column not in features)]))
    named = told_apart([*others, *map(feature_name, features)])[len(others) :]
    unchanged = [column if name == feature_name(column) else name for column, name in zip(features, named, strict=True)]
    return {column: column for column in guesses} | dict(zip(features, unchanged, strict=True))


def _numbered_together(samples: Mapping[str, _Sample]) -> list[str]:
    """Columns of whole numbers that share one numbering, three at least, as files of libFM and FuxiCTR have it.

    Each column then has a range of its own, and the ranges follow one another with hardly a number left out. Counts,
    ages and years have ranges that overlap or lie far apart.
    """
    ranges = []
    for name, sample in samples.items():
        if sample.is_whole and len(sample.counts) > 1 and not sample.never_repeats:
            numbers = [int(float(value)) for value in sample.counts]
            ranges.append((min(numbers), max(numbers), name))
    chains: list[list[tuple[int, int, str]]] = [[]]  # the longest that ends with each column
    for first, last, name in sorted(ranges):
        before = [x for x in chains[1:] if 0 < first - x[-1][1] <= 1 + _LEFT_OUT * (last - x[0][0])]
        chains.append([*max(before, key=len, default=[]), (first, last, name)])
    longest = max(chains, key=len)
    used = sum(len(samples[name].counts) for _, _, name in longest)
    if len(longest) < 3 or 2 * used < longest[-1][1] - longest[0][0] + 1:
        return []
    return [name for _, _, name in longest]


def _fitting(samples: Mapping[str, _Sample], guesses: Mapping[str, _Guess]) -> dict[str, float]:
    """Share of the values that are what their column was taken for, where that can be less than all."""
    fitting = {}
    for name, guess in guesses.items():
        sample = samples[name]
        if guess.key == "dense" and sample.strays:
            fitting[name] = sample.share(map(is_number, sample.counts))
        elif guess.key == "time" and not sample.is_numeric:
            fitting[name] = sample.times(sample.dates)
    return fitting


def _remarks(first: Path, *, has_time: bool) -> dict[str, str]:
    """Remarks on the keys of a guessed schema that are not columns."""
    split = "a tenth of the rows each for validation and test, drawn at random"
    return {
        "": f"Guessed from the first rows of {first.name}. Check it: a remark says why. Every key: docs/data.md",
        "column_names": "the first line is no header: rename as you like",
        "comment": "lines at the top that start like this are skipped",
        "encoding": "it is not UTF-8",
        "missing": "what stands for a missing value",
        "decimal": "before the fraction of a number",
        "thousands": "between the thousands of a number",
        "dates": "how 01/02/2026 is read",
        "split": split + ("; {by: time} holds back the latest instead" if has_time else ""),
    }


def _check_columns(first: Path, others: Sequence[Path], table: TableFormat, names: list[str]) -> None:
    """See that files have the same columns.

    Raises:
        ValueError: the files have other columns than each other.
    """
    for other in others:
        if not table.column_names and set(found := read_header(other, table).names) != set(names):
            fullest = other if len(found) > len(names) else first
            raise ValueError(
                f"{first} has the columns {', '.join(names)}, but {other} has {', '.join(found)}. These are files of "
                f"different tables: name those of one, such as {fullest}."
            )


def _date_order(samples: list[_Sample]) -> DateOrder | None:
    """How dates with slashes are read, by all of them in the sample; ``None`` where there are none.

    Raises:
        ValueError: both ways make sense.
    """
    day = month = 0.0
    found = []
    for sample in samples:
        if not sample.is_numeric and sample.times(None) < _ALMOST:
            shares = sample.times("day_first"), sample.times("month_first")
            if max(shares) >= _ALMOST:
                found.append(sample)
                day, month = day + shares[0], month + shares[1]
    if found and day == month:
        raise ValueError(
            f"column {found[0].name!r}: does {found[0].values[0]!r} start with the day or with the month? The sample "
            "has no date that tells. Say so: dates=day_first or dates=month_first."
        )
    return ("day_first" if day > month else "month_first") if found else None


def _plain_numbers(
    columns: dict[str, list[str | None]],
) -> tuple[dict[str, list[str | None]], dict[str, Any]]:
    """Columns with their numbers written with a dot, and how the file writes them."""
    marks: dict[str, Any] = {}
    for pattern, found in ((_DECIMAL_COMMA, {"decimal": ","}), (_THOUSANDS, {"thousands": ","})):
        chosen = [name for name, column in columns.items() if _has_marks(column, pattern)]
        others = (value for name in columns if name not in chosen for value in columns[name] if value is not None)
        if not chosen or marks or ("decimal" in found and any(re.fullmatch(GROUPED_BY_DOTS, x) for x in others)):
            continue  # where the marks are not those of all columns, numbers with a comma are words
        marks = dict(found)
        if "decimal" in marks and any("." in (value or "") for name in chosen for value in columns[name]):
            marks["thousands"] = "."
        drop, point = marks.get("thousands", ""), marks.get("decimal", ".")
        columns = columns | {
            name: [
                None if x is None else (x.replace(drop, "") if drop else x).replace(point, ".") for x in columns[name]
            ]
            for name in chosen
        }
    return columns, marks


def _has_marks(column: list[str | None], pattern: re.Pattern[str]) -> bool:
    """Whether values are numbers, and so many of them written so that it is no chance."""
    values = [value for value in column if value is not None and value not in _MISSING]
    marked = sum(pattern.fullmatch(value) is not None for value in values)
    return 10 * marked >= len(values) > 0 and all(is_number(x) or pattern.fullmatch(x) for x in values)


def _find_label(path: Path, samples: dict[str, _Sample], label: str | None) -> str:
    if label is not None:
        if label not in samples:
            raise ValueError(f"{path} has no column {label!r} to be the label. It has {', '.join(samples)}.")
        return label
    named = sorted((_LABEL_NAMES.index(name.lower()), name) for name in samples if name.lower() in _LABEL_NAMES)
    binary = [name for name, sample in samples.items() if len(sample.counts) == 2]
    if named:
        return named[0][1]
    if len(binary) == 1:
        return binary[0]
    candidates = f" {', '.join(binary)} have two values each." if binary else ""
    raise ValueError(f"{path}: which column is the label? Name it.{candidates} Columns: {', '.join(samples)}.")


def _label_rule(sample: _Sample) -> tuple[str | None, str]:
    """What makes a row positive, and why that is thought."""
    counts, total = sample.counts, len(sample.values)
    words = {word.lower() for word in counts}
    if (sample.is_numeric and {float(word) for word in counts} <= {0.0, 1.0}) or words <= {"true", "false"}:
        share = sum(count for word, count in counts.items() if word.lower() in ("true", "1", "1.0")) / total
        return None, f"0 and 1 already; {share:.1%} positive in the sample"
    (_, first), (_, second), *stray = [*counts.most_common(), ("", 0)]
    if stray and _ALMOST * total <= first + second < total:
        values = ", ".join(f"{value!r} ({count} rows)" for value, count in stray[:5] if count)
        raise ValueError(
            f"the label {sample.name!r} has two values in almost all rows, and also {values}. What do they mean? "
            "List them under missing and leave such rows out (on_bad_row=skip), or write the schema's label with a "
            f"rule such as {{column: {sample.name}, rule: '== {counts.most_common(1)[0][0]}'}}."
        )
    if sample.is_numeric:
        # The threshold that cuts the sample most evenly.
        shares = {
            threshold: sum(count for word, count in counts.items() if float(word) >= float(threshold)) / total
            for threshold in counts
        }
        threshold = min(shares, key=lambda word: abs(shares[word] - 0.5))
        return f">= {threshold}", f"a number: cut where it is most even, {shares[threshold]:.1%} positive"
    positive = next((word for word in counts if word.lower() in _POSITIVE), min(counts, key=lambda word: counts[word]))
    return f'== "{positive}"', f"a word: taken for the positive one, {counts[positive] / total:.1%} of the sample"


def _guess(sample: _Sample) -> _Guess:
    num_values = len(sample.counts)
    values = f"{num_values} different values in the sample"
    if sample.kind is not None and pa.types.is_nested(sample.kind):
        return _guess_nested(sample, sample.kind)
    if (why := _useless(sample)) is not None:
        return _Guess("ignore", None, why)
    if _is_time(sample):
        return _Guess("time", None, f"looks like the time of the row{_features_of_time(sample)}")
    if (sample.is_numeric or sample.strays) and num_values > _FEW_NUMBERS and not _ID_NAME.search(sample.name):
        return _guess_number(sample)
    if sample.never_repeats and not _ID_NAME.search(sample.name.removesuffix("id")):
        return _Guess("ignore", None, "different in every row of the sample")
    for separator in _LIST_SEPARATORS:
        items = [item for value in sample.values for item in value.split(separator)]
        several = 1.5 if separator == " " else 1.2  # names of two words are no lists
        if len(items) > several * len(sample.values) and several * len(set(items)) < 1.2 * num_values:
            return _Guess(
                "multi_valued", MultiValued(separator=separator), f"lists of {len(set(items))} different values"
            )
    if num_values > 0.3 * len(sample.values) and len(sample.values) >= _LARGE_SAMPLE:
        return _Guess("categorical", Categorical(min_count=2), f"{values}: the rare ones share an id")
    return _Guess("categorical", Categorical(), values)


def _useless(sample: _Sample) -> str | None:
    """Why no feature is made of a column, if that can be told without a look at its values one by one."""
    num_values = len(sample.counts)
    if not sample.name:
        return "it has no name"
    if num_values < 2 and not (num_values and sample.num_missing):
        return "the same in every row of the sample" if num_values else "empty in the sample"
    if _INDEX_NAME.fullmatch(sample.name) and _counts_rows(sample):
        return "counts the rows, as pandas writes its index"
    if sample.num_missing and _is_time(sample):
        return f"a time that some rows lack{_features_of_time(sample)}"
    return None


def _guess_nested(sample: _Sample, kind: pa.DataType) -> _Guess:
    """Lists, and what cannot be read, of a Parquet file."""
    if pa.types.is_map(kind) or pa.types.is_nested(getattr(kind, "value_type", kind)):
        return _Guess("ignore", None, f"{kind} cannot be read")
    if not sample.values:
        return _Guess("ignore", None, "empty in the sample")
    items = [item for value in sample.values for item in value.split("|")]
    if pa.types.is_floating(kind.value_type):
        widths = {value.count("|") + 1 for value in sample.values}
        if len(widths) > 1 or widths == {1}:
            return _Guess("ignore", None, f"lists of numbers, {len(items) / len(sample.values):.3g} on average")
        return _Guess("vectors", Vector(width=(width := widths.pop())), f"vectors of {width} numbers")
    return _Guess("multi_valued", MultiValued(), f"lists of {len(set(items))} different values")


def _counts_rows(sample: _Sample) -> bool:
    """Whether each value is the one before and 1."""
    try:
        numbers = [int(value) for value in sample.values]
    except ValueError:
        return False
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _guess_number(sample: _Sample) -> _Guess:
    numbers = [float(value) for value in sample.values if is_number(value)]
    if (ids := _looks_like_ids(sample, numbers)) is not None:
        return _Guess("categorical", Categorical(), ids)
    if sample.never_repeats and all(number.is_integer() for number in numbers):
        return _Guess("ignore", None, "a whole number of its own in every row of the sample")
    span = f"from {min(numbers):g} to {max(numbers):g}"
    if sample.strays:
        span += f"; {', '.join(map(repr, sample.strays))} taken for missing"
    if min(numbers) >= 0 and max(numbers) > _SKEWED * (1 + median(numbers)):
        return _Guess("dense", Dense(transform="log"), f"{span}, most of them small")
    return _Guess("dense", Dense(), span)


def _looks_like_ids(sample: _Sample, numbers: list[float]) -> str | None:
    """Why whole numbers are taken for ids: each comes often, and most of those between them never do."""
    distinct, largest = len(sample.counts), max(numbers)
    span = largest - min(numbers) + 1
    repeats = len(numbers) / distinct
    whole = all(number.is_integer() for number in numbers)
    even = median(numbers) > largest / _SKEWED  # amounts have most values near zero
    round_numbers = all(number % 10 == 0 for number in numbers)
    if whole and even and repeats >= 2 and largest >= _LARGE_NUMBER and span >= _GAPS * distinct and not round_numbers:
        return f"{distinct} different whole numbers with gaps, each {repeats:.0f} times on average: taken for ids"
    return None


def _features_of_time(sample: _Sample) -> str:
    """How a time becomes features, of dates and of numbers whose unit is known."""
    if sample.are_dates:
        weekday = f"{{column: {sample.name}, transform: weekday, unit: yyyymmdd}}"
        return f", dates as YYYYMMDD; its weekday as a feature, under categorical: weekday: {weekday}"
    if sample.is_numeric and not all(8e8 < float(value) < 2.5e9 for value in sample.counts):
        return ""
    return f"; its hour as a feature, under categorical: hour: {{column: {sample.name}, transform: hour}}"


def _is_time(sample: _Sample) -> bool:
    if not sample.is_numeric:
        return sample.times(sample.dates) >= _ALMOST
    if len(sample.counts) <= _FEW_NUMBERS:
        return False
    first, last = (extreme(map(float, sample.counts)) for extreme in (min, max))
    # Dates such as 20261231, and seconds since 1970, need no telling name; milliseconds do.
    return (
        sample.are_dates
        or (first > 8e8 and last < 2.5e9)
        or (first > 1e7 and _TIME_NAME.search(sample.name) is not None)
    )
