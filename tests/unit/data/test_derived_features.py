"""Features that are made from columns: parts of times, ages, n-grams, vectors, crosses; against one row at a time."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.feature_extraction.text import CountVectorizer
from table_oracle import hash_text

from lightning_recsys.data import Batch, Schema, TabularDataModule
from lightning_recsys.data.raw import cleaning
from lightning_recsys.data.raw.ngrams import ngram_bags
from lightning_recsys.data.tables.columns import parse_times
from lightning_recsys.serving.encoders import SchemaEncoder, encoder_from

SCHEMA: dict[str, Any] = {
    "files": {"train": "rows.csv", "test": "test.csv"},
    "label": "click",
    "dense": {
        "age": {"column": "published", "age_at": "shown", "standardize": False, "fill": -1},
        "born": {"age_at": "2026-01-31", "standardize": False, "fill": 0, "transform": "log"},
        "price": {},
    },
    "vectors": {"image": {"width": 3}, "scaled": {"column": "image", "width": 3, "standardize": True}},
    "categorical": {
        "hour": {"column": "shown", "transform": "hour"},
        "day": {"column": "shown", "transform": "weekday"},
        "device": {},
        "dear": {"column": "price", "edges": [3.5, 4.5, 9]},
        "device_dear": {"cross": ["device", "dear"]},
        "device_hour": {"cross": ["device", "hour"]},
        "device_country": {"cross": ["device", "country"], "hash_buckets": 50},
    },
    "multi_valued": {
        "words": {"column": "title", "ngrams": "words", "n": [1, 2], "hash_buckets": 100},
        "letters": {"column": "title", "ngrams": "characters", "limit": 5},
    },
    "time": "shown",
    "joins": [{"file": "items.csv", "column": "item"}],
    "split": {"validation": 0, "test": None},
}
START = datetime(2026, 1, 30, 22, 5, tzinfo=UTC)
WORDS = ["Red", "RED shoes", "blue-shoes", "größer", "a", "", "  two  words ", "日本 語"]


def made_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "click": i % 2,
            "shown": (START + timedelta(minutes=rng.randrange(20_000))).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "born": rng.choice(["", "2026-01-01", "1999-12-31 12:00"]),
            "price": rng.choice(["", "3", "4.5"]),
            "device": rng.choice(["", "phone", "desk"]),
            "item": f"i{rng.randrange(7)}",
            "title": " ".join(rng.choice(WORDS) for _ in range(rng.randrange(5))),
        }
        for i in range(count)
    ]


ITEMS = [
    {
        "item": f"i{i}",
        "published": "" if i == 3 else f"2026-01-{10 + i:02d}",
        "country": ["DE", "", "JP"][i % 3],
        "image": "" if i == 4 else f"[{i}.5 {i * i} -1e-1]" if i % 2 else f"{i}.5, {i * i}, -0.1",
    }
    for i in range(6)  # the last is not there
]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [";".join(rows[0]), *(";".join(str(value) for value in row.values()) for row in rows)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> TabularDataModule:
    folder = tmp_path_factory.mktemp("rows")
    write(folder / "rows.csv", made_rows(300))
    write(folder / "test.csv", made_rows(40, seed=1))
    write(folder / "items.csv", ITEMS)
    schema = SCHEMA | {"separator": ";", "joins": [SCHEMA["joins"][0] | {"separator": ";"}]}
    module = TabularDataModule(schema=schema, root=folder, batch_size=64, cache=folder / "cache")
    module.setup()
    return module


def all_rows(data: TabularDataModule, split: str = "train") -> Batch:
    rows = data.rows(split)
    return rows.take(torch.arange(len(rows)))


def bags_of(sparse, feature: str) -> list[list[int]]:
    picked = sparse.select((feature,))
    bounds = picked.bag_offsets().tolist()
    return [picked.values[start:end].tolist() for start, end in pairwise(bounds)]


def joined(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its item's columns."""
    items = {item["item"]: item for item in ITEMS}
    return row | items.get(row["item"], {"published": "", "country": "", "image": ""})


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def ids_by_count(values: list[list[str | None]]) -> dict[str, int]:
    """Of training rows: the most frequent one first, from 2 on; equally frequent ones in the order of their bytes."""
    counts = Counter(value for row in values for value in row if value is not None)
    return {value: i for i, value in enumerate(sorted(counts, key=lambda x: (-counts[x], x.encode())), 2)}


