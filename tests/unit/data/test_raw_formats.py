"""Raw text: whole lines from any file, and what the formats make of them, odd lines included."""

from __future__ import annotations

import gzip
import random
import re

import numpy as np
import pyarrow as pa
import pytest
from raw_rows import criteo_lines, text
from table_oracle import hash_text

from lightning_recsys.data.files import find_files
from lightning_recsys.data.raw import AvazuFormat, CriteoFormat, LibfmFormat
from lightning_recsys.data.raw.kernels import KeyTable, hash_values, parse_integers, parse_keys
from lightning_recsys.data.raw.text import text_blocks

CRITEO_LINE = ["1", *["5"] * 13, *["68fd1e64"] * 26]
AVAZU_HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    "device_id,device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


def with_value(line: list[str], column: int, value: str) -> str:
    return "\t".join([*line[:column], value, *line[column + 1 :]])


# --- files and blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["txt", "gz"])
@pytest.mark.parametrize("content", [b"", b"a\n", b"a", b"a\nbb\n\nccc\n", b"a\nbb\n\nccc", b"x" * 50 + b"\ny\n"])
@pytest.mark.parametrize("block_bytes", [1, 3, 100])
def test_blocks_when_cut_anywhere_then_lines_stay_whole_and_reading_can_go_on_at_any_block(
    tmp_path, suffix, content, block_bytes
):
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == "gz" else content)
    blocks = list(text_blocks(path, block_bytes=block_bytes))
    whole = content + (b"\n" if content and not content.endswith(b"\n") else b"")
    assert b"".join(block.data for block in blocks) == whole
    assert all(block.data.endswith(b"\n") for block in blocks)
    for i, block in enumerate(blocks):
        start = block.position.offset
        assert whole[start:].startswith(block.data)
        assert block.position.line == whole[:start].count(b"\n") + 1
        assert (
            list(text_blocks(path, block_bytes=block_bytes, position=block.position)) == blocks[i:] or suffix == "gz"
        )  # what was consumed of a compressed file depends on where reading began
    if blocks:
        assert blocks[-1].consumed == path.stat().st_size


def test_blocks_when_a_gzip_file_has_several_members_then_all_are_read(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"b\nc\n"))
    assert b"".join(block.data for block in text_blocks(path, block_bytes=2)) == b"a\nbb\nc\n"


@pytest.mark.parametrize(
    "damage", [lambda x: x[:-30], lambda x: x[:2000] + b"\0" * 50 + x[2050:], lambda x: b"plain\n"]
)
def test_blocks_when_a_gzip_file_is_damaged_then_it_is_named(tmp_path, damage):
    path = tmp_path / "file.gz"
    content = b"".join(b"%d\n" % random.randrange(10**9) for _ in range(2000))
    path.write_bytes(damage(gzip.compress(content)))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}, after line \d+: the file is damaged"):
        list(text_blocks(path, block_bytes=500))


def test_files_when_named_in_any_way_then_are_found_in_order(tmp_path):
    for name in ("day_1", "day_0", "other", ".hidden"):
        (tmp_path / name).write_text("x")
    names = [path.name for path in find_files(str(tmp_path / "day_*"))]
    assert names == ["day_0", "day_1"]
    assert [path.name for path in find_files(tmp_path)] == ["day_0", "day_1", "other"]
    listed = find_files([str(tmp_path / "other"), str(tmp_path / "day_*")])
    assert [path.name for path in listed] == ["other", "day_0", "day_1"]


def test_files_when_missing_or_repeated_then_raises(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"raw: there is no file .*b\*. It may be a file, a folder"):
        find_files(str(tmp_path / "b*"))
    with pytest.raises(ValueError, match=r"raw names .*/a twice"):
        find_files([str(tmp_path / "a"), str(tmp_path / "*")])
    with pytest.raises(ValueError, match="raw names no file"):
        find_files([])


# --- kernels --------------------------------------------------------------------------------------------------------


def test_hashes_when_computed_then_are_those_of_a_scalar_version():
    strings = [f"{random.random()}ü"[: random.randrange(20)] for _ in range(300)]
    expected = [hash_text(text) for text in strings]
    values = pa.array([text.encode() for text in strings], pa.binary())
    assert hash_values(values).tolist() == expected
    assert hash_values(values[100:200]).tolist() == expected[100:200]  # a slice


def test_key_table_when_keys_are_many_then_finds_all_and_only_those():
    keys = np.random.default_rng(0).integers(0, 1 << 63, 20_000, dtype=np.uint64)
    table = KeyTable(keys[:10_000])
    assert np.array_equal(table.ids(keys), np.concatenate([np.arange(1, 10_001), np.zeros(10_000)]))
    assert KeyTable(np.array([5, 5, 6], dtype=np.uint64)).ids(np.array([6, 5], dtype=np.uint64)).tolist() == [3, 1]
    assert KeyTable(np.empty(0, dtype=np.uint64)).ids(keys[:2]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "number"),
    [(b"0", 0), (b"-7", -7), (b"999999999999999999", 999999999999999999), (b"007", 7)],
)
def test_integer_when_it_is_one_then_is_parsed(value, number):
    numbers, wrong = parse_integers(pa.array([value]))
    assert (numbers.tolist(), wrong.tolist()) == ([float(number)], [False])


