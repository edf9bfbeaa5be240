"""Schemas guessed from files of many kinds, which then load unedited."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from lightning_recsys.data import Schema, TabularDataModule, guess_schema
from lightning_recsys.data.guesses.sniffing import sniff
from lightning_recsys.data.tables.reading import read_header
from lightning_recsys.data.tables.schema_parts import TableFormat
from lightning_recsys.serving.encoders import SchemaEncoder

CLICKS = random.Random(1).choices((0, 1), k=20_000)  # which no other column tells
NAMES = ["row_id", "click", "price", "views", "shop_id", "color", "tags", "seen_at", "empty", "same", "few", "comment"]


def make_rows(num_rows: int = 400) -> list[list[str]]:
    rng = random.Random(0)
    return [
        [
            str(1000 + i),
            str(rng.randrange(2)),
            f"{rng.random() * 100:.2f}",
            str(int(10 ** (rng.random() * 6))),
            str(rng.randrange(50)),
            rng.choice(["red", "green", "?"]),
            "|".join(rng.sample(["a", "b", "c", "d"], rng.randrange(1, 4))),
            f"2026-01-{1 + i % 28:02d} 10:{i % 60:02d}:00",
            "",
            "x",
            str(rng.randrange(3)),
            f"text number {i}",
        ]
        for i in range(num_rows)
    ]


def write(path: Path, rows: list[list[str]], separator: str = ",", *, encoding: str = "utf-8") -> Path:
    path.write_bytes("".join(separator.join(row) + "\n" for row in rows).encode(encoding))
    return path


def assert_loads(schema: Schema, folder: Path, num_rows: int = 400) -> None:
    """As a user would: written to a file, read, and every row used."""
    path = folder / "schema.yaml"
    path.write_text(schema.to_yaml(), encoding="utf-8")
    assert Schema.from_yaml(path) == schema
    data = TabularDataModule(schema=path)
    data.setup()
    assert sum(len(data.rows(split)) for split in ("train", "validation", "test")) == num_rows


def assert_columns(schema: Schema) -> None:
    assert schema.label.column == "click"
    assert schema.label.rule is None
    assert set(schema.dense) == {"price", "views"}
    assert schema.dense["views"].transform == "log"
    assert schema.dense["price"].transform == "none"
    assert set(schema.categorical) == {"shop_id", "color", "few"}
    assert {name: column.separator for name, column in schema.multi_valued.items()} == {"tags": "|"}
    assert schema.time == "seen_at"
    assert set(schema.ignore) == {"row_id", "empty", "same", "comment"}


def test_guess_when_the_file_has_a_header_then_every_column_finds_its_place(tmp_path):
    schema = guess_schema(write(tmp_path / "clicks.csv", [NAMES, *make_rows()]))
    assert_columns(schema)
    assert schema.table.missing == ("", "?")
    assert_loads(schema, tmp_path)
    text = schema.to_yaml()
    for remark in ("the same in every row", "empty in the sample", "different in every row", "looks like the time"):
        assert remark in text
    assert "under categorical: hour: {column: seen_at, transform: hour}" in text
    for remark in ("positive in the sample", "lists of 4 different values", "most of them small", "by: time"):
        assert remark in text


@pytest.mark.parametrize(
    ("name", "separator", "expected"), [("a.tsv", "\t", None), ("a.csv", ";", ";"), ("a.dat", "::", "::")]
)
def test_guess_when_the_separator_is_another_then_is_found(tmp_path, name, separator, expected):
    schema = guess_schema(write(tmp_path / name, [NAMES, *make_rows()], separator))
    assert schema.table.separator == expected
    assert_columns(schema)
    assert_loads(schema, tmp_path)


def test_guess_when_there_is_no_header_then_columns_are_numbered(tmp_path):
    schema = guess_schema(write(tmp_path / "bare.csv", make_rows()), label="column_2")
    assert schema.table.column_names == tuple(f"column_{i}" for i in range(1, 13))
    assert schema.time == "column_8"
    assert_loads(schema, tmp_path)


SORTED = [f"u{i // 100:02d},{CLICKS[i]},c{i % 3},{i % 90}.5" for i in range(2000)]  # by a user whose id starts with u


@pytest.mark.parametrize(
    ("top", "way"),
    [
        (["user,click,city,price"], {}),
        (["users of May", "user,click,city,price"], {"skip_lines": 1}),
        (["users of May", "", "from 1, to 31", "", "user,click,city,price"], {"skip_lines": 4}),
        (["# users, of, May, 2026", "#", "", "user,click,city,price"], {"comment": "#"}),
        (["// users of May", "user,click,city,price"], {"comment": "//"}),
        (["user,click,city,user"], {"skip_lines": 1, "column_names": ("user", "click", "city", "user_2")}),
        (["u, May", "user,click,city,user"], {"skip_lines": 2, "column_names": ("user", "click", "city", "user_2")}),
        (["user,click,city"], {"skip_lines": 1, "column_names": ("column_1", "user", "click", "city")}),
        (["#user,click,city,price"], {}),
        (["# users of May", "#user,click,city,price"], {"skip_lines": 1}),
        (["   ", "user,click,city,price"], {}),
        (["   ", "users of May", "\t", "user,click,city,price"], {"skip_lines": 3}),
        (["# users of May", " ", "user,click,city,price"], {"comment": "#"}),
        ([], {"column_names": ("column_1", "column_2", "column_3", "column_4")}),
    ],
)
def test_guess_when_lines_stand_above_the_rows_then_every_row_is_read(tmp_path, top, way):
    path = tmp_path / "clicks.csv"
    rows = [f"#{row}" for row in SORTED] if top[-1:] == ["#user,click,city,price"] else SORTED
    path.write_text("".join(f"{line}\n" for line in [*top, *rows]))
    schema = guess_schema(path, label=way.get("column_names", ["", "click"])[1])
    table = {name: getattr(schema.table, name) for name in ("skip_lines", "comment", "column_names")}
    assert table == {"skip_lines": 0, "comment": None, "column_names": None} | way
    data = TabularDataModule(schema=schema, on_bad_row="skip")
    data.setup()
    above = sum(bool(line.strip()) for line in top) - (schema.table.column_names is None)
    assert data.rows_read == {str(path): {"rows": 2000 + above, "used": 2000, "skipped": 0, "comments": above}}
    assert sum(len(data.rows(split)) for split in ("train", "validation", "test")) == 2000


def test_guess_when_all_rows_but_the_last_begin_with_a_mark_then_they_are_rows(tmp_path):
    rows = [f"#{i % 9},c{i % 3},{'yes' if i % 2 else 'no'}" for i in range(30)]
    path = write(tmp_path / "rows.csv", [row.split(",") for row in [*rows, "other,c7,maybe"]])
    table, columns = (sniffed := sniff(path)).table, sniffed.columns
    assert (table.comment, table.skip_lines, len(table.column_names)) == (None, 0, 3)
    assert [len(column) for column in columns.values()] == [31] * 3


@pytest.mark.parametrize("blank", ["\t\t", "  "])
def test_first_line_when_it_is_white_space_then_only_tabs_of_a_file_without_a_header_are_a_row(tmp_path, blank):
    path = tmp_path / "rows.tsv"
    path.write_text(f"{blank}\n1\tu\tc\n")
    assert read_header(path, TableFormat()).num_lines == 2
    assert read_header(path, TableFormat(column_names=("a", "b", "c"))).num_lines == (0 if "\t" in blank else 1)


def test_guess_when_the_file_is_latin_1_then_says_so(tmp_path):
    rows = [[*row[:5], "größe", *row[6:]] if i % 2 else row for i, row in enumerate(make_rows())]
    schema = guess_schema(write(tmp_path / "clicks.csv", [NAMES, *rows], encoding="latin-1"))
    assert schema.table.encoding == "latin-1"
    assert_loads(schema, tmp_path)


def test_guess_when_values_are_quoted_then_they_are_read(tmp_path):
    rows = [[*row[:5], '"dark, red"', *row[6:]] if i % 2 else row for i, row in enumerate(make_rows())]
    schema = guess_schema(write(tmp_path / "clicks.csv", [NAMES, *rows]))
    assert_columns(schema)
    assert_loads(schema, tmp_path)


def test_guess_when_the_file_is_parquet_then_types_help(tmp_path):
    rows = make_rows()
    columns = dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True))
    table = {
        **columns,
        "click": [value == "1" for value in columns["click"]],
        "price": list(map(float, columns["price"])),
        "views": list(map(int, columns["views"])),
        "tags": [value.split("|") for value in columns["tags"]],
        "empty": pa.nulls(len(rows), pa.string()),
    }
    parquet.write_table(pa.table(table), tmp_path / "clicks.parquet")
    schema = guess_schema(tmp_path / "clicks.parquet")
    assert_columns(schema)
    assert_loads(schema, tmp_path)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (["0", "1"], None),
        (["true", "false"], None),
        (["no", "no", "yes"], '== "yes"'),
        (["<=50K", "<=50K", ">50K"], '== ">50K"'),
        (["1", "2", "3", "4", "4", "5"], ">= 4"),
        (["a", "a", "b", "c", "c"], '== "b"'),
    ],
)
def test_guess_when_the_label_is_named_then_a_rule_fits_its_values(tmp_path, values, rule):
    rows = [[values[i % len(values)], f"u{i % 7}"] for i in range(200)]
    schema = guess_schema(write(tmp_path / "rows.csv", [["outcome", "user"], *rows]), label="outcome")
    assert schema.label.rule == rule
    assert_loads(schema, tmp_path, 200)


def test_guess_when_all_features_are_numbers_then_they_stay_numbers_and_load(tmp_path):
    rows = [[str(CLICKS[i]), str(i % 30), f"{i / 7:.3f}"] for i in range(300)]
    schema = guess_schema(write(tmp_path / "rows.csv", [["click", "a", "b"], *rows]))
    assert not schema.categorical
    assert set(schema.dense) == {"a", "b"}
    assert_loads(schema, tmp_path, 300)


@pytest.mark.parametrize(
    ("content", "label", "message"),
    [
        ("", None, r"rows\.csv is empty"),
        ("a\nb\nc\n", None, r"none of .*'::'.* cuts the first lines into equally many columns"),
        (
            "u,v\na,x\nb,y\na,y\n",
            None,
            r"which column is the label\? Name it\. u, v have two values each\. Columns: u, v",
        ),
        ("u,v\na,x\nb,y\nc,z\n", None, r"which column is the label\? Name it\. Columns: u, v"),
        ("u,v\na,x\nb,y\nc,z\n", "w", r"rows\.csv has no column 'w' to be the label\. It has u, v"),
    ],
)
def test_guess_when_it_cannot_then_says_why(tmp_path, content, label, message):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        guess_schema(path, label=label)


LONG = "[" + ", ".join(['{"click": 1, "user": "a"}'] * 50_000) + "\n"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt"])
@pytest.mark.parametrize(
    "text",
    [
        '[{"click": 1}]',
        '[\n  {\n"click": 1\n  }\n]\n',
        '[{\n"click": 1\n}]\n',
        '{\n"click": 1\n}\n',
        '[{"click": 1, "user": "a"},\n{"click": 0, "user": "b"}]\n',
        LONG,
    ],
    ids=range(6),
)
def test_file_when_it_is_json_but_not_of_lines_then_the_guess_and_the_reading_say_what_to_do(tmp_path, text, name):
    path = tmp_path / name
    path.write_text(text)
    schema = {"files": str(path), "label": "click", "categorical": ["user"]}
    for read in (lambda: guess_schema(path), lambda: TabularDataModule(schema=schema).setup()):
        with pytest.raises(ValueError, match=rf"{name} is JSON.*pandas\.read_json\('in\.json'\)\.to_json\("):
            read()


@pytest.mark.parametrize("separator", ["\t", "|", "::"])
@pytest.mark.parametrize("header", [True, False])
def test_table_when_its_first_column_is_json_then_is_read(tmp_path, separator, header):
    """Without a header the first line begins as a file in JSON does."""
    path, names = tmp_path / "rows.csv", ["context", "user", "click"]
    rows = [[f'{{"page": {i % 5}}}', f"u{i % 7}", str(CLICKS[i])] for i in range(200)]
    path.write_text("".join(f"{separator.join(row)}\n" for row in [*([names] if header else []), *rows]))
    guessed = guess_schema(path, label=None if header else "column_3")
    assert len(guessed.categorical) == 2
    assert_loads(guessed, tmp_path, 200)
    written = {"separator": separator, "quote": None, "column_names": None if header else names}
    data = TabularDataModule(schema={"files": str(path), "label": "click", "categorical": names[:2]} | written)
    data.setup()
    assert len(data.encoding.vocabularies["context"]) == 5


def test_table_when_its_lines_are_json_and_its_columns_are_named_then_the_schema_counts(tmp_path):
    (tmp_path / "rows.txt").write_text('{"user": 1}\n')
    assert read_header(tmp_path / "rows.txt", TableFormat(separator=":", column_names=("key", "value"))).num_lines == 0
    with pytest.raises(ValueError, match=r"rows\.txt is JSON"):
        read_header(tmp_path / "rows.txt", TableFormat(column_names=("key", "value")))


@pytest.mark.parametrize("separator", [" ", ",", "\t"])
def test_guess_when_r_has_written_the_table_then_every_row_is_read_and_its_names_of_rows_are_left_out(
    tmp_path, separator
):
    # write.table(rows, "rows.txt"): quotes around words, names of rows without a name of their own, NA without quotes
    rows = [f'"{i + 1}",{CLICKS[i]},"u {i % 7}",{i / 8 if i % 5 else "NA"}' for i in range(200)]
    path = tmp_path / "rows.txt"
    path.write_text("\n".join(row.replace(",", separator) for row in ['"click","user","price"', *rows]) + "\n")
    schema = guess_schema(path)
    assert (schema.table.column_names, schema.ignore) == (("column_1", "click", "user", "price"), ("column_1",))
    assert (set(schema.categorical), set(schema.dense)) == ({"user"}, {"price"})
    assert schema.present["price"] == 0.8
    assert_loads(schema, tmp_path, 200)


def test_guess_when_there_is_no_file_then_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*rows\.csv"):
        guess_schema(tmp_path / "rows.csv")


def guess_of(tmp_path: Path, header: str, rows: list[str], *, label: str | None = "click") -> Schema:
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{line}\n" for line in (header, *rows)))
    schema = guess_schema(path, label=label)
    assert_loads(schema, tmp_path, len(rows))
    return schema


def test_guess_when_whole_numbers_have_gaps_and_come_often_then_are_ids(tmp_path):
    rng = random.Random(0)
    shops = rng.sample(range(1000, 90_000), 30)
    rows = [f"{CLICKS[i]},{rng.choice(shops)},{rng.randrange(18, 80)},{rng.randrange(10) * 1000}" for i in range(400)]
    schema = guess_of(tmp_path, "click,shop,age,income", rows)
    assert "shop" in schema.categorical
    assert "with gaps" in schema.comments["shop"]
    assert "age" in schema.dense


def test_guess_when_columns_share_one_numbering_without_gaps_then_all_are_ids(tmp_path):
    """As FuxiCTR's Frappe has it: users from 1 on, then items, then countries, each with the next numbers."""
    rng = random.Random(0)
    sizes, first, columns = {"who": 300, "what": 500, "country": 80, "city": 233}, 1, {}
    for name, size in sizes.items():
        columns[name] = [first + int(size * rng.random() ** 1.5) for _ in range(4000)]
        first += size
    age = [rng.randrange(18, 80) for _ in range(4000)]
    rows = [f"{CLICKS[i]},{','.join(str(column[i]) for column in columns.values())},{age[i]}" for i in range(4000)]
    schema = guess_of(tmp_path, f"click,{','.join(columns)},age", rows)
    assert set(schema.categorical) >= set(sizes)
    assert "one numbering" in schema.comments["country"]


