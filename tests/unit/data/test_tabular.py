"""One's own files: formats, features, splits, joins, checkpoints, and what bad input is told."""

from __future__ import annotations

import gzip
import logging
import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from lightning_recsys.data import Batch, TabularDataModule

LINES = ["click,age,user,tags", "1,10,a,x|y", "0,20,b,", "0,30,a,y", "1,,c,z|x|x", "0,40,,x"]
SCHEMA = {
    "files": "clicks.csv",
    "label": "click",
    "dense": ["age"],
    "categorical": ["user"],
    "multi_valued": {"tags": {"separator": "|"}},
    "split": {"validation": 0, "test": 0},
}


def write(folder: Path, lines: list[str], name: str = "clicks.csv", *, encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))
    return path


def load(folder: Path, lines: list[str] | None = None, *, on_bad_row: str = "error", **change) -> TabularDataModule:
    if lines is not None:
        write(folder, lines)
    data = TabularDataModule(schema=SCHEMA | change, root=folder, batch_size=100, on_bad_row=on_bad_row)
    data.setup()
    return data


def all_rows(data: TabularDataModule, split: str = "train") -> Batch:
    rows = data.rows(split)
    return rows.take(torch.arange(len(rows)))


def ids_of(batch: Batch, feature: str) -> list[list[int]]:
    """The bags of a feature."""
    place = batch.sparse.keys.index(feature)
    bounds = batch.sparse.bag_offsets()[place * len(batch) : (place + 1) * len(batch) + 1].tolist()
    return [batch.sparse.values[start:end].tolist() for start, end in pairwise(bounds)]


# --- Features --------------------------------------------------------------------------------------------------------


def test_rows_when_everything_is_there_then_come_out_as_the_schema_says(tmp_path):
    data = load(tmp_path, LINES)
    batch = all_rows(data)
    assert batch.labels.tolist() == [1, 0, 0, 1, 0]
    # a twice, then b and c by alphabet; ids start at 2, missing is 1.
    assert ids_of(batch, "user") == [[2], [3], [2], [4], [1]]
    # x four times, y twice, z once.
    assert ids_of(batch, "tags") == [[2, 3], [], [3], [4, 2, 2], [2]]
    assert data.fields == {"user": 5, "tags": 5}
    assert data.num_dense == 1
    ages = np.array([10, 20, 30, 25, 40.0])  # the missing one is the mean of the others
    known = np.array([10, 20, 30, 40.0])
    np.testing.assert_allclose(batch.dense[:, 0], (ages - known.mean()) / known.std(), rtol=1e-6)
    assert data.best_normalized_entropy is None


def test_rows_when_all_features_have_one_value_then_take_the_fast_path(tmp_path):
    batch = all_rows(load(tmp_path, LINES, multi_valued={}))
    assert batch.sparse.is_single_hot
    assert batch.dense.is_contiguous()
    assert batch.sparse.values.dtype == torch.int64


def test_rows_when_there_are_no_dense_features_then_dense_is_empty(tmp_path):
    assert all_rows(load(tmp_path, LINES, dense={})).dense.shape == (5, 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"standardize": False}, [10, 20, 30, 25, 40]),
        ({"standardize": False, "fill": -1}, [10, 20, 30, -1, 40]),
        ({"standardize": False, "transform": "log"}, [np.log(11), np.log(21), np.log(31), None, np.log(41)]),
        (
            {"standardize": False, "transform": "log", "fill": -9},
            [np.log(11), np.log(21), np.log(31), -np.log(10), np.log(41)],
        ),
    ],
)
def test_dense_when_options_are_given_then_do_what_they_say(tmp_path, options, expected):
    logs = np.log1p([10, 20, 30, 40]).mean()
    expected = [logs if value is None else value for value in expected]
    batch = all_rows(load(tmp_path, LINES, dense={"age": options}))
    np.testing.assert_allclose(batch.dense[:, 0], expected, rtol=1e-6)


def test_dense_when_a_column_is_constant_or_all_missing_then_is_zero(tmp_path):
    lines = ["click,age,user,tags,blank", "1,7,a,x,", "0,7,b,y,"]
    batch = all_rows(load(tmp_path, lines, dense=["age", "blank"]))
    assert batch.dense.tolist() == [[0, 0], [0, 0]]
    rounded = all_rows(load(tmp_path, ["click,age,user,tags", *(f"{i % 2},0.1,a,x" for i in range(7))]))
    assert rounded.dense.abs().max() < 1e-9  # though the mean is not quite 0.1


def test_categories_when_rare_then_share_the_id_of_unknown_ones(tmp_path):
    data = load(tmp_path, LINES, categorical={"user": {"min_count": 2}})
    assert ids_of(all_rows(data), "user") == [[2], [0], [2], [0], [1]]
    assert data.fields["user"] == 3


