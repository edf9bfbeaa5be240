"""Tables that a query to a database makes: the batches of a file with the same rows."""

from __future__ import annotations

import datetime as dt
import re
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.files import find_files
from lightning_recsys.data.guesses.guessing import guess_schema
from lightning_recsys.data.queries import query_of, written_query
from lightning_recsys.data.raw.tabular import TabularFormat
from lightning_recsys.data.raw.text import Position

SQL = "SELECT click, user, shop, price AS cost FROM rows WHERE user LIKE 'u%' ORDER BY number; "
SCHEMA = {
    "label": "click",
    "dense": ["cost"],
    "categorical": ["user", "shop"],
    "split": {"validation": 0, "test": 0},
}


def rows(num_rows: int = 300) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "number": draw.permutation(num_rows),
            "click": draw.integers(0, 2, num_rows),
            "user": [f"u{i}" for i in draw.integers(0, 30, num_rows)],
            "shop": draw.integers(0, 20, num_rows),
            "price": [None if x < 0.1 else round(x, 3) for x in draw.random(num_rows)],
        }
    )


def write_sqlite(frame: pd.DataFrame, path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE rows (number INTEGER, click INTEGER, user TEXT, shop INTEGER, price REAL)")
    values = [[None if pd.isna(x) else x for x in row] for row in frame.astype(object).to_numpy().tolist()]
    database.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?)", values)
    database.commit()
    database.close()


def write_duckdb(frame: pd.DataFrame, path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs the extra [duckdb]")
    with duckdb.connect(str(path)) as database:
        database.execute("CREATE TABLE rows (number INTEGER, click INTEGER, user TEXT, shop INTEGER, price DOUBLE)")
        values = [[None if pd.isna(x) else x for x in row] for row in frame.astype(object).to_numpy().tolist()]
        database.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?)", values)


WRITERS = {"sqlite": write_sqlite, "duckdb": write_duckdb}


def load(files: object, root: Path, **options) -> TabularDataModule:
    data = TabularDataModule(schema=SCHEMA | {"files": files}, root=root, cache=root / "cache", **options)
    data.setup()
    return data


def as_csv(frame: pd.DataFrame, path: Path) -> None:
    found = frame.sort_values("number").rename(columns={"price": "cost"})
    found[["click", "user", "shop", "cost"]].to_csv(path, index=False)


def batch(data: TabularDataModule):
    found = data.rows("train")
    return found.take(torch.arange(len(found)))


@pytest.mark.parametrize("database", WRITERS)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_query_when_read_then_makes_the_batches_of_a_file_with_its_rows(tmp_path, database, is_absolute):
    WRITERS[database](rows(), tmp_path / "clicks.db")
    as_csv(rows(), tmp_path / "rows.csv")
    place = str(tmp_path / "clicks.db") if is_absolute else "clicks.db"
    data = load(f"{database}:///{place}?query={SQL}", tmp_path)
    found, expected = batch(data), batch(load("rows.csv", tmp_path))
    assert found.sparse.values.tolist() == expected.sparse.values.tolist()
    assert found.dense.tolist() == expected.dense.tolist()
    assert found.labels.tolist() == expected.labels.tolist()
    assert list(data.rows_read.values()) == [{"rows": 300, "used": 300, "skipped": 0, "comments": 0}]


@pytest.mark.parametrize("database", WRITERS)
def test_query_when_guessed_then_the_schema_names_it_and_trains(tmp_path, database):
    WRITERS[database](rows(), tmp_path / "clicks.db")
    as_csv(rows(), tmp_path / "rows.csv")
    query = f"{database}:///{tmp_path}/clicks.db?query={SQL}"
    guess, expected = guess_schema(query), guess_schema(tmp_path / "rows.csv")
    assert (guess.label, guess.num_rows) == (expected.label, 300)
    assert (set(guess.categorical), set(guess.dense)) == (set(expected.categorical), set(expected.dense))
    (tmp_path / "schema.yaml").write_text(guess.to_yaml())
    TabularDataModule(schema=tmp_path / "schema.yaml", cache=tmp_path / "cache").setup()


@pytest.mark.parametrize("database", WRITERS)
def test_query_when_read_in_small_blocks_then_every_row_comes_once_and_in_order(tmp_path, database):
    WRITERS[database](rows(), tmp_path / "clicks.db")
    raw = TabularFormat(schema=SCHEMA | {"files": f"{database}:///clicks.db?query={SQL}"}, root=tmp_path)
    (path,) = raw.files("train")
    blocks = list(raw.blocks(path, block_bytes=64 * 70, position=Position()))
    numbers = [number for block in blocks for number in raw.parse_block(path, block).lines_N.tolist()]
    assert numbers == list(range(1, 301))
    assert len(blocks) >= 5
    assert blocks[-1].consumed == (tmp_path / "clicks.db").stat().st_size
    again = list(raw.blocks(path, block_bytes=64 * 70, position=blocks[2].position))
    assert [block.data.to_pydict() for block in again] == [block.data.to_pydict() for block in blocks[2:]]


def test_sqlite_when_values_of_a_column_have_several_types_then_have_the_ids_of_text(tmp_path):
    database = sqlite3.connect(tmp_path / "clicks.db")
    database.execute("CREATE TABLE rows (click, user)")
    values = [1, 2.0, "a", b"b", 0.5, None, "2", 1e300]
    database.executemany("INSERT INTO rows VALUES (?, ?)", [(i % 2, value) for i, value in enumerate(values)])
    database.commit()
    database.close()
    (tmp_path / "rows.csv").write_text("click,user\n0,1\n1,2.0\n0,a\n1,b\n0,0.5\n1,\n0,2\n1,1e300\n")
    found, expected = (
        TabularDataModule(
            schema={"files": files, "label": "click", "categorical": ["user"], "split": SCHEMA["split"]},
            root=tmp_path,
            cache=tmp_path / "cache",
        )
        for files in ("sqlite:///clicks.db?query=SELECT * FROM rows", "rows.csv")
    )
    assert batch(found).sparse.values.tolist()[:7] == batch(expected).sparse.values.tolist()[:7]


