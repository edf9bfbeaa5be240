"""A table by its schema, one row and one value at a time: what the package does with whole columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
Row = Mapping[str, str]


def mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def key(*coordinates: int | str) -> int:
    state = 0
    for coordinate in coordinates:
        number = int.from_bytes(coordinate.encode(), "little") if isinstance(coordinate, str) else coordinate
        state = mix(state + (number & MASK) + GOLDEN & MASK)  # names of at most eight letters
    return state


def hash_text(text: str) -> int:
    data = text.encode()
    return mix((len(data) + sum((byte + 1) * pow(GOLDEN, i + 1, 1 << 64) for i, byte in enumerate(data))) & MASK)


def split_of(
    rows: Sequence[Row], *, validation: float, test: float, seed: int = 0, time: str | None = None
) -> list[int]:
    """0, 1 or 2 for each row: training, validation, test."""
    keys: list[Any] = [mix(number + key(seed, "split") & MASK) for number in range(len(rows))]
    if time is not None:
        keys = [row[time] for row in rows]
    ordered, held, tested = sorted(keys), round(len(rows) * validation), round(len(rows) * test)
    bounds = [ordered[len(rows) - count] if count else None for count in (held + tested, tested)]
    return [max((i for i, b in enumerate(bounds, 1) if b is not None and x >= b), default=0) for x in keys]


class Table:
    """What was learned from some rows, and encodes any.

    Args:
        schema: As for the package; every column with its options.
        train: The training rows.
    """

    def __init__(self, schema: Mapping[str, Any], train: Sequence[Row]) -> None:
        self.schema = schema
        self.missing = set(schema.get("missing", [""]))
        self.vocabulary: dict[str, dict[str, int]] = {}
        for name, options in self._features().items():
            counts = Counter(value for row in train for value in self._values(name, row))
            kept = [value for value in counts if counts[value] >= options.get("min_count", 1)]
            kept.sort(key=lambda value: (-counts[value], value.encode()))
            self.vocabulary[name] = {value: i for i, value in enumerate(kept, 2)}
        self.moments = {}
        for name, options in schema.get("dense", {}).items():
            known = [_transform(float(row[name]), options) for row in train if self._clean(row[name]) is not None]
            mean = math.fsum(known) / len(known) if known else 0.0
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / len(known)) if known else 0.0
            self.moments[name] = mean, std or 1.0

    @property
    def fields(self) -> dict[str, int]:
        return {
            name: options["hash_buckets"] + 1 if "hash_buckets" in options else len(self.vocabulary[name]) + 2
            for name, options in self._features().items()
        }

    def ids(self, name: str, row: Row) -> list[int]:
        """The bag of a feature; of one id where there is one for each row."""
        if name in self.schema["categorical"] and not self._values(name, row):
            return [0 if "hash_buckets" in self._features()[name] else 1]
        return [self._id(name, value) for value in self._values(name, row)]

    def dense(self, name: str, row: Row) -> float:
        options, (mean, std) = self.schema["dense"][name], self.moments[name]
        word = self._clean(row[name])
        if word is None and options.get("fill", "mean") == "mean":
            number = mean
        else:
            number = _transform(float(options["fill"] if word is None else word), options)
        return (number - mean) / std if options.get("standardize", True) else number

    def _id(self, name: str, value: str) -> int:
        buckets = self._features()[name].get("hash_buckets")
        return hash_text(value) % buckets + 1 if buckets else self.vocabulary[name].get(value, 0)

    def _features(self) -> dict[str, dict[str, Any]]:
        return {**self.schema["categorical"], **self.schema.get("multi_valued", {})}

    def _values(self, name: str, row: Row) -> list[str]:
        whole = self._clean(row[name])
        if whole is None:
            return []
        if name in self.schema["categorical"]:
            return [whole]
        items = (self._clean(item) for item in whole.split(self.schema["multi_valued"][name].get("separator", "|")))
        return [item for item in items if item]

    def _clean(self, word: str) -> str | None:
        word = word.strip()
        return None if word in self.missing else word


def _transform(number: float, options: Mapping[str, Any]) -> float:
    return math.copysign(math.log1p(abs(number)), number) if options.get("transform") == "log" else number
