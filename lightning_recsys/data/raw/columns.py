"""A block of raw text, parsed: the columns that every raw format turns its lines into."""

# Shape suffixes: N rows, F features, I dense features.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True)
class BadLine:
    """A line that holds no row.

    Args:
        line: Its number in the block, from 0.
        column: The column that is wrong; ``None`` where the whole line is.
        message: What is wrong.
    """

    line: int
    column: str | None
    message: str


@dataclass(frozen=True)
class Bags:
    """Lists of values.

    Args:
        values: The values of all rows, one after the other; arrow binary.
        lengths_N: How many belong to each row, int64.
        weights: One weight for each value, float32.
    """

    values: pa.Array
    lengths_N: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    def keep(self, mask_N: NDArray[np.bool_]) -> Bags:
        """Some of the rows."""
        mask = np.repeat(mask_N, self.lengths_N)
        weights = None if self.weights is None else self.weights[mask]
        return Bags(self.values.filter(pa.array(mask)), self.lengths_N[mask_N], weights)


@dataclass(frozen=True)
class RawColumns:
    """The rows of a block.

    Args:
        lines_N: Number of each row's line in the block, from 0, int64.
        labels_N: 0 or 1, float32.
        dense_IN: Numbers, float64, NaN where missing.
        categories: Values of each single-valued categorical feature, arrow binary, empty where missing.
        bags: Values of each multi-valued feature.
        time_N: When the row happened, in the unit that the format documents, int64; ``None`` where it says nothing.
        bad: Lines that hold no row. No row stands for them.
    """

    lines_N: NDArray[np.int64]
    labels_N: NDArray[np.float32]
    dense_IN: NDArray[np.float64]
    categories: Mapping[str, pa.Array]
    bags: Mapping[str, Bags] = field(default_factory=dict)
    time_N: NDArray[np.int64] | None = None
    bad: Sequence[BadLine] = ()

    def __len__(self) -> int:
        return len(self.labels_N)

    def keep(self, mask_N: NDArray[np.bool_] | None) -> RawColumns:
        """Some of the rows; all if the mask is ``None``."""
        if mask_N is None:
            return self
        arrow_mask = pa.array(mask_N)
        return RawColumns(
            self.lines_N[mask_N],
            self.labels_N[mask_N],
            self.dense_IN[:, mask_N],
            {name: values.filter(arrow_mask) for name, values in self.categories.items()},
            {name: bags.keep(mask_N) for name, bags in self.bags.items()},
            None if self.time_N is None else self.time_N[mask_N],
            self.bad,
        )


class RawFormat(ABC):
    """How to read the lines of a raw file. A subclass says what its rows have.

    Attributes:
        name: What the format is called.
        dense: Names of the dense features.
        categories: Names of the single-valued categorical features.
        bags: Names of the multi-valued ones, and whether they have weights.
        number_base: The categorical features whose values are numbers, and to which base: 10 or 16.
        header: Whether each file starts with a line of column names.
        time_unit: What :attr:`RawColumns.time_N` counts; ``None`` where there is no time.
    """

    name: str
    dense: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    bags: Mapping[str, bool] = {}
    number_base: Mapping[str, int] = {}
    header = False
    time_unit: str | None = None

    def check_header(self, line: bytes) -> None:  # noqa: B027 - most formats have none
        """Raise ``ValueError`` if a file's first line is not the expected one. Called where ``header`` is true."""

    @abstractmethod
    def parse(self, block: bytes) -> RawColumns:
        """The rows of a block of whole lines."""

    def options(self) -> dict[str, object]:
        """What the format was told, for the manifest."""
        return {"name": self.name}
