"""How a file of a table is written: its header, its separator, and the columns of a piece of its text."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.csv as arrow_csv

from lightning_recsys.data.files import COMPRESSION, ByteSource
from lightning_recsys.data.queries import query_of
from lightning_recsys.data.tables.json_lines import Place, find_places
from lightning_recsys.data.tables.record_files import leaves, open_records
from lightning_recsys.data.tables.schema_parts import Kind, TableFormat

BLOCK_BYTES = 1 << 24  # also the longest row that can be read
_UNIT_SEPARATOR = b"\x1f"  # stands in for separators of several characters, which Arrow does not know
_QUOTED_CHARACTERS = 80
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # what a file in UTF-16 starts with
_HEADER_BYTES = 1 << 14
_JSON_BYTES = 1 << 22  # of a file of JSON lines, which tell its columns
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_BINARY_SUFFIXES: Mapping[str, Kind] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".orc": "orc",
}
_STARTS: Mapping[bytes, tuple[str, Kind]] = {
    b"PAR1": ("a Parquet", "parquet"),
    b"ARROW1": ("an Arrow", "arrow"),
    b"ORC": ("an ORC", "orc"),
}
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_NO_ROW = 1 << 20  # characters of a line that begins as JSON does, and that is then no row of a table


@dataclass(frozen=True)
class Header:
    """The header of a file: how it is written, and its columns.

    Args:
        names: Names of all columns in the file; ``a.b`` for the field ``b`` of a structure ``a``.
        num_lines: Lines at the top of a text file that are no rows: comments, empty ones, the header.
        left_out: Those of them that are neither empty nor the header: comments, and what ``skip_lines`` counts.
        places: Where each column is, unless the file is text: the structures around it, and its own name.
        partitions: What the folders around the file say of all its rows; see :func:`partitions_of`.
    """

    names: Sequence[str]
    num_lines: int = 0
    left_out: Sequence[str] = ()
    places: Mapping[str, Place] = field(default_factory=dict)
    partitions: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Names of all columns that rows can be made of: those in the file, then those of the folders around it."""
        return [*self.names, *(name for name in self.partitions if name not in self.names)]


def read_header(path: Path, table: TableFormat) -> Header:
    """Look at the beginning of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, or repeats a name, or cannot be read.
    """
    kind = kind_of(path, table)
    if kind != "text":
        header = _at_places(_json_places(path, table) if kind == "json" else _typed_places(path, kind))
    else:
        above, line = _first_line(path, table)
        left_out = [text for text in above if text.strip()]
        if table.column_names:
            header = Header(table.column_names, len(above), left_out)
        else:
            header = Header(_split_line(line, path, table), len(above) + 1, left_out)
    _check_names(path, header)
    return replace(header, partitions=partitions_of(path))


def header_of(path: Path, schema: pa.Schema) -> Header:
    """The header of a table in memory, which errors call by a path.

    Raises:
        ValueError: it repeats a name.
    """
    header = _at_places(leaves(schema))
    _check_names(path, header)
    return header


def _at_places(found: Sequence[Place]) -> Header:
    names = [".".join(place) for place in found]
    return Header(names, places=dict(zip(names, found, strict=True)))


def _check_names(path: Path, header: Header) -> None:
    if twice := sorted({name for name in header.names if header.names.count(name) > 1}):
        where = "the first line names" if not header.places else "it has"
        raise ValueError(f"{path}: {where} column {', '.join(map(repr, twice))} more than once.")


def partitions_of(path: Path) -> dict[str, str | None]:
    """The columns that the names of the folders around a file say, as Hive, Spark and DuckDB write them.

    ``None`` is a missing value. The innermost folder counts where two have one name.

    >>> partitions_of(Path("days/day=2026-01-01/shop=a%20b/part-0.csv"))
    {'day': '2026-01-01', 'shop': 'a b'}
    """
    found: dict[str, str | None] = {}
    for part in path.parts[:-1]:
        name, is_one, value = part.partition("=")
        if name and is_one and not name.startswith((".", "_")):
            found[unquote(name)] = None if value == _NO_PARTITION else unquote(value)
    return found


