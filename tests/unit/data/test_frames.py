"""Tables in memory: the batches of a file with the same rows, prepared once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.frames import frame_file
from lightning_recsys.data.guesses.guessing import guess_schema

SCHEMA = {
    "label": "clicked",
    "dense": ["price"],
    "categorical": ["user", "shop"],
    "multi_valued": ["tags"],
    "split": {"validation": 0, "test": 0},
}


def rows(num_rows: int = 300, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "clicked": draw.integers(0, 2, num_rows),
            "user": [f"u{i}" for i in draw.integers(0, 30, num_rows)],
            "shop": draw.integers(0, 20, num_rows),
            "price": [None if x < 0.1 else round(x, 3) for x in draw.random(num_rows)],
            "tags": [[f"t{i}" for i in draw.integers(0, 9, n)] for n in draw.integers(0, 4, num_rows)],
        }
    )


class Exchanged:
    """A table of a library that pyarrow does not know."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __dataframe__(self, **options: object) -> object:
        return self._table.__dataframe__(**options)


class Streamed:
    """The two methods by which a data set of Hugging Face gives its rows as tables, in pieces of its own size."""

    def __init__(self, tables: Iterable[pa.Table], format: str = "python") -> None:
        self._tables, self._format = tables, format

    def with_format(self, kind: str) -> Streamed:
        return Streamed(self._tables, kind)

    def iter(self, batch_size: int) -> Iterator[pa.Table]:
        assert self._format == "arrow"
        assert batch_size > 0
        yield from self._tables


def streamed(frame: pd.DataFrame) -> Streamed:
    table = pa.Table.from_pandas(frame)
    pieces = [table.slice(start, 70) for start in range(0, len(table), 70)]
    return Streamed([pa.concat_tables([piece.slice(row, 1) for row in range(len(piece))]) for piece in pieces])


def hugging_face(frame: pd.DataFrame, *, streams: bool) -> object:
    """The rows in another order, and put back by an index as ``select`` does; or as a stream."""
    found = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
    if streams:
        return found.Dataset.from_pandas(frame).to_iterable_dataset(num_shards=3)
    return found.Dataset.from_pandas(frame.iloc[::-1], preserve_index=False).select(range(299, -1, -1))


class Formatted:
    """A data set as Hugging Face's are: ``set_format`` has chosen columns, and perhaps the others are shown as well."""

    def __init__(self, table: pa.Table, columns: list[str], *, shows_all: bool) -> None:
        self._table, self.format = table, {"columns": columns, "output_all_columns": shows_all}

    def with_format(self, kind: str, columns: list[str] | None = None) -> Formatted:
        assert kind == "arrow"
        return Formatted(self._table, columns or self._table.column_names, shows_all=False)

    def iter(self, batch_size: int):
        return iter([self._table.select(self.format["columns"])])


def with_chosen_columns(made, *, shows_all: bool):
    """The same of the library's own, where it is installed."""
    table = pa.Table.from_pandas(rows())
    if made == "library":
        found = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
        dataset = found.Dataset(table)
        dataset.set_format("numpy", columns=["clicked", "user"], output_all_columns=shows_all)
        return dataset
    return Formatted(table, ["clicked", "user"], shows_all=shows_all)


@pytest.mark.parametrize("made", ["here", "library"])
@pytest.mark.parametrize("shows_all", [False, True])
def test_data_set_when_its_format_chooses_columns_then_those_are_read(tmp_path, made, shows_all):
    data = TabularDataModule.from_frame(with_chosen_columns(made, shows_all=shows_all), label="clicked", cache=tmp_path)
    assert "user" in data.fields
    assert ("tags" in data.fields) == shows_all


def polars(frame: pd.DataFrame) -> object:
    found = pytest.importorskip("polars", reason="polars is not installed")
    return found.from_dict({name: frame[name].tolist() for name in frame}, strict=False).fill_nan(None)


def of_categories(frame: pd.DataFrame, *, lazy: bool = False) -> object:
    """A frame of polars whose words are categories, or the plan of one."""
    found = pytest.importorskip("polars", reason="polars is not installed")
    made = polars(frame).with_columns(found.col("user").cast(found.String).cast(found.Categorical))
    return made.lazy() if lazy else made