def test_categories_when_hashed_then_have_as_many_ids_as_asked_and_missing_has_its_own(tmp_path):
    data = load(tmp_path, LINES, categorical={"user": {"hash_buckets": 3}})
    ids = [bag[0] for bag in ids_of(all_rows(data), "user")]
    assert data.fields["user"] == 4
    assert ids[0] == ids[2]
    assert ids[4] == 0
    assert min(ids[:4]) >= 1


def test_features_when_a_column_has_a_dot_then_the_feature_has_an_underscore(tmp_path):
    lines = [LINES[0].replace("user", "user.id"), *LINES[1:]]
    assert list(load(tmp_path, lines, categorical=["user.id"]).fields) == ["user_id", "tags"]


def test_label_when_a_rule_is_given_then_makes_it(tmp_path):
    label = {"column": "age", "rule": "> 15"}
    lines = [LINES[0], *(line for line in LINES[1:] if ",," not in line[:4])]
    assert all_rows(load(tmp_path, lines, label=label, dense=[])).labels.tolist() == [0, 1, 1, 1]


# --- Formats ---------------------------------------------------------------------------------------------------------


def assert_same_rows(data: TabularDataModule, folder: Path) -> None:
    ours, theirs = all_rows(data), all_rows(load(folder, LINES))
    assert torch.equal(ours.labels, theirs.labels)
    assert torch.equal(ours.dense, theirs.dense)
    assert torch.equal(ours.sparse.values, theirs.sparse.values)
    assert torch.equal(ours.sparse.bag_lengths(), theirs.sparse.bag_lengths())


def test_text_when_separators_quotes_and_blanks_vary_then_rows_are_the_same(tmp_path):
    variants = {
        "tab.tsv": [line.replace(",", "\t") for line in LINES],
        "semicolon.csv": [line.replace(",", " ; ") for line in LINES],
        "colons.dat": [line.replace(",", "::") for line in LINES],
        "quoted.csv": [",".join(f'"{value}"' for value in line.split(",")) for line in LINES],
        "crlf.csv": [f"{line}\r" for line in LINES],
        "bom.csv": ["\ufeff" + LINES[0], *LINES[1:]],
        "blank_lines.csv": [LINES[0], "", *LINES[1:3], "", *LINES[3:], "", ""],
        "comments.csv": ["# one", "# two", *LINES],
    }
    options = {"semicolon.csv": {"separator": ";"}, "colons.dat": {"separator": "::"}, "comments.csv": {"comment": "#"}}
    for name, lines in variants.items():
        write(tmp_path, lines, name)
        assert_same_rows(load(tmp_path, files=name, **options.get(name, {})), tmp_path)


def test_text_when_there_is_no_header_then_the_schema_names_the_columns(tmp_path):
    write(tmp_path, LINES[1:], "bare.csv")
    assert_same_rows(load(tmp_path, files="bare.csv", column_names=["click", "age", "user", "tags"]), tmp_path)


def test_text_when_compressed_then_is_read_all_the_same(tmp_path):
    (tmp_path / "clicks.csv.gz").write_bytes(gzip.compress("\n".join(LINES).encode()))
    assert_same_rows(load(tmp_path, files="clicks.csv.gz"), tmp_path)


def test_text_when_quoted_values_hold_separators_and_line_ends_then_are_one_value(tmp_path):
    lines = ["click,user", '1,"a, b"', '0,"c', 'd"', '0,"a, b"']
    data = load(tmp_path, lines, dense=[], multi_valued={})
    assert ids_of(all_rows(data), "user") == [[2], [3], [2]]


def test_text_when_latin_1_then_equals_utf_8(tmp_path):
    lines = ["click,user", "1,Zürich", "0,Orléans", "0,Zürich"]
    write(tmp_path, lines, "latin.csv", encoding="latin-1")
    ours = load(tmp_path, files="latin.csv", encoding="latin-1", dense=[], multi_valued={})
    theirs = load(tmp_path, lines, dense=[], multi_valued={})
    assert ours.state_dict()["encoder"]["vocabularies"]["user"]["bytes"].tolist() == (
        theirs.state_dict()["encoder"]["vocabularies"]["user"]["bytes"].tolist()
    )


def test_text_when_missing_values_have_names_then_are_missing(tmp_path):
    lines = ["click,age,user,tags", "1,NA,?,x|NA", "0,2,NA,?", "0,4,a,x"]
    batch = all_rows(load(tmp_path, lines, missing=["", "NA", "?"], dense={"age": {"standardize": False}}))
    assert batch.dense[:, 0].tolist() == [3, 2, 4]
    assert ids_of(batch, "user") == [[1], [1], [2]]
    assert ids_of(batch, "tags") == [[2], [], [2]]


def test_files_when_there_are_several_then_rows_follow_each_other(tmp_path):
    write(tmp_path, LINES[:3], "part-1.csv")
    write(tmp_path, [LINES[0], *LINES[3:]], "part-2.csv")
    assert_same_rows(load(tmp_path, files="part-*.csv"), tmp_path)
    assert_same_rows(load(tmp_path, files=["part-1.csv", "part-2.csv"]), tmp_path)


