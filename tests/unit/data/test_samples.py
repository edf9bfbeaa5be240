"""Samples of files that are sorted: a guess sees all of a file, whatever its rows are sorted by."""

from __future__ import annotations

import gzip
import json
import random
import zipfile

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from lightning_recsys.data import guess_schema
from lightning_recsys.data.guesses import sniffing
from lightning_recsys.data.guesses.sniffing import sniff
from lightning_recsys.data.tables import record_files

ROWS = 20_000  # of which the last tenth is positive


@pytest.fixture
def table(tmp_path):
    """Writes the table in a format."""
    columns = {
        "row": [f"row {i}" for i in range(ROWS)],
        "words": [f"a{i % 7}" for i in range(ROWS)],
        "clicked": [int(i >= 0.9 * ROWS) for i in range(ROWS)],
    }
    lines = list(zip(*columns.values(), strict=True))

    def write(kind: str):
        path = tmp_path / f"sorted.{kind}"
        text = "\n".join(["row,words,clicked", *(",".join(map(str, x)) for x in lines)]) + "\n"
        if kind in ("parquet", "zip"):
            parquet.write_table(pa.table(columns), path.with_suffix(".parquet"), row_group_size=1000)
            if kind == "zip":
                with zipfile.ZipFile(path, "w") as archive:
                    archive.write(path.with_suffix(".parquet"), "sorted.parquet")
                path = path / "sorted.parquet"
        elif kind == "jsonl":
            path.write_text("\n".join(json.dumps(dict(zip(columns, x, strict=True))) for x in lines))
        elif kind == "csv.gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-16" if kind == "wide.csv" else "utf-8")
        return path

    return write


@pytest.mark.parametrize("limit", ["rows", "bytes"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_sample_when_the_file_is_sorted_by_its_label_then_has_both_and_each_row_once(table, kind, limit, monkeypatch):
    path = table(kind)
    num_rows = 4000
    if limit == "bytes":
        monkeypatch.setattr(sniffing, "_SAMPLE_BYTES", path.stat().st_size // 4)
        monkeypatch.setattr(sniffing, "_STRETCH_BYTES", 1000)
        num_rows = ROWS
    if kind == "parquet":
        monkeypatch.setattr(sniffing, "_SAMPLE_ROWS", num_rows)
        monkeypatch.setattr(record_files, "_DECODED_ROWS", 9000)
    sniffed = sniff(path, num_rows)
    rows = sniffed.columns["row"]
    assert 1000 < len(rows) <= (num_rows if limit == "rows" else 0.35 * ROWS)
    assert len(set(rows)) == len(rows)
    assert rows == sorted(rows, key=lambda row: int(row.split()[1]))
    assert rows[0] == "row 0"
    share = sum(map(int, sniffed.columns["clicked"])) / len(rows)
    assert 0.02 < share < 0.05  # a tenth of the last quarter of the sample, and somewhat more
    for row, word, clicked in zip(rows, sniffed.columns["words"], sniffed.columns["clicked"], strict=True):
        number = int(row.removeprefix("row "))
        assert (word, clicked) == (f"a{number % 7}", str(int(number >= 0.9 * ROWS)))
    assert sniffed.num_rows == pytest.approx(ROWS, rel=0.01 if limit == "rows" else 0.25)


@pytest.mark.parametrize("kind", ["csv.gz", "wide.csv", "zip"])
def test_sample_when_the_file_can_only_be_read_from_its_start_then_has_its_first_rows(table, kind, monkeypatch):
    path = table(kind)
    monkeypatch.setattr(sniffing, "_SAMPLE_BYTES", 60_000)
    rows = sniff(path).columns["row"]
    assert rows == [f"row {i}" for i in range(len(rows))]
    assert 1000 < len(rows) < ROWS


@pytest.mark.parametrize("sorted_by", ["label", "user"])
def test_guess_when_the_table_is_sorted_then_columns_are_judged(tmp_path, monkeypatch, sorted_by):
    monkeypatch.setattr(sniffing.sniff, "__defaults__", (4000,))
    generator = random.Random(0)
    users = {generator.randrange(10**5, 10**7): generator.choice([0.05, 0.7]) for _ in range(ROWS // 20)}
    rows = [(int(generator.random() < rate), user) for user, rate in users.items() for _ in range(20)]
    if sorted_by == "label":
        generator.shuffle(rows)
        rows.sort(key=lambda row: row[0])
    lines = ["clicked,user,price", *(f"{click},{user},{generator.random():.3f}" for click, user in rows)]
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    schema = guess_schema(tmp_path / "clicks.csv")
    assert "user" in schema.categorical
    assert "held-out log loss as ids" in schema.comments["user"]
    assert list(schema.dense) == ["price"]


def test_sample_when_arrow_can_take_no_rows_of_a_type_then_has_the_first_ones_of_each_part(tmp_path, monkeypatch):
    monkeypatch.setattr(sniffing, "_SAMPLE_ROWS", 160)
    columns = {"word": pa.array([f"w{i}" for i in range(1000)], pa.string_view()), "row": list(range(1000))}
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=500)
    sniffed = sniff(tmp_path / "x.parquet")
    assert sniffed.num_rows == 1000
    assert [word.removeprefix("w") for word in sniffed.columns["word"]] == sniffed.columns["row"]
    assert 0 < sum(int(row) >= 500 for row in sniffed.columns["row"]) <= 80