FRAMES = {
    "pandas": lambda frame: frame,
    "table": lambda frame: pa.Table.from_pandas(frame),
    "reader": lambda frame: pa.Table.from_pandas(frame).to_reader(max_chunksize=50),
    "polars": polars,
    "categories": of_categories,
    "lazy": partial(of_categories, lazy=True),
    "streamed": streamed,
    "dataset": partial(hugging_face, streams=False),
    "iterable": partial(hugging_face, streams=True),
}


def batch(data: TabularDataModule, split: str = "train"):
    data.setup()
    found = data.rows(split)
    return found.take(torch.arange(len(found)))


def of_text(frame: pd.DataFrame, folder: Path, **change) -> TabularDataModule:
    frame.assign(tags=frame["tags"].map("|".join)).to_csv(folder / "rows.csv", index=False)
    schema = SCHEMA | {"files": "rows.csv"} | change
    return TabularDataModule(schema=schema, root=folder, cache=folder / "cache")


@pytest.mark.parametrize("kind", FRAMES)
def test_frame_when_read_then_makes_the_batches_of_a_file_with_its_rows(tmp_path, kind):
    data = TabularDataModule.from_frame(FRAMES[kind](rows()), schema=SCHEMA, cache=tmp_path / "cache")
    found, expected = batch(data), batch(of_text(rows(), tmp_path))
    assert found.sparse.values.tolist() == expected.sparse.values.tolist()
    assert found.dense.tolist() == expected.dense.tolist()
    assert found.labels.tolist() == expected.labels.tolist()
    (account,) = data.rows_read.values()
    assert account == {"rows": 300, "used": 300, "skipped": 0, "comments": 0}


def test_frame_when_it_has_the_older_protocol_then_is_read(tmp_path):
    table = pa.Table.from_pandas(rows().drop(columns="tags"))
    schema = SCHEMA | {"multi_valued": []}
    data = TabularDataModule.from_frame(Exchanged(table), schema=schema, cache=tmp_path / "cache")
    expected = batch(of_text(rows(), tmp_path, multi_valued=[]))
    assert batch(data).sparse.values.tolist() == expected.sparse.values.tolist()


def test_frame_when_the_schema_is_guessed_then_is_that_of_a_file_with_its_rows(tmp_path):
    rows().assign(tags=rows()["tags"].map("|".join)).to_csv(tmp_path / "rows.csv", index=False)
    expected = guess_schema(tmp_path / "rows.csv", "clicked")
    data = TabularDataModule.from_frame(rows(), label="clicked", cache=tmp_path / "cache", batch_size=50)
    assert (list(data.schema.dense), list(data.schema.categorical)) == (
        list(expected.dense),
        list(expected.categorical),
    )
    assert len(next(iter(data.train_dataloader()))) == 50


def test_frames_when_there_are_further_ones_then_are_the_other_splits(tmp_path):
    given = {"validation": rows(40, 1), "test": rows(50, 2), "predict": rows(60, 3).drop(columns="clicked")}
    data = TabularDataModule.from_frame(rows(), schema=SCHEMA, cache=tmp_path / "cache", **given)
    data.setup()
    sizes = {split: len(data.rows(split)) for split in ("train", *given)}
    assert sizes == {"train": 300, "validation": 40, "test": 50, "predict": 60}


def test_frame_when_its_content_is_the_same_then_is_prepared_once(tmp_path):
    folders = []
    for frame in (rows(), rows().copy(), rows(seed=1)):
        data = TabularDataModule.from_frame(frame, schema=SCHEMA, cache=tmp_path)
        data.setup()
        folders.append(data.folder("train")[0])
    assert folders[0] == folders[1] != folders[2]
    assert len(list((tmp_path / "frames").iterdir())) == 2