@pytest.mark.parametrize("chunk", [2, 100])
def test_parquet_when_columns_have_their_own_types_then_rows_are_the_same(tmp_path, chunk):
    table = pa.table(
        {
            "click": pa.array([True, False, False, True, False]),
            "age": pa.array([10, 20, 30, None, 40], pa.int16()),
            "user": pa.array(["a", "b", "a", "c", None]).dictionary_encode(),
            "tags": pa.array([["x", "y"], None, ["y"], ["z", "x", "x"], ["x"]]),
            "unused": pa.array([{"a": 1}] * 5),
        }
    )
    parquet.write_table(table, tmp_path / "clicks.parquet", row_group_size=chunk)
    assert_same_rows(load(tmp_path, files="clicks.parquet"), tmp_path)


def test_parquet_when_ids_are_numbers_then_hash_and_count_as_in_text(tmp_path):
    numbers = [70000000000, 5, 70000000000, 9]
    table = pa.table({"click": [1, 0, 0, 1], "user": numbers, "tags": [[1, 2], [], [2], [2]]})
    parquet.write_table(table, tmp_path / "ids.parquet")
    tags = ["1|2", "", "2", "2"]
    lines = ["click,user,tags", *(f"{c},{u},{t}" for c, u, t in zip([1, 0, 0, 1], numbers, tags, strict=True))]
    for options in ({"min_count": 1}, {"hash_buckets": 1000}):
        change = {"dense": [], "categorical": {"user": options}}
        ours = all_rows(load(tmp_path, files="ids.parquet", **change))
        theirs = all_rows(load(tmp_path, lines, **change))
        assert torch.equal(ours.sparse.values, theirs.sparse.values)


# --- Splits ----------------------------------------------------------------------------------------------------------


def many_lines(num_rows: int) -> list[str]:
    return ["click,age,user,tags", *(f"{i % 2},{i},u{i % 7},x" for i in range(num_rows))]


def ages(data: TabularDataModule, split: str) -> list[int]:
    return all_rows(data, split).dense[:, 0].round().int().tolist()


RAW_AGE = {"dense": {"age": {"standardize": False}}}


def test_split_by_share_when_seeded_then_is_exact_disjoint_and_repeatable(tmp_path):
    def split(seed: int) -> dict[str, list[int]]:
        data = load(tmp_path, many_lines(200), split={"validation": 0.1, "test": 0.25, "seed": seed}, **RAW_AGE)
        return {name: ages(data, name) for name in ("train", "validation", "test")}

    first, again, other = split(0), split(0), split(1)
    assert first == again
    assert first["test"] != other["test"]
    assert [len(rows) for rows in first.values()] == [130, 20, 50]
    assert sorted(sum(first.values(), [])) == list(range(200))  # noqa: RUF017 - three short lists


def test_split_by_time_when_rows_are_not_in_order_then_the_latest_are_held_back(tmp_path):
    lines = ["click,age,user,tags,when", *(f"{i % 2},{i * 37 % 100},u,x,{i * 37 % 100}" for i in range(100))]
    data = load(tmp_path, lines, time="when", split={"by": "time", "validation": 0.1, "test": 0.2}, **RAW_AGE)
    assert sorted(ages(data, "train")) == list(range(70))
    assert sorted(ages(data, "validation")) == list(range(70, 80))
    assert sorted(ages(data, "test")) == list(range(80, 100))


def test_split_by_time_when_many_rows_share_a_time_then_they_stay_together(tmp_path):
    days = ["2026-01-01"] * 6 + ["2026-01-02"] * 3 + ["2026-01-03"]
    lines = ["click,age,user,tags,when", *(f"{i % 2},{i},u,x,{day}" for i, day in enumerate(days))]
    data = load(tmp_path, lines, time="when", split={"by": "time", "validation": 0, "test": 0.2}, **RAW_AGE)
    # Two rows are due for testing; the third last shares the day of the second last, so that day is tested whole.
    assert ages(data, "train") == [0, 1, 2, 3, 4, 5]
    assert ages(data, "test") == [6, 7, 8, 9]


def test_split_by_file_when_files_are_given_then_shares_apply_to_the_others_only(tmp_path):
    write(tmp_path, many_lines(50), "train.csv")
    write(tmp_path, many_lines(20), "test.csv")
    files = {"train": "train.csv", "test": "test.csv"}
    data = load(tmp_path, files=files, split={"validation": 0.2}, **RAW_AGE)
    assert [len(data.rows(split)) for split in ("train", "validation", "test")] == [40, 10, 20]
    assert ages(data, "test") == list(range(20))


def test_vocabulary_and_statistics_when_rows_are_held_back_then_come_from_training_rows_alone(tmp_path):
    num_rows = 300
    lines = ["click,age,user,tags", *(f"{i % 2},{i},u{i},t{i % 5}" for i in range(num_rows))]
    data = load(tmp_path, lines, split={"validation": 0.2, "test": 0.2})
    train, test = all_rows(data, "train"), all_rows(data, "test")
    assert data.fields["user"] == 180 + 2
    assert sorted(ids_of(train, "user")) == [[i] for i in range(2, 182)]
    assert ids_of(test, "user") == [[0]] * 60
    assert train.dense.mean() == pytest.approx(0, abs=1e-6)
    assert abs(float(test.dense.mean())) > 1e-3