def words_of(text: str, sizes: tuple[int, ...], unit: str = "word") -> list[str]:
    """By scikit-learn, in the order in which they begin."""
    analyzers = [
        CountVectorizer(analyzer=unit, ngram_range=(n, n), token_pattern=r"\w+").build_analyzer() for n in sizes
    ]
    found = [list(analyzer(text)) for analyzer in analyzers]
    return [grams[i] for i in range(max(map(len, found))) for grams in found if i < len(grams)]


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_when_features_are_derived_then_each_is_what_a_scalar_version_makes_of_its_row(data, split):
    train = [joined(row) for row in made_rows(300)]
    rows = train if split == "train" else [joined(row) for row in made_rows(40, seed=1)]
    batch = all_rows(data, split)
    assert data.num_dense == batch.dense.shape[1] == 3 + 3 + 3
    assert batch.labels.tolist() == [row["click"] for row in rows]

    def days(row):
        return (moment(row["shown"]) - moment(row["published"])) / timedelta(days=1) if row["published"] else -1

    assert batch.dense[:, 0].tolist() == pytest.approx([days(row) for row in rows])
    born = [(datetime(2026, 1, 31, tzinfo=UTC) - moment(x)) / timedelta(days=1) if x else 0 for x in born_of(rows)]
    assert batch.dense[:, 1].tolist() == pytest.approx(np.log1p(born).tolist())

    def image(row):
        return [float(x) for x in row["image"].strip("[]").replace(",", " ").split()] if row["image"] else [np.nan] * 3

    mean = np.nanmean([image(row) for row in train], axis=0)
    deviation = np.nanstd([image(row) for row in train], axis=0)
    images = np.array([image(row) for row in rows])
    assert batch.dense[:, 3:6].numpy() == pytest.approx(np.where(np.isnan(images), mean, images), abs=1e-5)
    scaled = (np.where(np.isnan(images), mean, images) - mean) / np.where(deviation > 1e-9, deviation, 1)
    assert batch.dense[:, 6:].numpy() == pytest.approx(scaled, abs=1e-5)  # the last is always the same, so it is 0

    def hour(row):
        return str(moment(row["shown"]).hour)

    def dear(row):
        return {"": None, "3": "0", "4.5": "2"}[row["price"]]

    def device_hour(row):
        return f"{row['device']}\x1f{hour(row)}"

    for name, value in {
        "hour": hour,
        "day": lambda row: str(moment(row["shown"]).weekday()),
        "device_hour": device_hour,
        "dear": dear,
        "device_dear": lambda row: f"{row['device']}\x1f{dear(row) or ''}" if row["device"] or dear(row) else None,
    }.items():
        known = {None: 1} | ids_by_count([[value(row)] for row in train])
        assert bags_of(batch.sparse, name) == [[known.get(value(row), 0)] for row in rows], name
        assert data.fields[name] == len(known) + 1
    crossed = [
        hash_text(f"{row['device']}\x1f{row['country']}") % 50 + 1 if row["device"] or row["country"] else 0
        for row in rows
    ]
    assert bags_of(batch.sparse, "device_country") == [[number] for number in crossed]
    assert 0 in crossed
    words = [[hash_text(word) % 100 + 1 for word in words_of(row["title"], (1, 2))] for row in rows]
    assert bags_of(batch.sparse, "words") == words
    known = ids_by_count([words_of(row["title"].strip(), (3,), "char")[:5] for row in train])
    letters = [[known.get(gram, 0) for gram in words_of(row["title"].strip(), (3,), "char")[:5]] for row in rows]
    assert bags_of(batch.sparse, "letters") == letters


def born_of(rows):
    return [row["born"] for row in rows]


def test_request_when_features_are_derived_then_it_is_encoded_as_training_encoded_the_row(data):
    encoder = SchemaEncoder(data.schema, data.encoding)
    encoder = encoder_from(*encoder.to_files())
    rows = [joined(row) for row in made_rows(300)]
    for row in rows:
        del row["click"]
    numbers, sparse = encoder.encode(rows)
    batch = all_rows(data)
    assert torch.equal(numbers, batch.dense)
    for name in data.fields:
        assert bags_of(sparse, name) == bags_of(batch.sparse, name), name
    # As JSON has them: numbers for times, lists for vectors, null for what is missing.
    typed = rows[0] | {"image": [0.5, 0, -0.1], "price": None, "shown": moment(rows[0]["shown"]).timestamp()}
    as_text = rows[0] | {"image": "0.5;0;-0.1", "price": ""}
    (numbers, sparse), (expected, expected_sparse) = encoder.encode([typed]), encoder.encode([as_text])
    assert torch.equal(numbers, expected)
    assert torch.equal(sparse.values, expected_sparse.values)
    assert len(encoder.encode([encoder.example()])[0]) == 1
    with pytest.raises(ValueError, match=r"row 1: 'image' must be a list of 3 finite numbers.*\[1\.0, 2\.0\]"):
        encoder.encode([typed, typed | {"image": [1, 2]}])
    with pytest.raises(ValueError, match=r"row 0: 'title' takes one value a row, got \['a', 'b'\]"):
        encoder.encode([typed | {"title": ["a", "b"]}])


