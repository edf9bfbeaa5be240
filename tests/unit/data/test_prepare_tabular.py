"""Tables that stream into shards by their schema: row by row what it says, as ``data=tabular`` prepares them too."""

from __future__ import annotations

import bz2
import csv
import gzip
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from table_oracle import Table, split_of

from lightning_recsys.data import Batch, PreparedDataModule, Schema, TabularDataModule
from lightning_recsys.data.preparation import BySchema, ByShare, ByTime, Preparation, Preprocessing, SchemaRules
from lightning_recsys.data.preparation.encoding import Encoding
from lightning_recsys.data.preparation.preprocessing import ColumnRules
from lightning_recsys.data.preparation.schema_split import smallest, sortable
from lightning_recsys.data.preparation.splits import SplitRule
from lightning_recsys.data.prepared import Manifest
from lightning_recsys.data.raw import CriteoFormat, Position, TabularFormat
from lightning_recsys.data.raw.kernels import find_records

HEADER = ["click", "when", "age", "price", "user", "city", "tags", "unused"]
SCHEMA = {
    "files": "rows.csv",
    "label": {"column": "click", "rule": ">= 4"},
    "missing": ["", "NA"],
    "dense": {"age": {"fill": -1}, "price": {"transform": "log"}, "visits": {"standardize": False}},
    "categorical": {"user": {"min_count": 2}, "city": {}, "country": {"hash_buckets": 5}},
    "multi_valued": {"tags": {"separator": "|"}, "likes": {"separator": " ", "hash_buckets": 7}},
    "time": "when",
    "joins": [{"file": "users.csv", "column": "user", "key": "id", "separator": ";"}],
    "split": {"validation": 0.2, "test": 0.1, "seed": 3},
}


def values(num_rows: int, *, seed: int = 0) -> list[list[str]]:
    """Rows with skewed, missing, quoted, several-lined and non-ASCII values."""
    rng = random.Random(seed)
    cities = ["Köln", 'the "big" one', "a, b", "two\nlines", "NA", "", " spaced "]

    def row(number: int) -> list[str]:
        return [
            str(rng.randrange(1, 6)),
            f"2026-01-{rng.randrange(1, 29):02}",
            rng.choice(["", "NA", str(rng.randrange(90))]),
            f"{rng.lognormvariate(3, 2):.4f}",
            rng.choice(["", f"u{int(rng.paretovariate(0.8))}", f"once{number}"]),
            rng.choice(cities),
            "|".join(rng.choice(["x", "y", "z", "NA"]) for _ in range(rng.randrange(4))),
            rng.choice(["", "5\u00d7"]),
        ]

    return [row(number) for number in range(num_rows)]


def quoted(row: list[str], *, separator: str = ",") -> str:
    special = (separator, '"', "\n")
    return separator.join(
        '"' + value.replace('"', '""') + '"' if any(x in value for x in special) else value for value in row
    )


def text(rows: list[list[str]], *, separator: str = ",") -> str:
    return "".join(f"{quoted(row, separator=separator)}\n" for row in rows)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "rows.csv").write_text(text([HEADER, *values(400)]))
    users = ["id;country;visits;likes", *(f"u{i};{'DE' if i % 3 else ''};{i * i};{'a b'[: i % 4]}" for i in range(9))]
    (tmp_path / "users.csv").write_text("".join(f"{line}\n" for line in users))
    return tmp_path


def prepare(
    folder: Path,
    schema: dict = SCHEMA,
    *,
    out: str = "out",
    files: list[Path] | None = None,
    split: SplitRule | None = None,
    preprocessing: ColumnRules | None = None,
    **options,
) -> Manifest:
    raw_format = TabularFormat(schema=schema, root=folder)
    return Preparation(
        folder / out,
        raw_format=raw_format,
        files=raw_format.files("train") if files is None else files,
        split=split or BySchema(raw_format),
        preprocessing=preprocessing or SchemaRules(),
        **{"shard_bytes": 2000, **options},
    ).run()


