"""The same rows make the same batches in every format as in text, and what cannot be read is told or counted."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
import torch

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.guesses.guessing import guess_schema
from lightning_recsys.data.raw.tabular import TabularFormat
from lightning_recsys.data.raw.text import Position

GOOD = ['{"click": 1, "user": "a", "price": 1.5}', '{"click": 0, "user": "b", "price": 2}']
SCHEMA = {"label": "click", "dense": ["price"], "categorical": ["user"], "split": {"validation": 0, "test": 0}}


def frame(num_rows: int = 200) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "click": draw.integers(0, 2, num_rows),
            "user": [f"u{i}" for i in draw.integers(0, 30, num_rows)],
            "shop": draw.integers(0, 20, num_rows),
            "price": [None if x < 0.1 else round(x, 3) for x in draw.random(num_rows)],
            "tags": [[f"t{i}" for i in draw.integers(0, 9, n)] for n in draw.integers(0, 4, num_rows)],
        }
    )


def write_stream(table: pa.Table, path: Path) -> None:
    with ipc.new_stream(path, table.schema) as file:
        file.write_table(table, max_chunksize=64)


def write_file(table: pa.Table, path: Path) -> None:
    with ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=64)


WRITERS = {
    "rows.parquet": lambda table, path: pq.write_table(table, path, row_group_size=64),
    "rows.arrow": write_file,
    "rows.ipc": write_stream,
    "rows.feather": lambda table, path: feather.write_feather(table, path, chunksize=64),
    "rows.orc": lambda table, path: orc.write_table(table, path),
}


def as_text(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(tags=rows["tags"].map("|".join))


def batch(files: object, root: Path, **change):
    schema = SCHEMA | {"files": files, "categorical": ["user", "shop"], "multi_valued": ["tags"]} | change
    data = TabularDataModule(schema=schema, root=root, cache=root / "cache")
    data.setup()
    rows = data.rows("train")
    return rows.take(torch.arange(len(rows)))


def assert_equal_batches(one, other) -> None:
    assert one.sparse.keys == other.sparse.keys
    assert one.labels.tolist() == other.labels.tolist()
    assert one.dense.tolist() == other.dense.tolist()
    assert one.sparse.values.tolist() == other.sparse.values.tolist()
    assert one.sparse.bag_offsets().tolist() == other.sparse.bag_offsets().tolist()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.json", "rows.jsonl.gz", "rows.json.gz"])
def test_json_lines_when_read_then_make_the_batches_of_the_same_rows_as_text(tmp_path, name):
    rows = frame()
    as_text(rows).to_csv(tmp_path / "rows.csv", index=False)
    rows.to_json(tmp_path / name, orient="records", lines=True)
    assert_equal_batches(batch(name, tmp_path), batch("rows.csv", tmp_path))


def test_json_lines_when_guessed_then_the_schema_is_that_of_the_same_rows_as_text(tmp_path):
    rows = frame()
    as_text(rows).to_csv(tmp_path / "rows.csv", index=False)
    rows.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    rows.to_json(tmp_path / "rows.txt", orient="records", lines=True)
    text, found, renamed = (guess_schema(tmp_path / name) for name in ("rows.csv", "rows.jsonl", "rows.txt"))
    assert renamed.table.format == "json"
    for guess in (found, renamed):
        assert (guess.label, guess.num_rows) == (text.label, len(rows))
        assert set(guess.categorical) == set(text.categorical)
        assert set(guess.dense) == set(text.dense)
        assert set(guess.multi_valued) == set(text.multi_valued) == {"tags"}
        TabularDataModule(schema=guess, cache=tmp_path / "cache").setup()


def test_json_lines_when_objects_are_nested_then_their_members_are_columns(tmp_path):
    rows = frame()
    plain = as_text(rows).rename(columns={"user": "who.user", "shop": "who.at.shop"})
    plain.to_csv(tmp_path / "rows.csv", index=False)
    nested = [
        {"click": row.click, "who": {"user": row.user, "at": {"shop": row.shop}}, "tags": row.tags}
        | ({} if pd.isna(row.price) else {"price": row.price})  # a member that is not there is missing
        for row in rows.itertuples()
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, nested)))
    names = ["who.user", "who.at.shop"]
    assert_equal_batches(
        batch("rows.jsonl", tmp_path, categorical=names), batch("rows.csv", tmp_path, categorical=names)
    )


def test_json_lines_when_blocks_are_small_then_every_row_comes_once_with_its_number(tmp_path):
    rows = frame()
    lines = rows.to_json(orient="records", lines=True).strip().split("\n")
    (tmp_path / "rows.jsonl").write_text("\ufeff\n\n" + "\r\n\n".join(lines))
    schema = SCHEMA | {"files": "rows.jsonl"}
    raw = TabularFormat(schema=schema, root=tmp_path)
    (path,) = raw.files("train")
    blocks = list(raw.blocks(path, block_bytes=500, position=Position()))
    assert len(blocks) > 5
    numbers = [number for block in blocks for number in raw.parse_block(path, block).lines_N.tolist()]
    assert numbers == list(range(1, len(rows) + 1))
    again = list(raw.blocks(path, block_bytes=500, position=blocks[3].position))
    assert [block.position for block in again] == [block.position for block in blocks[3:]]
    assert [block.data for block in again] == [block.data for block in blocks[3:]]


BAD = {
    '{"click": 1, "user": "a"': r"rows\.jsonl, row 2 \(line 3\): must be a JSON object, but is no JSON \(Expecting",
    '{"click": 1, "user": "\\ud83d", "price": 1}': r"row 2 \(line 3\): must be text, and holds half a character",
    '{"click": 1, "user": "\udce9", "price": 1}': r"row 2 \(line 3\): must be in UTF-8 \(or name its encoding",
    "[1, 2]": r"row 2 \(line 3\): must be a JSON object, got '\[1, 2\]'",
    '{"click": 1, "user": {"id": 7}, "price": 1}': r"row 2 \(line 3\), column 'user': must be one value",
    '{"click": 1, "user": ["a"], "price": 1}': r"row 2 \(line 3\), column 'user': must be one value \(lists belong",
    '{"click": 1, "user": "a", "price": "old"}': r"row 2 \(line 3\), column 'price': must be a finite number .*'old'",
    '{"click": 2, "user": "a", "price": 1}': r"row 2 \(line 3\), column 'click': the label must be .* got '?2",
}


@pytest.mark.parametrize("line", BAD)
def test_json_lines_when_a_row_is_bad_then_it_is_told_or_counted(tmp_path, line):
    text = "\n".join([GOOD[0], "", line, GOOD[1], ""])
    (tmp_path / "rows.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    schema = SCHEMA | {"files": "rows.jsonl"}
    with pytest.raises(ValueError, match=BAD[line]):
        TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache").setup()
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache", on_bad_row="skip")
    data.setup()
    assert data.rows_read == {str(tmp_path / "rows.jsonl"): {"rows": 3, "used": 2, "skipped": 1, "comments": 0}}
    assert len(data.rows("train")) == 2


def test_json_lines_when_numbers_are_large_or_characters_are_written_in_halves_then_are_kept(tmp_path):
    users = [str(2**53 + 1), "0.5", str(2**70), "0.00001", "\U0001f600", "1e300"]
    (tmp_path / "rows.csv").write_text("\n".join(["click,user", *(f"{i % 2},{x}" for i, x in enumerate(users))]))
    values = [2**53 + 1, 0.5, 2**70, 0.00001, "\U0001f600"]
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"click": i % 2, "user": x}) for i, x in enumerate([*values, "1e300"]))
    )
    schema = SCHEMA | {"dense": []}
    expected, found = (
        TabularDataModule(schema=schema | {"files": name}, root=tmp_path, cache=tmp_path / "cache")
        for name in ("rows.csv", "rows.jsonl")
    )
    expected.setup()
    found.load_state_dict(expected.state_dict())
    ids = [data.rows("train").take(torch.arange(6)).sparse.values.tolist() for data in (expected, found)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 6


def test_json_lines_when_predicted_then_the_rows_need_no_label(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(GOOD))
    with gzip.open(tmp_path / "new.jsonl.gz", "wt") as file:
        file.write('{"price": 3, "user": "b"}\n{"user": "c", "price": null}\n')
    schema = SCHEMA | {"files": {"train": "rows.jsonl", "predict": "new.jsonl.gz"}}
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    data.setup()
    assert data.rows("predict").take(torch.arange(2)).sparse.values.tolist() == [3, 0]
    assert [x for part in data.predicted_rows("user") for x in part.to_pylist()] == ["b", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"hello\n", "has no JSON object with members"),
        ('{"click": 1}\n'.encode("utf-16"), "UTF-16"),
        (b'{"click": 1, "user": "a"}\n', "'price', which is not in"),
        (b'{"click": 1, "user": "a", "a": {"b": 1}, "a.b": 2, "price": 1}\n', "has column 'a.b' more than once"),
    ],
)
def test_json_lines_when_the_file_is_no_such_file_then_says_so(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TabularDataModule(schema=SCHEMA | {"files": "rows.jsonl"}, root=tmp_path, cache=tmp_path / "cache").setup()


# --- Typed columns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("packed", [False, True])
def test_typed_columns_when_read_then_make_the_batches_of_the_same_rows_as_text(tmp_path, name, packed):
    rows = frame()
    as_text(rows).to_csv(tmp_path / "rows.csv", index=False)
    WRITERS[name](pa.Table.from_pandas(rows, preserve_index=False), tmp_path / name)
    found = name
    if packed:
        found = f"rows.zip/{name}"
        with zipfile.ZipFile(tmp_path / "rows.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(tmp_path / name, name)
    assert_equal_batches(batch(found, tmp_path), batch("rows.csv", tmp_path))


@pytest.mark.parametrize("name", [*WRITERS, "rows.jsonl"])
def test_structures_when_read_then_their_fields_are_columns(tmp_path, name):
    rows = frame()
    plain = as_text(rows).rename(columns={"user": "who.user", "shop": "who.at.shop", "tags": "who.tags"})
    plain.loc[5, ["who.user", "who.tags"]] = None
    plain.loc[5, "who.at.shop"] = None
    plain.astype({"who.at.shop": "Int64"}).to_csv(tmp_path / "rows.csv", index=False)
    nested = [
        {
            "click": row.click,
            "who": {"user": row.user, "at": {"shop": row.shop}, "tags": row.tags} if row.Index != 5 else None,
            "price": None if pd.isna(row.price) else row.price,
        }
        for row in rows.itertuples()
    ]
    if name == "rows.jsonl":
        (tmp_path / name).write_text("\n".join(map(json.dumps, nested)))
    else:
        WRITERS[name](pa.Table.from_pylist(nested), tmp_path / name)
    columns = {"categorical": ["who.user", "who.at.shop"], "multi_valued": ["who.tags"]}
    assert_equal_batches(batch(name, tmp_path, **columns), batch("rows.csv", tmp_path, **columns))


@pytest.mark.parametrize("name", WRITERS)
def test_typed_columns_when_guessed_then_the_schema_is_that_of_the_same_rows_as_text(tmp_path, name):
    rows = frame()
    as_text(rows).to_csv(tmp_path / "rows.csv", index=False)
    WRITERS[name](pa.Table.from_pandas(rows, preserve_index=False), tmp_path / name)
    text, guess = guess_schema(tmp_path / "rows.csv"), guess_schema(tmp_path / name)
    assert guess.label == text.label
    assert guess.num_rows == pytest.approx(len(rows), rel=0.05)  # of a stream, by its size
    assert set(guess.categorical) == set(text.categorical)
    assert set(guess.dense) == set(text.dense)
    assert set(guess.multi_valued) == set(text.multi_valued)


@pytest.mark.parametrize("name", WRITERS)
def test_typed_columns_when_read_from_the_middle_then_the_same_blocks_follow(tmp_path, name):
    rows = frame()
    WRITERS[name](pa.Table.from_pandas(rows, preserve_index=False), tmp_path / name)
    raw = TabularFormat(schema=SCHEMA | {"files": name}, root=tmp_path)
    (path,) = raw.files("train")
    blocks = list(raw.blocks(path, block_bytes=64 * 50, position=Position()))
    assert [block.position.row for block in blocks][:2] == [1, 51]
    assert len(blocks) >= 4
    sizes = [block.consumed for block in blocks]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= path.stat().st_size
    again = list(raw.blocks(path, block_bytes=64 * 50, position=blocks[2].position))
    assert [block.position for block in again] == [block.position for block in blocks[2:]]
    assert all(one.data.equals(other.data) for one, other in zip(again, blocks[2:], strict=True))


@pytest.mark.parametrize("name", WRITERS)
def test_typed_columns_when_a_row_is_bad_then_it_is_counted(tmp_path, name):
    rows = frame().assign(price=lambda table: table["price"].fillna(1.0))
    rows.loc[70, "price"] = np.inf
    WRITERS[name](pa.Table.from_pandas(rows, preserve_index=False), tmp_path / name)
    schema = SCHEMA | {"files": name}
    with pytest.raises(ValueError, match=rf"{name}, row 71, column 'price': must be a finite number"):
        TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache").setup()
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache", on_bad_row="skip")
    data.setup()
    assert data.rows_read[str(tmp_path / name)] == {"rows": 200, "used": 199, "skipped": 1, "comments": 0}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("cut", [0, 0.5])
def test_typed_columns_when_the_file_is_cut_off_or_text_then_is_an_error_that_names_it(tmp_path, name, cut):
    WRITERS[name](pa.Table.from_pandas(frame(), preserve_index=False), tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(cut * len(whole))] or b"click,user,price\n1,a,2\n")
    with pytest.raises(ValueError, match=rf"{name}(, after row \d+: the file is damaged| is no \w+ file, or not all)"):
        TabularDataModule(schema=SCHEMA | {"files": name}, root=tmp_path, cache=tmp_path / "cache").setup()


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.orc"])
def test_typed_columns_when_they_are_called_text_then_the_error_says_what_they_are(tmp_path, name):
    WRITERS[name](pa.Table.from_pandas(frame(), preserve_index=False), tmp_path / "rows.csv")
    kind = name.partition(".")[2]
    for read in (
        lambda: guess_schema(tmp_path / "rows.csv"),
        lambda: TabularDataModule(schema=SCHEMA | {"files": "rows.csv"}, root=tmp_path).setup(),
    ):
        with pytest.raises(ValueError, match=rf"is an? \w+ file\. Name it \.{kind}, or write format: {kind}"):
            read()
    assert len(batch({"train": {"path": "rows.csv", "format": kind}}, tmp_path)) == 200


@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(),
        pa.large_string(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.run_end_encoded(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_arrow_when_words_are_stored_in_another_way_then_they_are_the_same(tmp_path, kind):
    words = ["a", "a", None, "b"]
    is_coded = pa.types.is_run_end_encoded(kind)
    stored = pa.compute.run_end_encode(pa.array(words)) if is_coded else pa.array(words, kind)
    items = pa.array([["x"], ["y", "x"], [], None], pa.list_view(pa.string_view()))
    table = pa.table({"click": [0, 1, 0, 1], "user": stored, "tags": items, "price": [1.0] * 4})
    write_file(table, tmp_path / "rows.arrow")
    (tmp_path / "rows.csv").write_text("click,user,tags,price\n0,a,x,1\n1,a,y|x,1\n0,,,1\n1,b,,1\n")
    columns = {"categorical": ["user"]}
    assert_equal_batches(batch("rows.arrow", tmp_path, **columns), batch("rows.csv", tmp_path, **columns))