@pytest.mark.parametrize("of", ["words", "characters"])
@pytest.mark.parametrize("sizes", [(1,), (2, 3), (1, 4)])
def test_ngrams_then_they_are_those_of_scikit_learn(of, sizes):
    texts = ["", "a", "The cat, the CAT", "größer als 3,5_x", "x" * 40, "日本語 テキスト", "tab\tand\n\nline"]
    unit = "word" if of == "words" else "char"
    texts = [" ".join(text.split()) for text in texts] if of == "characters" else texts
    bags = ngram_bags(pa.array(texts), of, sizes=sizes, limit=10_000)
    grams, ends = bags.values.to_pylist(), np.cumsum(bags.lengths_N)
    for text, end, length in zip(texts, ends, bags.lengths_N, strict=True):
        assert Counter(grams[end - length : end]) == Counter(words_of(text, sizes, unit)), text
    limited = ngram_bags(pa.array(texts), of, sizes=sizes, limit=3)
    assert limited.lengths_N.tolist() == np.minimum(bags.lengths_N, 3).tolist()


def small(tmp_path, table: dict[str, list[Any]], **change) -> Batch:
    """Rows of a Parquet file of these columns."""
    pq.write_table(
        pa.table({"click": [i % 2 for i in range(len(next(iter(table.values()))))], **table}), tmp_path / "x.parquet"
    )
    schema = {"files": "x.parquet", "label": "click", "split": {"validation": 0, "test": 0}} | change
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    data.setup("fit")
    return all_rows(data)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 2), pa.large_list(pa.int64()), pa.string()], ids=str
)
def test_vectors_when_of_any_kind_then_are_read(tmp_path, kind):
    lists = [[1, 2], None, [3, -4]]
    values = pa.array([x and f"{x[0]}|{x[1]}" for x in lists] if kind == pa.string() else lists, kind)
    batch = small(tmp_path, {"v": values, "user": ["a", "b", "c"]}, vectors={"v": {"width": 2}}, categorical=["user"])
    assert batch.dense.tolist() == [[1, 2], [2, -1], [3, -4]]


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        ("s", [3600 * 23, None, 86400 * 4]),
        ("ms", [3_600_000 * 23, None, 86_400_000 * 4]),
        ("us", ["82800000000", "", "345600000000"]),
        ("s", [datetime(1970, 1, 1, 23, 59), None, datetime(1970, 1, 5)]),
        ("ms", ["1970-01-02T01:00:00+02:00", None, "345600000"]),
        (None, ["1970-01-01T23:00:00Z", None, "345600"]),
    ],
)
def test_times_when_of_any_unit_then_hours_and_weekdays_are_those_of_utc(tmp_path, unit, values):
    options = {"column": "at", "unit": unit, "hash_buckets": 1000}
    batch = small(
        tmp_path,
        {"at": values},
        categorical={"hour": options | {"transform": "hour"}, "day": options | {"transform": "weekday"}},
    )
    assert bags_of(batch.sparse, "hour") == [[hash_text("23") % 1000 + 1], [0], [hash_text("0") % 1000 + 1]]
    assert bags_of(batch.sparse, "day") == [[hash_text("3") % 1000 + 1], [0], [hash_text("0") % 1000 + 1]]


@pytest.mark.parametrize("values", [[5, -1, 7], [5.0, -1.0, 7.0], ["5", "-1", "7"]], ids=["int", "float", "text"])
def test_numbers_when_one_stands_for_missing_then_is_missing_however_it_is_stored(tmp_path, values):
    dense = {"price": {"standardize": False, "fill": -9}}
    batch = small(
        tmp_path, {"price": values, "user": ["a", "b", "c"]}, dense=dense, missing=["", "-1"], categorical=["user"]
    )
    assert batch.dense.flatten().tolist() == [5.0, -9.0, 7.0]


