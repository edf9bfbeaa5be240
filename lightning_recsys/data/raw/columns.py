"""A block of raw text, parsed: the columns that every raw format turns its lines into."""

# Shape suffixes: N rows, F features, I dense features.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.data.raw.text import Block, Position, text_blocks

OnBadRow: TypeAlias = Literal["error", "skip"]


@dataclass(frozen=True)
class BadLine:
    """A line that holds no row.

    Args:
        line: Its number in the block, from 0.
        column: The column that is wrong; ``None`` where the whole line is.
        message: What is wrong with the line, in words.
        place: How to call it, such as ``row 2 (line 3)``; empty where that follows from its number.
    """

    line: int
    column: str | None
    message: str
    place: str = ""

    def describe(self, path: Path) -> str:
        """The complaint about a value, with its place."""
        column = "" if self.column is None else f", column {self.column!r}"
        return f"{path}, {self.place}{column}: {self.message}."

    @property
    def kind(self) -> str:
        """The same for lines with the same mistake, whatever the value that stands there."""
        return f"{self.column}: {self.message.partition(', got ')[0]}"


@dataclass
class SkippedRows:
    """How many rows of a file were good, and what was wrong with the others.

    Args:
        good: Good rows.
        examples: For each kind of mistake the first line that has it, and how many do.
        comments: Lines above the rows that were left out: comments, titles, what the schema's ``skip_lines`` counts.
    """

    good: int = 0
    examples: dict[str, tuple[str, int]] = field(default_factory=dict)
    comments: int = 0

    @property
    def bad(self) -> int:
        """Bad rows."""
        return sum(count for _, count in self.examples.values())

    @property
    def account(self) -> dict[str, int]:
        """The rows of the file (all lines that are neither empty nor the header), and what became of them.

        >>> SkippedRows(7, {"click: must be 0 or 1": ("row 3 ...", 2)}, comments=1).account
        {'rows': 10, 'used': 7, 'skipped': 2, 'comments': 1}
        """
        rows = self.good + self.bad + self.comments
        return {"rows": rows, "used": self.good, "skipped": self.bad, "comments": self.comments}

    def add(self, path: Path, good: int, bad: Sequence[BadLine], *, on_bad_row: OnBadRow) -> None:
        """Count some rows of the file.

        Raises:
            ValueError: one is bad, and bad rows are errors.
        """
        self.good += good
        for line in bad:
            message = line.describe(path)
            if on_bad_row == "error":
                raise ValueError(f"{message} (on_bad_row=skip leaves out such rows and counts them.)")
            example, count = self.examples.get(line.kind, (message, 0))
            self.examples[line.kind] = example, count + 1

    def merge(self, other: SkippedRows) -> SkippedRows:
        """Both together; the first examples are this one's."""
        examples = dict(self.examples)
        for kind, (example, count) in other.examples.items():
            first, before = examples.get(kind, (example, 0))
            examples[kind] = first, before + count
        return SkippedRows(self.good + other.good, examples, self.comments + other.comments)

    def check(self, path: Path) -> None:
        """Raise ``ValueError`` if the file has no rows, or no good ones."""
        if not self.good:
            raise ValueError(
                f"{path}: all {self.bad} rows are bad: {self.kinds}" if self.bad else f"{path} has no rows."
            )

    def describe(self, path: str | Path) -> str:
        """How many rows of the file were skipped, and why."""
        return f"{path}: skipped {self.bad:,} of {self.good + self.bad:,} rows: {self.kinds}"

    @property
    def kinds(self) -> str:
        """How many rows there are of each kind of mistake, with an example."""
        return "; ".join(f"{count} like {example}" for example, count in self.examples.values())


class RowJudge:
    """Is told which rows of a block make no sense, and keeps the first message about each.

    Args:
        rows_N: Number of each row in the block, as :class:`BadLine` counts.
        bad: Rows of the block that are known to be bad, and are none of these.
        place: How to call the row of a number; see :class:`BadLine`.

    Attributes:
        good: Which of the rows make sense, shape ``[N]``.
    """

    def __init__(
        self, rows_N: NDArray[np.int64], bad: Sequence[BadLine] = (), place: Callable[[int], str] = lambda _: ""
    ) -> None:
        self.good = np.ones(len(rows_N), dtype=np.bool_)
        self._rows = rows_N
        self._bad = list(bad)
        self._place = place

    def flag(self, bad: NDArray[np.bool_], *, column: str, problem: str, values: pa.Array | pa.ChunkedArray) -> None:
        """Mark rows as bad.

        Args:
            bad: Marks the bad rows, shape ``[N]``.
            column: Name of the column that makes them bad.
            problem: What it must be, in words that ``, got <value>`` can follow.
            values: The column's values, which messages quote.
        """
        for i in np.flatnonzero(bad & self.good).tolist():
            found, row = values[i].as_py(), int(self._rows[i])
            found = found.decode("utf-8", "backslashreplace") if isinstance(found, bytes) else found
            self._bad.append(BadLine(row, column, f"{problem}, got {found!r}", self._place(row)))
        self.good &= ~bad

    @property
    def bad(self) -> list[BadLine]:
        """All bad rows, in the order of the file."""
        return sorted(self._bad, key=lambda line: line.line)