def test_guess_when_counts_overlap_or_lie_apart_then_are_numbers(tmp_path):
    rng = random.Random(0)
    ranges = ((1, 13), (18, 90), (1950, 2020), (0, 40))
    rows = [f"{CLICKS[i]},u{i % 7}," + ",".join(str(rng.randrange(*x)) for x in ranges) for i in range(2000)]
    schema = guess_of(tmp_path, "click,user,month,age,year,visits", rows)
    assert set(schema.dense) == {"month", "age", "year", "visits"}


def test_guess_when_prices_repeat_and_no_column_is_a_category_then_they_stay_numbers(tmp_path):
    rng = random.Random(0)
    rows = [f"{CLICKS[i]},{rng.randrange(1, 800)},{rng.randrange(5001) / 100:.2f}" for i in range(20_000)]
    schema = guess_of(tmp_path, "click,customer,price", rows)
    assert not schema.categorical
    assert set(schema.dense) == {"customer", "price"}


def test_guess_when_there_are_only_fractions_then_all_are_dense(tmp_path):
    rng = random.Random(0)
    rows = [f"{CLICKS[i]},{rng.random():.9f},{rng.randrange(5001) / 100:.2f}" for i in range(400)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["click,v1,amount", *rows]))
    schema = guess_schema(path, label="click")
    assert set(schema.dense) == {"v1", "amount"}
    assert not schema.categorical


