"""Tables in archives, folders and patterns, each file written in its own way: read as if they lay there plainly."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import tarfile
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
import yaml

from lightning_recsys.data import Batch, Schema, TabularDataModule, guess_schema
from lightning_recsys.data.files import ByteSource, InputFile, check_md5, find_files, members
from lightning_recsys.data.guesses import sniffing
from lightning_recsys.data.raw import Position, TabularFormat
from lightning_recsys.data.raw.text import text_blocks
from lightning_recsys.serving.encoders import SchemaEncoder, encoder_from, encoder_of

HEADER = "click,age,user"
ROWS = [f"{i % 2},{i},u{i % 3}" for i in range(40)]
SCHEMA = {"label": "click", "dense": ["age"], "categorical": ["user"], "split": {"validation": 0, "test": 0}}


def csv(rows: list[str], header: str | None = HEADER) -> bytes:
    return "".join(f"{line}\n" for line in ([] if header is None else [header]) + rows).encode()


def parquet_bytes(columns: Mapping[str, object]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.table(columns), sink, row_group_size=10)
    return sink.getvalue()


def pack(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write an archive, a folder or a file, by the name."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, content in files.items():
                zipped.writestr(name, content)
    elif ".tar" in path.suffixes or path.suffix == ".tgz":
        with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    else:
        path.mkdir()
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    return path


def ages(folder: Path, files: object, *, of: str = "train", **change: object) -> list[float]:
    """The ages of all rows of a split."""
    dense = {"age": {"standardize": False}}
    data = TabularDataModule(schema={**SCHEMA, "files": files, "dense": dense, **change}, root=folder)
    data.prepare_data()
    data.setup()
    return all_rows(data, of).dense.flatten().tolist()


def all_rows(data: TabularDataModule, split: str = "train") -> Batch:
    rows = data.rows(split)
    return rows.take(torch.arange(len(rows)))


PARTS = {
    "c.csv": csv(ROWS[30:]),
    "b/one/b.csv": csv(ROWS[20:30]),
    "b/one/_SUCCESS": b"",
    "b/_temporary/0/b.csv": csv(ROWS),
    "a.csv": csv(ROWS[:20]),
    "__MACOSX/._a.csv": b"\0\1junk",
    ".DS_Store": b"\0",
    "_SUCCESS": b"",
}


@pytest.mark.parametrize("name", ["rows.zip", "rows.tar.gz", "rows.tgz", "rows.tar", "rows"])
def test_rows_when_files_lie_in_an_archive_or_folder_then_are_those_of_the_files(tmp_path, name):
    pack(tmp_path / name, PARTS)
    assert sorted(ages(tmp_path, name)) == list(map(float, range(40)))
    for pattern in (name, *([f"{name}/*", f"{name}/**"] if name == "rows" else [])):
        files = find_files(pattern, root=tmp_path)
        inside = [path.relative_to(tmp_path / name).as_posix() for path in files]
        assert inside == ["a.csv", "b/one/b.csv", "c.csv"]


def test_folder_when_something_in_it_cannot_be_read_then_is_refused(tmp_path):
    folder = pack(tmp_path / "rows", {"a.csv": csv(ROWS), "deep/b.csv": csv(ROWS)})
    (folder / "deep/around").symlink_to(folder)
    with pytest.raises(
        ValueError, match=r"rows/deep/around leads back to a folder that it is in\. Folders are read whole"
    ):
        find_files(folder)
    (folder / "deep/around").unlink()
    for goal in (tmp_path / "nowhere.csv", folder / "deep/gone.csv"):  # the latter is the link itself
        (folder / "deep/gone.csv").symlink_to(goal)
        for named in (folder, folder / "deep/gone.csv"):
            with pytest.raises(ValueError, match=r"deep/gone\.csv is no file, or a link that leads nowhere"):
                find_files(named)
        (folder / "deep/gone.csv").unlink()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("rows/*.csv", ["_2024.csv", "a.csv"]),
        ("rows/[_a]*.csv", ["_2024.csv", "a.csv"]),
        ("rows/**/*.csv", ["_2024.csv", "a.csv", "deep/_b.csv"]),
        ("r*/_tmp/*.csv", ["_tmp/c.csv"]),
        ("rows/*", ["a.csv"]),
        ("rows", ["a.csv"]),
    ],
)
def test_file_that_begins_with_an_underscore_when_a_pattern_matches_its_name_then_is_read(tmp_path, pattern, expected):
    """What programs leave is left out of folders, and a folder of such a name wherever a pattern looks."""
    files = ["_2024.csv", "a.csv", "deep/_b.csv", "_tmp/c.csv", "_SUCCESS"]
    folder = pack(tmp_path / "rows", dict.fromkeys(files, csv(ROWS)))
    found = [path.relative_to(folder).as_posix() for path in find_files(pattern, root=tmp_path)]
    assert found == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("rows.zip/a.csv", range(20)),
        ("rows.zip/[bc]*", range(20, 40)),
        ("*.zip/a.csv", range(20)),
        ("*.zip", range(40)),
        (["rows.zip/c.csv", "rows.zip/b/*", "rows.zip/a.csv"], range(40)),
        ({"train": "rows.zip/a.csv", "test": "rows.zip/c.csv"}, range(20)),
    ],
)
def test_rows_when_a_file_of_an_archive_is_named_then_are_its_own(tmp_path, files, expected):
    pack(tmp_path / "rows.zip", PARTS)
    assert sorted(ages(tmp_path, files)) == list(expected)


@pytest.mark.parametrize("name", ["rows.zip", "rows.tar.gz"])
@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("rows.csv.gz", gzip.compress(csv(ROWS))),
        ("deep/er/rows.csv.bz2", bz2.compress(csv(ROWS))),
        ("rows.parquet", parquet_bytes({"click": [i % 2 for i in range(40)], "age": range(40), "user": ["u"] * 40})),
    ],
)
def test_rows_when_files_in_an_archive_are_compressed_or_parquet_then_are_read(tmp_path, name, member, content):
    pack(tmp_path / name, {member: content})
    assert sorted(ages(tmp_path, name)) == list(map(float, range(40)))


def test_blocks_when_in_an_archive_then_can_be_read_again_from_any_on(tmp_path):
    path = pack(tmp_path / "rows.zip", PARTS) / "a.csv"
    blocks = list(text_blocks(path, block_bytes=50))
    assert b"".join(block.data for block in blocks) == PARTS["a.csv"]
    assert blocks[-1].consumed == InputFile.of(path).bytes == len(PARTS["a.csv"])
    again = text_blocks(path, block_bytes=50, position=blocks[2].position)
    assert next(iter(again)) == blocks[2]
    table = TabularFormat(schema={**SCHEMA, "files": "rows.zip/a.csv"}, root=tmp_path)
    whole = list(table.blocks(path, block_bytes=64, position=Position()))
    assert [x.data for x in table.blocks(path, block_bytes=64, position=whole[1].position)] == [
        x.data for x in whole[1:]
    ]


@pytest.mark.parametrize("name", ["rows.zip", "rows.tar.gz"])
def test_archive_when_large_then_is_not_unpacked_into_memory(tmp_path, name):
    content = csv(ROWS * 40_000)
    path = pack(tmp_path / name, {"rows.csv": content}) / "rows.csv"
    table = TabularFormat(schema={**SCHEMA, "files": name}, root=tmp_path)
    tracemalloc.start()
    try:
        length = sum(len(block.data) for block in table.blocks(path, block_bytes=1 << 18, position=Position()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert length == len(content) - len(HEADER) - 1 > 10_000_000
    assert peak < 5_000_000


@pytest.mark.parametrize("name", ["rows.zip", "rows.tar.gz", "rows.csv.gz"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_archive_when_it_is_cut_off_then_says_so_and_which(tmp_path, name, share):
    path = tmp_path / name
    content = csv([f"{i % 2},{i * 7919 % 10007},u" for i in range(3000)])
    _ = path.write_bytes(gzip.compress(content)) if name == "rows.csv.gz" else pack(path, {"rows.csv": content})
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ValueError, match=rf"{name}.*(cut off|damaged)"):
        ages(tmp_path, name)


def test_archive_when_a_file_in_it_is_damaged_then_says_which(tmp_path):
    path = pack(tmp_path / "rows.zip", {"rows.csv": csv([f"{i % 2},{i * 7919 % 10007},u" for i in range(3000)])})
    content = bytearray(path.read_bytes())
    content[5000:5010] = bytes(10)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.zip/rows\.csv.* damaged"):
        ages(tmp_path, "rows.zip")


def tar_of(path: Path, *files: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_archive_when_a_file_stands_twice_then_the_last_is_read(tmp_path):
    tar_of(tmp_path / "x.tar", ("a.csv", csv(ROWS[:9])), ("./a.csv", csv(ROWS[5:8])))
    assert ages(tmp_path, "x.tar") == [5.0, 6.0, 7.0]


def test_archive_when_names_start_at_the_root_then_what_lies_on_the_disk_is_not_read(tmp_path):
    disk = tmp_path / "a.csv"
    disk.write_bytes(csv(ROWS[:2]))
    tar_of(tmp_path / "x.tar", (str(disk), csv(ROWS[5:8])))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as zipped:
        zipped.writestr(str(disk), csv(ROWS[5:8]))
    assert ages(tmp_path, "x.tar") == ages(tmp_path, "x.zip") == [5.0, 6.0, 7.0]


def test_archive_when_a_file_lies_outside_of_it_then_is_refused(tmp_path):
    tar_of(tmp_path / "x.tar", ("b/../../a.csv", csv(ROWS)))
    with pytest.raises(ValueError, match=r"x\.tar holds 'b/\.\./\.\./a\.csv', which lies outside"):
        ages(tmp_path, "x.tar")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("empty.zip", r"schema\.files\.train: there is no file .*empty\.zip"),
        ("rows.zip/d.csv", r"there is no file .*rows\.zip/d\.csv"),
        (
            "none",
            r"there is no file .*none\. Relative paths start from data\.root, which is .*It may be a file, a folder",
        ),
        ("day_*.csv", r"there is no file .*day_\*\.csv"),
        ("hollow", r"there is no file .*hollow"),
        ("nested.zip", r"nested\.zip/old/days\.tar\.gz is an archive inside an archive.*Unpack .*nested\.zip and"),
        ("nested.zip/old/*", r"train: .*days\.tar\.gz is an archive inside"),
        (["rows.zip", "rows.zip/a.csv"], r"names .*rows\.zip/a\.csv twice"),
    ],
)
def test_files_when_nothing_is_there_then_says_what_was_looked_for(tmp_path, files, message):
    pack(tmp_path / "rows.zip", PARTS)
    pack(tmp_path / "empty.zip", {})
    pack(tmp_path / "nested.zip", {"a.csv": csv(ROWS), "old/days.tar.gz": b"packed"})
    (tmp_path / "hollow").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ages(tmp_path, files)


def test_rows_when_a_file_in_an_archive_changes_then_are_prepared_anew(tmp_path):
    pack(tmp_path / "rows.zip", PARTS)
    assert len(ages(tmp_path, "rows.zip")) == 40
    pack(tmp_path / "rows.zip", {**PARTS, "d.csv": csv(["1,7,u"])})
    assert len(ages(tmp_path, "rows.zip")) == 41
    assert list(members(tmp_path / "rows.zip")) == ["a.csv", "b/one/b.csv", "c.csv", "d.csv"]


def test_side_table_when_in_an_archive_then_is_read_and_must_be_one(tmp_path):
    (tmp_path / "rows.csv").write_bytes(csv(ROWS))
    pack(tmp_path / "sides.zip", {"users.csv": b"id,score\nu0,5\nu1,6\nu2,7\n", "x.csv": b""})
    join = {"file": "sides.zip/users.csv", "column": "user", "key": "id"}
    dense = {"score": {"standardize": False}}
    assert set(ages(tmp_path, "rows.csv", joins=[join], dense=dense)) == {5.0, 6.0, 7.0}
    with pytest.raises(ValueError, match=r"schema\.joins\[0\]\.file must name one file, got sides\.zip, which names"):
        ages(tmp_path, "rows.csv", joins=[join | {"file": "sides.zip"}])


# --- each file written in its own way --------------------------------------------------------------------------------


def test_files_when_each_is_written_in_its_own_way_then_are_read_so(tmp_path):
    (tmp_path / "train.csv").write_bytes(csv(ROWS))
    (tmp_path / "test.csv").write_bytes(csv(["u1;0;1,5", "u9;1;2,5"], header=None))
    (tmp_path / "more.csv").write_bytes(csv(["1|7|u"], header="click|age|user"))
    test = {"path": "test.csv", "separator": ";", "decimal": ",", "column_names": ["user", "click", "age"]}
    files = {"train": ["train.csv", {"path": "more.csv", "separator": "|"}], "test": test}
    change = {"split": {"validation": 0}}
    assert sorted(ages(tmp_path, files, of="test", **change)) == [1.5, 2.5]
    assert sorted(ages(tmp_path, files, **change)) == sorted([*map(float, range(40)), 7.0])
    schema = Schema.from_dict({**SCHEMA, **change, "files": files})
    (tmp_path / "schema.yaml").write_text(schema.to_yaml())
    assert Schema.from_yaml(tmp_path / "schema.yaml") == schema


NA_FILE = {"path": "train.csv", "missing": ["", "NA"]}


def users(schema: Schema, root: Path, path: Path) -> list[bytes | None]:
    """The users of a file that the schema need not name."""
    raw_format = TabularFormat(schema=schema, root=root)
    (block,) = raw_format.blocks(path, block_bytes=1 << 20, position=Position())
    return raw_format.parse_block(path, block).categories["user"].to_pylist()


@pytest.mark.parametrize("name", ["train.csv", "new.csv"])
def test_files_when_named_by_another_path_or_not_at_all_then_are_read_as_those_of_training(tmp_path, name):
    for file in ("train.csv", "new.csv"):
        (tmp_path / file).write_bytes(csv(["0,1,NA", "1,2,u"]))
    (tmp_path / "link").symlink_to(tmp_path)
    schema = Schema.from_dict({**SCHEMA, "files": NA_FILE})
    assert users(schema, tmp_path, tmp_path / "link" / name) == [None, b"u"]
    named = Schema.from_dict({**SCHEMA, "files": {"train": NA_FILE, "predict": str(tmp_path / "link" / name)}})
    raw_format = TabularFormat(schema=named, root=tmp_path, labelled=False)
    assert [raw_format.format_of(path).missing for path in raw_format.files("predict")] == [("", "NA")]


def test_files_when_those_of_training_are_written_in_several_ways_then_others_must_say_how_they_are(tmp_path):
    for file in ("train.csv", "b.csv", "new.csv"):
        (tmp_path / file).write_bytes(csv(["0,1,NA", "1,2,u"]))
    schema = Schema.from_dict({**SCHEMA, "files": {"train": [NA_FILE, "b.csv"]}})
    assert users(schema, tmp_path, tmp_path / "b.csv") == [b"NA", b"u"]
    assert users(schema, tmp_path, tmp_path / "train.csv") == [None, b"u"]
    with pytest.raises(ValueError, match=r"new\.csv: the files of training are written in several ways"):
        users(schema, tmp_path, tmp_path / "new.csv")


def test_requests_when_the_file_of_training_has_its_own_words_for_missing_then_so_have_they(tmp_path):
    (tmp_path / "train.csv").write_bytes(csv(["0,1,NA", "1,2,u", "1,2,v"]))
    data = TabularDataModule(schema={**SCHEMA, "files": NA_FILE}, root=tmp_path)
    encoder = encoder_of(data, {}, 1)
    for known in (encoder, encoder_from(*encoder.to_files())):
        _, sparse = known.encode([{"age": 1, "user": user} for user in (None, "NA", "u", "new")])
        missing, words, u, unknown = sparse.values.tolist()
        assert missing == words
        assert len({missing, u, unknown}) == 3
    both = Schema.from_dict({**SCHEMA, "files": {"train": [NA_FILE, "b.csv"]}})
    with pytest.raises(ValueError, match=r"requests: the files of training.* Write those in one way"):
        SchemaEncoder(both, data.encoding)


def test_files_when_the_format_of_one_changes_then_its_rows_are_prepared_anew(tmp_path):
    (tmp_path / "train.csv").write_bytes(csv(ROWS))
    (tmp_path / "test.csv").write_bytes(csv(["0;1,500;u1", "1;2,500;u1"], "click;age;user"))
    change = {"split": {"validation": 0}}
    test = {"path": "test.csv", "separator": ";"}
    found = [
        sorted(ages(tmp_path, {"train": "train.csv", "test": test | marks}, of="test", **change))
        for marks in ({"decimal": ","}, {"thousands": ","})
    ]
    assert found == [[1.5, 2.5], [1500.0, 2500.0]]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "a.csv", "seperator": ";"}, r"schema\.files\.train.*seperator.*[Dd]id you mean 'separator'"),
        ({"separator": ";"}, r"schema\.files\.train\.path"),
        ({"path": "a.csv", "encoding": "klingon"}, r"schema\.files, a\.csv\.encoding 'klingon' is unknown"),
        (5, r"schema\.files\.train must be"),
    ],
)
def test_files_when_the_format_of_one_is_wrong_then_names_the_key(entry, message):
    with pytest.raises(ValueError, match=message):
        Schema.from_dict({**SCHEMA, "files": {"train": [entry]}})


def test_files_when_the_first_rows_of_the_test_are_bad_then_an_error_before_training(tmp_path):
    (tmp_path / "train.csv").write_bytes(csv(ROWS))
    (tmp_path / "test.csv").write_bytes(csv(["1,old,u1"]))
    with pytest.raises(ValueError, match=r"test\.csv, row 1 \(line 2\), column 'age': must be a finite number.*'old'"):
        ages(tmp_path, {"train": "train.csv", "test": "test.csv"}, split={"validation": 0})


# --- Parquet ---------------------------------------------------------------------------------------------------------

NESTED = {
    "click": pa.array([i % 2 for i in range(20)]),
    "who": pa.array([None if i == 7 else {"id": i % 4, "home": {"zip": f"z{i % 2}", "lat": i / 2}} for i in range(20)]),
    "seen": pa.array([[{"item": 1}]] * 20),
    "tags": pa.array([["a", "b"][: i % 3] for i in range(20)]),
    "one": pa.array([[i % 3] for i in range(20)]),
    "vector": pa.array([[0.5, i] for i in range(20)], pa.list_(pa.float32(), 2)),
    "options": pa.array([[("k", 1)]] * 20, pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("place", ["rows.parquet", "rows.zip"])
def test_parquet_when_it_has_structures_then_their_fields_are_columns(tmp_path, place):
    content = parquet_bytes(NESTED)
    _ = pack(tmp_path / place, {"x.parquet": content}) if place[-1] == "p" else (tmp_path / place).write_bytes(content)
    data = TabularDataModule(
        schema={
            "files": place,
            "label": "click",
            "dense": {"who.home.lat": {"standardize": False, "fill": -1}},
            "categorical": ["who.id", "who.home.zip"],
            "multi_valued": ["tags", "one", "vector"],
            "split": {"validation": 0, "test": 0},
        },
        root=tmp_path,
    )
    data.setup()
    assert sorted(all_rows(data).dense.flatten().tolist()) == sorted([-1.0, *(i / 2 for i in range(20) if i != 7)])
    assert data.fields == {"who_id": 6, "who_home_zip": 4, "tags": 4, "one": 5, "vector": 2 + 21}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multi_valued": ["seen"]}, r"column 'seen' has type list<.*struct.*lists of lists or structures, and maps"),
        ({"categorical": ["options"]}, r"column 'options' has type map<"),
        ({"categorical": ["tags"]}, r"column 'tags' has type list<.*belong under multi_valued"),
        ({"categorical": ["who"]}, r"names column 'who', which is not in .*Did you mean 'who\.id'"),
    ],
)
def test_parquet_when_a_column_cannot_be_read_then_says_so(tmp_path, change, message):
    (tmp_path / "rows.parquet").write_bytes(parquet_bytes(NESTED))
    with pytest.raises(ValueError, match=message):
        ages(tmp_path, "rows.parquet", **{"dense": [], "categorical": [], **change})


def test_parquet_when_ids_are_floats_then_are_those_of_whole_numbers(tmp_path):
    ids = [3, 10**16, 20_000_000]
    (tmp_path / "train.parquet").write_bytes(parquet_bytes({"click": [0, 1, 1], "age": [1, 2, 3], "user": ids}))
    floats = pa.array([3.0, 1e16, None, 2e7])
    (tmp_path / "test.parquet").write_bytes(parquet_bytes({"click": [0, 1] * 2, "age": [1.0] * 4, "user": floats}))
    data = TabularDataModule(
        schema={**SCHEMA, "files": {"train": "train.parquet", "test": "test.parquet"}, "split": {"validation": 0}},
        root=tmp_path,
    )
    data.setup()
    assert data.unknown_ids("test") == {"user": 0.0}


# --- the guess -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.zip", "rows.tar.gz", "rows", "rows/**/*.csv"])
def test_guess_when_files_lie_in_an_archive_or_folder_then_the_schema_names_it(tmp_path, name):
    pack(tmp_path / name.removesuffix("/**/*.csv"), PARTS)
    schema = guess_schema(tmp_path / name)
    assert schema.files == {"train": (str(tmp_path / name),)}
    assert (set(schema.dense), set(schema.categorical)) == ({"age"}, {"user"})
    data = TabularDataModule(schema=schema)
    data.setup()
    assert sum(len(data.rows(split)) for split in ("train", "validation", "test")) == 40


def test_guess_when_an_archive_holds_several_tables_then_asks_for_one(tmp_path):
    pack(tmp_path / "kaggle.zip", {"test.csv": csv(["1,u"], "age,user"), "train.csv": csv(ROWS)})
    with pytest.raises(ValueError, match=r"test\.csv has the columns age, user, but .*train\.csv has click, age, user"):
        guess_schema(tmp_path / "kaggle.zip")
    assert guess_schema(tmp_path / "kaggle.zip/train.csv").label.column == "click"


def test_guess_when_parquet_is_nested_then_takes_what_can_be_read(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(parquet_bytes(NESTED))
    schema = guess_schema(tmp_path / "rows.parquet")
    assert set(schema.categorical) == {"who.id", "who.home.zip"}
    assert set(schema.multi_valued) == {"tags", "one"}
    assert {name: vector.width for name, vector in schema.vectors.items()} == {"vector": 2}
    assert set(schema.ignore) >= {"seen", "options"}
    assert "cannot be read" in schema.comments["seen"]
    data = TabularDataModule(schema=schema)
    data.setup()


def test_guess_when_there_is_a_header_alone_then_says_so(tmp_path):
    (tmp_path / "rows.csv").write_text("click,age,user\n")
    with pytest.raises(ValueError, match=r"rows\.csv has a header and no rows"):
        guess_schema(tmp_path / "rows.csv")


def guess_dates(folder: Path, days: list[str], **options: object) -> Schema:
    rows = [f"{i % 2},u{i % 3},{day}" for i, day in enumerate(days)]
    (folder / "rows.csv").write_bytes(csv(rows, "click,user,day"))
    return guess_schema(folder / "rows.csv", **options)


@pytest.mark.parametrize(
    ("form", "order"),
    [
        ("{d:02}/{m:02}/2026", "day_first"),
        ("{m}/{d}/2026 {m}:05 PM", "month_first"),
        ("{d:02}-{m:02}-2026", "day_first"),
    ],
)
def test_guess_when_some_dates_tell_the_order_then_all_are_read_so(tmp_path, form, order):
    schema = guess_dates(tmp_path, [form.format(d=1 + i % 28, m=1 + i % 12) for i in range(100)])
    assert (schema.time, schema.table.dates, schema.fitting["day"]) == ("day", order, 1.0)
    data = TabularDataModule(schema=schema)
    data.setup()


def test_guess_when_no_date_tells_the_order_then_asks_and_takes_the_answer(tmp_path):
    dates = [f"{1 + i % 12:02}/{1 + i % 7:02}/2026" for i in range(100)]
    with pytest.raises(ValueError, match=r"'day': does '01/01/2026' start with the day or with the month\?.*dates=day"):
        guess_dates(tmp_path, dates)
    assert guess_dates(tmp_path, dates, dates="month_first").table.dates == "month_first"


def test_guess_then_tells_the_share_of_values_that_are_what_they_are_taken_for(tmp_path):
    lines = [
        f"{i % 2},{'unknown' if i % 50 == 0 else i / 4},2026-01-{1 + i % 28:02}{'?' if i == 9 else ''},u{i % 3}"
        for i in range(200)
    ]
    (tmp_path / "rows.csv").write_bytes(csv(lines, "click,price,day,user"))
    schema = guess_schema(tmp_path / "rows.csv")
    assert (set(schema.dense), schema.time) == ({"price"}, "day")
    assert schema.fitting == {"click": 1.0, "price": 0.98, "day": 0.995}
    assert "unknown" in schema.table.missing
    assert "'unknown' taken for missing" in schema.comments["price"]


def test_guess_when_numbers_are_dates_then_the_schema_it_tells_of_reads_them_so(tmp_path):
    rows = [f"{i % 2},{20240101 + i % 28},u{i % 3}" for i in range(100)]
    (tmp_path / "rows.csv").write_bytes(csv(rows, "click,published,user"))
    schema = guess_schema(tmp_path / "rows.csv")
    assert (schema.time, schema.fitting.get("published", 1.0)) == ("published", 1.0)
    assert "dates as YYYYMMDD" in schema.comments["published"]
    told = yaml.safe_load(schema.comments["published"].partition("under categorical: ")[2])
    assert told == {"weekday": {"column": "published", "transform": "weekday", "unit": "yyyymmdd"}}
    data = TabularDataModule(schema=yaml.safe_load(schema.to_yaml()) | {"categorical": told})
    assert set(data.encoding.vocabularies["weekday"].to_pylist()) == set("0123456")


def test_rows_when_a_file_is_named_in_several_archives_then_are_of_all(tmp_path):
    pack(tmp_path / "day_1.zip", {"clicks.csv": csv(ROWS[:5])})
    pack(tmp_path / "day_2.zip", {"clicks.csv": csv(ROWS[5:9])})
    assert ages(tmp_path, "day_*.zip/clicks.csv") == list(range(9))


def test_rows_when_there_is_a_header_alone_without_the_end_of_its_line_then_says_in_which_file(tmp_path):
    (tmp_path / "x.csv").write_bytes(HEADER.encode())
    with pytest.raises(ValueError, match=r"x\.csv"):
        ages(tmp_path, "x.csv")


def test_times_when_they_are_finer_than_microseconds_then_are_read(tmp_path):
    columns = {"click": [1, 0], "age": [1, 2], "user": ["a", "b"]}
    when = pa.array([1_700_000_000_123_456_789, 1], pa.timestamp("ns"))
    parquet.write_table(pa.table({**columns, "when": when}), tmp_path / "x.parquet")
    assert ages(tmp_path, "x.parquet", time="when") == [1.0, 2.0]


def test_times_when_they_are_of_the_day_then_says_which_column(tmp_path):
    columns = {"click": [1, 0], "age": [1, 2], "user": ["a", "b"], "when": pa.array([1, 2], pa.time64("us"))}
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet, column 'when' has type time64"):
        ages(tmp_path, "x.parquet", time="when")


def test_parquet_when_a_page_is_damaged_then_says_which_file(tmp_path):
    rows = {"click": [1, 0] * 500, "age": list(range(1000)), "user": [f"u{i * 7919 % 1000}" for i in range(1000)]}
    parquet.write_table(pa.table(rows), tmp_path / "x.parquet", compression="zstd")
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    start = parquet.ParquetFile(tmp_path / "x.parquet").metadata.row_group(0).column(2).dictionary_page_offset
    content[start + 30 : start + 300] = b"\xff" * 270
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.parquet.*damaged"):
        ages(tmp_path, "x.parquet")


def test_source_when_what_is_skipped_is_damaged_then_says_so(tmp_path):
    path = pack(tmp_path / "x.zip", {"x.csv": csv([f"{i % 2},{i * 7919 % 10007},u" for i in range(3000)])})
    content = bytearray(path.read_bytes())
    content[5000:5010] = bytes(10)
    path.write_bytes(content)
    with ByteSource(path / "x.csv") as source, pytest.raises(OSError, match=r"CRC|decompressing"):
        source.skip(1 << 20)


def test_files_when_their_suffixes_are_in_capitals_then_are_read_as_in_small_letters(tmp_path):
    (tmp_path / "A.TSV.GZ").write_bytes(gzip.compress(csv(ROWS).replace(b",", b"\t")))
    (tmp_path / "B.PARQUET").write_bytes(parquet_bytes({"click": [0, 1], "age": [7, 8], "user": ["a", "b"]}))
    assert ages(tmp_path, "A.TSV.GZ") == list(range(40))
    assert ages(tmp_path, "B.PARQUET") == [7, 8]


def test_vectors_when_decimals_have_commas_then_are_split_elsewhere(tmp_path):
    (tmp_path / "x.csv").write_text("click|user|v\n0|a|1,5;-2\n1|b|[0,25 3]\n1|c|1,5, 4\n")
    change = {"separator": "|", "decimal": ",", "vectors": {"v": {"width": 2, "standardize": False}}, "dense": []}
    data = TabularDataModule(schema={**SCHEMA, **change, "files": "x.csv"}, root=tmp_path)
    data.setup()
    assert all_rows(data).dense.tolist() == [[1.5, -2.0], [0.25, 3.0], [1.5, 4.0]]


def test_checksums_when_files_lie_in_one_archive_then_it_is_read_once(tmp_path, monkeypatch):
    path = pack(tmp_path / "x.zip", {"a.csv": csv(ROWS[:3]), "b.csv": csv(ROWS[3:])})
    read: list[object] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: read.append(given) or digest(*given))
    with pytest.raises(ValueError, match=r"x\.zip is not the published file"):
        check_md5(find_files(path), {"x.zip": "0"})
    check_md5(find_files(path), {"x.zip": hashlib.md5(path.read_bytes()).hexdigest()})
    assert len(read) == 2


def test_guess_when_rows_of_parquet_are_large_then_looks_at_a_share_of_them(tmp_path, monkeypatch):
    rows = {"click": [0, 1] * 500, "user": [f"u{i % 7}" for i in range(1000)], "v": [[0.5] * 64] * 1000}
    (tmp_path / "x.parquet").write_bytes(parquet_bytes(rows))
    size = pa.table(rows).nbytes
    monkeypatch.setattr(sniffing, "_SAMPLE_BYTES", size // 4)
    sniffed = sniffing.sniff(tmp_path / "x.parquet")
    assert 200 <= len(sniffed.columns["v"]) <= 250
    assert sniffed.num_rows == 1000


@pytest.mark.parametrize(("sample_bytes", "sample_rows"), [(1 << 20, 10_000), (1 << 20, 300), (10_000, 10_000)])
@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_guess_when_it_has_seen_some_rows_then_tells_the_number_of_all(
    tmp_path, monkeypatch, name, sample_bytes, sample_rows
):
    monkeypatch.setattr(sniffing, "_SAMPLE_BYTES", sample_bytes)
    monkeypatch.setattr(sniffing, "_SAMPLE_ROWS", sample_rows)
    text = "click,user\n" + "".join(f"{i * 7 % 5 % 2},u{i * i % 101}\n" for i in range(3000))
    compress = gzip.compress if name.endswith(".gz") else bytes
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(compress(text.encode()))
    exact = 0 if sample_bytes > len(text) else 0.5 if name.endswith(".gz") else 0.02  # what is packed is read ahead
    assert guess_schema(tmp_path / "a" / name).num_rows == pytest.approx(3000, rel=exact)
    assert guess_schema([tmp_path / "a" / name, tmp_path / "b" / name]).num_rows == pytest.approx(6000, rel=exact)