def test_split_when_a_share_is_none_then_there_is_no_loader(tmp_path):
    data = load(tmp_path, LINES)
    assert data.val_dataloader() == []
    assert data.rows("test") is None


def test_loader_when_epochs_pass_then_every_row_comes_in_a_new_order(tmp_path):
    data = load(tmp_path, many_lines(64), **RAW_AGE)
    loader = data.train_dataloader()
    first, second = ([row for batch in loader for row in batch.dense[:, 0].int().tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second


# --- Joins -----------------------------------------------------------------------------------------------------------

USERS = ["id;country;visits;likes", "a;DE;3;x y", "b;FR;;", "z;US;9;y"]
JOIN = {
    "joins": [{"file": "users.csv", "column": "user", "key": "id", "separator": ";"}],
    "dense": {"visits": {"standardize": False}},
    "categorical": ["user", "country"],
    "multi_valued": {"likes": {"separator": " "}},
}


def test_join_when_rows_refer_to_a_side_table_then_get_its_columns(tmp_path):
    write(tmp_path, USERS, "users.csv")
    batch = all_rows(load(tmp_path, LINES, **JOIN))
    # Users a, b, a, c, missing: c and the missing one are in no row of the side table.
    assert ids_of(batch, "country") == [[2], [3], [2], [1], [1]]
    assert ids_of(batch, "likes") == [[2, 3], [], [2, 3], [], []]
    assert batch.dense[:, 0].tolist() == [3, 3, 3, 3, 3]  # the mean of the training rows that have one


def test_join_when_label_or_time_have_no_row_there_then_the_row_is_bad(tmp_path):
    write(tmp_path, ["id,when,bought", *(f"u{i},{i},{i % 2}" for i in range(1, 40))], "orders.csv")
    lines = ["user", *(f"u{i}" for i in range(40))]
    change = {"dense": [], "multi_valued": {}, "joins": [{"file": "orders.csv", "column": "user", "key": "id"}]}
    for own in ({"label": "bought"}, {"time": "when", "label": "click"}):
        here = (
            lines if "click" not in own.values() else ["user,click", *(f"{x},{i % 2}" for i, x in enumerate(lines[1:]))]
        )
        with pytest.raises(
            ValueError, match=r"clicks\.csv, row 1, column '(bought|when)': must have a value, and its side"
        ):
            load(tmp_path, here, **change | own)
        data = load(tmp_path, here, on_bad_row="skip", **change | own)
        assert len(data.rows("train")) == 39
        assert not all_rows(data).labels.isnan().any()


def test_join_when_the_key_is_no_feature_then_is_only_looked_up(tmp_path):
    write(tmp_path, USERS, "users.csv")
    data = load(tmp_path, LINES, **JOIN | {"categorical": ["country"]})
    assert list(data.fields) == ["country", "likes"]


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ([*USERS, "a;IT;1;"], r"users\.csv: each value of the key 'id' must stand once, but a does not"),
        ([*USERS, ";IT;1;"], r"users\.csv: each value of the key 'id' must stand once, but a missing value does not"),
        (
            ["id;country;visits;likes", "y;DE;3;"],
            r"no value of column 'user' of .*clicks\.csv is in column 'id' of .*users",
        ),
        (
            ["uid;country;visits;likes", "a;DE;3;"],
            r"schema\.joins\[0\]\.key names column 'id', which is not in .*users",
        ),
        ([USERS[0], "a;DE;many;x"], r"users\.csv, row 1 \(line 2\), column 'visits': must be a finite number"),
    ],
)
def test_join_when_the_side_table_is_wrong_then_says_where(tmp_path, users, message):
    write(tmp_path, users, "users.csv")
    with pytest.raises(ValueError, match=message):
        load(tmp_path, LINES, **JOIN)


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "1,2,3",
            r"clicks\.csv, row 3 \(line 4\): 4 columns expected, got 3: '1,2,3'\. \(on_bad_row=skip leaves",
        ),
        ("1,2,3,4,5", r"clicks\.csv, row 3 \(line 4\): 4 columns expected, got 5: '1,2,3,4,5'"),
        ("2,2,a,x", r"row 3 \(line 4\), column 'click': the label must be 0 or 1, .*rule: \">= 4\", got '2'"),
        (",2,a,x", r"row 3 \(line 4\), column 'click': the label must be 0 or 1, .*, got ''"),
        (
            "1,old,a,x",
            r"row 3 \(line 4\), column 'age': must be a finite number \(or listed under `missing`.*, got 'old'",
        ),
        ("1,nan,a,x", r"row 3 \(line 4\), column 'age': must be a finite number .*, got 'nan'"),
        ("1,-inf,a,x", r"row 3 \(line 4\), column 'age': must be a finite number .*, got '-inf'"),
        ("1,1e39,a,x", r"row 3 \(line 4\), column 'age': must be within 3.4e\+38, .* \(or listed .*, got '1e39'"),
        ("1,-1.7976931348623157e308,a,x", r"row 3 \(line 4\), column 'age': must be within 3.4e\+38"),
        ("1,1,a,x", None),
    ],
)
def test_bad_row_when_errors_are_wanted_then_says_file_row_and_column_and_else_is_skipped(tmp_path, line, message):
    lines = [*LINES[:3], line, *LINES[3:]]
    if message is None:
        assert load(tmp_path, lines, on_bad_row="skip").skipped_rows == {}
        return
    with pytest.raises(ValueError, match=message):
        load(tmp_path, lines)
    data = load(tmp_path, lines, on_bad_row="skip")
    assert data.skipped_rows == {str(tmp_path / "clicks.csv"): 1}
    assert_same_rows(data, tmp_path)