def test_frame_when_it_was_not_asked_for_in_a_week_then_its_copy_goes(tmp_path):
    old = frame_file(rows(), tmp_path)
    assert frame_file(rows(), tmp_path) == old
    os.utime(old, (time.time() - 8 * 24 * 3600, old.stat().st_mtime))
    new = frame_file(rows(seed=1), tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_frame_when_it_has_an_index_then_that_is_a_column_where_it_says_something(tmp_path):
    schema = SCHEMA | {"categorical": ["user"], "multi_valued": []}
    data = TabularDataModule.from_frame(rows().set_index("user"), schema=schema, cache=tmp_path / "cache")
    assert batch(data).sparse.values.tolist() == batch(of_text(rows(), tmp_path, **schema)).sparse.values.tolist()


def test_frame_when_its_index_is_a_range_then_that_is_a_column_where_it_has_a_name(tmp_path):
    frame = pd.DataFrame({"clicked": [0, 1] * 3})
    levels = pd.MultiIndex.from_arrays([range(6), list("abcabc")], names=["row", "shop"])
    for index, columns in (
        (pd.RangeIndex(6), ["clicked"]),
        (pd.RangeIndex(3, 9, name="row"), ["clicked", "row"]),
        (levels, ["clicked", "row", "shop"]),
    ):
        file = frame_file(frame.set_axis(index), tmp_path)
        with pa.ipc.open_file(file) as reader:
            assert reader.schema.names == columns
            table = reader.read_all().to_pandas()
        for name in columns[1:]:
            assert table[name].tolist() == index.get_level_values(name).tolist()


def test_frame_when_it_has_intervals_or_periods_then_they_are_the_words_of_its_text(tmp_path):
    frame = pd.DataFrame({"clicked": [0, 1] * 6, "price": [*range(11), None]})
    frame["bin"] = pd.cut(frame["price"], [-1, 3, 7, 11])
    frame["span"] = frame["bin"].astype(pd.IntervalDtype("float64", "right"))
    frame["month"] = pd.period_range("2026-01", periods=12, freq="M")
    frame.to_csv(tmp_path / "rows.csv", index=False)
    schema = {"label": "clicked", "categorical": ["bin", "span", "month"], "split": {"validation": 0, "test": 0}}
    data = TabularDataModule.from_frame(frame, schema=schema, cache=tmp_path / "cache")
    text = TabularDataModule(schema=schema | {"files": "rows.csv"}, root=tmp_path, cache=tmp_path / "cache")
    rows = torch.arange(12)
    assert data.rows("train").take(rows).sparse.values.equal(text.rows("train").take(rows).sparse.values)
    assert "(3.0, 7.0]" in data.encoding.vocabularies["bin"].to_pylist()
    guessed = TabularDataModule.from_frame(frame, label="clicked", cache=tmp_path / "cache")
    assert guessed.schema.label.column == "clicked"


def test_frame_when_it_is_none_or_has_a_column_of_several_types_then_says_so(tmp_path):
    with pytest.raises(TypeError, match=r"__arrow_c_stream__ or __dataframe__, got dict"):
        TabularDataModule.from_frame({"clicked": [1]}, cache=tmp_path)
    with pytest.raises(TypeError, match=r"a Series is one column: give its \.to_frame\(\)"):
        TabularDataModule.from_frame(rows()["clicked"], label="clicked", cache=tmp_path)
    mixed = pd.DataFrame({"clicked": [0, 1], "user": pd.Series(["a", 1], dtype=object)})
    with pytest.raises(ValueError, match=r"cannot be made a table of Arrow: .*Give each column one type"):
        TabularDataModule.from_frame(mixed, label="clicked", cache=tmp_path)
    with pytest.raises(ValueError, match="with schema=, name them in it"):
        TabularDataModule.from_frame(rows(), label="clicked", schema=SCHEMA, cache=tmp_path)


def test_data_set_when_each_row_is_a_chunk_then_its_file_has_a_batch_for_each_table(tmp_path):
    """Shuffled data sets come so, and a batch a row would take minutes and fifty times the bytes."""
    with pa.ipc.open_file(frame_file(streamed(rows()), tmp_path)) as file:
        assert file.num_record_batches == 5  # 300 rows, 70 at a time
        assert file.read_all().num_rows == 300


def test_data_set_when_it_is_empty_or_changes_or_is_several_then_says_so(tmp_path):
    table = pa.Table.from_pandas(rows())
    with pytest.raises(ValueError, match="the data set has no rows"):
        TabularDataModule.from_frame(Streamed([]), cache=tmp_path)
    other = table.set_column(0, "clicked", pa.array(["yes"] * 300))
    for changed in (other, table.drop_columns("user")):
        with pytest.raises(ValueError, match="later rows of the data set have other columns than the first"):
            TabularDataModule.from_frame(Streamed([table, changed]), label="clicked", cache=tmp_path)
    with pytest.raises(
        TypeError, match=r"one table, got a dict of train, test\. Give one of them, and others as valid"
    ):
        TabularDataModule.from_frame({"train": streamed(rows()), "test": streamed(rows())}, cache=tmp_path)
    assert list((tmp_path / "frames").iterdir()) == []
