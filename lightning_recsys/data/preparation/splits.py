"""Which rows are for training, validation and test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.files import find_files
from lightning_recsys.data.hashing import key64, mix64, uniform
from lightning_recsys.data.options import Split
from lightning_recsys.data.raw import RawFormat
from lightning_recsys.typed_yaml import make

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
Times = NDArray[np.int64] | NDArray[np.float64]


class SplitRule(ABC):
    """Parts rows into :data:`SPLITS`."""

    by: ClassVar[str]
    surveys: bool = False
    """Whether all rows have to be looked at before one can be assigned."""

    def files(self) -> list[tuple[Path, Split]]:
        """Files beside the raw ones, and the split that all their rows belong to."""
        return []

    def options(self) -> dict[str, object]:
        """The arguments of the rule, for the manifest."""
        return {"by": self.by, **asdict(self)}  # type: ignore[call-overload]

    def check(self, raw_format: RawFormat) -> None:  # noqa: B027 - most rules fit all formats
        """Raise ``ValueError`` if rows of this format cannot be split so."""

    @abstractmethod
    def assign(
        self, *, file: int, line_N: NDArray[np.int64], time_N: Times | None, first_row: int | None = None
    ) -> NDArray[np.int8]:
        """Positions in :data:`SPLITS` for rows of the raw files.

        Args:
            file: Number of the file that they come from.
            line_N: Number of their line in the file.
            time_N: When they happened, if the format knows it.
            first_row: Good rows before these in all raw files, where the rule surveys.
        """


@dataclass(frozen=True)
class ByShare(SplitRule):
    """Draws evaluation rows at random. A row's lot hangs on the seed, its file's position and its line only.

    Args:
        validation: Share of the rows.
        test: Share of the rows.
        seed: Seed of the draw.
    """

    by = "share"
    validation: float = 0.1
    test: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, share in (("validation", self.validation), ("test", self.test)):
            if not 0 <= share < 1:
                raise ValueError(f"split.{name} must be a share of the rows, from 0 to below 1, got {share}.")
        if self.validation + self.test >= 1:
            raise ValueError(
                f"split.validation + split.test must leave rows for training, got {self.validation} + {self.test}."
            )

    def assign(
        self, *, file: int, line_N: NDArray[np.int64], time_N: Times | None, first_row: int | None = None
    ) -> NDArray[np.int8]:
        """See the base class."""
        draws = uniform(mix64(mix64(line_N.astype(np.uint64)) ^ key64("split", self.seed, file)))
        return np.digitize(draws, [1 - self.validation - self.test, 1 - self.test]).astype(np.int8)


@dataclass(frozen=True)
class ByTime(SplitRule):
    """Parts the rows at points in time.

    Args:
        validation: Rows from this time on are for validation, in the unit of the raw format; ``None`` for none.
        test: Rows from this time on are for the test; ``None`` for none.
    """

    by = "time"
    validation: int | None = None
    test: int | None = None

    def __post_init__(self) -> None:
        if self.validation is None and self.test is None:
            raise ValueError("split.by=time needs split.validation or split.test: the time where those rows start.")
        if self.validation is not None and self.test is not None and self.test < self.validation:
            raise ValueError(
                f"split.test={self.test} is before split.validation={self.validation}. Test rows are the latest."
            )

    def check(self, raw_format: RawFormat) -> None:
        """See the base class."""
        if raw_format.time_unit is None:
            raise ValueError(
                f"split.by=time: rows of data={raw_format.name} carry no time. Use split.by=file (a file for each day, "
                "say) or split.by=share."
            )

    def assign(
        self, *, file: int, line_N: NDArray[np.int64], time_N: Times | None, first_row: int | None = None
    ) -> NDArray[np.int8]:
        """See the base class."""
        assert time_N is not None
        return parted(time_N, (self.validation, self.test))


@dataclass(frozen=True)
class ByFile(SplitRule):
    """Takes evaluation rows from files of their own.

    Args:
        validation: Files, folders or patterns; ``None`` for none.
        test: Files, folders or patterns; ``None`` for none.
    """

    by = "file"
    validation: str | tuple[str, ...] | None = None
    test: str | tuple[str, ...] | None = None

    def files(self) -> list[tuple[Path, Split]]:
        """See the base class."""
        found: list[tuple[Path, Split]] = []
        for split, patterns in (("validation", self.validation), ("test", self.test)):
            if patterns is not None:
                found += [(path, split) for path in find_files(patterns, name=f"split.{split}")]  # type: ignore[misc]
        return found

    def assign(
        self, *, file: int, line_N: NDArray[np.int64], time_N: Times | None, first_row: int | None = None
    ) -> NDArray[np.int8]:
        """See the base class."""
        return np.zeros(len(line_N), dtype=np.int8)


def parted(numbers_N: NDArray[Any], starts: Iterable[Any]) -> NDArray[np.int8]:
    """Positions in :data:`SPLITS` of rows that are in order: each split behind the first has those from a number on.

    A split that starts nowhere, at ``None``, has none.
    """
    split = np.zeros(len(numbers_N), dtype=np.int8)
    for position, start in enumerate(starts, 1):
        if start is not None:
            split[numbers_N >= start] = position
    return split


def split_rule(*, by: str, validation: object = None, test: object = None, seed: int = 0) -> SplitRule:
    """The rule that options name.

    Raises:
        ValueError: ``by`` is no rule, or its options are out of range.

    >>> split_rule(by="share", validation=0.1, test=0.2)
    ByShare(validation=0.1, test=0.2, seed=0)
    """
    rules: dict[str, type[SplitRule]] = {rule.by: rule for rule in (ByShare, ByTime, ByFile)}
    if by not in rules:
        raise ValueError(f"split.by must be share, time or file, got {by!r}.")
    given = {"validation": validation, "test": test}
    if by == "share":
        given = {name: 0.0 if share is None else share for name, share in given.items()} | {"seed": seed}
    return make(rules[by], f"with split.by={by}, split", given)