def test_bad_rows_when_skipped_then_are_counted_by_kind_and_logged_once(tmp_path, caplog):
    lines = [LINES[0], "1", *LINES[1:], "7,1,a,x", "1,x,a,x", "1,y,a,x", "8,z,a,x", "1,2"]
    with caplog.at_level(logging.INFO):
        data = load(tmp_path, lines, on_bad_row="skip")
    assert data.skipped_rows == {str(tmp_path / "clicks.csv"): 6}
    assert data.rows_read == {str(tmp_path / "clicks.csv"): {"rows": 11, "used": 5, "skipped": 6, "comments": 0}}
    (message,) = [record.message for record in caplog.records if "clicks.csv: skipped" in record.message]
    assert "clicks.csv: skipped 6 of 11 rows: 2 like " in message
    assert "row 1 (line 2): 4 columns expected, got 1" in message
    # The row with two mistakes counts once, for the first of them.
    assert "2 like " in message.split(";")[1]
    assert "row 7 (line 8), column 'click'" in message.split(";")[1]
    assert "row 8 (line 9), column 'age'" in message.split(";")[2]
    assert_same_rows(data, tmp_path)


def test_bad_row_when_lines_are_blank_or_commented_then_is_found_where_an_editor_shows_it(tmp_path):
    lines = ["", "# remark", "", LINES[0], "", LINES[1], "", "", "1,2", "0,1,a,x", "x,1,a,x", ""]
    with pytest.raises(ValueError, match=r"row 2 \(line 9\): 4 columns expected, got 2"):
        load(tmp_path, lines, comment="#")
    lines[8] = "1,2,a,x\r"
    with pytest.raises(ValueError, match=r"row 4 \(line 11\), column 'click'"):
        load(tmp_path, lines, comment="#")
    (tmp_path / "clicks.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    with pytest.raises(ValueError, match=r"clicks\.csv\.gz, row 4 \(line 11\), column 'click'"):
        load(tmp_path, comment="#", files="clicks.csv.gz")


def test_bad_row_when_only_unused_columns_are_filled_then_is_not_taken_for_an_empty_line(tmp_path):
    lines = [f"{line},more" for line in LINES] + [",,,,something"]
    with pytest.raises(ValueError, match=r"row 6 \(line 7\), column 'click': the label must be 0 or 1"):
        load(tmp_path, lines)
    assert load(tmp_path, lines, on_bad_row="skip").skipped_rows == {str(tmp_path / "clicks.csv"): 1}


def test_bad_row_when_the_separator_is_long_then_is_quoted_as_it_stands(tmp_path):
    lines = [line.replace(",", "::") for line in [*LINES, "1::2"]]
    with pytest.raises(ValueError, match=r"row 6 \(line 7\): 4 columns expected, got 2: '1::2'"):
        load(tmp_path, lines, separator="::")


def test_bad_rows_when_all_are_bad_then_raises_even_if_skipping(tmp_path):
    with pytest.raises(ValueError, match=r"clicks\.csv: all 2 rows are bad: 2 like .*row 1 \(line 2\), column 'click'"):
        load(tmp_path, [LINES[0], "5,1,a,x", "6,1,a,x"], on_bad_row="skip")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_bad_row_when_a_parquet_number_is_not_finite_then_says_row_and_column(tmp_path, value):
    table = pa.table({"click": [1, 0], "age": [1.0, value], "user": ["a", "b"], "tags": [["x"], ["y"]]})
    parquet.write_table(table, tmp_path / "clicks.parquet")
    with pytest.raises(
        ValueError,
        match=r"clicks\.parquet, row 2, column 'age': must be (a finite number|within) .*got (nan|inf|1e.300)",
    ):
        load(tmp_path, files="clicks.parquet")
    if np.isnan(value):
        data = load(tmp_path, files="clicks.parquet", missing=["NaN"], dense={"age": {"standardize": False}})
        assert all_rows(data).dense[:, 0].tolist() == [1, 1]


def test_parquet_when_a_column_has_an_impossible_type_then_says_which(tmp_path):
    table = pa.table({"click": [1, 0], "age": [[1], [2]], "user": ["a", "b"], "tags": [["x"], ["y"]]})
    parquet.write_table(table, tmp_path / "clicks.parquet")
    with pytest.raises(
        ValueError, match=r"clicks\.parquet, column 'age' has type list<.*does not fit its place in the"
    ):
        load(tmp_path, files="clicks.parquet")


@pytest.mark.parametrize("when", ["soon", ""])
def test_bad_row_when_a_time_cannot_be_read_then_says_so(tmp_path, when):
    lines = ["click,age,user,tags,when", "1,1,a,x,2026-01-01", f"0,1,a,x,{when}"]
    with pytest.raises(ValueError, match=rf"row 2 \(line 3\), column 'when': the time must be .*, got '{when}'"):
        load(tmp_path, lines, time="when")


@pytest.mark.parametrize(
    ("lines", "change", "message"),
    [
        ([], {}, r"clicks\.csv is empty"),
        ([""], {}, r"clicks\.csv is empty"),
        (LINES[:1], {}, r"clicks\.csv has a header and no rows"),
        (["click,age,user,user", "1,2,3,4"], {}, r"clicks\.csv: the first line names column 'user' more than once"),
        (
            LINES,
            {"dense": ["agee"]},
            r"schema\.dense names column 'agee', which is not in .*clicks\.csv\. Did you mean 'age'\? "
            r"clicks\.csv has click, age, user, tags\. If its first line is no header",
        ),
        (LINES, {"label": "clicked"}, r"schema\.label names column 'clicked', which is not in .*Did you mean 'click'"),
        (
            LINES,
            {"files": "no.csv"},
            r"schema\.files\.train: there is no file .*no\.csv\. Relative paths start from data\.root",
        ),
        (LINES, {"files": "no-*.csv"}, r"schema\.files\.train: there is no file .*no-\*\.csv"),
        (
            LINES,
            {"label": {"column": "click", "rule": "> 5"}},
            r"all 5 training rows have the label 0 under the rule '> 5' on "
            r"column 'click'",
        ),
        (LINES, {"split": {"test": 0.01}}, r"schema\.split leaves no validation rows of 5|leaves no test rows of 5"),
        (
            LINES,
            {"encoding": "ascii", "files": "umlaut.csv"},
            r"umlaut\.csv is not written in ascii\. Name its encoding",
        ),
        (LINES, {"files": "latin.csv"}, r"latin\.csv is not written in utf-8\. Name its encoding .* encoding: latin-1"),
        (["click::a", "1::\x1f"], {"separator": "::", "categorical": ["a"]}, r"holds the control character 0x1f"),
        (
            LINES,
            {"joins": [{"file": "clicks.csv", "column": "usr", "key": "user"}]},
            r"schema\.joins names column 'usr', which",
        ),
    ],
)
def test_file_when_it_does_not_fit_the_schema_then_says_how(tmp_path, lines, change, message):
    write(tmp_path, [*LINES, "1,1,Zürich,x"], "umlaut.csv")
    write(tmp_path, [*LINES, "1,1,Zürich,x"], "latin.csv", encoding="latin-1")
    change = {"multi_valued": {}, "dense": []} | change if "separator" in change else change
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(tmp_path, lines, **change)


def test_module_when_an_argument_is_wrong_then_says_what_is_allowed(tmp_path):
    with pytest.raises(ValueError, match=r"data\.on_bad_row must be error or skip, got 'ignore'"):
        TabularDataModule(schema=SCHEMA, on_bad_row="ignore")


def test_training_when_the_schema_has_no_training_file_then_says_so(tmp_path):
    write(tmp_path, LINES)
    with pytest.raises(ValueError, match=r"schema\.files has no train, so there are no rows for it"):
        load(tmp_path, files={"test": "clicks.csv"})


# --- Schema files, other processes, checkpoints ----------------------------------------------------------------------


def test_schema_file_when_given_by_path_then_its_folder_is_where_paths_start(tmp_path):
    write(tmp_path, LINES)
    (tmp_path / "schema.yaml").write_text(TabularDataModule(schema=SCHEMA).schema.to_yaml())
    data = TabularDataModule(schema=str(tmp_path / "schema.yaml"))
    data.setup("fit")
    assert_same_rows(data, tmp_path)


def test_module_when_sent_to_another_process_then_has_its_rows(tmp_path):
    data = load(tmp_path, LINES)
    copy = pickle.loads(pickle.dumps(data))
    (tmp_path / "clicks.csv").unlink()  # nothing is read again
    copy.setup("fit")
    assert torch.equal(all_rows(copy).sparse.values, all_rows(data).sparse.values)


def test_checkpoint_when_loaded_then_new_files_are_encoded_without_the_training_rows(tmp_path):
    trained = load(tmp_path, many_lines(100), split={"validation": 0, "test": 0.2})
    torch.save(trained.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    write(tmp_path, many_lines(100)[:31], "new.csv")
    (tmp_path / "clicks.csv").rename(tmp_path / "old.csv")

    for files in ({"test": "new.csv"}, {"train": "gone.csv", "test": "new.csv"}):
        later = TabularDataModule(schema=SCHEMA | {"files": files}, root=tmp_path)
        later.load_state_dict(state)
        later.setup("test")
        assert later.fields == trained.fields
        # As a trainer does it: set up first, then load.
        afterwards = TabularDataModule(schema=SCHEMA | {"files": files}, root=tmp_path)
        afterwards.setup("test")
        afterwards.load_state_dict(state)
        vocabulary = trained.encoding.vocabularies["user"].to_pylist()
        mean, std = trained.encoding.statistics["age"]
        for data in (later, afterwards):
            (batch,) = data.test_dataloader()
            assert ids_of(batch, "user") == [[2 + vocabulary.index(f"u{i % 7}")] for i in range(30)]
            assert batch.dense[:, 0].tolist() == pytest.approx([(i - mean) / std for i in range(30)], rel=1e-5)


def test_checkpoint_when_it_is_of_the_same_rows_then_nothing_is_read_again(tmp_path):
    data = load(tmp_path, LINES)
    before = data.rows("train")
    data.load_state_dict(data.state_dict())
    assert data.rows("train") is before


def test_checkpoint_when_the_columns_changed_then_raises(tmp_path):
    state = load(tmp_path, LINES).state_dict()
    other = TabularDataModule(schema=SCHEMA | {"categorical": ["tags"], "multi_valued": {}}, root=tmp_path)
    with pytest.raises(
        ValueError, match=r"checkpoint has vocabularies of tags, user, but the schema wants tags\. Evaluate"
    ):
        other.load_state_dict(state)


TWO_DENSE = ["click,age,price,user,tags", *(f"{i % 2},{i},{1000 * i + 7},u{i % 3},x" for i in range(20))]


def test_rows_when_the_schema_lists_columns_in_another_order_then_are_in_that_order(tmp_path):
    raw = {"standardize": False}
    first = all_rows(load(tmp_path, TWO_DENSE, dense={"age": raw, "price": raw}))
    second = all_rows(load(tmp_path, dense={"price": raw, "age": raw}))
    assert first.dense[3].tolist() == [3, 3007]
    assert second.dense[3].tolist() == [3007, 3]
    tags_first = load(tmp_path, categorical=["tags", "user"], multi_valued={}, dense=[])
    users_first = load(tmp_path, categorical=["user", "tags"], multi_valued={}, dense=[])
    assert list(tags_first.fields) == list(all_rows(tags_first).sparse.keys) == ["tags", "user"]
    assert list(users_first.fields) == list(all_rows(users_first).sparse.keys) == ["user", "tags"]


def test_checkpoint_when_the_columns_are_in_another_order_then_raises(tmp_path):
    state = load(tmp_path, TWO_DENSE, dense=["age", "price"]).state_dict()
    other = TabularDataModule(schema=SCHEMA | {"dense": ["price", "age"]}, root=tmp_path)
    with pytest.raises(
        ValueError, match=r"statistics in the order age, price, but the schema has price, age\. A model"
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multi_valued": {"tags": {"hash_buckets": 9, "separator": "|"}}}, None),
        (
            {"multi_valued": {"tags": {"hash_buckets": 9, "separator": ","}}},
            r"schema\.multi_valued\.tags is .*separator.*, and was",
        ),
        (
            {"categorical": {"user": {"hash_buckets": 9, "column": "tags"}}},
            r"schema\.categorical\.user is .*tags.*, and was",
        ),
        ({"dense": {"age": {"transform": "log"}}}, r"schema\.dense\.age is .*log.*, and was {} where the checkpoint"),
        (
            {"categorical": {"tags": {"hash_buckets": 9}, "user": {"hash_buckets": 9}}, "multi_valued": {}},
            r"schema\.categorical is \['tags', 'user'\], and was \['user'\]",
        ),
    ],
)
def test_checkpoint_when_features_are_made_otherwise_then_raises(tmp_path, change, message):
    hashed = {"categorical": {"user": {"hash_buckets": 9}}, "multi_valued": {"tags": {"hash_buckets": 9}}}
    state = load(tmp_path, LINES, **hashed).state_dict()
    other = TabularDataModule(schema=SCHEMA | hashed | change, root=tmp_path)
    if message is None:
        other.load_state_dict(state)
        return
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)