@pytest.mark.parametrize("values", [[20240131, None, 20240205], ["20240131", "", "2024-02-05"]], ids=["int", "text"])
def test_times_when_numbers_are_dates_then_are_read_so(tmp_path, values):
    options = {"column": "at", "unit": "yyyymmdd"}
    batch = small(
        tmp_path,
        {"at": values, "user": ["a", "b", "c"]},
        dense={"age": options | {"age_at": "2024-02-06", "standardize": False, "fill": -1}},
        categorical={"day": options | {"transform": "weekday", "hash_buckets": 1000}},
    )
    assert batch.dense.flatten().tolist() == [6.0, -1.0, 1.0]
    assert bags_of(batch.sparse, "day") == [[hash_text("2") % 1000 + 1], [0], [hash_text("0") % 1000 + 1]]


def test_times_when_several_features_are_made_of_a_column_then_it_is_read_once(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        cleaning, "parse_times", lambda *args, **options: read.append(1) or parse_times(*args, **options)
    )
    batch = small(
        tmp_path,
        {"at": ["2024-01-31", "1970-01-01T05:00:00Z"]},
        dense={"age": {"column": "at", "age_at": "2024-02-06", "standardize": False}},
        categorical={name: {"column": "at", "transform": name} for name in ("hour", "weekday")},
        time="at",
    )
    assert batch.dense.flatten().tolist() == pytest.approx([6.0, 19759 - 5 / 24])
    assert len(read) == 2  # for a first look at the file, and for its rows


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        (
            {"at": [20240131, 20240201]},
            {"categorical": {"at": {"transform": "weekday"}}},
            r"row 1, column 'at': most numbers here are dates.*write unit: yyyymmdd.*or unit: s if.*got 20240131",
        ),
        (
            {"at": ["20240131", "20240231"]},
            {"categorical": {"at": {"transform": "weekday", "unit": "yyyymmdd"}}},
            r"row 2, column 'at': the time must be a date such as 20260131.*got '20240231'",
        ),
        (
            {"at": [1, 9e12]},
            {"categorical": {"at": {"transform": "hour"}}},
            r"row 2, column 'at': the time must be before the year 2200, with unit: s.*got 9000000",
        ),
        (
            {"at": ["1", "soon"]},
            {"categorical": {"at": {"transform": "hour"}}},
            r"row 2, column 'at': the time must be a number or ISO 8601.*'soon'",
        ),
        (
            {"v": [[1.0], [1.0, 2.0]]},
            {"vectors": {"v": {"width": 1}}},
            r"row 2, column 'v': must be a list of 1 finite numbers.*got \[1\.0, 2\.0\]",
        ),
        (
            {"v": ["1 2", "1 x"]},
            {"vectors": {"v": {"width": 2}}},
            r"row 2, column 'v': must be a list of 2 finite.*got '1 x'",
        ),
        ({"v": [[1.0], [1e39]]}, {"vectors": {"v": {"width": 1}}}, r"row 2, .* finite numbers within .*got \[1e\+39\]"),
        ({"v": [[1.0], [None]]}, {"vectors": {"v": {"width": 1}}}, r"row 2, column 'v': must be a list of 1 finite"),
        (
            {"v": [[["a"]], [["b"]]]},
            {"vectors": {"v": {"width": 1}}},
            r"x\.parquet, column 'v' has type .*: no numbers",
        ),
        ({"v": [["a"], ["b"]]}, {"multi_valued": {"v": {"ngrams": "words"}}}, r"x\.parquet, column 'v' has type list"),
        (
            {"v": ["a", "b"]},
            {"categorical": {"w": {"cross": ["v", "country"]}}},
            r"schema\.categorical names column 'country', which is not in .*x\.parq",
        ),
    ],
)
def test_rows_when_they_do_not_fit_then_says_file_row_and_column(tmp_path, table, change, message):
    user = {} if "categorical" in change else {"categorical": ["user"]}
    with pytest.raises(ValueError, match=message):
        small(tmp_path, {**table, "user": ["a", "b"]}, **change, **user)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"categorical": {"click": {"transform": "hour"}}}, r"column 'click' stands under schema\.label and"),
        (
            {"categorical": {"x": {"column": "click"}}},
            r"categorical\.x is made from column 'click', which is the label",
        ),
        ({"categorical": {"x": {"cross": ["user", "click"]}}}, r"x is made from column 'click', which is the label"),
        (
            {"dense": {"x": {"age_at": "old"}}, "ignore": ["old"]},
            r"dense\.x is made from column 'old', which stands under",
        ),
        (
            {"time": "at", "categorical": {"at": {"transform": "hour"}}},
            r"give the feature another name, and column: at",
        ),
        ({"categorical": {"x": {"cross": ["user"]}}}, r"x\.cross must list two or more different .*got user"),
        (
            {"categorical": {"x": {"cross": ["a", "b"], "column": "c"}}},
            r"x has cross beside column, transform or edges",
        ),
        (
            {"categorical": {"x": {"cross": ["a", "b"]}, "y": {"cross": ["x", "c"]}}},
            r"lists 'x', which is a cross itself",
        ),
        ({"categorical": {"x": {"cross": ["a", "b"]}}, "dense": ["a"]}, r"lists 'a', which stands under schema\.dense"),
        ({"categorical": {"x": {"unit": "ms"}}}, r"x\.unit is for times, so it needs a transform"),
        ({"dense": {"x": {"unit": "ms"}}}, r"x\.unit is for times, so it needs age_at"),
        ({"vectors": ["x"]}, r"schema\.vectors\.x\.width is missing"),
        ({"vectors": {"x": {"width": 0}}}, r"x\.width must be at least 1, got 0"),
        ({"multi_valued": {"x": {"n": 2}}}, r"x\.n is the size of n-grams, so it needs ngrams"),
        ({"multi_valued": {"x": {"ngrams": "words", "n": [1, 0]}}}, r"x\.n must be at least 1, got 1, 0"),
        ({"multi_valued": {"x": {"ngrams": "words", "n": ["a"]}}}, r"x\.n must be a list of whole numbers, got"),
        ({"multi_valued": {"x": {"ngrams": "syllables"}}}, r"x\.ngrams must be words or characters or null, got 'syll"),
        ({"multi_valued": {"x": {"ngrams": "words", "limit": 0}}}, r"x\.limit must be at least 1, got 0"),
    ],
)
def test_schema_when_a_derived_feature_is_wrong_then_says_how(change, message):
    with pytest.raises(ValueError, match=message):
        Schema.from_dict({"files": "x.csv", "label": "click", "categorical": ["user"]} | change)


