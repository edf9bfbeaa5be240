"""Criteo's display advertising logs: the Kaggle challenge's ``train.txt`` and the terabyte set's ``day_*.gz``."""

from __future__ import annotations

import numpy as np

from lightning_recsys.data.raw.columns import LineFormat, RawColumns, RowJudge
from lightning_recsys.data.raw.delimited import parse_labels, split_columns
from lightning_recsys.data.raw.kernels import parse_integers, parse_keys


class CriteoFormat(LineFormat):
    r"""Tab-separated lines without a header: label, 13 integers, 26 hexadecimal numbers.

    All but the label may be empty. There is no time in the rows; those of the Kaggle file are in order of time, and
    each file of the terabyte set is a day. Other editions part columns by commas, below a header.

    Args:
        separator: The character between two columns.
        header: Whether files start with a line of column names, ``Label,I1,...,C26``.

    >>> rows = CriteoFormat().parse(b"1" + b"\t5" * 13 + b"\t68fd1e64" * 26 + b"\n")
    >>> rows.labels_N.tolist(), rows.dense_IN.shape, rows.categories["C1"].to_pylist()
    ([1.0], (13, 1), [b'68fd1e64'])
    """

    name = "criteo"

    def __init__(self, *, separator: str = "\t", header: bool = False) -> None:
        self._separator, self.header = separator, header

    def options(self) -> dict[str, object]:
        """See the base class."""
        plain = self._separator == "\t" and not self.header
        return super().options() | ({} if plain else {"separator": self._separator, "header": self.header})

    def check_header(self, line: bytes) -> None:
        """See the base class."""
        expected = self._separator.join(("Label", *self.dense, *self.categories))
        if (found := line.decode("utf-8", "backslashreplace")) != expected:
            raise ValueError(f"the header must be {expected}, got {found[:200]}.")

    dense = tuple(f"I{i}" for i in range(1, 14))
    categories = tuple(f"C{i}" for i in range(1, 27))
    number_base = dict.fromkeys(categories, 16)

    def parse(self, block: bytes) -> RawColumns:
        """The rows of a block of whole lines."""
        columns, lines, bad = split_columns(block, ("label", *self.dense, *self.categories), separator=self._separator)
        judge = RowJudge(lines, bad)
        labels, wrong = parse_labels(columns[0])
        judge.flag(wrong, column="label", problem="must be 0 or 1", values=columns[0])
        dense = np.empty((len(self.dense), len(labels)))
        for i, (name, values) in enumerate(zip(self.dense, columns[1:14], strict=True)):
            dense[i], wrong = parse_integers(values)
            judge.flag(wrong, column=name, problem="must be an integer or empty", values=values)
        categories = dict(zip(self.categories, columns[14:], strict=True))
        for name, values in categories.items():
            _, wrong = parse_keys(values, base=16)
            judge.flag(wrong, column=name, problem="must be a hexadecimal number or empty", values=values)
        return RawColumns(lines, labels, dense, categories, bad=judge.bad).keep(judge.good)
