"""Schemas: what they read, what they refuse and with which words, and that they survive being written."""

from __future__ import annotations

import pytest
import yaml

from lightning_recsys.data import Schema

MINIMAL = {"files": "clicks.csv", "label": "click", "categorical": ["user"]}
FULL = {
    "files": {"train": ["a.csv", "b/*.csv"], "test": "t.csv"},
    "format": "text",
    "separator": "::",
    "column_names": ["click", "age", "user", "zip", "genres", "when"],
    "comment": "#",
    "encoding": "latin-1",
    "quote": None,
    "strip": False,
    "missing": ["", "?", -1],
    "label": {"column": "click", "rule": ">= 4", "strip": "."},
    "defaults": {"categorical": {"min_count": 7}},
    "dense": {"age": {"transform": "log", "standardize": False, "fill": 3}},
    "categorical": {"user": None, "zip": {"min_count": 1}, "device": {"min_count": 1, "hash_buckets": 100}},
    "multi_valued": {"genres": {"separator": ","}},
    "time": "when",
    "ignore": ["name"],
    "joins": [{"file": "users.csv", "column": "user", "key": "id", "separator": ";"}],
    "split": {"by": "time", "validation": 0.2, "seed": 3},
}


def test_from_dict_when_minimal_then_the_rest_has_its_default():
    schema = Schema.from_dict(MINIMAL)
    assert schema.files == {"train": ("clicks.csv",)}
    assert schema.label.rule is None
    assert schema.categorical["user"].min_count == 1
    assert schema.table.missing == ("",)
    assert (schema.share("validation"), schema.share("test")) == (0.1, 0.1)


def test_from_dict_when_everything_is_given_then_it_is_all_there():
    schema = Schema.from_dict(FULL)
    assert schema.files == {"train": ("a.csv", "b/*.csv"), "test": ("t.csv",)}
    assert (schema.table.separator, schema.table.quote, schema.table.strip) == ("::", None, False)
    assert schema.table.missing == ("", "?", "-1")
    assert (schema.dense["age"].transform, schema.dense["age"].fill) == ("log", 3.0)
    assert [schema.categorical[name].min_count for name in ("user", "zip", "device")] == [7, 1, 1]
    assert schema.categorical["device"].hash_buckets == 100
    assert schema.multi_valued["genres"].separator == ","
    assert (schema.joins[0].key, schema.joins[0].table.separator) == ("id", ";")
    assert (schema.share("validation"), schema.share("test")) == (0.2, 0.0)


@pytest.mark.parametrize("content", [MINIMAL, FULL])
def test_to_yaml_when_read_back_then_is_the_same_schema(tmp_path, content):
    schema = Schema.from_dict(content)
    path = tmp_path / "schema.yaml"
    path.write_text(schema.to_yaml())
    assert Schema.from_yaml(path) == schema


