"""Folders whose names are columns: ``day=2026-01-01/``, as Hive writes them."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pandas as pd
import pytest
import torch

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.guesses.guessing import guess_schema

ROWS = pd.DataFrame(
    {
        "day": ["2026-01-01"] * 30 + ["2026-01-02"] * 40,
        "shop": ["a b"] * 20 + ["c"] * 10 + ["a b"] * 40,
        "click": [0, 1] * 35,
        "user": [f"u{i % 7}" for i in range(70)],
    }
)
WRITERS = {
    "csv": lambda rows, path: rows.to_csv(path, index=False),
    "parquet": lambda rows, path: rows.to_parquet(path, index=False),
    "jsonl": lambda rows, path: rows.to_json(path, orient="records", lines=True),
    "feather": lambda rows, path: rows.reset_index(drop=True).to_feather(path),
    "orc": lambda rows, path: rows.reset_index(drop=True).to_orc(path),
}
SCHEMA = {"label": "click", "categorical": ["user", "shop"], "time": "day", "split": {"validation": 0, "test": 0}}


def write(folder: Path, suffix: str, **keep: list[str]) -> None:
    for (day, shop), rows in ROWS.groupby(["day", "shop"]):
        inner = folder / f"day={day}" / f"shop={shop.replace(' ', '%20')}"
        inner.mkdir(parents=True)
        WRITERS[suffix](rows[["click", "user", *keep.get("keep", [])]], inner / f"part-0.{suffix}")


def load(root: Path, files: object, **change):
    data = TabularDataModule(schema=SCHEMA | {"files": files} | change, root=root, cache=root / "cache")
    data.setup()
    return data


def all_rows(root: Path, files: object, **change):
    rows = load(root, files, **change).rows("train")
    return rows.take(torch.arange(len(rows)))


@pytest.mark.parametrize("suffix", WRITERS)
def test_partitions_when_read_then_the_rows_are_those_of_one_file_with_the_columns(tmp_path, suffix):
    write(tmp_path / "days", suffix)
    ROWS.to_csv(tmp_path / "rows.csv", index=False)
    found, expected = all_rows(tmp_path, "days"), all_rows(tmp_path, "rows.csv")
    assert found.sparse.values.tolist() == expected.sparse.values.tolist()
    assert found.labels.tolist() == expected.labels.tolist()


def test_partitions_when_split_by_time_then_the_latest_folder_is_held_back(tmp_path):
    write(tmp_path / "days", "csv")
    data = load(tmp_path, "days", split={"by": "time", "validation": 0, "test": 0.4})
    assert (len(data.rows("train")), len(data.rows("test"))) == (30, 40)


def test_partitions_when_the_folders_are_in_an_archive_then_are_columns_too(tmp_path):
    write(tmp_path / "days", "csv")
    with zipfile.ZipFile(tmp_path / "days.zip", "w") as archive:
        for path in sorted((tmp_path / "days").rglob("*.csv")):
            archive.write(path, path.relative_to(tmp_path / "days"))
    found, expected = all_rows(tmp_path, "days.zip"), all_rows(tmp_path, "days")
    assert found.sparse.values.tolist() == expected.sparse.values.tolist()


@pytest.mark.parametrize("suffix", WRITERS)
def test_partitions_when_the_file_has_the_column_too_then_its_values_must_be_those(tmp_path, suffix):
    write(tmp_path / "days", suffix, keep=["day"])
    expected = all_rows(tmp_path, "days").sparse.values.tolist()
    folder = tmp_path / "days" / "day=2026-01-01"
    folder.rename(folder.with_name("day=2026-01-03"))
    problem = r"column 'day' has the value '2026-01-01', and the folder around the file says day=2026-01-03"
    with pytest.raises(ValueError, match=problem):
        load(tmp_path, "days")
    assert sorted(all_rows(tmp_path, "days", time=None).sparse.values.tolist()) == sorted(expected)


def test_partitions_when_numbers_have_zeros_in_front_then_are_those_of_the_file(tmp_path):
    (tmp_path / "month=01").mkdir()
    (tmp_path / "month=01" / "rows.csv").write_text("click,month\n0,1\n1,1\n")
    data = load(tmp_path, "month=01", categorical=["month"], time=None)
    assert data.fields == {"month": 3}


def test_partitions_when_a_value_is_missing_then_is_so(tmp_path):
    for name in ("a", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / "days" / f"shop={name}").mkdir(parents=True)
        (tmp_path / "days" / f"shop={name}" / "rows.csv").write_text("click,user\n0,1\n1,1\n")
    batch = all_rows(tmp_path, "days", categorical=["shop"], time=None)
    assert sorted(batch.sparse.values.tolist()) == [1, 1, 2, 2]


def test_partitions_when_a_key_is_missing_in_some_folders_then_says_where(tmp_path):
    write(tmp_path / "days", "csv")
    stray = tmp_path / "days" / "day=2026-01-02" / "rows.csv"
    stray.write_text("click,user\n0,1\n1,1\n")
    with pytest.raises(
        ValueError, match=rf"no folder around {re.escape(str(stray))}\. Move the file into a folder shop="
    ):
        load(tmp_path, "days")
    with pytest.raises(
        ValueError, match=rf"is in a folder shop=.*, and {re.escape(str(stray))} is in none of that name"
    ):
        guess_schema(tmp_path / "days")
    assert len(load(tmp_path, "days", categorical=["user"]).rows("train")) == 72


@pytest.mark.parametrize("suffix", WRITERS)
def test_partitions_when_guessed_then_dates_are_the_time_and_words_are_categories(tmp_path, suffix):
    write(tmp_path / "days", suffix)
    guess = guess_schema(tmp_path / "days")
    assert guess.time == "day"
    assert list(guess.categorical) == ["user", "shop"]
    assert "folders with 2 values" in guess.to_yaml()
    TabularDataModule(schema=guess, cache=tmp_path / "cache").setup()


def test_partitions_when_there_is_one_value_then_the_guess_leaves_it_out(tmp_path):
    write(tmp_path / "days", "csv")
    guess = guess_schema(tmp_path / "days" / "day=2026-01-02")
    assert set(guess.ignore) == {"day", "shop"}


def test_partitions_when_rows_are_predicted_then_one_folder_is_enough(tmp_path):
    write(tmp_path / "days", "csv")
    data = load(tmp_path, {"train": "days", "predict": "days/day=2026-01-02"})
    assert len(data.rows("predict")) == 40
    assert {x for part in data.predicted_rows("day") for x in part.to_pylist()} == {"2026-01-02"}