def test_state_when_nothing_was_read_yet_then_is_empty(tmp_path):
    assert TabularDataModule(schema=SCHEMA, root=tmp_path).state_dict() == {}


def test_ids_when_counted_over_a_large_random_file_then_match_a_counter(tmp_path):
    rng = np.random.default_rng(0)
    users = [f"u{x}" for x in rng.zipf(1.4, 3000) % 500]
    lines = ["click,user", *(f"{i % 2},{user}" for i, user in enumerate(users))]
    data = load(tmp_path, lines, dense=[], multi_valued={}, categorical={"user": {"min_count": 3}})
    counts = Counter(users)
    seen = [bag[0] for bag in ids_of(all_rows(data), "user")]
    known = {user for user, count in counts.items() if count >= 3}
    assert data.fields["user"] == len(known) + 2
    assert [id_ == 0 for id_ in seen] == [user not in known for user in users]
    assert len({(user, id_) for user, id_ in zip(users, seen, strict=True) if user in known}) == len(known)


# --- Before anything is trained --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"schema\.files\.test: there is no file .*later\."),
        (b"click,age,user,tags\n", r"later\.csv has a header and no rows"),
        (b"", r"later\.csv is empty"),
        (b"click,age,tags\n1,2,x\n", r"schema\.categorical names column 'user', which is not in .*later\.csv"),
        (
            "click,age,user,tags\n1,2,a,x\n".encode("utf-16"),
            r"later\.csv is written in UTF-16\. Write encoding: utf-16",
        ),
        (b"PAR1....", r"later\.csv is a Parquet file\. Name it \.parquet"),
    ],
)
def test_files_when_one_of_the_test_cannot_be_used_then_an_error_before_training(tmp_path, content, message):
    if content is not None:
        (tmp_path / "later.csv").write_bytes(content)
    write(tmp_path, LINES)
    data = TabularDataModule(
        schema=SCHEMA | {"files": {"train": "clicks.csv", "test": "later.csv"}, "split": {"validation": 0}},
        root=tmp_path,
    )
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.prepare_data()