def test_duckdb_when_columns_have_types_then_have_the_ids_of_text(tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="needs the extra [duckdb]")
    with duckdb.connect(str(tmp_path / "clicks.db")) as database:
        database.execute(
            "CREATE TABLE rows AS SELECT i % 2 AS click, (i / 2)::DECIMAL(10, 2) AS price, i::HUGEINT AS big, "
            "TIMESTAMP '2026-01-31 12:00:00' + INTERVAL (i) SECOND AS at, {'name': 'n' || i} AS shop, "
            "['x', 't' || i] AS tags FROM range(6) numbers(i)"
        )
    times = [dt.datetime(2026, 1, 31, 12, 0, i) for i in range(6)]
    lines = [f"{i % 2},{i / 2:g},{i},{times[i]},n{i},x|t{i}" for i in range(6)]
    (tmp_path / "rows.csv").write_text("\n".join(["click,price,big,at,shop.name,tags", *lines]))
    names = ["price", "big", "at", "shop.name"]
    found, expected = (
        TabularDataModule(
            schema={"files": files, "label": "click", "categorical": names, "multi_valued": ["tags"]}
            | {"split": SCHEMA["split"]},
            root=tmp_path,
            cache=tmp_path / "cache",
        )
        for files in ("duckdb:///clicks.db?query=FROM rows", "rows.csv")
    )
    assert batch(found).sparse.values.tolist() == batch(expected).sparse.values.tolist()


@pytest.mark.parametrize("is_logged", [False, True])
def test_sqlite_when_rows_are_added_then_are_prepared_anew(tmp_path, is_logged):
    write_sqlite(rows(), tmp_path / "clicks.db")
    query = f"sqlite:///clicks.db?query={SQL}"
    database = sqlite3.connect(tmp_path / "clicks.db")
    if is_logged:
        database.execute("PRAGMA journal_mode=WAL")
    assert len(load(query, tmp_path).rows("train")) == 300
    database.execute("INSERT INTO rows VALUES (1000, 1, 'u1', 3, 0.5)")
    database.commit()
    assert len(load(query, tmp_path).rows("train")) == 301
    database.close()


@pytest.mark.parametrize("database", WRITERS)
def test_query_when_it_is_wrong_or_would_write_then_says_so_and_writes_nothing(tmp_path, database):
    WRITERS[database](rows(20), tmp_path / "clicks.db")
    before = (tmp_path / "clicks.db").read_bytes()
    for sql in ("SELECT * FROM clicks", "DELETE FROM rows", "CREATE TABLE other (x INTEGER)", "nonsense"):
        with pytest.raises(ValueError, match=rf"clicks\.db: the query '{re.escape(sql)}' fails \("):
            load(f"{database}:///clicks.db?query={sql}", tmp_path)
    with pytest.raises(ValueError, match="has a header and no rows"):
        load(f"{database}:///clicks.db?query=SELECT click, user, shop, price AS cost FROM rows WHERE 1 = 2", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no database .*other\.db"):
        load(f"{database}:///other.db?query=SELECT 1", tmp_path)
    for wrong in (f"{database}://clicks.db?query=SELECT 1", f"{database}:///clicks.db", f"{database}:///?query=x"):
        with pytest.raises(ValueError, match="a query to a database is written"):
            load(wrong, tmp_path)
    assert (tmp_path / "clicks.db").read_bytes() == before
    (tmp_path / "clicks.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match=r"clicks\.db"):
        load(f"{database}:///clicks.db?query={SQL}", tmp_path)


def test_query_when_a_row_is_bad_then_it_is_counted(tmp_path):
    write_sqlite(rows(), tmp_path / "clicks.db")
    sql = (
        "SELECT CASE number WHEN 4 THEN 7 ELSE click END AS click, user, shop, price AS cost FROM rows ORDER BY number"
    )
    with pytest.raises(ValueError, match=r"row 5, column 'click': the label must be"):
        load(f"sqlite:///clicks.db?query={sql}", tmp_path)
    data = load(f"sqlite:///clicks.db?query={sql}", tmp_path, on_bad_row="skip")
    assert list(data.rows_read.values()) == [{"rows": 300, "used": 299, "skipped": 1, "comments": 0}]


def test_query_when_duckdb_is_not_installed_then_says_how(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    (tmp_path / "clicks.db").write_bytes(b"x")
    with pytest.raises(ImportError, match=r"pip install 'lightning-recsys\[duckdb\]'"):
        load("duckdb:///clicks.db?query=SELECT 1", tmp_path)


def test_query_when_its_path_is_read_back_then_is_the_same():
    query = written_query("sqlite:////data/a b.db?query=SELECT a/b, '100%' FROM \"x?y\" WHERE c = '=//..'")
    assert query is not None
    assert query_of(query.path) == query
    assert query.path.name.startswith("a b.db?query=SELECT%20")
    assert written_query(str(query)) == query
    assert written_query("clicks.csv") is None
    assert query_of(Path("/data/clicks.csv")) is None


def test_query_when_its_path_is_looked_for_again_then_is_found(tmp_path):
    write_sqlite(rows(3), tmp_path / "clicks.db")
    found = find_files("sqlite:///clicks.db?query=SELECT * FROM rows", root=tmp_path)
    for again in (str(found[0]), str(found[0].absolute()), found[0].resolve()):
        assert find_files(again, root=tmp_path / "elsewhere") == found