def test_guess_when_no_column_can_be_a_feature_then_says_why(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["click,site", *(f"{CLICKS[i]},same" for i in range(100))]))
    with pytest.raises(ValueError, match=r"rows\.csv: no column can be a feature\. site: "):
        guess_schema(path, label="click")


def test_guess_when_pandas_wrote_its_index_then_is_ignored(tmp_path):
    schema = guess_of(tmp_path, ",click,user", [f"{i},{CLICKS[i]},u{i % 7}" for i in range(200)])
    assert schema.ignore == ("",)


def test_guess_when_names_stand_twice_then_they_are_told_apart(tmp_path):
    schema = guess_of(tmp_path, "click,user,user", [f"{CLICKS[i]},u{i % 7},v{i % 5}" for i in range(200)])
    assert set(schema.categorical) == {"user", "user_2"}


@pytest.mark.parametrize("header", ["click,user,", "click,user"])
def test_guess_when_lines_end_in_a_separator_then_the_last_column_is_ignored(tmp_path, header):
    schema = guess_of(tmp_path, header, [f"{CLICKS[i]},u{i % 7}," for i in range(200)])
    assert set(schema.categorical) == {"user"}
    assert len(schema.ignore) == 1


def test_guess_when_numbers_have_commas_then_the_schema_says_how_they_are_written(tmp_path):
    rows = [f"{CLICKS[i]};u{i % 7};{i % 9}.{100 + i},{i % 10}5" for i in range(200)]
    schema = guess_of(tmp_path, "click;user;price", rows)
    assert (schema.table.decimal, schema.table.thousands) == (",", ".")
    assert set(schema.dense) == {"price"}
    schema = guess_of(tmp_path, "click;user;price", [f"{CLICKS[i]};u{i % 7};{1 + i % 9},{100 + i}" for i in range(200)])
    assert set(schema.dense) == {"price"}