def test_file_when_it_is_text_that_is_named_parquet_then_says_so(tmp_path):
    write(tmp_path, LINES, "clicks.parquet")
    with pytest.raises(ValueError, match=r"clicks\.parquet is no Parquet file, or not all of it .* name it \.csv"):
        load(tmp_path, files="clicks.parquet")


def test_numbers_when_written_with_commas_then_are_read_by_the_schema(tmp_path):
    lines = ["click;age;user;tags", "1;1.234,5;3;x", "0;7;3.0;y"]
    data = load(tmp_path, lines, separator=";", decimal=",", thousands=".", dense={"age": {"standardize": False}})
    batch = all_rows(data)
    assert sorted(batch.dense.flatten().tolist()) == [7.0, 1234.5]
    assert ids_of(batch, "user") == [[2], [2]]  # 3 and 3.0 are one user
    with pytest.raises(ValueError, match=r"column 'age': is a thousand or a fraction, where decimal is a comma"):
        load(tmp_path, [lines[0], lines[2], "1;1.500;3;y"], separator=";", decimal=",", dense=["age"])


def test_files_when_they_are_of_training_and_of_an_evaluation_then_a_warning_names_them(tmp_path, caplog):
    write(tmp_path, LINES)
    files = {"train": "*.csv", "validation": "clicks.csv", "predict": "clicks.csv"}
    TabularDataModule(schema=SCHEMA | {"files": files, "split": {"test": 0}}, root=tmp_path).prepare_data()
    (warning,) = [line for line in caplog.messages if "is under files.train" in line]
    assert warning == f"{tmp_path}/clicks.csv is under files.train and under files.validation: its rows are trained on."


