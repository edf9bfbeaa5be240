"""Tables of typed columns: Parquet, Arrow, ORC and queries to databases, all read as Arrow's record batches."""

from __future__ import annotations

import math
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
import pyarrow.orc as orc
import pyarrow.parquet as pq

from lightning_recsys.data.files import DAMAGED, open_stored, stored_bytes, stored_file
from lightning_recsys.data.queries import query_of
from lightning_recsys.data.tables.json_lines import Place, as_column
from lightning_recsys.data.tables.schema_parts import Kind

_ARROW_FILE = b"ARROW1"
_CALLED: Mapping[Kind, str] = {"parquet": "Parquet", "arrow": "Arrow", "orc": "ORC"}
_DECODED_ROWS = 2_000_000  # of Parquet, at most, of which a sample is taken,
_SAMPLED_GROUPS = 64  # in so many row groups at most,
_PIECES = 8  # of each of which there are as many pieces
_HEAD_ROWS = 1000  # of a query, which tell the types of its columns
_VIEWS = (
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_binary_view, pa.binary()),
)


class Records(NamedTuple):
    """Some rows of a file.

    Attributes:
        first: Number of the first of them, from 0.
        batch: Their columns, structures as a whole.
        share: Share of the file that has been read with them.
    """

    first: int
    batch: pa.RecordBatch
    share: float