def whole(data, split: str) -> Batch | None:
    rows = data.rows(split)
    return None if rows is None else rows.take(torch.arange(len(rows)))


def rows_of(folder: Path, *, good: Callable[[dict[str, str]], bool] = lambda row: True) -> list[dict[str, str]]:
    """The good rows of rows.csv with the columns of users.csv, as the standard library reads them."""
    with (folder / "users.csv").open(newline="") as file:
        users = {row["id"]: row for row in csv.DictReader(file, delimiter=";")}
    nobody = dict.fromkeys(("country", "visits", "likes"), "")
    with (folder / "rows.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.DictReader(file) if good(row)]
    return [row | {name: users.get(row["user"], nobody)[name] for name in nobody} for row in rows]


def assert_same(
    folder: Path, schema: dict = SCHEMA, *, out: str | None = "out", rows=None, splits=None, **options
) -> None:
    """Every row of every split is what a scalar version of the schema makes of it.

    Args:
        folder: Where the files are.
        schema: The schema.
        out: Rows that were prepared; ``None`` for those of the data module that prepares by itself.
        rows: The rows, if not those of :func:`rows_of`.
        splits: The split of each.
        options: Of the data module.
    """
    rows = rows_of(folder) if rows is None else rows
    if splits is None:
        how = schema["split"]
        shares = {name: how.get(name, 0.1) for name in ("validation", "test")}
        splits = split_of(rows, **shares, seed=how.get("seed", 0), time="when" if how.get("by") == "time" else None)
    parts = [[row for row, part in zip(rows, splits, strict=True) if part == i] for i in range(3)]
    table = Table(schema, parts[0])
    data = PreparedDataModule(root=folder / out) if out else TabularDataModule(schema=schema, root=folder, **options)
    data.setup()
    assert data.fields == table.fields
    assert list(data.fields) == list(table.fields)
    assert data.num_dense == len(schema["dense"])
    for split, part in zip(("train", "validation", "test"), parts, strict=True):
        batch = whole(data, split)
        if batch is None:
            assert not part
            continue
        assert batch.labels.tolist() == [float(float(row["click"]) >= 4) for row in part]
        bags = [table.ids(name, row) for name in table.fields for row in part]
        assert batch.sparse.keys == tuple(table.fields)
        assert batch.sparse.bag_lengths().tolist() == list(map(len, bags))
        assert batch.sparse.values.tolist() == list(chain.from_iterable(bags))
        expected = [[table.dense(name, row) for name in schema["dense"]] for row in part]
        np.testing.assert_allclose(batch.dense.numpy(), np.array(expected), rtol=2e-6, atol=2e-6)  # float32


# --- row by row as the schema says ------------------------------------------------------------------------------------


def test_rows_when_prepared_then_are_what_the_schema_says_and_the_data_module_does_the_same_by_itself(folder):
    manifest = prepare(folder)
    assert len(manifest.splits["train"]) > 5
    assert_same(folder)
    assert_same(folder, out=None)
    assert manifest.details["skipped"] == {}
    assert sum(manifest.details["statistics"]["positives"].values()) == sum(int(x[0]) >= 4 for x in values(400))
    assert manifest.details["statistics"]["missing"]["city"] == sum(x[5] in ("", "NA") for x in values(400))
    names = {Path(file["path"]).name for file in manifest.details["inputs"]}
    assert names == {"rows.csv", "users.csv"}
    assert manifest.details["options"]["data"]["schema"]["label"] == {"column": "click", "rule": ">= 4"}


@pytest.mark.parametrize(
    "split",
    [
        {"validation": 0, "test": 0},
        {"validation": 0, "test": 0.3},
        {"validation": 0.5, "test": 0},
        {"by": "time", "validation": 0.1, "test": 0.2},
        {"by": "time", "validation": 0, "test": 0.5},
    ],
)
def test_split_when_the_schema_draws_or_holds_back_then_is_the_same_row_by_row(folder, split):
    schema = SCHEMA | {"split": split}
    prepare(folder, schema, num_threads=1)
    assert_same(folder, schema)
    assert_same(folder, schema, out=None)


def test_split_when_there_are_files_for_it_then_they_are_used(folder):
    for name, seed in (("train-1.csv", 1), ("train-2.csv", 2), ("test.csv", 3)):
        (folder / name).write_text(text([HEADER, *values(60 + seed, seed=seed)]))
    schema = SCHEMA | {"files": {"train": "train-*.csv", "test": "test.csv"}, "split": {"validation": 0.25}}
    manifest = prepare(folder, schema)
    assert sum(shard.rows for shard in manifest.splits["test"]) == 63
    parts = []
    for name in ("train-1.csv", "train-2.csv", "test.csv"):
        (folder / name).rename(folder / "rows.csv")
        parts.append(rows_of(folder))
        (folder / "rows.csv").rename(folder / name)
    drawn = split_of([*parts[0], *parts[1]], validation=0.25, test=0)
    rows, splits = list(chain(*parts)), [*drawn, *[2] * 63]
    assert_same(folder, schema, rows=rows, splits=splits)
    assert_same(folder, schema, rows=rows, splits=splits, out=None)


ROWS = [HEADER, *values(150)]
PLAIN = text(ROWS).encode()
VARIANTS = {
    "a.csv.gz": (gzip.compress(PLAIN), {}),
    "two_members.csv.gz": (gzip.compress(PLAIN[:5000]) + gzip.compress(PLAIN[5000:]), {}),
    "a.csv.bz2": (bz2.compress(PLAIN), {}),
    "latin.csv": (text(ROWS).encode("latin-1"), {"encoding": "latin-1"}),
    "utf16.csv": (text(ROWS).encode("utf-16"), {"encoding": "utf-16"}),
    "bom.csv": (b"\xef\xbb\xbf" + PLAIN, {}),
    "bare.csv": (b"\xef\xbb\xbf" + text(ROWS[1:]).encode(), {"column_names": HEADER}),
    "a.tsv": (text(ROWS, separator="\t").encode(), {}),
    "semicolon.csv": (text(ROWS, separator=";").encode(), {"separator": ";"}),
    "crlf.csv": (b"\r\n".join(quoted(row).encode() for row in ROWS), {}),
    "gaps.csv": (b"# remark\n\n# more\n" + b"\n\r\n\n".join(quoted(x).encode() for x in ROWS), {"comment": "#"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_file_when_compressed_encoded_or_separated_otherwise_then_rows_are_the_same(folder, name):
    content, change = VARIANTS[name]
    (folder / name).write_bytes(content)
    (folder / "rows.csv").write_bytes(PLAIN)
    schema = SCHEMA | {"files": name} | change
    prepare(folder, schema)
    assert_same(folder, schema)  # those of the plain file


def test_files_when_the_separator_is_long_then_rows_are_the_same(folder):
    rows = [[value.replace('"', "").replace("\n", " ") for value in row] for row in [HEADER, *values(300)]]
    (folder / "rows.csv").write_text(text(rows, separator=","))
    (folder / "rows.dat").write_text("".join("::".join(row) + "\n" for row in rows))
    schema = SCHEMA | {"files": "rows.dat", "separator": "::"}
    prepare(folder, schema)
    assert_same(folder, schema)


def test_files_when_their_columns_are_in_another_order_then_each_goes_by_its_own_header(folder):
    rows = [HEADER, *values(200)]
    (folder / "rows.csv").write_text(text(rows))
    (folder / "part-1.csv").write_text(text(rows[:100]))
    (folder / "part-2.csv").write_text(text([rows[0][::-1], *(row[::-1] for row in rows[100:])]))
    schema = SCHEMA | {"files": "part-*.csv"}
    prepare(folder, schema)
    assert_same(folder, schema)


@pytest.mark.parametrize("group", [40, 1000])
def test_parquet_when_streamed_then_rows_are_the_same(folder, group):
    table = {
        "click": pa.array([int(row[0]) for row in values(300)], pa.int8()),
        "when": pa.array([row[1] for row in values(300)]).cast(pa.timestamp("us")),
        "age": pa.array([int(row[2]) if row[2].isdigit() else None for row in values(300)]),
        "price": pa.array([float(row[3]) for row in values(300)]),
        "user": pa.array([row[4] or None for row in values(300)]).dictionary_encode(),
        "city": pa.array([row[5] for row in values(300)]),
        "tags": pa.array([row[6].split("|") for row in values(300)]),
    }
    pq.write_table(pa.table(table), folder / "rows.parquet", row_group_size=group)
    for split in ({"validation": 0.2}, {"by": "time"}):
        schema = SCHEMA | {"files": "rows.parquet", "split": split}
        prepare(folder, schema, out=f"out-{len(split)}-{split.get('by')}")
        (folder / "rows.csv").write_text(text([HEADER, *values(300)]))
        assert_same(folder, schema, out=f"out-{len(split)}-{split.get('by')}")


def test_split_when_the_rules_of_other_formats_are_asked_for_then_they_work_too(folder):
    days = np.array([np.datetime64(row[1]).astype("datetime64[s]").astype(int) for row in values(400)])
    start = int(np.datetime64("2026-01-20").astype("datetime64[s]").astype(int))
    manifest = prepare(folder, split=ByTime(start), out="time")
    assert sum(shard.rows for shard in manifest.splits["validation"]) == (days >= start).sum()
    manifest = prepare(folder, split=ByShare(0.5, 0), out="share")
    assert 140 < sum(shard.rows for shard in manifest.splits["validation"]) < 260  # 6 standard deviations
    with pytest.raises(ValueError, match="rows of data=tabular carry no time"):
        prepare(folder, SCHEMA | {"time": None}, split=ByTime(start), out="none")


def test_vocabulary_when_it_would_be_too_large_then_only_the_lowest_min_count_is_raised(folder):
    manifest = prepare(folder, preprocessing=SchemaRules(max_vocabulary=12))
    learned = manifest.details["learned"]
    assert learned["raised"]
    sizes = [
        len(pq.read_table(folder / "out" / feature.vocabulary))
        for feature in manifest.features.values()
        if feature.vocabulary
    ]
    assert 0 < sum(sizes) <= 12
    assert manifest.features["country"].num_embeddings == 6


# --- bad rows --------------------------------------------------------------------------------------------------------


def spoiled(folder: Path) -> list[str]:
    """Rows with every kind of mistake; what each is called."""
    rows = values(300)
    mistakes = {
        10: (
            0,
            "no number",
            "column 'click': the label must be a number, to be compared by the rule '>= 4', got 'no number'",
        ),
        120: (2, "old", "column 'age': must be a finite number"),
        121: (1, "soon", "column 'when': the time must be a number or ISO 8601"),
        250: (3, "inf", "column 'price': must be a finite number"),
    }
    lines, told, line_number = [], [], 2
    for number, row in enumerate(rows):
        if number in mistakes:
            column, value, message = mistakes[number]
            row = [*row[:column], value, *row[column + 1 :]]
            told.append(f"rows.csv, row {number + 1} (line {line_number}), {message}")
        if number == 77:
            row = row[:3]
            told.append(f"rows.csv, row 78 (line {line_number}): 8 columns expected, got 3: ")
        lines.append(quoted(row) + "\n")
        line_number += lines[-1].count("\n")
    (folder / "rows.csv").write_text(quoted(HEADER) + "\n" + "".join(lines))
    return sorted(told, key=lambda message: int(message.split("row ")[1].split()[0]))


def good(row: dict[str, str]) -> bool:
    """Whether a row of :func:`spoiled` makes sense."""
    return (
        None not in row.values()
        and row["click"].isdigit()
        and row["age"] != "old"
        and row["when"] != "soon"
        and (row["price"] != "inf")
    )


def test_bad_rows_when_skipped_then_the_rest_is_as_in_memory_and_they_are_named(folder):
    told = spoiled(folder)
    manifest = prepare(folder, on_bad_row="skip", shard_bytes=100_000)
    (skipped,) = manifest.details["skipped"].values()
    assert (skipped["good"], len(told)) == (295, 5)
    for (message, count), expected in zip(skipped["examples"].values(), told, strict=True):
        assert message.startswith(f"{folder}/{expected}")
        assert count == 1
    rows = rows_of(folder, good=good)
    assert_same(folder, rows=rows)
    small = prepare(folder, on_bad_row="skip", shard_bytes=700, out="small")
    assert small.details["skipped"] == manifest.details["skipped"]
    assert_same(folder, rows=rows, out="small")
    assert_same(folder, rows=rows, out=None, on_bad_row="skip")


def test_bad_row_when_it_is_an_error_then_is_named_by_file_row_line_and_column(folder):
    (first, *_) = spoiled(folder)
    with pytest.raises(
        ValueError, match=r"rows.csv, row 11 \(line \d+\), column 'click'.*\(on_bad_row=skip leaves out"
    ):
        prepare(folder)
    assert "row 11 " in first


def test_bad_row_when_in_a_parquet_file_then_is_named_by_row(folder):
    table = {name: [row[i] for row in values(100)] for i, name in enumerate(HEADER)}
    table["age"][60] = "old"
    pq.write_table(pa.table(table), folder / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows.parquet, row 61, column 'age': must be a finite number"):
        prepare(folder, SCHEMA | {"files": "rows.parquet"})


def test_block_when_all_its_rows_are_bad_then_the_others_are_read(folder):
    rows = values(200)
    lines = [quoted(row) + "\n" for row in rows]
    lines[50:50] = ["nothing\n"] * 300
    lines[20:20] = ["x" + lines[0][1:].replace("\n", " ") + "\n"] * 200
    (folder / "rows.csv").write_text(quoted(HEADER) + "\n" + "".join(lines))
    (skipped,) = prepare(folder, on_bad_row="skip", shard_bytes=500).details["skipped"].values()
    assert sorted(count for _, count in skipped["examples"].values()) == [200, 300]
    (folder / "rows.csv").write_text(text([HEADER, *rows]))
    assert_same(folder)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense": ["agee"]}, r"schema.dense names column 'agee', which is not in .*rows.csv or .*Did you mean 'age'"),
        ({"files": "none.csv"}, r"schema.files.train: there is no file .*none.csv"),
        ({"files": {"test": "rows.csv"}, "split": {}}, r"schema.files has no train"),
        ({"files": "empty.csv"}, r"empty.csv is empty"),
        ({"split": {"test": 0.001}}, r"schema.split leaves no test rows of 400"),
        ({"encoding": "ascii"}, r"rows.csv is not written in ascii"),
        ({"files": "latin.csv"}, r"latin.csv is not written in utf-8. Name its encoding"),
        ({"files": "cut.csv.gz"}, r"cut.csv.gz.* (damaged|cannot be read)"),
        (
            {"joins": [{"file": "users.csv", "column": "city", "key": "id", "separator": ";"}]},
            r"no value of column 'city'",
        ),
        (
            {"joins": [{"file": name, "column": "user", "key": "id"} for name in ("one.csv", "two.csv")]},
            r"schema.dense names column 'visits', which is in .*one.csv and in .*two.csv: it could be either",
        ),
        (
            {"joins": [{"file": "three.csv", "column": "user", "key": "id"}]},
            r"schema.dense names column 'age', which is in .*rows.csv and in .*three.csv: it could be either",
        ),
        ({"categorical": ["tags.x", "tags_x"]}, r"same name once dots become underscores"),
        ({"dense": ["label"]}, r"two columns would be called 'label': .* Rename the column in the file"),
    ],
)
def test_input_when_it_does_not_fit_the_schema_then_says_how(folder, change, message):
    (folder / "empty.csv").touch()
    for name, header in (("one", "id,visits"), ("two", "id,visits"), ("three", "id,age,visits,country,likes")):
        (folder / f"{name}.csv").write_text(f"{header}\nu1{',1' * header.count(',')}\n")
    (folder / "latin.csv").write_text(text([HEADER, *values(50)]), encoding="latin-1")
    (folder / "cut.csv.gz").write_bytes(gzip.compress((folder / "rows.csv").read_bytes())[:-500])
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(folder, SCHEMA | change)


def test_row_when_a_quote_is_never_closed_then_says_so_instead_of_reading_on(folder, monkeypatch):
    monkeypatch.setattr("lightning_recsys.data.raw.table_file._LONGEST_ROW", 1 << 14)
    rows = values(3000)
    rows[40][5] = "x"
    content = text([HEADER, *rows[:40]]) + '4,2026-01-01,1,1,u,"open,x,\n' + text(rows[41:]).replace('"', "")
    (folder / "rows.csv").write_text(content)
    with pytest.raises(ValueError, match=r"rows.csv: row 41 \(line \d+\) has no end within .* quote: null"):
        prepare(folder)


@pytest.mark.parametrize("behind", [0, 1, 300])
def test_row_when_a_quote_is_not_closed_by_the_end_of_the_file_then_says_so_instead_of_taking_the_rest(folder, behind):
    rows = values(41 + behind)
    content = text([HEADER, *rows[:40]]) + '4,2026-01-01,1,1,u,"open,x,\n' + text(rows[41:]).replace('"', "")
    (folder / "rows.csv").write_text(content)
    with pytest.raises(
        ValueError, match=r"rows.csv: row 41 \(line \d+\) has a quote that is never closed.* quote: null"
    ):
        prepare(folder)


def test_options_when_they_are_for_other_formats_then_are_refused(folder):
    with pytest.raises(ValueError, match="data=tabular needs preprocessing=schema"):
        prepare(folder, preprocessing=Preprocessing())
    with pytest.raises(ValueError, match=r"split\.by=schema is for data=tabular; data=criteo has no schema"):
        BySchema(CriteoFormat())
    with pytest.raises(ValueError, match="preprocessing=schema is for data=tabular; data=criteo has no schema"):
        SchemaRules().check(CriteoFormat())
    with pytest.raises(ValueError, match=r"preprocessing.max_vocabulary must be at least 1, got 0"):
        SchemaRules(max_vocabulary=0)


def test_run_when_schema_or_side_table_changed_then_is_refused(folder):
    prepare(folder)
    with pytest.raises(ValueError, match=r"begun with another data.schema.categorical.user.min_count: 2 then, 3 now"):
        prepare(folder, SCHEMA | {"categorical": SCHEMA["categorical"] | {"user": {"min_count": 3}}})
    with (folder / "users.csv").open("a") as file:
        file.write("new;DE;1;\n")
    with pytest.raises(ValueError, match=r"begun with another raw file .*users.csv"):
        prepare(folder)


# --- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 50, 333, 10**6])
@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.parquet"])
def test_blocks_when_read_from_any_position_then_are_the_same(folder, name, block_bytes):
    (folder / "rows.csv.gz").write_bytes(gzip.compress((folder / "rows.csv").read_bytes()))
    pq.write_table(
        pa.table({key: [row[i] for row in values(60)] for i, key in enumerate(HEADER)}),
        folder / "rows.parquet",
        row_group_size=25,
    )
    raw_format = TabularFormat(schema=SCHEMA, root=folder)

    def read(position: Position) -> list:
        blocks = raw_format.blocks(folder / name, block_bytes=block_bytes, position=position)
        return [(block.position, block.next_position, block.data) for block in blocks]

    blocks = read(Position())
    if "parquet" not in name:
        content = b"".join(data for *_, data in blocks).decode()
        assert content == text(values(400))
        assert blocks[-1][1].row == 401
    for i in range(0, len(blocks), max(1, len(blocks) // 7)):
        assert read(blocks[i][0]) == blocks[i:]
        assert i == 0 or blocks[i][0] == blocks[i - 1][1]


def test_records_when_found_at_any_cut_then_are_those_that_arrow_reads(folder):
    content = (text(values(100)) + "\r\n\n,\r" + text(values(20, seed=1))).encode()
    data = np.frombuffer(content, dtype=np.uint8)
    lines, end, num_lines = find_records(data, delimiter=",", quote='"', whole=True)
    read = pa.csv.read_csv(
        pa.py_buffer(content),
        read_options=pa.csv.ReadOptions(column_names=[str(i) for i in range(8)], block_size=1 << 20, use_threads=False),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=lambda row: "skip"),
    )
    assert len(lines) - 1 == len(read) == 120  # one has two columns only
    assert end == len(content)
    for cut in random.Random(0).sample(range(len(content)), 300):
        found, end, skipped = find_records(data[:cut], delimiter=",", quote='"', whole=False)
        assert found.tolist() == lines[: len(found)].tolist()
        rest, _, more = find_records(data[end:], delimiter=",", quote='"', whole=True)
        assert [*found.tolist(), *(rest + skipped).tolist()] == lines.tolist()
        assert skipped + more == num_lines


def test_smallest_when_asked_for_any_place_then_is_that_of_the_sorted_numbers():
    rng = np.random.default_rng(0)
    times = np.concatenate([rng.normal(size=500) * 1e9, np.repeat([0.0, -0.0, 5.0, -np.inf, np.inf], 30)])
    keys = sortable(times)
    expected = sortable(np.sort(times))
    assert np.all(np.diff(expected.astype(object)) >= 0)
    for k in (0, 1, 250, 400, len(times) - 1):
        assert smallest(lambda: np.array_split(keys, 7), k) == int(expected[k])


def test_schema_when_given_as_a_path_then_its_folder_is_where_paths_start(folder):
    (folder / "schema.yaml").write_text(Schema.from_dict(SCHEMA).to_yaml())
    raw_format = TabularFormat(schema=folder / "schema.yaml")
    assert raw_format.files("train") == [folder / "rows.csv"]
    assert raw_format.files("test") == []
    assert [path.name for path in raw_format.side_files()] == ["users.csv"]


def test_go_on_when_the_columns_are_in_another_order_or_more_then_raises(folder):
    schema = SCHEMA | {"dense": {"age": {}, "price": {}}}
    prepare(folder, schema)
    with pytest.raises(
        ValueError, match=r"begun with another order of columns: .*\.age, .*\.price then, .*\.price, .*\.age now"
    ):
        prepare(folder, schema | {"dense": {"price": {}, "age": {}}})
    with pytest.raises(ValueError, match=r"begun with another data.schema.dense.visits: None then, \{\} now"):
        prepare(folder, schema | {"dense": {"age": {}, "price": {}, "visits": {}}})


def test_known_when_it_was_learned_for_another_order_then_is_looked_up_by_name(folder):
    schema = TabularFormat(schema=SCHEMA, root=folder).schema
    given = Encoding(schema, vocabularies={}, statistics={"visits": (3, 6), "age": (1, 4), "price": (2, 5)})
    learned = SchemaRules(given=given).known(folder / "vocabulary", TabularFormat(schema=SCHEMA, root=folder))
    assert learned.dense == [[1, 1, 16], [1, 2, 25], [1, 3, 36]]  # age, price, visits