def test_unknown_ids_then_their_share_is_told_by_column(tmp_path):
    write(tmp_path, ["click,age,user,tags", "1,1,a,x", "1,1,d,x|w|v", "0,1,e,y", "1,1,,z"], "test.csv")
    data = load(tmp_path, LINES, files={"train": "clicks.csv", "test": "test.csv"}, split={"validation": 0})
    assert data.unknown_ids("test") == {"user": 0.5, "tags": pytest.approx(2 / 6)}
    assert data.unknown_ids("train") == {"user": 0.0, "tags": 0.0}


TRUTHS = {"0.csv": ["0", "1"], "pandas.csv": ["False", "True"], "json.csv": ["false", "true"], "bool.parquet": [0, 1]}


@pytest.mark.parametrize(
    ("rule", "names"),
    [(None, [*TRUTHS]), ("== 1", ["0.csv", "bool.parquet"]), ("== true", ["json.csv", "bool.parquet"])],
)
def test_truths_when_a_file_writes_them_otherwise_than_training_then_ids_and_labels_are_the_same(tmp_path, rule, names):
    for name in names:
        rows = [TRUTHS[name][click] for click in (0, 1, 1, 0, 1)]
        if name.endswith("csv"):
            write(tmp_path, ["click,flag", *(f"{x},{x}" for x in rows)], name)
        else:
            parquet.write_table(
                pa.table({x: pa.array(rows).cast(pa.bool_()) for x in ("click", "flag")}), tmp_path / name
            )
    schema = {"label": {"column": "click", "rule": rule}, "categorical": ["flag"], "split": {"validation": 0}}
    for trained in names:
        data = TabularDataModule(
            schema=schema | {"files": {"train": trained, "test": names}}, root=tmp_path, batch_size=5
        )
        data.setup()
        batch = all_rows(data, "test")
        assert batch.labels.tolist() == [0, 1, 1, 0, 1] * len(names)
        assert batch.sparse.values.tolist() == [3, 2, 2, 3, 2] * len(names)
        assert data.unknown_ids("test") == {"flag": 0.0}