def test_schema_when_written_and_read_back_then_is_the_same_with_dates_as_text(tmp_path):
    schema = Schema.from_dict(SCHEMA)
    (tmp_path / "s.yaml").write_text(schema.to_yaml())
    assert Schema.from_yaml(tmp_path / "s.yaml") == schema
    text = "files: x.csv\nlabel: click\ncategorical: [user]\ndense: {born: {age_at: 2026-01-31}}\n"
    (tmp_path / "t.yaml").write_text(text)
    assert Schema.from_yaml(tmp_path / "t.yaml").dense["born"].age_at == "2026-01-31"


def test_ages_when_times_have_fractions_of_seconds_then_are_those_of_typed_times_in_text_and_requests(tmp_path):
    """Rows of one second are in the order of their times, too, so that a split by time is the same."""
    start = datetime(2026, 1, 31, 12)
    times = [start + timedelta(microseconds=i * 50_000 + 7) for i in range(40)]
    table = pa.table({"click": [0, 1] * 20, "at": times, "seen": [start] * 40})
    pq.write_table(table, tmp_path / "rows.parquet")
    table.to_pandas().to_csv(tmp_path / "rows.csv", index=False, date_format="%Y-%m-%dT%H:%M:%S.%f")
    schema = {"label": "click", "time": "at", "split": {"by": "time"}}
    schema["dense"] = {"age": {"column": "seen", "age_at": "at", "standardize": False}}
    for name in ("rows.parquet", "rows.csv"):
        data = TabularDataModule(schema=schema | {"files": name}, root=tmp_path, cache=tmp_path / "cache")
        rows = data.rows("test")
        found = rows.take(torch.arange(len(rows))).dense.flatten() * 86_400
        torch.testing.assert_close(found, torch.tensor([i * 0.05 + 7e-6 for i in range(36, 40)]))
    asked = [{"seen": start.isoformat(), "at": time.isoformat()} for time in times[36:]]
    dense, _ = SchemaEncoder(data.schema, data.encoding).encode(asked)
    torch.testing.assert_close(dense.flatten() * 86_400, found)
