"""Tables in memory (pandas, polars, PyArrow, Hugging Face's, whatever else speaks Arrow) as files named by content."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
from pyarrow.interchange import from_dataframe

FRAMES = "frames"  # the folder in a cache of prepared rows
_BATCH_ROWS = 1 << 16
_KEPT_SECONDS = 7 * 24 * 3600.0  # since a file was last used
_UNTYPED = "a stream whose rows lack values has no types: make a Dataset of it, as Dataset.from_list(list(stream))"
_PRIVATE = 0o700  # as the rows that are made of it


def frame_file(frame: Any, folder: Path) -> Path:
    """Write a table into a file, unless a file with this content is there.

    A file stays as it is for as long as it is used, its time of change too, so that rows that were prepared from it are
    found again. Files that were not asked for in a week are removed.

    Args:
        frame: A table with ``__arrow_c_stream__`` or ``__dataframe__``, such as one of pandas, polars or PyArrow, or a
            ``Dataset`` or ``IterableDataset`` of Hugging Face, which is read once from its beginning. A ``LazyFrame``
            of polars is collected.
        folder: Where the files are; made if it is not there.

    Raises:
        TypeError: it is no table.
        ValueError: a column has a type that Arrow does not know, such as words and numbers in one; or other types in
            later rows; or a data set has no rows.
    """
    reader = _reader(frame)
    folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".part")
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            options = ipc.IpcWriteOptions(compression="lz4")
            with ipc.new_file(file, reader.schema.remove_metadata(), options=options) as writer:
                for batch in reader:
                    plain = batch.replace_schema_metadata(None)
                    for start in range(0, len(plain), _BATCH_ROWS):
                        writer.write_batch(plain.slice(start, _BATCH_ROWS))
        with unfinished.open("rb") as written:
            digest = hashlib.file_digest(written, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        path = folder / f"{digest}.arrow"
        with suppress(FileExistsError):
            os.link(unfinished, path)  # which, other than a rename, leaves a file that another process has just made
    finally:
        unfinished.unlink(missing_ok=True)
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    remove_frames(folder, unused_seconds=_KEPT_SECONDS)
    return path


def frame_files(folder: Path) -> dict[Path, int]:
    """The files of tables in a folder, unfinished ones too, and how many bytes each takes."""
    found: dict[Path, int] = {}
    for path in [*folder.glob("*.arrow"), *folder.glob("*.part")]:
        with suppress(FileNotFoundError):  # another process has removed it
            found[path] = path.stat().st_size
    return found


def remove_frames(folder: Path, *, unused_seconds: float, keep: Collection[str] = ()) -> list[int]:
    """Remove files of tables that were not asked for lately.

    Args:
        folder: Where the files are; it may not be there.
        unused_seconds: For how long a file was not asked for.
        keep: Paths of files that stay.

    Returns:
        The bytes of each that was removed.
    """
    removed = []
    for path, size in frame_files(folder).items():
        with suppress(OSError):
            about = path.stat()
            used = about.st_mtime if path.suffix == ".part" else about.st_atime  # one that is written was not asked for
            if str(path) not in keep and time.time() - used > unused_seconds:
                path.unlink()
                removed.append(size)
    return removed


def _reader(frame: Any) -> pa.RecordBatchReader:
    if hasattr(frame, "collect_schema") and hasattr(frame, "collect"):  # the plan of a frame, as polars has it
        frame = frame.collect()
    if hasattr(frame, "to_frame") and not hasattr(frame, "columns"):
        raise TypeError(f"from_frame takes a table, and a {type(frame).__name__} is one column: give its .to_frame().")
    try:
        if hasattr(frame, "with_format") and hasattr(frame, "iter"):
            return _reader_of_batches(_in_arrow(frame).iter(batch_size=_BATCH_ROWS))
        if (pandas := sys.modules.get("pandas")) is not None and isinstance(frame, pandas.DataFrame):
            named = any(name is not None for name in frame.index.names)  # a range of numbers is left out otherwise
            return pa.Table.from_pandas(_in_words(frame), preserve_index=named or None).to_reader()
        if hasattr(frame, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(frame)
        if hasattr(frame, "__dataframe__"):
            return from_dataframe(frame).to_reader()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"the frame cannot be made a table of Arrow: {error}. Give each column one type.") from error
    if isinstance(frame, Mapping) and any(hasattr(part, "with_format") for part in frame.values()):
        raise TypeError(
            f"from_frame takes one table, got a {type(frame).__name__} of {', '.join(map(str, frame))}. Give one of "
            "them, and others as validation=, test= and predict=."
        )
    raise TypeError(
        "from_frame takes a table of pandas, polars, PyArrow, Hugging Face's datasets or another library that has "
        f"__arrow_c_stream__ or __dataframe__, got {type(frame).__name__}."
    )


def _in_words(frame: Any) -> Any:
    """A frame of pandas whose intervals, as ``pandas.cut`` makes them, and periods are words, as its CSV has them."""
    kinds = [getattr(kind.categories, "dtype", None) if kind.name == "category" else kind for kind in frame.dtypes]
    places = [i for i, kind in enumerate(kinds) if str(kind).startswith(("interval", "period"))]
    if places:
        frame = frame.copy(deep=False)
    for i in places:
        frame.isetitem(i, frame.iloc[:, i].astype("string"))
    return frame


def _in_arrow(dataset: Any) -> Any:
    """A data set of Hugging Face whose batches are Arrow's, with the columns that its own format shows."""
    shown = getattr(dataset, "format", None)
    if not isinstance(shown, Mapping) or shown.get("output_all_columns", True):
        return dataset.with_format("arrow")
    return dataset.with_format("arrow", columns=shown["columns"])


def _reader_of_batches(tables: Iterator[pa.Table]) -> pa.RecordBatchReader:
    """Tables that come one after the other, as Hugging Face's data sets give their rows, chosen and shuffled ones too.

    Raises:
        ValueError: there is none, or they do not fit together.
    """
    try:
        first = next(tables, None)
    except pa.ArrowException as error:
        raise ValueError(f"{_UNTYPED}: {error}") from error
    if first is None:
        raise ValueError("the data set has no rows.")

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for table in chain([first], tables):
                # Rows in another order come as a chunk each, which would be a batch of the file each.
                yield from table.cast(first.schema).combine_chunks().to_batches()
        except (pa.ArrowException, ValueError) as error:
            raise ValueError(
                f"later rows of the data set have other columns than the first. {_UNTYPED}: {error}"
            ) from error

    return pa.RecordBatchReader.from_batches(first.schema, batches())
