"""Columns of categories, bags and numbers, against lists in plain Python."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recsys.data.raw.cleaning import as_bags, concatenate
from lightning_recsys.data.raw.columns import Bags
from lightning_recsys.data.tables.columns import as_categories, parse_numbers, parse_times, split_lists
from lightning_recsys.data.tables.words import float_words

WORDS = st.lists(st.sampled_from(["a", " a", "b ", "", "?", "ü", "ab", None]), max_size=30)
MISSING = ("", "?")


def tidy(word: str | None) -> str | None:
    return None if word is None or word.strip() in MISSING else word.strip()


def words_of(column: pa.DictionaryArray) -> list[str | None]:
    return column.to_pylist()


def bags_of(bags: Bags) -> list[list[str | None]]:
    items, ends = bags.values.to_pylist(), np.cumsum(bags.lengths_N)
    return [items[end - length : end] for end, length in zip(ends, bags.lengths_N, strict=True)]


def chunked(words: list[str | None], *, encode: bool) -> pa.ChunkedArray:
    """In two chunks, whose dictionaries differ."""
    half = len(words) // 2
    chunks = [pa.array(part, pa.string()) for part in (words[:half], words[half:])]
    return pa.chunked_array([chunk.dictionary_encode() for chunk in chunks] if encode else chunks)


@given(words=WORDS, encode=st.booleans())
def test_categories_when_made_from_strings_then_hold_them_tidied_once(words, encode):
    column = as_categories(chunked(words, encode=encode), strip=True, missing=MISSING)
    assert words_of(column) == [tidy(word) for word in words]
    assert column.type == pa.dictionary(pa.int32(), pa.string())
    assert len(set(column.dictionary.to_pylist())) == len(column.dictionary)
    assert None not in column.dictionary.to_pylist()


@given(parts=st.lists(WORDS, min_size=1, max_size=3))
def test_categories_when_joined_then_follow_each_other(parts):
    columns = [as_categories(chunked(part, encode=True), strip=True, missing=MISSING) for part in parts]
    joined = concatenate(columns)
    assert words_of(joined) == [word for column in columns for word in words_of(column)]
    assert len(set(joined.dictionary.to_pylist())) == len(joined.dictionary)


@given(lists=st.lists(st.one_of(st.none(), WORDS), max_size=8), data=st.data())
def test_bags_when_made_taken_and_joined_then_are_lists(lists, data):
    bags = as_bags(pa.chunked_array([pa.array(lists, pa.list_(pa.string()))]), strip=True, missing=MISSING)
    expected = [[tidy(word) for word in words or [] if tidy(word) is not None] for words in lists]
    assert bags_of(bags) == expected
    rows = data.draw(st.lists(st.integers(-1, len(lists) - 1), max_size=8))
    taken = bags.take(np.array(rows, dtype=np.int64))
    assert bags_of(taken) == [expected[row] if row >= 0 else [] for row in rows]
    assert bags_of(concatenate([bags, taken])) == expected + bags_of(taken)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists))), dtype=bool)
    assert bags_of(bags.keep(mask)) == [bag for bag, kept in zip(expected, mask, strict=True) if kept]


@pytest.mark.parametrize("word", ["1", "-1.5", "+2", ".5", "3.", "1e5", "-2.5E-3", "007"])
def test_numbers_when_they_are_numbers_then_are_parsed_as_python_does(word):
    alone, _ = parse_numbers(pa.array([word]))
    beside_a_bad_one, bad = parse_numbers(pa.array([word, "x"]))
    assert alone[0] == beside_a_bad_one[0] == float(word)
    assert bad.tolist() == [False, True]


@pytest.mark.parametrize("word", ["x", "1,5", "0x10", "1_000", "--1", "nan", "inf", "-Infinity", "1 2", "", "1e999"])
def test_numbers_when_they_are_not_finite_or_no_numbers_then_are_bad(word):
    numbers, bad = parse_numbers(pa.array([word, "1", None]))
    assert bad.tolist() == [True, False, False]
    assert np.isnan(numbers).tolist() == [True, False, True]


@pytest.mark.parametrize("word", ["2000-12-31", "2000-12-31 22:12:40", "2000-12-31T22:12:40", "2000-12-31T22:12"])
def test_times_when_they_are_iso_8601_then_are_seconds_as_python_counts_them(word):
    expected = dt.datetime.fromisoformat(word).replace(tzinfo=dt.UTC).timestamp()
    for suffix in ("", "Z") if "T" in word else ("",):
        times, bad = parse_times(pa.array([word + suffix, "12"]))
        assert times.tolist() == [expected, 12.0]
        assert not bad.any()


@pytest.mark.parametrize(
    "word", ["2000-13-01", "yesterday", "31/12/2000", "2000-12-31T25:00:00", "2000-12-31+02:00", "2000-12-31 noon"]
)
def test_times_when_they_are_none_then_are_bad(word):
    times, bad = parse_times(pa.array([word, "2000-12-31", None]))
    assert bad.tolist() == [True, False, False]
    assert np.isnan(times).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("2000-12-31T10:00:00+02:00", "2000-12-31T08:00:00+00:00"),
        ("2000-12-31 10:00:00.25-0330", "2000-12-31T13:30:00.25+00:00"),
        ("1969-12-31T23:59:59.999999Z", "1969-12-31T23:59:59.999999+00:00"),
        ("31.12.2000 10:00:00.5 PM", "2000-12-31T22:00:00.5+00:00"),
        ("2000-12-31 10:00 UTC", "2000-12-31T10:00:00+00:00"),
        ("31.12.2000", "2000-12-31T00:00:00+00:00"),
        ("31.12.2000 10:00", "2000-12-31T10:00:00+00:00"),
        ("2000/12/31", "2000-12-31T00:00:00+00:00"),
    ],
)
def test_times_when_they_have_offsets_or_other_dates_then_are_seconds_all_the_same(word, expected):
    times, bad = parse_times(pa.array([word]))
    assert (times.tolist(), bad.tolist()) == ([dt.datetime.fromisoformat(expected).timestamp()], [False])


def test_categories_when_whole_numbers_have_a_fraction_then_are_the_same_without():
    column = as_categories(pa.chunked_array([["3", "3.0", "-7.0", "3.10", "v3.0"]]), strip=True, missing=[""])
    assert column.to_pylist() == ["3", "3", "-7", "3.10", "v3.0"]


def test_categories_when_no_word_ends_like_a_whole_number_then_none_is_rewritten(monkeypatch):
    monkeypatch.setattr(pc, "replace_substring_regex", lambda *_, **__: pytest.fail("the pattern was run"))
    column = as_categories(pa.chunked_array([["a", None, "3.5", "b"]]), strip=True, missing=[""])
    assert column.to_pylist() == ["a", None, "3.5", "b"]
    assert as_categories(pa.chunked_array([[None, "?"]], pa.string()), strip=True, missing=["?"]).null_count == 2


@pytest.mark.parametrize("beside", [0.5, float("nan"), 1e300, None])
def test_floats_when_whole_then_are_written_the_same_beside_any_other(beside):
    words = float_words(pa.chunked_array([pa.array([12345678901.0, beside, -0.0, 2.0**53], pa.float64())]))
    assert [words.to_pylist()[i] for i in (0, 2, 3)] == ["12345678901", "0", "9007199254740992"]
    assert (words[1].as_py() is None) == (beside is None)


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32()])
def test_floats_when_narrow_then_keep_their_own_digits(kind):
    words = float_words(pa.chunked_array([pa.array([np.float16(0.5), np.float16(3), None], pa.float16()).cast(kind)]))
    assert words.to_pylist() == ["0.5", "3", None]


@pytest.mark.parametrize("word", ["31/02/2026", "29.02.2025", "2026-04-31 10:00", "2026/00/10", "2026-01-00"])
def test_times_when_there_is_no_such_day_then_are_bad(word):
    times, bad = parse_times(pa.array([word, "29/02/2024"]), dates="day_first")
    assert np.isnan(times[0])
    assert bad.tolist() == [True, False]


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.float64(), 2), pa.large_list(pa.float64())])
def test_bags_when_items_are_whole_floats_then_are_words_of_whole_numbers(kind):
    bags = as_bags(pa.array([[12345678901.0, 0.5], None, [12345678901.0, 7.0]], kind), strip=True, missing=[])
    assert bags.lengths_N.tolist() == [2, 0, 2]
    assert bags.values.to_pylist() == ["12345678901", "0.5", "12345678901", "7"]


LISTS = {
    "[1, None]": ["1"],
    "[1.0, nan]": ["1.0"],
    "[null]": [],
    "[None]": [],
    "[]": [""],
    "['None', 'nan', None]": ["None", "nan"],
    '["null", null, "\\u00e9"]': ["null", "é"],
    "[a, b]": ["a", "b"],
    "[None|b]": ["b"],
}


@pytest.mark.parametrize("text", LISTS)
def test_lists_when_written_in_brackets_then_only_what_has_no_quotes_stands_for_no_item(text):
    assert split_lists(pa.array([text]), "|").to_pylist() == [LISTS[text]]