class RecordFile(ABC):
    """An open file of typed columns.

    Attributes:
        schema: The columns at the top, structures as a whole.
    """

    schema: pa.Schema

    @abstractmethod
    def batches(self, num_rows: int, *, places: Sequence[Place] | None = None, first: int = 0) -> Iterator[Records]:
        """The rows, ``num_rows`` at a time, fewer where a part of the file ends; the same batches from any of them on.

        Args:
            num_rows: Number of rows of a batch.
            places: The columns to read, all if absent; other fields of their structures may come along.
            first: The number of the first row to read, which is the first of a batch.

        Raises:
            pyarrow.ArrowInvalid: the file is damaged; or ``OSError``.
        """

    def sample(self, num_rows: int, num_bytes: int) -> Iterator[Records]:
        """Some batches, of so many rows, or of fewer where these have more than so many bytes; of one row at least.

        They are the file's first ones, but for Parquet, where they come from all over it, unless it is in an archive.
        """
        before = 0.0
        for first, batch, share in self.batches(num_rows):
            fitting = min(num_rows, len(batch), max(num_bytes * len(batch) // max(batch.nbytes, 1), int(not first)))
            piece = batch.slice(0, fitting)
            yield Records(first, piece, before + (share - before) * fitting / max(len(batch), 1))
            num_rows, num_bytes, before = num_rows - fitting, num_bytes - piece.nbytes, share
            if fitting < len(batch) or num_rows <= 0:
                return

    def leaves(self) -> list[Place]:
        """The columns, each with the structures around it."""
        return leaves(self.schema)


def leaves(fields: pa.Schema | pa.StructType, around: Place = ()) -> list[Place]:
    """The columns of a schema, each with the structures around it.

    >>> leaves(pa.schema({"a": pa.struct({"b": pa.int64(), "c": pa.string()}), "d": pa.int64()}))
    [('a', 'b'), ('a', 'c'), ('d',)]
    """
    found: list[Place] = []
    for column in fields:
        place = (*around, column.name)
        found += leaves(column.type, place) if pa.types.is_struct(column.type) else [place]
    return found


def leaf(batch: pa.RecordBatch, place: Place) -> pa.Array:
    """A column of a batch, of a type that is computed with; null where a structure around it is."""
    column = pc.struct_field(batch[place[0]], list(place[1:])) if len(place) > 1 else batch[place[0]]
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    return next((column.cast(plain) for is_a, plain in _VIEWS if is_a(column.type)), column)


def head_of(count: int) -> int:
    """How much of a sample is the beginning of its file: three quarters, since rows of one id may lie together."""
    return count * 3 // 4


def thinned(rows: pa.RecordBatch, count: int) -> pa.RecordBatch:
    """At most so many rows, evenly spaced; the first ones where Arrow takes none of their type, such as views."""
    if len(rows) <= count:
        return rows
    try:
        return rows.take(pa.array(np.linspace(0, len(rows) - 1, count).astype(int)))
    except pa.ArrowNotImplementedError:
        return rows.slice(0, count)


@contextmanager
def open_records(path: Path, kind: Kind) -> Iterator[RecordFile]:
    """A file of typed columns, also one in an archive.

    Args:
        path: The file, which may be a member of an archive; of a query, its path.
        kind: How it is written: ``parquet``, ``arrow`` or ``orc``; or the database of a query.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: it is a query to DuckDB, which is not installed (the extra ``[duckdb]``).
        ValueError: it is none, its archive is damaged, or the query fails.
    """
    with ExitStack() as opened:
        try:
            file = _OPEN[kind](path, opened)
        except FileNotFoundError:
            raise
        except (pa.ArrowInvalid, OSError, *DAMAGED) as error:
            raise ValueError(
                f"{path} is no {_CALLED[kind]} file, or not all of it ({str(error).splitlines()[0]}). If it is text, "
                "name it .csv, or write format: text in the schema."
            ) from error
        yield file


def _slices(batch: pa.RecordBatch, num_rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A batch in pieces, each with the number of rows before it."""
    for start in range(0, len(batch), num_rows):
        yield start, batch.slice(start, num_rows)


def _top(places: Sequence[Place] | None) -> list[str] | None:
    return None if places is None else list(dict.fromkeys(place[0] for place in places))


class _ParquetFile(RecordFile):
    def __init__(self, path: Path, opened: ExitStack) -> None:
        # In an archive, it is read one column after the other, as they lie there.
        self._whole = stored_file(path) == path
        source: Any = path if self._whole else opened.enter_context(open_stored(path))
        self._file = opened.enter_context(pq.ParquetFile(source, memory_map=self._whole, pre_buffer=False))
        self.schema = self._file.schema_arrow

    def batches(self, num_rows: int, *, places: Sequence[Place] | None = None, first: int = 0) -> Iterator[Records]:
        file, start = self._file, 0
        columns = None if places is None else [".".join(place) for place in places]
        for group in range(file.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            if stop > first:
                for batch in file.iter_batches(num_rows, row_groups=[group], columns=columns, use_threads=self._whole):
                    before, start = start, start + len(batch)
                    if before >= first:
                        yield Records(before, batch, start / file.metadata.num_rows)
            start = stop

    def sample(self, num_rows: int, num_bytes: int) -> Iterator[Records]:
        if not self._whole:  # all of an archive would be unpacked for its last rows
            yield from super().sample(num_rows, num_bytes)
            return
        file, metadata = self._file, self._file.metadata
        lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        start = next(file.iter_batches(_HEAD_ROWS), None)
        if start is None or not len(start):
            return
        wanted = min(num_rows, math.ceil(num_bytes * len(start) / max(start.nbytes, 1)))
        if metadata.num_rows <= wanted:
            yield from self.batches(num_rows)
            return
        given = 0
        for _, batch, _ in self.batches(num_rows):
            piece = batch.slice(0, head_of(wanted) - given)
            given += len(piece)
            yield Records(given - len(piece), piece, given / metadata.num_rows)
            if given == head_of(wanted):
                break
        chosen = sorted({round(x) for x in np.linspace(0, len(lengths) - 1, min(len(lengths), _SAMPLED_GROUPS))})
        head, due, share = given, float(given), (wanted - given) / sum(lengths[x] for x in chosen)
        for group in chosen:
            first, of_piece = sum(lengths[:group]), share * lengths[group] / _PIECES
            length = max(min(lengths[group], _DECODED_ROWS // len(chosen)) // _PIECES, math.ceil(of_piece))
            for batch in islice(file.iter_batches(length, row_groups=[group], use_threads=self._whole), _PIECES):
                due += of_piece  # so many rows, of which `given` are whole ones
                piece = thinned(batch.slice(max(head - first, 0)), int(due) - given)
                first, given = first + len(batch), given + len(piece)
                yield Records(given - len(piece), piece, given / metadata.num_rows)


class _ArrowFile(RecordFile):
    """Arrow's own format: a file with an index of its batches, as Feather is, or a stream."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        whole = stored_file(path) == path
        self._bytes = max(stored_bytes(path), 1)
        source = opened.enter_context(open_stored(path))
        self._indexed = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        self._source: Any = pa.memory_map(str(path)) if whole else pa.PythonFile(source, mode="r")
        opened.callback(self._source.close)
        self.schema = self._open(None).schema

    def _open(self, columns: Sequence[str] | None) -> Any:
        self._source.seek(0)
        if not self._indexed:
            return ipc.open_stream(self._source)
        fields = None if columns is None else [self.schema.get_field_index(name) for name in columns]
        return ipc.open_file(self._source, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))

    def _parts(self, columns: Sequence[str] | None) -> Iterator[tuple[pa.RecordBatch, float, float]]:
        """Each batch of the file, with the share of the file before it and with it."""
        reader = self._open(columns)
        if self._indexed:
            count = reader.num_record_batches
            for number in range(count):
                yield reader.get_batch(number), number / count, (number + 1) / count
            return
        before = 0.0
        for batch in reader:
            after = self._source.tell() / self._bytes
            yield batch if columns is None else batch.select(columns), before, after
            before = after

    def batches(self, num_rows: int, *, places: Sequence[Place] | None = None, first: int = 0) -> Iterator[Records]:
        start = 0
        for part, before, after in self._parts(_top(places)):
            for place, batch in _slices(part, num_rows):
                if start + place >= first:
                    share = before + (after - before) * (place + len(batch)) / len(part)
                    yield Records(start + place, batch, share)
            start += len(part)


class _OrcFile(RecordFile):
    """A stripe at a time is in memory."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._file = orc.ORCFile(opened.enter_context(open_stored(path)))
        self.schema = self._file.schema

    def batches(self, num_rows: int, *, places: Sequence[Place] | None = None, first: int = 0) -> Iterator[Records]:
        start, columns = 0, _top(places)
        for number in range(self._file.nstripes):
            stripe = self._file.read_stripe(number, columns=columns)
            for place, batch in _slices(stripe, num_rows):
                if start + place >= first:
                    yield Records(start + place, batch, (start + place + len(batch)) / self._file.nrows)
            start += len(stripe)


class _QueryFile(RecordFile, ABC):
    """The rows of a query, which is asked again for each reading."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        query = query_of(path)
        assert query is not None
        if not query.file.is_file():
            raise FileNotFoundError(f"there is no database {query.file}")
        self._query = query
        with self._told():
            self._connect(opened)
            self.schema = next(self._read(query.sql, _HEAD_ROWS)).schema

    errors: tuple[type[Exception], ...] = ()

    @abstractmethod
    def _connect(self, opened: ExitStack) -> None:
        """Open the database, such that nothing can be written."""

    @abstractmethod
    def _read(self, sql: str, num_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows that a query finds, so many at a time, always in one order; and a batch at least."""

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self.errors as error:
            raise ValueError(f"{self._query.file}: the query {self._query.sql!r} fails ({error}).") from error

    def batches(self, num_rows: int, *, places: Sequence[Place] | None = None, first: int = 0) -> Iterator[Records]:
        start, sql = 0, self._query.sql.strip().rstrip(";")
        with self._told():
            found = (batch for batch in self._read(sql, num_rows) if len(batch))
            some = list(islice(found, 2))
            count = f"SELECT count(*) FROM ({sql}\n)"  # noqa: S608 - the query is the user's own
            total = sum(map(len, some))
            if len(some) == 2:  # there may be more
                total = sum(batch.column(0)[0].as_py() for batch in self._read(count, 1) if len(batch))
            for batch in chain(some, found):
                before, start = start, start + len(batch)
                if before >= first:
                    yield Records(before, batch, min(1.0, start / total))


class _SqliteQuery(_QueryFile):
    errors = (sqlite3.Error,)

    def _connect(self, opened: ExitStack) -> None:
        file = quote(str(self._query.file))
        # A generator that is not read to its end may be closed in another thread.
        self._database = sqlite3.connect(f"file:{file}?mode=ro", uri=True, check_same_thread=False)
        opened.callback(self._database.close)

    def _read(self, sql: str, num_rows: int) -> Iterator[pa.RecordBatch]:
        cursor = self._database.execute(sql)
        if cursor.description is None:
            raise sqlite3.ProgrammingError("it must be a SELECT")
        names = [column[0] for column in cursor.description]
        rows = cursor.fetchmany(num_rows)
        while True:
            columns = zip(*rows, strict=True) if rows else [()] * len(names)
            yield pa.RecordBatch.from_arrays([as_column(list(column)) for column in columns], names)
            if not (rows := cursor.fetchmany(num_rows)):
                return


class _DuckdbQuery(_QueryFile):
    def _connect(self, opened: ExitStack) -> None:
        try:
            import duckdb  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ImportError(
                f"{self._query.file}: a query to DuckDB needs the extra [duckdb]: "
                "pip install 'lightning-recsys[duckdb]'."
            ) from error
        self.errors = (duckdb.Error,)
        # In one thread the rows of a query without ORDER BY have the same order each time, which passes over them need.
        # Neither files nor Python's variables are tables of a query.
        options: dict[str, Any] = {
            "threads": 1,
            "enable_external_access": False,
            "python_enable_replacements": False,
        }
        self._database = opened.enter_context(duckdb.connect(str(self._query.file), read_only=True, config=options))

    def _read(self, sql: str, num_rows: int) -> Iterator[pa.RecordBatch]:
        # A cursor for each reading: a connection has one result at a time.
        if (relation := self._database.cursor().sql(sql)) is None:
            raise ValueError(f"{self._query.file}: the query {sql!r} fails (it must be a SELECT).")
        reader = relation.to_arrow_reader(num_rows)
        yield pa.RecordBatch.from_pylist([], reader.schema)
        for batch in reader:
            yield from (part for _, part in _slices(batch, num_rows))


_OPEN: Mapping[Kind, Callable[[Path, ExitStack], RecordFile]] = {
    "parquet": _ParquetFile,
    "arrow": _ArrowFile,
    "orc": _OrcFile,
    "sqlite": _SqliteQuery,
    "duckdb": _DuckdbQuery,
}