def test_to_yaml_when_names_need_quotes_then_has_them(tmp_path):
    names = ["no", "1", "a: b", "# c", "ü", "null", "- d", "x.y"]
    schema = Schema.from_dict(MINIMAL | {"categorical": dict.fromkeys(names), "missing": ["null", "~", "#"]})
    path = tmp_path / "schema.yaml"
    path.write_text(schema.to_yaml(), encoding="utf-8")
    assert Schema.from_yaml(path) == schema


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sperator": ";"}, r"schema has no key 'sperator'\. Did you mean 'separator'\? Allowed: files, format,"),
        ({"label": None}, r"schema\.label is missing"),
        ({"files": None}, r"schema\.files is missing"),
        ({"files": {"train": []}}, r"schema\.files must name at least one file"),
        ({"files": {"tests": "x"}}, r"schema\.files has no key 'tests'\. Did you mean 'test'\?"),
        ({"label": {"rule": "> 1"}}, r"schema\.label\.column is missing"),
        (
            {"label": {"column": "a", "rule": "about 4"}},
            r"schema\.label\.rule 'about 4' cannot be read\. Rules are: >= 4",
        ),
        ({"label": 3}, r"schema\.label must be a mapping with some of the keys column, rule, strip; got 3"),
        ({"categorical": []}, r"needs at least one feature: a column under dense, vectors, categorical, multi_valued"),
        ({"categorical": ["user", "user"]}, r"schema\.categorical lists user twice"),
        ({"dense": ["user"]}, r"column 'user' stands under schema\.dense and under schema\.categorical"),
        ({"ignore": ["click"]}, r"column 'click' stands under schema\.label and under schema\.ignore"),
        ({"time": "user"}, r"column 'user' stands under schema\.categorical and under schema\.time"),
        ({"categorical": {"user": {"min_cont": 2}}}, r"schema\.categorical\.user has no key 'min_cont'.* 'min_count'"),
        (
            {"categorical": {"user": {"min_count": 0}}},
            r"schema\.categorical\.user\.min_count must be at least 1, got 0",
        ),
        ({"categorical": {"user": {"min_count": 2.5}}}, r"user\.min_count must be a whole number, got 2\.5"),
        ({"categorical": {"user": {"hash_buckets": 0}}}, r"user\.hash_buckets must be at least 1, got 0"),
        ({"categorical": {"user": {"hash_buckets": 9, "min_count": 2}}}, r"user has both min_count and hash_buckets"),
        ({"missing": ["", False]}, r"schema\.missing must be a list of strings, got \['', False\]"),
        ({"categorical": {1: None}}, r"schema\.categorical: the column name 1 is no string"),
        ({"categorical": ["a.b", "a_b"]}, r"two of the columns a_b, a_b have the same name once dots"),
        ({"categorical": {"a": {"edges": [2, 1]}}}, r"schema\.categorical\.a\.edges must increase, .* got 2\.0, 1\.0"),
        ({"categorical": {"a": {"edges": ["x"]}}}, r"schema\.categorical\.a\.edges must be a list of numbers"),
        (
            {"categorical": {"a": {"edges": [1], "transform": "hour"}}},
            r"schema\.categorical\.a has edges, of a number, and a transform of times",
        ),
        (
            {"categorical": {"a": {"edges": [1], "cross": ["b", "c"]}}},
            r"has cross beside column, transform or edges",
        ),
        ({"dense": {"age": {"transform": "sqrt"}}}, r"schema\.dense\.age\.transform must be none or log, got 'sqrt'"),
        ({"dense": {"age": {"standardize": 1}}}, r"schema\.dense\.age\.standardize must be true or false, got 1"),
        ({"dense": {"age": {"fill": 1e39}}}, r"schema\.dense\.age\.fill must be mean or a number within 3.4e\+38"),
        ({"dense": {"age": {"fill": "zero"}}}, r"schema\.dense\.age\.fill must be mean or a number, got 'zero'"),
        (
            {"defaults": {"label": {}}},
            r"schema\.defaults has no key 'label'\. Allowed: dense, vectors, categorical, multi_valued",
        ),
        ({"separator": ""}, r"schema\.separator must be one or more characters"),
        ({"quote": "''"}, r"schema\.quote must be one character, got \"''\""),
        (
            {"comment": "|"},
            r"schema\.comment must be #, %, // or null, got '\|'\. In its place write comment: null and skip_lines: N, "
            r".*; for the checkpoint of an earlier run \+\+data\.schema\.comment=null \+\+data\.schema\.skip_lines=N",
        ),
        ({"encoding": "utf-9"}, r"schema\.encoding 'utf-9' is unknown\. Common ones: utf-8, latin-1"),
        ({"format": "excel"}, r"schema\.format must be text or json or parquet or arrow or orc or null, got 'excel'"),
        ({"column_names": ["a", "b", "a"]}, r"schema\.column_names lists a more than once"),
        ({"joins": {"file": "x"}}, r"schema\.joins must be a list of side tables"),
        ({"joins": [{"file": "x"}]}, r"schema\.joins\[0\]\.column is missing"),
        ({"joins": [{"file": "x", "column": "y", "on": "z"}]}, r"schema\.joins\[0\] has no key 'on'"),
        ({"joins": [{"file": "x", "column": "y", "separator": ""}]}, r"schema\.joins\[0\]\.separator must be"),
        ({"split": {"by": "user"}}, r"schema\.split\.by must be share or time, got 'user'"),
        ({"split": {"by": "time"}}, r"schema\.split\.by is time, but schema\.time names no column"),
        ({"split": {"test": 1.0}}, r"schema\.split\.test must be at least 0 and below 1, got 1\.0"),
        (
            {"split": {"test": 0.5, "validation": 0.5}},
            r"schema\.split leaves no training rows: validation and test take 1",
        ),
        (
            {"files": {"train": "a", "test": "b"}, "split": {"test": 0.1}},
            r"split\.test and schema\.files\.test both say",
        ),
    ],
)
def test_from_dict_when_something_is_wrong_then_names_the_key_and_what_is_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        Schema.from_dict(MINIMAL | change)


def test_from_yaml_when_a_key_is_repeated_then_names_line_and_key(tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text("files: a.csv\nlabel: click\ncategorical:\n  user: {}\n  user: {min_count: 2}\n")
    with pytest.raises(ValueError, match=r"schema\.yaml is not a schema: line 5: 'user' is listed twice"):
        Schema.from_yaml(path)


def test_from_yaml_when_it_is_no_yaml_then_says_so(tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text("files: [a.csv\n")
    with pytest.raises(ValueError, match=r"schema\.yaml is not a schema: while parsing"):
        Schema.from_yaml(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"schema must be a mapping with some of the keys files, .*; got None"):
        Schema.from_yaml(path)
    with pytest.raises(FileNotFoundError, match=r"there is no schema file .*nothing\.yaml"):
        Schema.from_yaml(tmp_path / "nothing.yaml")


def test_yaml_when_comments_are_there_then_they_change_nothing():
    schema = Schema.from_dict(MINIMAL)
    commented = Schema(
        **{
            **vars(schema),
            "comments": {"schema.": "two\nlines", "user": "who", "schema.label": "why", "schema.split": "how"},
        }
    )
    text = commented.to_yaml()
    assert text.startswith("# two\n# lines\n")
    assert "  user: {}  # who\n" in text
    assert Schema.from_dict(yaml.safe_load(text)) == schema == commented