def _typed_places(path: Path, kind: Kind) -> list[Place]:
    with open_records(path, kind) as file:
        return file.leaves()


def _json_places(path: Path, table: TableFormat) -> list[Place]:
    """Those of the first rows: the members of later ones that these do not have are not read."""
    start, more = b"", b""
    with ByteSource(path, encoding=table.encoding) as stream:
        try:
            while b"\n" not in start.strip() and (more := stream.read(_JSON_BYTES)):
                start += more
        except OSError as error:
            raise ValueError(f"{path}: the file is damaged ({error}).") from error
    if start[:2] in _UTF_16 and "16" not in table.encoding:
        raise ValueError(f"{path} is written in UTF-16. Write encoding: utf-16 in the schema.")
    whole = start if len(more) < _JSON_BYTES else start[: start.rfind(b"\n") + 1] or start
    if not (lines := [line for line in whole.removeprefix(codecs.BOM_UTF8).split(b"\n") if line.strip()]):
        raise ValueError(f"{path} is empty.")
    return find_places(lines, path)


def kind_of(path: Path, table: TableFormat) -> Kind:
    """How the file is written, by the schema or else by its suffix; a file of text may be compressed.

    >>> [kind_of(Path(name), TableFormat()) for name in ("a.pq", "a.ndjson", "a.json.gz", "a.csv")]
    ['parquet', 'json', 'json', 'text']
    """
    if (query := query_of(path)) is not None:
        return query.database
    if table.format is not None:
        return table.format
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix in COMPRESSION else suffix
    return "json" if inner in _JSON_SUFFIXES else _BINARY_SUFFIXES.get(suffix, "text")


def separator_of(path: Path, table: TableFormat) -> str:
    """The separator of a text file: the schema's, else a tab or a comma by the file's suffix."""
    if table.separator is not None:
        return table.separator
    return "\t" if {".tsv", ".tab"} & {suffix.lower() for suffix in path.suffixes} else ","


def lines_of(text: str) -> list[str]:
    r"""Text without its line ends; other characters that Python takes for line ends are letters, as they are to Arrow.

    >>> lines_of("a\u2028b\r\nc\rd")
    ['a\u2028b', 'c', 'd']
    """
    return re.split(r"\r\n|\n|\r", text)


def parse_block(
    block: bytes, path: Path, table: TableFormat, *, names: Sequence[str], columns: Sequence[str], plain: Sequence[str]
) -> tuple[Mapping[str, pa.ChunkedArray], dict[int, str]]:
    """Read some columns of some whole rows of a text file: in UTF-8, without its first lines.

    Args:
        block: The rows as bytes, which are whole lines.
        path: The file that they come from, for messages.
        table: The format in which the file is written.
        names: The names of all columns of the file, in their order.
        columns: Columns to read; all are in the file.
        plain: Those of them that are mostly distinct, so that storing distinct values once is no use.

    Returns:
        The columns, without the rows that have the wrong number of columns; and what is wrong with each of those rows,
        by its number, from 1. Empty lines are no rows.

    Raises:
        ValueError: the text is in another encoding.
    """
    separator = separator_of(path, table)
    quote: str | bool = (table.quote or False) if len(separator) == 1 else False
    text, coded = pa.string(), pa.dictionary(pa.int32(), pa.string())
    bad: dict[int, str] = {}

    def note(row: arrow_csv.InvalidRow) -> str:
        shown = row.text if len(row.text) <= _QUOTED_CHARACTERS else row.text[:_QUOTED_CHARACTERS] + "..."
        shown = shown.replace("\x1f", separator)
        bad[row.number] = f"{row.expected_columns} columns expected, got {row.actual_columns}: {shown!r}"
        return "skip"

    try:
        data = arrow_csv.read_csv(
            pa.py_buffer(block if len(separator) == 1 else _with_short_separator(block, path, separator)),
            # One thread, because only then Arrow knows the number of an invalid row.
            read_options=arrow_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, column_names=list(names)),
            parse_options=arrow_csv.ParseOptions(
                delimiter=separator if len(separator) == 1 else "\x1f",
                quote_char=quote,
                newlines_in_values=bool(quote),
                invalid_row_handler=note,
            ),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=list(columns),
                column_types={name: text if name in plain else coded for name in columns},
                strings_can_be_null=False,
            ),
        )
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(explain(error, path, table)) from error
    return dict(zip(data.column_names, data.columns, strict=True)), bad


