"""What happens to a row that makes no sense: an error that says where it stands, or skipped and counted."""

from __future__ import annotations

import logging
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
from lightning_utilities.core.rank_zero import rank_zero_only
from numpy.typing import NDArray

from lightning_recsys.data.tables.reading import MisshapenRow, RawTable

OnBadRow = Literal["error", "skip"]

log = logging.getLogger(__name__)


class RowJudge(Protocol):
    """Is told which rows make no sense; ``good`` says which do, shape ``[rows]``."""

    good: NDArray[np.bool_]

    def flag(self, bad: NDArray[np.bool_], *, column: str, problem: str, values: pa.ChunkedArray) -> None:
        """See :meth:`BadRows.flag`."""
        ...

    def report(self) -> None:
        """All columns were looked at."""
        ...


class BadRows:
    """Judges the rows of one file.

    Args:
        table: The rows.
        misshapen: Rows that could not be split into columns.
        on_bad_row: ``error`` raises ``ValueError`` at the first bad row, ``skip`` counts them.
    """

    def __init__(self, table: RawTable, misshapen: list[MisshapenRow], *, on_bad_row: OnBadRow) -> None:
        self.good = np.ones(len(table), dtype=bool)
        self._table = table
        self._on_bad_row = on_bad_row
        self._num_misshapen = len(misshapen)
        self._reasons: dict[str, int] = {}  # what the first of a kind looks like, and how many there are
        if misshapen:
            first = misshapen[0]
            self._add(f"{table.place(first.row)}: {first.problem}", count=len(misshapen))

    @property
    def num_bad(self) -> int:
        """Bad rows so far."""
        return sum(self._reasons.values())

    def flag(self, bad: NDArray[np.bool_], *, column: str, problem: str, values: pa.ChunkedArray) -> None:
        """Mark rows as bad.

        Args:
            bad: Which rows; shape ``[rows]``.
            column: The column that makes them so.
            problem: What it must be, in words that ``, got <value>`` can follow.
            values: The column, to quote from.

        Raises:
            ValueError: there is such a row, and bad rows are errors.
        """
        (rows,) = np.nonzero(bad & self.good)
        if len(rows):
            place = self._table.place(int(self._table.rows[rows[0]]))
            got = values[int(rows[0])].as_py()
            self._add(f"{place}, column {column!r}: {problem}, got {got!r}", count=len(rows))
            self.good &= ~bad

    def report(self) -> None:
        """Log how many rows were skipped, and the first of each kind.

        Raises:
            ValueError: no row is left.
        """
        if not self._reasons:
            return
        total = len(self._table) + self._num_misshapen
        kinds = "; ".join(f"{count} like {example}" for example, count in self._reasons.items())
        if not self.good.any():
            raise ValueError(f"{self._table.path}: all {total} rows are bad: {kinds}")
        _log_once(f"{self._table.path}: skipped {self.num_bad} of {total} rows: {kinds}")

    def _add(self, example: str, *, count: int) -> None:
        if self._on_bad_row == "error":
            raise ValueError(f"{example}. (data.on_bad_row=skip leaves out such rows and counts them.)")
        self._reasons[example] = count


@rank_zero_only
def _log_once(message: str) -> None:
    log.info(message)
