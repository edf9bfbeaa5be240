"""A value that training read from a typed column has the same id in a request, whichever way a client writes it."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
import torch

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.preparation.encoding import Encoding
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.serving.encoders import SchemaEncoder, encoder_from

BERLIN = dt.timezone(dt.timedelta(hours=1))
NOON = dt.datetime(2026, 1, 31, 12)
LATER = dt.datetime(2026, 1, 31, 12, 0, 0, 120_000)
NARROW = pa.array([0.1, 3.0, 1e-7, 0.3], pa.float32())
# Type of a Parquet column -> values of it, as PyArrow takes them.
COLUMNS = {
    pa.bool_(): [True, False],
    pa.int8(): [-7, 3],
    pa.int64(): [-(2**63), 2**63 - 1],
    pa.uint64(): [2**63 + 5, 2**64 - 1, 7],
    pa.float16(): [0.5, 3.0],
    pa.float32(): NARROW.to_pylist(),
    pa.float64(): [0.1, 3.0, 1e-7, 1e300],
    pa.decimal128(10, 2): [Decimal("1.50"), Decimal("3.00"), Decimal("-0.25")],
    pa.decimal128(38, 9): [Decimal("1.5"), Decimal("0.000000125"), Decimal("123456789012345678901.5")],
    pa.decimal256(50, 20): [Decimal("1.5"), Decimal(7)],
    pa.string(): ["a", "3.0"],
    pa.large_string(): ["a", "3.0"],
    pa.binary(): [b"a", b"3.0"],
    pa.dictionary(pa.int32(), pa.string()): ["a", "b"],
    pa.date32(): [dt.date(2026, 1, 31)],
    pa.date64(): [dt.date(2026, 1, 31)],
    pa.time64("us"): [dt.time(12), dt.time(12, 0, 1, 500_000)],
    **{pa.timestamp(unit): [NOON, LATER] if unit != "s" else [NOON] for unit in ("s", "ms", "us", "ns")},
    pa.timestamp("ms", tz="Europe/Berlin"): [NOON.replace(tzinfo=BERLIN), LATER.replace(tzinfo=dt.UTC)],
}

ORC_TYPES = [
    pa.bool_(),
    pa.int8(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(10, 2),
    pa.string(),
    pa.binary(),
    pa.date32(),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    pa.timestamp("ms", tz="Europe/Berlin"),
]


def ways(value, kind: pa.DataType) -> list[object]:
    """How clients write a value: as Python has it, as a word, and as JSON does either."""
    if isinstance(value, bool):
        return [value, int(value), str(value), str(value).lower(), str(int(value))]
    found = [value.decode() if isinstance(value, bytes) else value]
    if isinstance(value, dt.datetime):
        found += [value.isoformat(), str(value)]
        found += [value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")] if value.tzinfo == dt.UTC else []
    elif isinstance(value, Decimal):
        found += [value.normalize(), *([float(value)] if len(str(value)) < 15 else [])]
        found += [f"{value.normalize():f}"] if abs(value) > 1e-6 else []
    elif isinstance(value, float):
        found += [pa.scalar(value, kind).as_py()]  # 0.1 in 32 bits is 0.10000000149011612 in 64
        found += [round(value, 7)] if kind == pa.float32() else []
        found += [int(value)] if value.is_integer() and value < 1e15 else []
    elif not isinstance(value, str):
        found += [str(found[0])]
    return found + [json.loads(json.dumps(way, default=str)) for way in found if not isinstance(way, Decimal)]


@pytest.mark.parametrize("feature", ["categorical", "multi_valued"])
def test_typed_values_when_a_request_has_them_then_their_ids_are_those_of_training(tmp_path, feature):
    columns = {"click": pa.array([0, 1] * 2)}
    for kind, values in COLUMNS.items():
        column = pa.array((values * 4)[:4], kind)
        if feature == "multi_valued":
            column = pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), column)
        columns[str(kind)] = column
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    names = list(columns)[1:]
    schema = {"files": "rows.parquet", "label": "click", feature: names, "split": {"validation": 0, "test": 0}}
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    data.setup()
    trained = data.rows("train").take(torch.arange(4)).sparse
    encoder = SchemaEncoder(data.schema, data.encoding)
    empty = dict.fromkeys(names)
    wrong = {}
    for name, (kind, values) in zip(names, COLUMNS.items(), strict=True):
        ids = trained.select((name.replace(".", "_"),)).values.tolist()[: len(values)]
        assert len(set(ids)) == len(values), name
        assert min(ids) >= 2
        asked = [(way, number) for value, number in zip(values, ids, strict=True) for way in ways(value, kind)]
        requests = [{**empty, name: way if feature == "categorical" else [way]} for way, _ in asked]
        alone = [encoder.encode([request])[1].select((name,)).values.item() for request in requests]
        together = encoder.encode(requests)[1].select((name,)).values.tolist()
        wrong |= {
            (name, repr(way)): (number, *found)
            for (way, number), *found in zip(asked, alone, together, strict=True)
            if {number} != {*found}
        }
    assert wrong == {}


def test_typed_values_when_json_lines_have_them_then_their_ids_are_those_of_training(tmp_path):
    """Each way to write a value stands beside other ones in its column, and alone in its block or not."""
    names = list(map(str, COLUMNS))
    typed = {
        name: pa.array((values * 4)[:4], kind) for name, (kind, values) in zip(names, COLUMNS.items(), strict=True)
    }
    pq.write_table(pa.table({"click": [0, 1] * 2, **typed}), tmp_path / "rows.parquet")
    schema = {"label": "click", "categorical": names, "split": {"validation": 0, "test": 0}}
    data = TabularDataModule(schema=schema | {"files": "rows.parquet"}, root=tmp_path, cache=tmp_path / "cache")
    data.setup()
    trained = data.rows("train").take(torch.arange(4)).sparse
    asked, expected = {}, {}
    for name, (kind, values) in zip(names, COLUMNS.items(), strict=True):
        ids = trained.select((name.replace(".", "_"),)).values.tolist()
        found = [(way, ids[row]) for row, value in enumerate(values) for way in ways(value, kind)]
        asked[name], expected[name] = zip(
            *((way, number) for way, number in found if isinstance(way, str | int | float)), strict=True
        )
    num_rows = max(map(len, asked.values()))
    columns = {name: [*ways_of, *[None] * (num_rows - len(ways_of))] for name, ways_of in asked.items()}
    columns["click"] = [row % 2 for row in range(num_rows)]
    rows = zip(*columns.values(), strict=True)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
    again = TabularDataModule(schema=schema | {"files": "rows.jsonl"}, root=tmp_path, cache=tmp_path / "cache")
    again.load_state_dict(data.state_dict())
    read = again.rows("train").take(torch.arange(num_rows)).sparse
    for name in names:
        ids = read.select((name.replace(".", "_"),)).values.tolist()[: len(expected[name])]
        assert ids == list(expected[name]), (name, asked[name])


@pytest.mark.parametrize("strip", [True, False])
def test_typed_values_when_lists_of_json_stand_beside_texts_then_their_ids_are_those_of_lists_alone(tmp_path, strip):
    """Some writers write a list of one item as the item."""
    lists = [[1, 2], [True, False], [0.5, None], [None], ["nan", 1], [2**70], ["None", "a"], [1e16], [], None, ["b"]]
    alone, beside = ([{"click": row % 2, "tags": tags} for row, tags in enumerate(lists)] for _ in range(2))
    beside[-1]["tags"] = "b"
    schema = {"label": "click", "multi_valued": ["tags"], "split": {"validation": 0, "test": 0}, "strip": strip}
    batches = []
    for rows, name in ((alone, "alone.jsonl"), (beside, "beside.jsonl")):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
        data = TabularDataModule(schema=schema | {"files": name}, root=tmp_path, cache=tmp_path / "cache")
        batches.append(data.rows("train").take(torch.arange(len(lists))).sparse)
    requests = SchemaEncoder(data.schema, data.encoding).encode(beside)[1]
    for other in (batches[1], requests):
        assert other.values.tolist() == batches[0].values.tolist()
        assert other.bag_offsets().tolist() == batches[0].bag_offsets().tolist()


def test_typed_values_when_lists_of_json_are_vectors_then_are_those_of_lists_alone(tmp_path):
    lists = [[1, 2], [0.5, -1e-7], ["1", "0.25"], [True, False], "1 2"]
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"click": row % 2, "image": x}) for row, x in enumerate(lists))
    )
    schema = {"files": "rows.jsonl", "label": "click", "vectors": {"image": {"width": 2}}}
    schema["split"] = {"validation": 0, "test": 0}
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    expected = torch.tensor([[1, 2], [0.5, -1e-7], [1, 0.25], [1, 0], [1, 2]])
    assert data.rows("train").take(torch.arange(len(lists))).dense.equal(expected)
    encoder = SchemaEncoder(data.schema, data.encoding)
    assert encoder.encode([{"image": x} for x in lists])[0].equal(expected)


@pytest.mark.parametrize("missing", [-999, "-999.0"])
def test_typed_values_when_a_number_stands_for_a_missing_one_then_it_does_in_every_type(tmp_path, missing):
    """pandas writes -999.0 where a column has fractions, or empty places."""
    columns = {"click": [0, 1] * 2, "age": [-999, 0.5, 2, -999], "user": [3, -999, None, 3], "shop": [1, 2, -999, 1]}
    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
    floats = table.cast(pa.schema([(name, pa.float64()) for name in columns]))
    pq.write_table(table, tmp_path / "rows.parquet")
    table.to_pandas().to_csv(tmp_path / "rows.csv", index=False)
    floats.to_pandas().to_csv(tmp_path / "floats.csv", index=False)
    rows = table.to_pylist()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    schema = {"label": "click", "dense": {"age": {"standardize": False}}, "categorical": ["user", "shop"]}
    schema |= {"missing": ["", missing], "split": {"validation": 0, "test": 0}}
    for name in ("rows.parquet", "rows.csv", "floats.csv", "rows.jsonl"):
        data = TabularDataModule(schema=schema | {"files": name}, root=tmp_path, cache=tmp_path / "cache")
        batch = data.rows("train").take(torch.arange(4))
        assert batch.dense.flatten().tolist() == [1.25, 0.5, 2, 1.25], name
        assert batch.sparse.values.tolist() == [2, 1, 1, 2, 2, 3, 1, 2], name
        encoder = SchemaEncoder(data.schema, data.encoding)
        for way in (float, str, lambda value: str(float(value))):
            written = [{k: None if v is None else way(v) for k, v in row.items()} for row in rows]
            dense, sparse = encoder.encode(written)
            assert dense.equal(batch.dense)
            assert sparse.values.equal(batch.sparse.values)


def test_typed_values_when_a_fraction_stands_for_a_missing_one_then_it_does_in_32_bits_too(tmp_path):
    ages = pa.array([-9.9, 0.5, 2.0, -9.9], pa.float32())
    pq.write_table(pa.table({"click": [0, 1] * 2, "age": ages}), tmp_path / "rows.parquet")
    schema = {"files": "rows.parquet", "label": "click", "dense": {"age": {"standardize": False}}}
    schema |= {"missing": [-9.9], "split": {"validation": 0, "test": 0}}
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    assert data.rows("train").take(torch.arange(4)).dense.flatten().tolist() == [1.25, 0.5, 2, 1.25]


GERMAN = {
    "separator": ";",
    "decimal": ",",
    "thousands": ".",
    "missing": ["", -999],
    "split": {"validation": 0, "test": 0},
}
GERMAN |= {"label": {"column": "stars", "rule": ">= 2.5"}, "dense": {"price": {"standardize": False}}}
GERMAN |= {
    "categorical": {
        "user": {},
        "size": {},
        "both": {"cross": ["user", "size"]},
        "hashed": {"column": "size", "hash_buckets": 99},
    }
}
GERMAN |= {"multi_valued": {"tags": {"separator": "|"}}}
STARS, PRICES = [2.5, 0.5, 4.0, 1.0], [1.234, 1234.5, None, 0.5]
USERS, SIZES, TAGS = [11, None, 2, -999], [0.5, 1.234, 1234, 3.0], [[0.5, 3], [], [1.234], [3, 1234]]


def german(value: object) -> str:
    """As pandas writes it with ``decimal=","``, and Excel with dots between thousands."""
    if isinstance(value, list):
        return "|".join(map(german, value))
    return "" if value is None else f"{float(value):,}".translate(str.maketrans(",.", ".,"))


def test_numbers_when_texts_write_them_with_a_comma_then_their_ids_are_those_of_typed_columns(tmp_path):
    columns = {"stars": STARS, "price": PRICES, "user": USERS, "size": SIZES, "tags": TAGS}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = [";".join(columns), *(";".join(map(german, row.values())) for row in rows)]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    mixed = [{k: german(v) if number % 2 else v for k, v in row.items()} for number, row in enumerate(rows)]
    for name, some in (("rows.jsonl", rows), ("mixed.jsonl", mixed)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, some)))
    batches = {}
    for name in ("rows.csv", "rows.parquet", "rows.jsonl", "mixed.jsonl"):
        data = TabularDataModule(schema=GERMAN | {"files": name}, root=tmp_path, cache=tmp_path / "cache")
        batches[name] = data.rows("train").take(torch.arange(4))
        requests = SchemaEncoder(data.schema, data.encoding)
        for asked in (rows, mixed, [{k: german(v) for k, v in row.items()} for row in rows]):
            dense, sparse = requests.encode(asked)
            assert dense.equal(batches[name].dense)
            assert sparse.values.equal(batches[name].sparse.values)
    expected = batches["rows.parquet"]
    assert expected.labels.tolist() == [1, 0, 1, 0]
    assert data.encoding.vocabularies["size"].to_pylist() == ["0.5", "1.234", "1234", "3"]
    for batch in batches.values():
        assert batch.labels.equal(expected.labels)
        assert batch.dense.equal(expected.dense)
        assert batch.sparse.values.equal(expected.sparse.values)


def test_numbers_when_an_earlier_version_called_them_as_they_were_written_then_have_the_ids_that_were_trained():
    schema = Schema.from_dict(GERMAN | {"files": "rows.csv", "dense": [], "multi_valued": []})
    words = {"user": ["11,0", "2,0"], "size": ["0,5", "1.234,0"], "both": ["11,0\x1f0,5", "\x1f1.234,0"]}
    vocabularies = {name: pa.array(values) for name, values in words.items()}
    state = Encoding(schema, vocabularies=vocabularies, statistics={}).state_dict() | {"format": 2}
    encoder = SchemaEncoder(schema, Encoding.from_state_dict(schema, state))
    for first, second in (((11, 0.5), (None, 1234)), (("11,0", "0,5"), ("", "1.234,0"))):
        sparse = encoder.encode([dict(zip(("user", "size"), row, strict=True)) for row in (first, second)])[1]
        assert sparse.select(("user", "size", "both")).values.tolist() == [2, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("suffix", ["arrow", "feather", "orc"])
def test_typed_values_when_another_file_of_typed_columns_has_them_then_their_ids_are_the_same(tmp_path, suffix):
    kinds = list(COLUMNS)
    if suffix == "orc":  # which has fewer types
        kinds = [kind for kind in kinds if kind in ORC_TYPES]
        assert len(kinds) == len(ORC_TYPES)
    table = pa.table({"click": [0, 1] * 2, **{str(kind): pa.array((COLUMNS[kind] * 4)[:4], kind) for kind in kinds}})
    pq.write_table(table, tmp_path / "rows.parquet")
    write = {"arrow": feather.write_feather, "feather": feather.write_feather, "orc": orc.write_table}
    write[suffix](table, tmp_path / f"rows.{suffix}")
    schema = {"label": "click", "categorical": table.column_names[1:], "split": {"validation": 0, "test": 0}}
    data, again = (
        TabularDataModule(schema=schema | {"files": name}, root=tmp_path, cache=tmp_path / "cache")
        for name in ("rows.parquet", f"rows.{suffix}")
    )
    data.setup()
    again.load_state_dict(data.state_dict())
    trained, read = (module.rows("train").take(torch.arange(4)).sparse for module in (data, again))
    for name in trained.keys:
        assert read.select((name,)).values.tolist() == trained.select((name,)).values.tolist(), name


@pytest.mark.parametrize("written", [(True, False), ("true", "false"), ("True", "False"), (1, 0)])
def test_true_and_false_when_hashed_or_crossed_then_ids_do_not_depend_on_how_they_are_written(tmp_path, written):
    columns = {"click": [0, 1] * 4, "truth": list(written) * 4, "other": ["a", "a", "b", "b"] * 2}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    features = {"hashed": {"column": "truth", "hash_buckets": 1000}, "crossed": {"cross": ["truth", "other"]}}
    schema = {"files": "rows.parquet", "label": "click", "categorical": {"truth": {}, "other": {}, **features}}
    schema["split"] = {"validation": 0, "test": 0}
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    data.setup()
    trained = data.rows("train").take(torch.arange(8)).sparse.select(tuple(features))
    encoder = SchemaEncoder(data.schema, data.encoding)
    for true, false in [(True, False), ("true", "false"), ("True", "False"), (1, 0), (1.0, 0.0), ("1", "0")]:
        words = [{"truth": (true, false)[place % 2], "other": columns["other"][place]} for place in range(8)]
        asked = encoder.encode(words)[1].select(tuple(features))
        assert asked.values.tolist() == trained.values.tolist(), (true, false)


ZONES = [NOON.replace(tzinfo=BERLIN), LATER.replace(tzinfo=dt.UTC)]
# Type of a Parquet column -> its values, and what the vocabulary of a version before called them.
EARLIER = {
    pa.bool_(): ([True, False], ["true", "false"]),
    pa.decimal128(10, 2): ([Decimal("1.50"), Decimal("100.10")], ["1.50", "100.10"]),
    pa.decimal128(10, 1): ([Decimal("1.5"), Decimal("3.0")], ["1.5", "3"]),
    pa.decimal128(38, 9): (
        [Decimal("0.000000125"), Decimal("123456789012345678901.5")],
        ["1.25E-7", "123456789012345678901.500000000"],
    ),
    pa.float32(): ([0.5, 3.0], ["0.5", "3"]),
    pa.float64(): ([pa.scalar(0.1, pa.float32()).as_py(), 1e300], ["0.10000000149011612", "1e+300"]),
    pa.time64("us"): ([dt.time(12), dt.time(12, 0, 1, 500_000)], ["12:00:00.000000", "12:00:01.500000"]),
    pa.timestamp("ms"): ([NOON, LATER], ["2026-01-31 12:00:00.000", "2026-01-31 12:00:00.120"]),
    pa.timestamp("ns"): ([NOON, LATER], ["2026-01-31 12:00:00.000000000", "2026-01-31 12:00:00.120000000"]),
    pa.timestamp("us", tz="Europe/Berlin"): (
        ZONES,
        ["2026-01-31 12:00:00.000000+0100", "2026-01-31 13:00:00.120000+0100"],
    ),
    pa.timestamp("ns", tz="Europe/Berlin"): (
        ZONES,
        ["2026-01-31 12:00:00.000000000+0100", "2026-01-31 13:00:00.120000000+0100"],
    ),
    pa.string(): (["2026-01-31T12:00:00+01:00", "1.50"], ["2026-01-31T12:00:00+01:00", "1.50"]),
    pa.large_string(): (["1.50", "3.00"], ["1.50", "3.00"]),  # a text keeps its name, which looks like a decimal's
    pa.binary(): ([b"True", b"plain"], ["True", "plain"]),
}
CROSSED = ["true\x1f1.50\x1f2026-01-31 12:00:00.000", "false\x1f100.10\x1f2026-01-31 12:00:00.120"]


def test_vocabularies_when_an_earlier_version_wrote_them_then_typed_values_have_the_ids_that_were_trained(tmp_path):
    """In new rows, in requests, and after the checkpoint was written once more."""
    kinds = {str(kind): kind for kind in EARLIER}
    columns = {name: pa.array(EARLIER[kind][0], kind) for name, kind in kinds.items()}
    pq.write_table(pa.table({"click": [0, 1], **columns}), tmp_path / "rows.parquet")
    cross = ["bool", "decimal128(10, 2)", "timestamp[ms]"]
    categorical = {**{name: {} for name in kinds}, "crossed": {"cross": cross}}
    schema = {"files": "rows.parquet", "label": "click", "categorical": categorical}
    schema["split"] = {"validation": 0, "test": 0}
    words = {**{name: pa.array(EARLIER[kind][1]) for name, kind in kinds.items()}, "crossed": pa.array(CROSSED)}
    parsed = Schema.from_dict(schema)
    state = Encoding(parsed, vocabularies=words, statistics={}).state_dict()
    present = Encoding.from_state_dict(parsed, state)
    del state["format"]  # as it was then
    assert Encoding.from_state_dict(parsed, state) != present
    state = Encoding.from_state_dict(parsed, state).state_dict()
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    data.load_state_dict({"encoder": state})
    trained = data.rows("train").take(torch.arange(2)).sparse
    ids = {name: trained.select((name,)).values.tolist() for name in trained.keys}
    assert ids == {name: [2, 3] for name in trained.keys}
    plain, tensors = SchemaEncoder(data.schema, data.encoding).to_files()
    requests = [{name: EARLIER[kind][0][row] for name, kind in kinds.items()} for row in range(2)]
    for files in (plain, {key: value for key, value in plain.items() if key != "format"}):
        asked = encoder_from(files, tensors).encode(requests)[1]
        assert asked.values.tolist() == trained.values.tolist()


def test_vocabularies_when_a_later_version_wrote_them_then_are_refused():
    schema = Schema.from_dict({"files": "a.csv", "label": "click", "categorical": ["user"]})
    state = Encoding(schema, vocabularies={"user": pa.array(["a"])}, statistics={}).state_dict()
    with pytest.raises(ValueError, match=r"vocabularies of format 99, which a later version .* up to 3"):
        Encoding.from_state_dict(schema, state | {"format": 99})


@pytest.mark.parametrize("mark", ["|", "u", "#"])
def test_encoder_when_the_schema_leaves_out_lines_at_the_top_then_requests_have_none(mark):
    """Versions that were published before have marks that are none any more."""
    schema = Schema.from_dict(
        {"files": "a.csv", "label": "click", "categorical": ["user"], "comment": "#", "skip_lines": 2}
    )
    encoding = Encoding(schema, vocabularies={"user": pa.array(["ann"])}, statistics={})
    plain, tensors = SchemaEncoder(schema, encoding).to_files()
    assert "comment" not in plain["schema"]
    assert "skip_lines" not in plain["schema"]
    before = plain | {"schema": f"comment: '{mark}'\nskip_lines: 2\n{plain['schema']}"}
    assert encoder_from(before, tensors).encode([{"user": "ann"}])[1].values.tolist() == [2]