@pytest.mark.parametrize("value", [b"-", b"1.0", b"+1", b" 1", b"1e3", b"9" * 19, b"\xff", b"0x1"])
def test_integer_when_it_is_none_then_is_refused(value):
    numbers, wrong = parse_integers(pa.array([value]))
    assert np.isnan(numbers[0])
    assert wrong[0]


@pytest.mark.parametrize("base", [10, 16])
def test_key_when_parsed_then_equals_python_s(base):
    digits = "0123456789abcdefABCDEF"[: 10 if base == 10 else None]
    strings = ["".join(random.choices(digits, k=random.randrange(1, 17))) for _ in range(200)]
    keys, wrong = parse_keys(pa.array([x.encode() for x in strings]), base=base)
    assert keys.tolist() == [int(x, base) for x in strings]
    assert not wrong.any()
    refused = pa.array([b"g", b"-1", b" 1", b"/", b":", b"@", b"`", b"1" * 17] + [b"a"] * (base == 10))
    assert parse_keys(refused, base=base)[1].all()


# --- Criteo ---------------------------------------------------------------------------------------------------------


def test_criteo_when_parsed_then_equals_the_text():
    lines = criteo_lines(200)
    rows = CriteoFormat().parse(text(lines))
    assert rows.bad == []
    for i, line in enumerate(lines):
        label, *values = line.split("\t")
        assert rows.labels_N[i] == int(label)
        dense = [np.nan if x == "" else float(x) for x in values[:13]]
        np.testing.assert_array_equal(rows.dense_IN[:, i], dense)
        assert [rows.categories[name][i].as_py().decode() for name in rows.categories] == values[13:]


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        (with_value(CRITEO_LINE, 0, "2"), "label", "must be 0 or 1, got '2'"),
        (with_value(CRITEO_LINE, 0, ""), "label", "must be 0 or 1, got ''"),
        (with_value(CRITEO_LINE, 3, "4.5"), "I3", "must be an integer or empty, got '4.5'"),
        (with_value(CRITEO_LINE, 39, "no hex"), "C26", "must be a hexadecimal number or empty, got 'no hex'"),
        (with_value(CRITEO_LINE, 14, "\udcff"), "C1", r"must be a hexadecimal number or empty, got '\\xff'"),
        ("\t".join(CRITEO_LINE[:-1]), None, "40 columns expected, got 39"),
        ("\t".join([*CRITEO_LINE, "x"]), None, "40 columns expected, got 41"),
        ("", "label", "must be 0 or 1, got ''"),
        (with_value(CRITEO_LINE, 14, '"'), "C1", "must be a hexadecimal number or empty, got '\"'"),
    ],
)
def test_criteo_when_a_line_is_odd_then_it_is_named_and_the_others_are_kept(line, column, message):
    good = "\t".join(CRITEO_LINE)
    block = "\n".join([good, line, good, line, ""]).encode("utf-8", "surrogateescape")
    rows = CriteoFormat().parse(block)
    assert [(bad.line, bad.column, bad.message) for bad in rows.bad] == [(1, column, message), (3, column, message)]
    assert rows.lines_N.tolist() == [0, 2]
    assert rows.labels_N.tolist() == [1, 1]
    assert rows.dense_IN.tolist() == [[5, 5]] * 13
    assert [values.to_pylist() for values in rows.categories.values()] == [[b"68fd1e64"] * 2] * 26


def test_criteo_when_lines_end_as_on_windows_then_are_read_the_same():
    line = "\t".join(CRITEO_LINE).encode()
    rows = CriteoFormat().parse(line + b"\r\n" + line + b"\r\n")
    assert rows.categories["C26"].to_pylist() == [b"68fd1e64"] * 2


# --- Avazu ----------------------------------------------------------------------------------------------------------


def avazu_line(click: str = "0", hour: str = "14102105", columns: int = 21) -> str:
    return ",".join(["10000371904215119486", click, hour, *(f"v{i}" for i in range(columns))])


def test_avazu_when_parsed_then_time_becomes_hour_and_weekday():
    rows = AvazuFormat().parse(text([avazu_line("1"), avazu_line("0", "14102623")]))
    assert rows.labels_N.tolist() == [1, 0]
    assert rows.time_N.tolist() == [14102105, 14102623]
    assert list(rows.categories) == ["hour", "weekday", *AVAZU_HEADER.split(",")[3:]]
    by_row = list(zip(*(values.to_pylist() for values in rows.categories.values()), strict=True))
    expected = tuple(f"v{i}".encode() for i in range(21))
    assert by_row == [(b"5", b"1", *expected), (b"23", b"6", *expected)]  # a Tuesday, a Sunday
    assert rows.dense_IN.shape == (0, 2)


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        (avazu_line("yes"), "click", "must be 0 or 1, got 'yes'"),
        (avazu_line(hour="14102124"), "hour", "must be a time as YYMMDDHH, got '14102124'"),
        (avazu_line(hour="1410215"), "hour", "must be a time as YYMMDDHH, got '1410215'"),
        (avazu_line(columns=20), None, "24 columns expected, got 23"),
    ],
)
def test_avazu_when_a_line_is_odd_then_it_is_named(line, column, message):
    rows = AvazuFormat().parse(text([avazu_line(), line]))
    assert [(bad.line, bad.column, bad.message) for bad in rows.bad] == [(1, column, message)]
    assert len(rows) == 1