def test_guess_when_a_label_is_stray_then_asks(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("click,user\n" + "".join(f"{CLICKS[i]},u{i % 7}\n" for i in range(200)) + "-1,u1\n")
    with pytest.raises(ValueError, match=r"label 'click' has two values in almost all rows, and also '-1' \(1 rows\)"):
        guess_schema(path, label="click")


def test_guess_then_tells_in_how_many_rows_a_column_has_a_value(tmp_path):
    schema = guess_of(
        tmp_path, "click,user", [f"{CLICKS[i]},{'' if i % 4 else 'u'}{i % 3 if not i % 4 else ''}" for i in range(200)]
    )
    assert schema.present == {"click": 1.0, "user": 0.25}


def test_guess_when_names_cannot_be_those_of_features_then_features_have_others(tmp_path):
    schema = guess_of(
        tmp_path, "click,label,a.b,a_b,", [f"{CLICKS[i]},l{i % 5},u{i % 7},v{i % 6},w{i % 4}" for i in range(200)]
    )
    assert {name: feature.column for name, feature in schema.categorical.items()} == {
        "label_2": "label",
        "a.b": None,
        "a_b_2": "a_b",
    }
    assert schema.ignore == ("",)
    assert "  label_2: {column: label}  # 5 different values in the sample\n" in schema.to_yaml()


def test_guess_when_columns_are_called_like_keys_then_each_has_its_own_remark(tmp_path):
    text = guess_of(tmp_path, "click,split,train", [f"{CLICKS[i]},u{i % 7},v{i % 5}" for i in range(200)]).to_yaml()
    assert "  split: {}  # 7 different values in the sample\n" in text
    assert "split: {}  # a tenth of the rows" in text
    assert text.count("5 different values") == 1


def test_guess_when_some_rows_lack_a_value_then_times_are_ignored_and_flags_are_not(tmp_path):
    rows = [f"{CLICKS[i]},{'1' if i % 3 else ''},{'2026-01-' + str(10 + i % 9) if i % 4 else ''},x" for i in range(200)]
    schema = guess_of(tmp_path, "click,flag,login,same", rows)
    assert (schema.time, schema.ignore, list(schema.categorical)) == (None, ("login", "same"), ["flag"])
    assert "a time that some rows lack; its hour as a feature" in schema.comments["login"]


@pytest.mark.parametrize("separator", [",", "\t"])
def test_guess_when_a_quote_opens_a_value_and_is_never_closed_then_quotes_are_letters(tmp_path, separator):
    rows = [
        separator.join(
            [str(CLICKS[i]), f"u{i % 7}", f"{'' if i % 900 - 50 else chr(34)}a title of some length {i % 40}"]
        )
        for i in range(6000)
    ]
    schema = guess_of(tmp_path, separator.join(["click", "user", "title"]), rows)
    assert schema.table.quote is None
    assert len(schema.present) == 3


def test_guess_when_values_hold_line_ends_then_they_are_read(tmp_path):
    schema = guess_of(
        tmp_path, "click,user,title", [f'{CLICKS[i]},u{i % 7},"two, or\nthree\nlines {i % 4}"' for i in range(200)]
    )
    assert schema.table.quote == '"'
    assert set(schema.categorical) == {"user", "title"}


def test_guess_when_some_columns_have_commas_and_others_dots_then_every_row_is_read(tmp_path):
    rows = [f"{CLICKS[i]};u{i % 7};{i % 9},{i % 10}5;{1 + i % 9}.{100 + i};0.{10 + i % 90}" for i in range(200)]
    schema = guess_of(tmp_path, "click;user;size;price;share", rows)
    assert (schema.table.decimal, "price" in schema.dense) == (".", True)
    schema = guess_of(tmp_path, "click;user;size;share", [row.replace(row.split(";")[3] + ";", "") for row in rows])
    assert (schema.table.decimal, list(schema.dense)) == (",", ["size", "share"])


def test_guess_when_the_first_column_alone_has_quotes_then_they_are_no_letters(tmp_path):
    rows = [f"{'red' if i % 3 else chr(34) + 'dark' + chr(9) + 'red' + chr(34)}\t{CLICKS[i]}" for i in range(200)]
    assert guess_of(tmp_path, "color\tclick", rows).table.quote == '"'


@pytest.mark.parametrize("form", ["{}", "k{}"])
def test_guess_when_an_id_never_repeats_then_is_left_out_however_its_name_is_written(tmp_path, form):
    names = ["id", "ID", "Id", "customer_id", "customerID", "customerId", "PassengerId", "USER_ID"]
    rows = [
        f"{CLICKS[i]},u{i % 7},{i / 8}" + f",{form.format(7919 * i % 1009 + 5000)}" * len(names) for i in range(300)
    ]
    schema = guess_of(tmp_path, ",".join(["click", "user", "bid", *names]), rows)
    assert (schema.ignore, set(schema.dense)) == (tuple(names), {"bid"})


@pytest.mark.parametrize("form", [repr, json.dumps, lambda items: "[" + " ".join(map(repr, items)) + "]", tuple])
def test_guess_when_lists_are_written_in_brackets_then_items_have_neither_brackets_nor_quotes(tmp_path, form):
    vocabulary = ["a1", "b2", "it's", 'so "called"', "x, y", "back\\slash", "é"]
    lists = [vocabulary[i % 7 : i % 7 + 1 + i % 3] for i in range(200)]
    vectors = [[i / 200, -0.5, 1e-3 * i, float(i)] for i in range(200)]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["click", "tags", "vector", "numbers"])
        for i, (tags, vector) in enumerate(zip(lists, vectors, strict=True)):
            numbers = form([i % 5, i % 7]) if form is not tuple else [i % 5, i % 7]
            rows.writerow([CLICKS[i], form(tags), form(vector) if form is not tuple else repr(vector), numbers])
    schema = guess_schema(path)
    assert (set(schema.multi_valued), schema.vectors["vector"].width) == ({"tags", "numbers"}, 4)
    data = TabularDataModule(schema=schema)
    data.setup()
    assert set(data.encoding.vocabularies["tags"].to_pylist()) == set(vocabulary)
    assert set(data.encoding.vocabularies["numbers"].to_pylist()) == set(map(str, range(7)))
    assert data.num_dense == 4
    order = data.encoding.vocabularies["tags"].to_pylist()
    encoder = SchemaEncoder(data.schema, data.encoding)
    expected = [order.index(tag) + 2 for tags in lists[:7] for tag in tags]
    for given in (lists, [str(form(tags)) for tags in lists], [*lists[:3], *(str(form(tags)) for tags in lists[3:])]):
        requests = [{"tags": tags, "numbers": [], "vector": None} for tags in given[:7]]
        assert encoder.encode(requests)[1].select(("tags",)).values.tolist() == expected