def explain(error: Exception, path: Path, table: TableFormat) -> str:
    """Why a file cannot be read, in words that say what to do."""
    if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
        return f"{path} is not written in {table.encoding}. Name its encoding in the schema, such as encoding: latin-1."
    return f"{path} cannot be read: {error}"


def _first_line(path: Path, table: TableFormat) -> tuple[list[str], str]:
    """The lines that the file starts with which are neither header nor rows, and the line behind them."""
    encoding = "utf-8-sig" if table.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else table.encoding
    comment = table.comment
    # White space alone is no header. Of tabs alone there may be a row, whose values are all missing.
    spaces = " " if table.column_names and separator_of(path, table) == "\t" else None
    with ByteSource(path) as stream:
        start, size = b"", _HEADER_BYTES
        while True:  # a look at more of the file, where what has been read is left out as a whole
            try:
                start += (more := stream.read(size))
            except OSError as error:
                raise ValueError(f"{path}: the file is damaged ({error}).") from error
            lines = lines_of(start.decode(encoding, errors="replace"))
            rest = lines[table.skip_lines :]
            comments = takewhile(lambda line: not line.strip(spaces) or (comment and line.startswith(comment)), rest)
            num_above = table.skip_lines + sum(1 for _ in comments)
            if num_above + 1 < len(lines) or not more:
                break
            size *= 2
    if start[:2] in _UTF_16 and "16" not in table.encoding:
        raise ValueError(f"{path} is written in UTF-16. Write encoding: utf-16 in the schema.")
    refuse_binary(start, path)
    if num_above >= len(lines) or not start.strip():
        raise ValueError(f"{path} is empty.")
    names, line = table.column_names, lines[num_above]
    if names is None or len(_split_line(line, path, table)) != len(names):
        refuse_json(line, path)
    return lines[:num_above], line


def refuse_binary(start: bytes, path: Path) -> None:
    """Raise ``ValueError`` if a file of text starts as one of typed columns."""
    for magic, (called, kind) in _STARTS.items():
        if start.startswith(magic) and (magic != b"ORC" or b"\0" in start):  # which may begin the name of a column
            raise ValueError(f"{path} is {called} file. Name it .{kind}, or write format: {kind} in the schema.")


def refuse_json(line: str, path: Path) -> None:
    """Raise ``ValueError`` if a line is the beginning of a file in JSON, and not of a table that has some in a column.

    Such a line is JSON as a whole, or an object of a list that goes on, or opens one.
    """
    if _is_json(line.strip()):
        raise ValueError(
            f"{path} is JSON. If it has an object on each line, name it .jsonl, or write format: json in the schema. "
            "If it is a list, make such a file of it first: pandas.read_json('in.json').to_json('out.jsonl', "
            "orient='records', lines=True)."
        )


def _is_json(line: str) -> bool:
    if "".join(line.split()) in ("[", "{", "[{"):
        return True
    if not re.match(r'(\[\s*)?\{\s*["}]', line):
        return False
    if len(line) >= _NO_ROW:
        return True
    for text in (line, line.removeprefix("[").removesuffix(",")):
        with suppress(ValueError):
            json.loads(text)
            return True
    return False


def _split_line(line: str, path: Path, table: TableFormat) -> list[str]:
    separator = separator_of(path, table)
    if len(separator) > 1:
        names = line.split(separator)
    else:
        quoting: dict[str, Any] = {"quotechar": table.quote} if table.quote else {"quoting": csv.QUOTE_NONE}
        (names,) = csv.reader([line], delimiter=separator, **quoting)
    return [name.strip() for name in names] if table.strip else names


def _with_short_separator(content: bytes, path: Path, separator: str) -> bytes:
    if _UNIT_SEPARATOR in content:
        raise ValueError(
            f"{path} holds the control character 0x1f, so separators of several characters cannot be read."
        )
    return content.replace(separator.encode(), _UNIT_SEPARATOR)