def test_avazu_when_the_header_is_another_then_says_so():
    AvazuFormat().check_header(AVAZU_HEADER.encode())
    with pytest.raises(
        ValueError, match=r"the header must be id,click,hour,.*got id,hour.*without labels cannot be used"
    ):
        AvazuFormat().check_header(AVAZU_HEADER.replace("click,", "").encode())


# --- libfm ----------------------------------------------------------------------------------------------------------


def test_libfm_when_numbers_are_written_in_any_way_then_are_read_as_python_reads_them():
    numbers = ["0", "1", "-1", "+2.5", "1e3", "1E-3", "-.5", "7.", "123456.789", "1e-300", "0.1", "3.25e+2"]
    entries = " ".join(f"{i}:{number}" for i, number in enumerate(numbers))
    bag = LibfmFormat().parse(f"1 {entries}\n".encode()).bags["features"]
    assert bag.values.to_pylist() == [str(i).encode() for i in range(len(numbers))]
    np.testing.assert_allclose(bag.weights, [np.float32(number) for number in numbers], rtol=1e-7)


def test_libfm_when_lines_have_remarks_tabs_and_windows_ends_then_are_read():
    rows = LibfmFormat().parse(b"+1 \t 3:1  4:2 # a remark 5:1\r\n-1\n0 1:1 \n")
    assert rows.labels_N.tolist() == [1, 0, 0]
    assert rows.bags["features"].lengths_N.tolist() == [2, 0, 1]
    assert rows.bad == []


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("2 1:1", "label", "must be 1, 0 or -1, got '2 1:1'"),
        ("", "label", "must be 1, 0 or -1, got ''"),
        ("1x 1:1", "label", "must be 1, 0 or -1, got '1x 1:1'"),
        ("1 5", None, "an entry must be index:value with an index of at most 18 digits, got '1 5'"),
        ("1 a:1", None, "an entry must be index:value with an index of at most 18 digits, got '1 a:1'"),
        ("1 3:1 4:", None, "a value must be a number that float32 holds, got '1 3:1 4:'"),
        ("1 3:1 4:1e", None, "a value must be a number that float32 holds, got '1 3:1 4:1e'"),
        ("1 4:nan", None, "a value must be a number that float32 holds, got '1 4:nan'"),
        ("1 4:1e999", None, "a value must be a number that float32 holds, got '1 4:1e999'"),
        ("1 4:1e39", None, "a value must be a number that float32 holds, got '1 4:1e39'"),
        ("1 1:2:3", None, "a value must be a number that float32 holds, got '1 1:2:3'"),
    ],
)
def test_libfm_when_a_line_is_odd_then_it_is_named_and_the_others_are_kept(line, column, message):
    rows = LibfmFormat().parse(text(["1 7:0.5 8:1", line, "0 9:2"]))
    assert [(bad.line, bad.column, bad.message) for bad in rows.bad] == [(1, column, message)]
    assert rows.lines_N.tolist() == [0, 2]
    bag = rows.bags["features"]
    assert (bag.values.to_pylist(), bag.lengths_N.tolist()) == ([b"7", b"8", b"9"], [2, 1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 0:3 7:1", "3 entries expected, got 2: '1 0:3 7:1'"),
        ("1 0:3 7:1 8:1 9:1", "3 entries expected, got 4: '1 0:3 7:1 8:1 9:1'"),
        ("1 0:3 7:1 8:2", "the value of a categorical feature must be 1, got '1 0:3 7:1 8:2'"),
    ],
)
def test_libfm_when_fields_are_expected_and_a_line_has_others_then_it_is_named(line, message):
    rows = LibfmFormat(num_fields=2, num_dense=1).parse(text(["1 0:-2 5:1 6:1", line, "x", "0 0:4 7:1 8:1"]))
    assert [(bad.line, bad.message) for bad in rows.bad[:1]] == [(1, message)]
    assert rows.bad[1].column == "label"
    assert rows.dense_IN.tolist() == [[-2, 4]]
    assert {name: values.to_pylist() for name, values in rows.categories.items()} == {
        "f0": [b"5", b"7"],
        "f1": [b"6", b"8"],
    }


def test_libfm_when_options_make_no_sense_then_raises():
    with pytest.raises(ValueError, match=r"data.num_dense=3 needs data.num_fields"):
        LibfmFormat(num_dense=3)
    with pytest.raises(ValueError, match=r"data.num_fields must be at least 1 and data.num_dense 0, got 0, 0"):
        LibfmFormat(num_fields=0)