@pytest.mark.parametrize("pair", ["[]", "()"])
def test_items_when_each_has_brackets_of_its_own_then_they_are_kept(tmp_path, pair):
    vocabulary = [f"{pair[0]}{word}{pair[1]}" for word in ("a", "b's", "c d")]
    rows = [[str(CLICKS[i]), "|".join(vocabulary[i % 3 : i % 3 + 1 + i % 2]), f"u{i % 7}"] for i in range(90)]
    path = write(tmp_path / "rows.csv", [["click", "tags", "user"], *rows])
    data = TabularDataModule(schema=guess_schema(path))
    data.setup()
    assert set(data.schema.multi_valued) == {"tags"}
    assert set(data.encoding.vocabularies["tags"].to_pylist()) == set(vocabulary)


# --- Lists of one length ---------------------------------------------------------------------------------------------


def listed_rows(separator: str, length: int) -> list[str]:
    """A header and rows whose lists have as many words each; hardly two lists are equal."""
    drawn = random.Random(0)
    words = [f"w{i}" for i in range(40)]
    rows = [
        f"{drawn.randint(1, 9)},{separator.join(drawn.sample(words, length))},{drawn.randint(0, 1)}" for _ in range(600)
    ]
    return ["age,words,clicked", *rows]


@pytest.mark.parametrize("separator", ["|", ";"])
@pytest.mark.parametrize("length", [4, 8])
def test_guess_when_every_row_has_a_list_of_one_length_then_it_is_a_list_and_no_columns(tmp_path, separator, length):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(listed_rows(separator, length)))
    schema = guess_schema(path, label="clicked")
    assert schema.table.separator is None  # the comma, as of any .csv
    assert schema.multi_valued["words"].separator == separator


def test_guess_when_the_header_of_such_a_table_lacks_a_name_then_the_same(tmp_path):
    header, *rows = listed_rows("|", 8)
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([header, *(f"{number},{row}" for number, row in enumerate(rows))]))
    schema = guess_schema(path, label="clicked")
    assert schema.table.separator is None
    assert schema.table.column_names == ("column_1", "age", "words", "clicked")


def test_guess_when_sentences_never_come_twice_then_they_are_no_lists(tmp_path):
    header, *rows = listed_rows(" ", 8)
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([header, *rows]))
    assert "words" in guess_schema(path, label="clicked").ignore
