"""The kinds of features: which columns each is made from, and how."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lightning_recsys.data.tables.columns import fixed_time
from lightning_recsys.data.tables.schema_parts import require

TimeUnit = Literal["s", "ms", "us", "yyyymmdd"]
LARGEST = 3.4e38
"""The largest number that a numeric feature can be: they are float32."""

Parse = Literal["label", "time", "key", "number", "moment", "category", "bag", "vector", "text"]
"""``time`` must be there in every row, ``moment`` may be missing; ``key`` refers to another table; ``text`` is carried
along."""


@dataclass(frozen=True)
class Input:
    """A column, and how it is read.

    Args:
        column: Name of the column in the file.
        parse: What its values become; also tells which rows are bad.
        by: What says more: the unit of moments (``None`` where the schema names none), the feature of bags and vectors.
    """

    column: str
    parse: Parse
    by: TimeUnit | Vector | MultiValued | None = None

    @property
    def takes_lists(self) -> bool:
        """Whether a value may be a list: of numbers, or of the words of a bag, but no text that is cut into n-grams."""
        return isinstance(self.by, Vector) or (isinstance(self.by, MultiValued) and self.by.ngrams is None)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A numeric feature.

    Args:
        column: The column that it is made from; the one of its own name if absent.
        age_at: Makes the feature the days from the time in its column to this one: a column with times, or a fixed time
            such as ``2026-01-31``.
        unit: What times that are numbers count since 1970: ``s``, ``ms`` or ``us``; or ``yyyymmdd`` for dates such as
            20260131. If absent they are seconds, and a column where most numbers are such dates is refused.
        transform: ``none``, or ``log`` for ``sign(x) * log(1 + |x|)``, which tames counts.
        standardize: Whether to subtract the mean and divide by the standard deviation of the training rows.
        fill: What a missing value is replaced with: ``mean`` of the (transformed) training rows, or a number, which is
            taken as if it stood in the file.
    """

    column: str | None = None
    age_at: str | None = None
    unit: TimeUnit | None = None
    transform: Literal["none", "log"] = "none"
    standardize: bool = True
    fill: Literal["mean"] | float = "mean"

    def check(self, where: str) -> None:
        """Raise ``ValueError`` about what the types leave open, naming it as a key below ``where``."""
        require(self.unit is None or self.age_at is not None, f"{where}.unit is for times, so it needs age_at.")
        require(
            self.fill == "mean" or abs(self.fill) <= LARGEST,
            f"{where}.fill must be mean or a number within {LARGEST}, which is what features hold, got {self.fill}.",
        )

    def inputs(self, name: str) -> tuple[Input, ...]:
        """The columns that a feature of this name is made from."""
        column = self.column or name
        if self.age_at is None:
            return (Input(column, "number"),)
        times = (column,) if fixed_time(self.age_at) is not None else (column, self.age_at)
        return tuple(Input(time, "moment", self.unit) for time in times)


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A list of numbers that every row has equally many of, such as a pretrained embedding.

    A missing one is replaced with the mean of the training rows.

    Args:
        width: Number of numbers in the list, the same in every row.
        column: The column that it is made from; the one of its own name if absent. Parquet lists, or text with commas,
            semicolons, bars or white space between the numbers, in brackets or not.
        standardize: Whether to subtract from each number the mean of its place, and divide by the deviation.
    """

    width: int
    column: str | None = None
    standardize: bool = False

    def check(self, where: str) -> None:
        """See :meth:`Dense.check`."""
        require(self.width >= 1, f"{where}.width must be at least 1, got {self.width}.")

    def inputs(self, name: str) -> tuple[Input, ...]:
        """See :meth:`Dense.inputs`."""
        return (Input(self.column or name, "vector", self),)

    def places(self, name: str) -> list[str]:
        """Names of its numbers."""
        return [f"{name}[{place}]" for place in range(self.width)]


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """A feature whose values have embeddings.

    Args:
        column: The column that it is made from; the one of its own name if absent.
        min_count: Values that the training rows hold less often share the id of unknown values.
        hash_buckets: Number of buckets to hash values into, instead of a vocabulary.
    """

    column: str | None = None
    min_count: int = 1
    hash_buckets: int | None = None

    def check(self, where: str) -> None:
        """See :meth:`Dense.check`."""
        require(self.min_count >= 1, f"{where}.min_count must be at least 1, got {self.min_count}.")
        buckets = self.hash_buckets
        require(buckets is None or buckets >= 1, f"{where}.hash_buckets must be at least 1, got {buckets}.")
        require(
            buckets is None or self.min_count == 1,
            f"{where} has both min_count and hash_buckets: hashing keeps no counts. Choose one.",
        )


@dataclass(frozen=True, kw_only=True)
class Categorical(Embedded):
    """A feature with one id per row.

    Args:
        column: The column that it is made from; the one of its own name if absent.
        min_count: Values that the training rows hold less often share the id of unknown values.
        hash_buckets: Number of buckets to hash values into, instead of a vocabulary.
        transform: ``hour`` makes a time the hour of its day, from 0 to 23, ``weekday`` the day of its week, 0 on
            Mondays; both in UTC.
        unit: What times that are numbers count, as in :class:`Dense`.
        edges: Increasing numbers, which make bins of a number: below the first edge, from it to below the second, and
            so on.
        cross: Two or more categorical features or columns: the feature is what they are together.
    """

    transform: Literal["none", "hour", "weekday"] = "none"
    unit: TimeUnit | None = None
    edges: tuple[float, ...] = ()
    cross: tuple[str, ...] = ()

    def check(self, where: str) -> None:
        """See :meth:`Dense.check`."""
        super().check(where)
        require(self.unit is None or self.transform != "none", f"{where}.unit is for times, so it needs a transform.")
        require(
            all(low < high for low, high in pairwise(self.edges)) and all(abs(x) <= LARGEST for x in self.edges),
            f"{where}.edges must increase, and be within {LARGEST}, got {', '.join(map(str, self.edges))}.",
        )
        require(
            not self.edges or self.transform == "none", f"{where} has edges, of a number, and a transform of times."
        )
        if self.cross:
            require(
                self.column is None and self.transform == "none" and not self.edges,
                f"{where} has cross beside column, transform or edges: a cross is made from what it lists alone.",
            )
            require(
                len(set(self.cross)) == len(self.cross) >= 2,
                f"{where}.cross must list two or more different features or columns, got {', '.join(self.cross)}.",
            )

    def inputs(self, name: str) -> tuple[Input, ...]:
        """See :meth:`Dense.inputs`; of a cross, what it lists makes them."""
        if self.edges:
            return (Input(self.column or name, "number"),)
        if self.transform == "none":
            return (Input(self.column or name, "category"),)
        return (Input(self.column or name, "moment", self.unit),)


@dataclass(frozen=True, kw_only=True)
class MultiValued(Embedded):
    """A feature with a bag of ids per row.

    Args:
        column: The column that it is made from; the one of its own name if absent.
        min_count: Values that the training rows hold less often share the id of unknown values.
        hash_buckets: Number of buckets to hash values into, instead of a vocabulary.
        separator: Between the values of a text; Parquet lists need none, nor do lists that are written in brackets with
            quotes, as pandas writes them.
        ngrams: Makes a text the bag of its n-grams, of ``words`` or of ``characters``.
        n: How many words or characters an n-gram has: one or more sizes; 1 for words and 3 for characters if absent.
        limit: How many n-grams of a row are kept: the first ones.
    """

    separator: str = "|"
    ngrams: Literal["words", "characters"] | None = None
    n: tuple[int, ...] = ()
    limit: int = 128

    def check(self, where: str) -> None:
        """See :meth:`Dense.check`."""
        super().check(where)
        require(self.separator != "", f"{where}.separator must be one or more characters, got none.")
        require(self.ngrams is not None or not self.n, f"{where}.n is the size of n-grams, so it needs ngrams.")
        require(all(size >= 1 for size in self.n), f"{where}.n must be at least 1, got {', '.join(map(str, self.n))}.")
        require(self.limit >= 1, f"{where}.limit must be at least 1, got {self.limit}.")

    def inputs(self, name: str) -> tuple[Input, ...]:
        """See :meth:`Dense.inputs`."""
        return (Input(self.column or name, "bag", self),)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the n-grams."""
        return self.n or ((1,) if self.ngrams == "words" else (3,))
