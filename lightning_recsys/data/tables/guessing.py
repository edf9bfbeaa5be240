"""A first schema for an unknown file, with a remark on everything that was assumed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import Categorical, Dense, Label, MultiValued
from lightning_recsys.data.tables.sniffing import is_number, sniff

_MISSING = ("", "?", "NA", "N/A", "NULL", "null", "None", "nan", "NaN", "\\N")
_LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "converted", "purchase", "rating")
_POSITIVE = ("1", "true", "yes", "y", "click", "clicked", "positive")
_ID_NAME = re.compile(r"(^|[_ .-])(id|user|item|movie|product|zip|code)$|[a-z]I[dD]$", re.IGNORECASE)
_TIME_NAME = re.compile(r"time|date|hour|(^|_)ts$", re.IGNORECASE)
_ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?Z?)?")
_LIST_SEPARATORS = ("|", ";", ",")
_FEW_NUMBERS = 10  # a number with no more distinct values than that is a category
_LARGE_SAMPLE = 100  # rows that it takes to tell that a column never repeats
_SKEWED = 100  # largest value over the typical one, from which on a logarithm helps


@dataclass(frozen=True)
class _Sample:
    """The values of a column in the sample, without the missing ones."""

    name: str
    values: list[str]

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(self.values)

    @cached_property
    def is_numeric(self) -> bool:
        return all(map(is_number, self.counts))

    @property
    def never_repeats(self) -> bool:
        return len(self.values) >= _LARGE_SAMPLE and len(self.counts) > 0.99 * len(self.values)


@dataclass(frozen=True)
class _Guess:
    """Where in the schema a column belongs, with which options, and why."""

    key: str
    options: Any
    reason: str


def guess_schema(path: str | Path, label: str | None = None) -> Schema:
    """Guess what the columns of a file mean, from its first ten thousand rows.

    Numbers become dense features, or categories where they are few or named like ids; words become categories, or bags
    where they are lists; what is constant, or different in every row, is ignored. ``to_yaml`` of the result writes all
    of it down with the reasons, ready to be corrected.

    Args:
        path: CSV, TSV or the like, or Parquet.
        label: The column that says what is a click; looked for if absent.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no table, has no column ``label``, or no column looks like a label.
    """
    path = Path(path).absolute()
    table, columns = sniff(path)
    tokens = [token for token in _MISSING if any(token in column for column in columns.values())]
    samples = {
        name: _Sample(name, [value for value in column if value is not None and value not in _MISSING])
        for name, column in columns.items()
    }
    chosen = _find_label(path, samples, label)
    rule, reason = _label_rule(samples.pop(chosen))
    guesses = {name: _guess(sample) for name, sample in samples.items()}
    if not any(guess.key in ("categorical", "multi_valued") for guess in guesses.values()):
        guesses |= {
            name: _Guess(
                "categorical", Categorical(), "a number, taken for an id, because no other column is a category"
            )
            for name, guess in guesses.items()
            if guess.key == "dense" and 2 * len(samples[name].counts) < len(samples[name].values)
        }
    times = [name for name, guess in guesses.items() if guess.key == "time"]
    guesses |= {name: _Guess("ignore", None, "a second time") for name in times[1:]}
    split = "a tenth of the rows each for validation and test, drawn at random"
    return Schema(
        files={"train": (str(path),)},
        table=replace(table, missing=tuple(dict.fromkeys(["", *tokens]))),
        label=Label(column=chosen, rule=rule),
        dense={name: guess.options for name, guess in guesses.items() if guess.key == "dense"},
        categorical={name: guess.options for name, guess in guesses.items() if guess.key == "categorical"},
        multi_valued={name: guess.options for name, guess in guesses.items() if guess.key == "multi_valued"},
        time=times[0] if times else None,
        ignore=tuple(name for name, guess in guesses.items() if guess.key == "ignore"),
        comments={
            "": f"Guessed from the first rows of {path.name}. Check it: a remark says why. Every key: docs/data.md",
            **{name: guess.reason for name, guess in guesses.items()},
            "label": reason,
            "column_names": "the first line is no header: rename as you like",
            "comment": "lines at the top that start like this are skipped",
            "encoding": "it is not UTF-8",
            "missing": "what stands for a missing value",
            "split": split + ("; {by: time} holds back the latest instead" if times else ""),
        },
    )


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
    if num_values < 2:
        return _Guess("ignore", None, "the same in every row of the sample" if num_values else "empty in the sample")
    if _is_time(sample):
        return _Guess("time", None, "looks like the time of the row")
    if sample.is_numeric and num_values > _FEW_NUMBERS and not _ID_NAME.search(sample.name):
        return _guess_number(sample)
    if sample.never_repeats and not _ID_NAME.search(sample.name.removesuffix("id")):
        return _Guess("ignore", None, "different in every row of the sample")
    for separator in _LIST_SEPARATORS:
        items = [item for value in sample.values for item in value.split(separator)]
        if len(items) > 1.2 * len(sample.values) and len(set(items)) < num_values:
            return _Guess(
                "multi_valued", MultiValued(separator=separator), f"lists of {len(set(items))} different values"
            )
    if num_values > 0.3 * len(sample.values) and len(sample.values) >= _LARGE_SAMPLE:
        return _Guess("categorical", Categorical(min_count=2), f"{values}: the rare ones share an id")
    return _Guess("categorical", Categorical(), values)


def _guess_number(sample: _Sample) -> _Guess:
    numbers = [float(value) for value in sample.values]
    if sample.never_repeats and all(number.is_integer() for number in numbers):
        return _Guess("ignore", None, "a whole number of its own in every row of the sample")
    span = f"from {min(numbers):g} to {max(numbers):g}"
    if min(numbers) >= 0 and max(numbers) > _SKEWED * (1 + median(numbers)):
        return _Guess("dense", Dense(transform="log"), f"{span}, most of them small")
    return _Guess("dense", Dense(), span)


def _is_time(sample: _Sample) -> bool:
    if all(map(_ISO_TIME.fullmatch, sample.counts)):
        return True
    if not sample.is_numeric or len(sample.counts) <= _FEW_NUMBERS:
        return False
    first, last = (extreme(map(float, sample.counts)) for extreme in (min, max))
    # Seconds since 1970 need no telling name; milliseconds, and digits such as 20261231, do.
    return (first > 8e8 and last < 2.5e9) or (first > 1e7 and _TIME_NAME.search(sample.name) is not None)
