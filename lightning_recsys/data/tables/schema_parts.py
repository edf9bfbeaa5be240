"""The parts of a schema: how a file is written, the label, side tables, the split."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lightning_recsys.data.queries import Database

Written: TypeAlias = Literal["text", "json", "parquet", "arrow", "orc"]
"""How a file is written, as far as its suffix tells."""

Kind: TypeAlias = Written | Database
"""The same, and whose query makes a table."""

COMMENT_MARKS = ("#", "%", "//")
"""The marks of comments at the top of a text file; nothing else is a mark."""


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How a file is written.

    Args:
        format: ``text`` (CSV, TSV and the like, also compressed), ``json`` (an object a line, also compressed),
            ``parquet``, ``arrow`` (Feather, too) or ``orc``; by the file's suffix if absent.
        separator: Between columns, one or more characters; a tab for ``.tsv`` and ``.tab``, else a comma, if absent.
        column_names: Names of all columns, where the file has no header line.
        skip_lines: Number of lines at the very top that are left out, whatever stands in them: a title, say.
        comment: Lines at the top of the file, behind those, that start with this mark are left out: ``#``, ``%`` or
            ``//``.
        encoding: Encoding of text, such as ``utf-8`` or ``latin-1``.
        quote: Character around values that contain the separator; ``None`` where quotes are letters like any other.
            Separators of several characters know no quotes.
        strip: Whether white space around values is dropped.
        missing: Values that stand for a missing one.
        decimal: What stands before the fraction of a number: a dot or a comma.
        thousands: What stands between the thousands of a number; ``None`` for nothing.
        dates: Whether ``01/02/2026`` and ``01-02-2026`` are of February or of January; ``None`` where there are none.
    """

    format: Written | None = None
    separator: str | None = None
    column_names: tuple[str, ...] | None = None
    skip_lines: int = 0
    comment: str | None = None
    encoding: str = "utf-8"
    quote: str | None = '"'
    strip: bool = True
    missing: tuple[str, ...] = ("",)
    decimal: Literal[".", ","] = "."
    thousands: str | None = None
    dates: Literal["day_first", "month_first"] | None = None

    def check(self, where: str) -> None:
        """Raise ``ValueError`` about what the types leave open, naming it as a key below ``where``."""
        require(self.separator != "", f"{where}.separator must be one or more characters, got none.")
        require(self.quote is None or len(self.quote) == 1, f"{where}.quote must be one character, got {self.quote!r}.")
        require(self.skip_lines >= 0, f"{where}.skip_lines must be at least 0, got {self.skip_lines}.")
        require(
            self.comment is None or self.comment in COMMENT_MARKS,
            f"{where}.comment must be {', '.join(COMMENT_MARKS)} or null, got {self.comment!r}. In its place write "
            "comment: null and skip_lines: N, the number of lines at the top of the file that are left out; for the "
            "checkpoint of an earlier run ++data.schema.comment=null ++data.schema.skip_lines=N on the command line.",
        )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ValueError(f"{where}.encoding {self.encoding!r} is unknown. Common ones: utf-8, latin-1.") from None
        thousands = self.thousands
        require(
            thousands is None or (len(thousands) == 1 and thousands != self.decimal and not thousands.isalnum()),
            f"{where}.thousands must be one character that is no digit and not {where}.decimal, got {thousands!r}.",
        )
        names = self.column_names or ()
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"{where}.column_names lists {', '.join(twice)} more than once.")


VALUE_KEYS = ("strip", "missing", "decimal", "thousands", "dates")  # of a format: what its values mean


@dataclass(frozen=True, kw_only=True)
class Label:
    """The column that says whether a row is a click.

    Args:
        column: Name of the column in the files of rows; no feature may be made from it.
        rule: What makes a row positive; see :class:`~lightning_recsys.data.tables.label.LabelRule`.
        strip: Characters to drop from both ends of the values, such as a trailing dot.
    """

    column: str
    rule: str | None = None
    strip: str = ""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A side table whose columns are appended to the rows.

    Args:
        file: Path of the side table, relative to where the schema's paths start; it must name one file.
        column: Column of the rows that refers to it.
        key: Column of the side table that is referred to, where each value stands once; ``column`` if absent.
        table: The format in which the file is written.
    """

    file: str
    column: str
    key: str
    table: TableFormat = field(default_factory=TableFormat)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How validation and test rows are parted from the training rows, where they have no files of their own.

    Args:
        by: ``share`` draws them at random; ``time`` takes the latest, test rows last.
        validation: Share of the rows; 0.1 if absent.
        test: Share of the rows; 0.1 if absent.
        seed: Seed of the draw of evaluation rows.
    """

    by: Literal["share", "time"] = "share"
    validation: float | None = None
    test: float | None = None
    seed: int = 0