@dataclass(frozen=True)
class Bags:
    """Lists of values.

    Args:
        values: The values of all rows, one after the other; arrow strings or binary, possibly dictionary-encoded; or
            their ids, an array of integers.
        lengths_N: How many belong to each row, int64.
        weights: One weight for each value, float32.
    """

    values: pa.Array
    lengths_N: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    def keep(self, mask_N: NDArray[np.bool_]) -> Bags:
        """Some of the rows, in order."""
        mask = np.repeat(mask_N, self.lengths_N)
        weights = None if self.weights is None else self.weights[mask]
        return Bags(self.values.filter(pa.array(mask)), self.lengths_N[mask_N], weights)

    def take(self, rows: NDArray[np.int64]) -> Bags:
        """Some of the rows; -1 among them gives an empty bag."""
        lengths = np.append(self.lengths_N, 0)[rows]
        starts = np.append(np.cumsum(self.lengths_N) - self.lengths_N, 0)[rows]
        places = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return Bags(self.values.take(pa.array(places)), lengths, None if self.weights is None else self.weights[places])


@dataclass(frozen=True)
class RawColumns:
    """The rows of a block.

    Args:
        lines_N: Number of each row's line in the block, from 0, int64.
        labels_N: 0 or 1, float32.
        dense_IN: Numbers, float64, NaN where missing.
        categories: Values of each single-valued categorical feature, arrow binary, empty where missing; or, as the
            format documents, dictionary-encoded and null where missing.
        bags: Values of each multi-valued feature.
        time_N: When the row happened, in the unit that the format documents, int64 or float64; ``None`` where it says
            nothing.
        bad: Lines that hold no row. No row stands for them.
    """

    lines_N: NDArray[np.int64]
    labels_N: NDArray[np.float32]
    dense_IN: NDArray[np.float64]
    categories: Mapping[str, pa.Array]
    bags: Mapping[str, Bags] = field(default_factory=dict)
    time_N: NDArray[np.int64] | NDArray[np.float64] | None = None
    bad: Sequence[BadLine] = ()

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def nbytes(self) -> int:
        """Memory that the rows take."""
        arrays = [self.lines_N, self.labels_N, self.dense_IN, *self.categories.values()]
        arrays += [part for bags in self.bags.values() for part in (bags.values, bags.lengths_N, bags.weights)]
        return sum(array.nbytes for array in (*arrays, self.time_N) if array is not None)

    def keep(self, mask_N: NDArray[np.bool_]) -> RawColumns:
        """Some of the rows."""
        if mask_N.all():
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
    """A way to read a raw file. A subclass says which columns its rows have.

    Attributes:
        name: Name of the format, as manifests have it.
        dense: Names of the dense features.
        categories: Names of the single-valued categorical features.
        bags: Names of the multi-valued ones, and whether they have weights.
        number_base: The categorical features whose values are numbers, and to which base: 10 or 16.
        time_unit: What :attr:`RawColumns.time_N` counts; ``None`` where there is no time.
    """

    name: str
    dense: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    bags: Mapping[str, bool] = {}
    number_base: Mapping[str, int] = {}
    time_unit: str | None = None

    @abstractmethod
    def blocks(self, path: Path, *, block_bytes: int, position: Position) -> Iterator[Block]:
        """A file in blocks: the same ones from the position of any of them on.

        Args:
            path: The raw file to read.
            block_bytes: Size of a block in bytes, about; a block ends with a row.
            position: Position of the first block.
        """

    @abstractmethod
    def parse_block(self, path: Path, block: Block) -> RawColumns:
        """The rows of a block, with the numbers that their lines have in the file.

        Raises:
            ValueError: the header is wrong.
        """

    def check_file(self, path: Path, *, on_bad_row: OnBadRow) -> None:  # noqa: B027 - most do not
        """Raise an error if a file cannot be read, or its beginning is not what the format says."""

    def check_read(self) -> None:  # noqa: B027 - most formats have nothing to say
        """Raise ``ValueError`` if what was read, once all files of a pass were, cannot be what was meant."""

    def side_files(self) -> Sequence[Path]:
        """Files that are read beside the raw ones."""
        return ()

    def side_rows(self) -> Mapping[Path, SkippedRows]:
        """The good and bad rows of those files."""
        return {}

    def num_comments(self, path: Path) -> int:
        """Number of lines of a file that are left out because the format calls them comments; not a header."""
        return 0

    def options(self) -> dict[str, object]:
        """The arguments of the format, for the manifest."""
        return {"name": self.name}


class LineFormat(RawFormat):
    """A format where each line is a row.

    Attributes:
        header: Whether each file starts with a line of column names.
    """

    header = False

    def check_header(self, line: bytes) -> None:
        """Raise ``ValueError`` if a file's first line is not the expected one. Called where ``header`` is true."""

    @abstractmethod
    def parse(self, block: bytes) -> RawColumns:
        """The rows of a block of whole lines."""

    def blocks(self, path: Path, *, block_bytes: int, position: Position) -> Iterator[Block]:
        """See the base class."""
        return text_blocks(path, block_bytes=block_bytes, position=position)

    def parse_block(self, path: Path, block: Block) -> RawColumns:
        """See the base class."""
        assert isinstance(block.data, bytes)
        data, first_line = block.data, block.position.line
        if self.header and not block.position.offset:
            header, _, data = data.partition(b"\n")
            try:
                self.check_header(header.rstrip(b"\r"))
            except ValueError as error:
                raise ValueError(f"{path}, line 1: {error}") from None
            first_line += 1
        rows = self.parse(data)
        bad = [
            replace(line, place=f"row {number - self.header} (line {number})")
            for line in rows.bad
            for number in [first_line + line.line]
        ]
        return replace(rows, lines_N=rows.lines_N + first_line, bad=bad)
