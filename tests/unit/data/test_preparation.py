"""Prepared rows against scalar versions of the documented preprocessing, and every way a preparation can be refused."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from raw_rows import criteo_lines, text

from lightning_recsys.data import PreparedDataModule
from lightning_recsys.data.preparation import ByFile, ByShare, ByTime, Preparation, Preprocessing, split_rule
from lightning_recsys.data.preparation.vocabulary import ValueCounter, count_values, load_table, vocabulary_file
from lightning_recsys.data.prepared import Manifest
from lightning_recsys.data.raw import AvazuFormat, CriteoFormat, LibfmFormat
from lightning_recsys.data.raw.kernels import hash_values

EVERYTHING = ByShare(0, 0)


def prepare(out: Path, files, *, raw_format=None, split=EVERYTHING, preprocessing=None, **options) -> Manifest:
    options = {"shard_bytes": 20_000, "num_threads": 2, **options}
    return Preparation(
        out,
        raw_format=raw_format or CriteoFormat(),
        files=files,
        split=split,
        preprocessing=preprocessing or Preprocessing(num_ids=1000),
        **options,
    ).run()


def read(out: Path, split: str = "train") -> dict[str, list]:
    """All columns of a split, in order."""
    shards = Manifest.load(out).splits[split]
    return pa.concat_tables([pq.read_table(out / shard.path) for shard in shards]).to_pydict()


@pytest.fixture
def criteo(tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes(text(criteo_lines(600)))
    return path


def values_of(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


# --- preprocessing, one value at a time ------------------------------------------------------------------------------


def test_dlrm_when_prepared_then_every_value_follows_the_reference(criteo, tmp_path):
    manifest = prepare(tmp_path / "out", [criteo])
    assert len(manifest.splits["train"]) > 3
    rows = read(tmp_path / "out")
    for i, (label, *values) in enumerate(values_of(criteo)):
        assert rows["label"][i] == int(label)
        for j in range(13):
            expected = math.log(max(int(values[j] or 0), 0) + 1)
            assert rows[f"I{j + 1}"][i] == pytest.approx(expected, rel=1e-6)
        for j in range(26):
            assert rows[f"C{j + 1}"][i] == int(values[13 + j] or "0", 16) % 1000
    assert {name: feature.num_embeddings for name, feature in manifest.features.items()} == {
        f"C{j}": 1000 for j in range(1, 27)
    }


def test_torchrec_when_prepared_then_the_smallest_training_value_is_shifted_to_two(criteo, tmp_path):
    split = ByShare(0.3, 0.3, seed=1)
    prepare(tmp_path / "out", [criteo], split=split, preprocessing=Preprocessing(dense="log_shift"))
    lines = values_of(criteo)
    parts = split.assign(file=0, line_N=np.arange(1, len(lines) + 1), time_N=None)
    train = [line for line, part in zip(lines, parts, strict=True) if part == 0]
    for position, name in enumerate(("train", "validation", "test")):
        rows = read(tmp_path / "out", name)
        mine = [line for line, part in zip(lines, parts, strict=True) if part == position]
        for j in (1, 2, 13):
            smallest = min(int(line[j] or 0) for line in train)
            assert rows[f"I{j}"] == pytest.approx(
                [math.log(max(int(line[j] or 0), smallest) - smallest + 2) for line in mine], rel=1e-6
            )


def test_torchrec_when_blocks_have_no_training_rows_then_they_shift_nothing(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("".join("\t".join(["1", *[str(7 + n)] * 13, *["a"] * 26]) + "\n" for n in range(20)))
    split = ByShare(0.3, 0.3, seed=1)
    rules = Preprocessing(dense="log_shift")
    prepare(tmp_path / "out", [path], split=split, preprocessing=rules, shard_bytes=1)  # a block for each line
    parts = split.assign(file=0, line_N=np.arange(1, 21), time_N=None)
    assert parts[0] != 0
    values = 7 + np.flatnonzero(parts == 0)
    assert read(tmp_path / "out")["I1"] == pytest.approx(np.log(values - values.min() + 2).tolist(), rel=1e-6)


def test_bars_when_prepared_then_vocabularies_come_from_the_training_rows_only(criteo, tmp_path):
    split = ByShare(0.2, 0.2, seed=3)
    manifest = prepare(
        tmp_path / "out", [criteo], split=split, preprocessing=Preprocessing("bucket", "vocabulary", min_count=3)
    )

    def bucket(text: str) -> str:
        x = int(text) if text else None
        return "" if x is None else str(math.floor(math.log(x) ** 2) if x > 2 else x)

    lines = [[*map(bucket, line[1:14]), *line[14:]] for line in values_of(criteo)]
    parts = split.assign(file=0, line_N=np.arange(1, len(lines) + 1), time_N=None)
    names = [*(f"I{j}" for j in range(1, 14)), *(f"C{j}" for j in range(1, 27))]
    assert (manifest.dense, list(manifest.features)) == ((), names)
    rows = {name: read(tmp_path / "out", name) for name in ("train", "validation", "test")}
    for j, name in enumerate(names):
        counts = Counter(line[j] for line, part in zip(lines, parts, strict=True) if part == 0)
        kept = sorted((value for value in counts if counts[value] >= 3), key=lambda x: (-counts[x], x))
        ids = {value: i for i, value in enumerate(kept, 1)}
        assert manifest.features[name].num_embeddings == len(kept) + 1
        written = pq.read_table(tmp_path / "out" / manifest.features[name].vocabulary).to_pydict()
        assert written == {"value": [x.encode() for x in kept], "count": [counts[x] for x in kept]}
        for position, part in enumerate(rows.values()):
            mine = [line[j] for line, own in zip(lines, parts, strict=True) if own == position]
            assert part[name] == [ids.get(value, 0) for value in mine]
    unseen = {line[13] for line in lines} - {line[13] for line, part in zip(lines, parts, strict=True) if part == 0}
    assert unseen  # or the test would not tell training rows from all rows


def test_avazu_when_prepared_then_text_is_hashed_and_time_splits(tmp_path):
    path = tmp_path / "train.csv"
    header = "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    header += "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
    lines = [
        f"{n},{n % 2},1410{21 + n // 24:02}{n % 24:02}," + ",".join(f"v{n % 9}" for _ in range(21)) for n in range(96)
    ]
    path.write_bytes(text([header, *lines]))
    manifest = prepare(
        tmp_path / "out",
        [path],
        raw_format=AvazuFormat(),
        split=ByTime(14102300, 14102400),
        shard_bytes=1000,
        preprocessing=Preprocessing(num_ids=500),
    )
    assert {split: sum(shard.rows for shard in shards) for split, shards in manifest.splits.items()} == {
        "train": 48,
        "validation": 24,
        "test": 24,
    }
    rows = read(tmp_path / "out")
    hashes = hash_values(pa.array([f"v{n % 9}".encode() for n in range(48)])) % np.uint64(500)
    assert rows["device_ip"] == hashes.tolist()
    assert rows["hour"] == (hash_values(pa.array([str(n % 24).encode() for n in range(48)])) % np.uint64(500)).tolist()


def test_libfm_when_prepared_then_indices_are_ids_and_values_are_weights(tmp_path):
    path = tmp_path / "train.libfm"
    path.write_text("1 3:0.5 99:2\n0\n-1 7:1\n")
    manifest = prepare(tmp_path / "out", [path], raw_format=LibfmFormat(), preprocessing=Preprocessing(num_ids=50))
    assert manifest.features["features"].bag
    data = PreparedDataModule(root=tmp_path / "out", batch_size=3, shuffle_window=0)
    data.setup()
    (batch,) = data.train_dataloader()
    assert batch.sparse.values.tolist() == [3, 49, 7]
    assert batch.sparse.weights.tolist() == [0.5, 2, 1]
    assert batch.sparse.lengths.tolist() == [2, 0, 1]
    assert batch.labels.tolist() == [1, 0, 0]


# --- files and splits ------------------------------------------------------------------------------------------------


def test_files_when_compressed_and_several_then_rows_are_the_same(criteo, tmp_path):
    content = criteo.read_bytes()
    cut = content.index(b"\n", len(content) // 2) + 1
    (tmp_path / "a.gz").write_bytes(gzip.compress(content[:cut]))
    (tmp_path / "b.txt").write_bytes(content[cut:-1])  # the last line has no end
    prepare(tmp_path / "one", [criteo])
    prepare(tmp_path / "two", [tmp_path / "a.gz", tmp_path / "b.txt"], compression="zstd", num_threads=1)
    assert read(tmp_path / "one") == read(tmp_path / "two")


def test_share_when_drawn_then_is_near_what_was_asked_and_hangs_on_seed_and_line_only():
    lines = np.arange(1, 100_001)
    drawn = ByShare(0.1, 0.2, seed=5).assign(file=0, line_N=lines, time_N=None)
    np.testing.assert_allclose(np.bincount(drawn) / len(lines), [0.7, 0.1, 0.2], atol=0.005)  # 3 standard deviations
    assert np.array_equal(ByShare(0.1, 0.2, seed=5).assign(file=0, line_N=lines[50:60], time_N=None), drawn[50:60])
    for other in ({"seed": 6, "file": 0}, {"seed": 5, "file": 1}):
        again = ByShare(0.1, 0.2, seed=other["seed"]).assign(file=other["file"], line_N=lines, time_N=None)
        assert 0.4 < (again == drawn).mean() < 0.6  # 0.54 where independent


def test_share_when_a_bad_row_is_skipped_then_the_others_keep_their_split(criteo, tmp_path):
    prepare(tmp_path / "all", [criteo], split=ByShare(0.3, 0))
    lines = criteo.read_text().splitlines()
    lines[100] = "bad"
    criteo.write_text("\n".join(lines))
    manifest = prepare(tmp_path / "some", [criteo], split=ByShare(0.3, 0), on_bad_row="skip")
    lost = 0
    for split in ("train", "validation"):
        whole, rest = (Counter(zip(*read(tmp_path / x, split).values(), strict=True)) for x in ("all", "some"))
        assert not rest - whole
        lost += (whole - rest).total()
    assert lost == 1
    assert [skipped["good"] for skipped in manifest.details["skipped"].values()] == [599]


def test_files_when_they_make_the_splits_then_vocabularies_know_training_files_only(tmp_path):
    for seed, name in enumerate(("day_0", "day_1", "day_2")):
        (tmp_path / name).write_bytes(text(criteo_lines(50 + seed, seed=seed)))
    split = ByFile(str(tmp_path / "day_1"), (str(tmp_path / "day_2"),))
    manifest = prepare(
        tmp_path / "out", [tmp_path / "day_0"], split=split, preprocessing=Preprocessing(ids="vocabulary", min_count=1)
    )
    assert [len(read(tmp_path / "out", name)["label"]) for name in ("train", "validation", "test")] == [50, 51, 52]
    values = pq.read_table(tmp_path / "out" / manifest.features["C1"].vocabulary)["value"].to_pylist()
    assert {x.decode() for x in values} == {line.split("\t")[14] for line in criteo_lines(50, seed=0)}


# --- the manifest ----------------------------------------------------------------------------------------------------


def test_manifest_when_written_then_counts_sums_and_options_are_true(criteo, tmp_path):
    manifest = prepare(tmp_path / "out", [criteo], split=ByShare(0.1, 0.1))
    for split, shards in manifest.splits.items():
        for shard in shards:
            path = tmp_path / "out" / shard.path
            assert path.stat().st_size == shard.bytes
            assert hashlib.blake2b(path.read_bytes()).hexdigest() == shard.blake2b
            assert pq.ParquetFile(path).metadata.num_rows == shard.rows
        positives = sum(read(tmp_path / "out", split)["label"])
        assert manifest.details["statistics"]["positives"][split] == positives
    lines = values_of(criteo)
    missing = manifest.details["statistics"]["missing"]
    assert missing["I3"] == sum(line[3] == "" for line in lines)
    assert missing["C26"] == sum(line[39] == "" for line in lines)
    assert manifest.details["options"]["split"] == {"by": "share", "validation": 0.1, "test": 0.1, "seed": 0}
    assert manifest.details["inputs"][0]["bytes"] == criteo.stat().st_size
    assert manifest == Manifest.load(tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"manifest.json", *(shard.path for shards in manifest.splits.values() for shard in shards)}


def test_progress_when_a_phase_begins_then_is_told_before_its_first_rows(criteo, tmp_path):
    told = []
    prepare(tmp_path / "out", [criteo], preprocessing=Preprocessing("bucket", "vocabulary"), on_progress=told.append)
    for phase in ("learn", "write"):
        first, *_, last = [x for x in told if x.phase == phase]
        assert (first.rows, first.bytes) == (0, 0)
        assert (last.rows, last.bytes) == (600, criteo.stat().st_size)
        assert first.total_bytes == last.total_bytes == criteo.stat().st_size


def test_run_when_all_is_done_then_does_nothing(criteo, tmp_path):
    first = prepare(tmp_path / "out", [criteo])
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert prepare(tmp_path / "out", [criteo]) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preprocessing": Preprocessing(num_ids=2000)}, "another preprocessing.num_ids: 1000 then, 2000 now"),
        ({"split": ByShare(0, 0.5)}, "another split.test: 0 then, 0.5 now"),
        ({"split": ByFile()}, "another split.by: share then, file now"),
        ({"compression": "zstd"}, "another compression: none then, zstd now"),
        ({"on_bad_row": "skip"}, "another on_bad_row: error then, skip now"),
        ({"raw_format": LibfmFormat()}, "another data.name: criteo then, libfm now"),
    ],
)
def test_run_when_options_are_others_then_is_refused(criteo, tmp_path, change, message):
    prepare(tmp_path / "out", [criteo])
    with pytest.raises(ValueError, match=rf"out was begun with {message}. Go on with what it was begun with, choose"):
        prepare(tmp_path / "out", [criteo], **change)


def test_run_when_inputs_are_others_then_is_refused(criteo, tmp_path):
    prepare(tmp_path / "out", [criteo])
    content = criteo.read_bytes()
    criteo.write_bytes(b"0" + content[1:] if content[:1] == b"1" else b"1" + content[1:])
    with pytest.raises(ValueError, match=r"begun with another raw file .*train.txt: \d+ bytes, checksum"):
        prepare(tmp_path / "out", [criteo])
    other = tmp_path / "other.txt"
    other.write_bytes(content)
    with pytest.raises(ValueError, match=r"another raw file .*train.txt: \d+ bytes.* then, .*other.txt now"):
        prepare(tmp_path / "out", [other])
    criteo.write_bytes(content)
    with pytest.raises(ValueError, match="another number of raw files: 1 then, 2 now"):
        prepare(tmp_path / "out", [criteo, other])


def test_run_when_another_process_is_at_work_then_is_refused(criteo, tmp_path):
    (tmp_path / "out/.work").mkdir(parents=True)
    with (tmp_path / "out/.work/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="out: another process is preparing rows in this folder"):
            prepare(tmp_path / "out", [criteo])


# --- odd input -------------------------------------------------------------------------------------------------------


def test_bad_row_when_it_is_an_error_then_is_named_by_file_row_and_column(criteo, tmp_path):
    lines = criteo.read_text().splitlines()
    lines[497] = lines[497].rpartition("\t")[0] + "\tnonsense"
    criteo.write_text("\n".join(lines))
    where = rf"{re.escape(str(criteo))}, row 498 \(line 498\), column 'C26': must be a hexadecimal number or empty, got"
    for preprocessing in (Preprocessing(), Preprocessing("bucket", "vocabulary")):
        with pytest.raises(ValueError, match=where + r" 'nonsense'. \(on_bad_row=skip leaves out such rows"):
            prepare(tmp_path / "out", [criteo], preprocessing=preprocessing)
        assert not list((tmp_path / "out").rglob("*.tmp"))
        for path in (tmp_path / "out/.work").glob("*"):
            path.unlink()


def test_bad_rows_when_skipped_then_are_counted_and_quoted(criteo, tmp_path):
    lines = criteo.read_text().splitlines()
    for i in (0, 250, 599):
        lines[i] = f"bad {i}"
    criteo.write_text("\n".join(lines))
    manifest = prepare(tmp_path / "out", [criteo], on_bad_row="skip")
    (example,) = manifest.details["skipped"][str(criteo)].pop("examples").values()
    assert tuple(example) == (f"{criteo}, row 1 (line 1): 40 columns expected, got 1.", 3)
    assert manifest.details["skipped"] == {str(criteo): {"good": 597, "comments": 0}}
    assert manifest.details["rows"] == {str(criteo): {"rows": 600, "used": 597, "skipped": 3, "comments": 0}}
    assert len(read(tmp_path / "out")["label"]) == 597


def test_input_when_empty_or_without_training_rows_then_raises(criteo, tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty is empty"):
        prepare(tmp_path / "out", [tmp_path / "empty"])
    (tmp_path / "bad").write_text("bad\n")
    with pytest.raises(ValueError, match=r"bad: all 1 rows are bad: 1 like .*/bad, row 1"):
        prepare(tmp_path / "out", [tmp_path / "bad"], on_bad_row="skip")


def test_header_when_wrong_then_the_file_is_named(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"x.csv, line 1: the header must be id,click"):
        prepare(tmp_path / "out", [path], raw_format=AvazuFormat())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Preprocessing(dense="sqrt"), "preprocessing.dense must be log, log_shift or bucket, got 'sqrt'"),
        (lambda: Preprocessing(ids="both"), "preprocessing.ids must be hash or vocabulary, got 'both'"),
        (lambda: Preprocessing(num_ids=0), "preprocessing.num_ids must be at least 1, got 0"),
        (lambda: ByShare(1.5), r"split.validation must be a share of the rows, from 0 to below 1, got 1.5"),
        (lambda: ByShare(0.5, 0.5), r"must leave rows for training, got 0.5 \+ 0.5"),
        (lambda: ByTime(), r"split.by=time needs split.validation or split.test"),
        (lambda: ByTime(5, 4), r"split.test=4 is before split.validation=5"),
        (lambda: split_rule(by="luck"), "split.by must be share, time or file, got 'luck'"),
        (lambda: split_rule(by="share", test="x"), "with split.by=share, split.test must be a number, got 'x'"),
        (
            lambda: split_rule(by="time", test=0.5),
            "with split.by=time, split.test must be a whole number or null, got 0.5",
        ),
        (
            lambda: split_rule(by="file", test=0.5),
            "with split.by=file, split.test must be a string or a list of strings or null, got 0.5",
        ),
    ],
)
def test_option_when_out_of_range_then_raises(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_row": "ignore"}, "on_bad_row must be error or skip, got 'ignore'"),
        ({"compression": "lz4"}, "compression must be none or zstd, got 'lz4'"),
        ({"shard_bytes": 0}, "shard_bytes must be at least 1, got 0"),
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
        ({"split": ByTime(5)}, "rows of data=criteo carry no time. Use split.by=file"),
    ],
)
def test_preparation_when_an_option_does_not_fit_then_raises(criteo, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "out", [criteo], **options)


# --- vocabularies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_entries", [50, 1000, 10**6])
def test_counts_when_they_do_not_fit_in_memory_then_are_exact_all_the_same(tmp_path, max_entries):
    rng = np.random.default_rng(0)
    counter = ValueCounter(["a", "b/c"], folder=tmp_path / "spill", max_entries=max_entries)
    expected = {"a": Counter(), "b/c": Counter()}
    for _ in range(8):
        drawn = {"a": rng.zipf(1.2, 500) % 400, "b/c": rng.integers(0, 300, 500)}
        columns = {name: [str(x).encode() for x in values.tolist()] for name, values in drawn.items()}
        counter.add({name: count_values(pa.array(values)) for name, values in columns.items()})
        for name, values in columns.items():
            expected[name].update(values)
    assert (tmp_path / "spill").exists() == (max_entries < 10**6)
    sizes, min_count = counter.write(tmp_path / "vocabulary", min_count={"a": 4, "b/c": 4}, max_vocabulary=10**6)
    assert min_count == 4
    assert not (tmp_path / "spill").exists()
    for name, counts in expected.items():
        path = tmp_path / "vocabulary" / vocabulary_file(name)
        kept = sorted(((x, n) for x, n in counts.items() if n >= 4), key=lambda x: (-x[1], x[0]))
        written = pq.read_table(path).to_pydict()
        assert list(zip(written["value"], written["count"], strict=True)) == kept
        assert sizes[name] == len(kept)
        ids = load_table(path).ids(hash_values(pa.array([*written["value"], b"unseen"])))
        assert ids.tolist() == [*range(1, len(kept) + 1), 0]


def test_vocabulary_when_it_would_be_too_large_then_the_rarest_values_go(tmp_path):
    counter = ValueCounter(["a", "b"], folder=tmp_path / "spill")
    column = pa.array([str(n).encode() for n in range(1, 21) for _ in range(n)])  # value n occurs n times
    counter.add({"a": count_values(column), "b": count_values(column)})
    sizes, min_count = counter.write(tmp_path / "vocabulary", min_count={"a": 2, "b": 2}, max_vocabulary=11)
    assert (sizes, min_count) == ({"a": 5, "b": 5}, 16)


# --- checkpoints and folders that were prepared otherwise ------------------------------------------------------------


def checkpoint_of(folder: Path) -> dict:
    """The state that a checkpoint holds of a data module, as it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(PreparedDataModule(root=folder).state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense": "log_shift"}, "the preprocessing.dense is log_shift here and was log there"),
        ({"num_ids": 999}, "the number of ids of C1 is 999 here and was 1000 there, and 25 more differ"),
        ({"dense": "bucket"}, r"the order of the dense features is \[\] here"),
    ],
)
def test_checkpoint_when_its_folder_was_prepared_by_other_rules_then_is_refused(criteo, tmp_path, options, message):
    prepare(tmp_path / "one", [criteo])
    prepare(tmp_path / "two", [criteo], preprocessing=Preprocessing(**{"num_ids": 1000, **options}))
    with pytest.raises(ValueError, match=rf"data.root={tmp_path}/two was prepared otherwise .* {message}"):
        PreparedDataModule(root=tmp_path / "two").load_state_dict(checkpoint_of(tmp_path / "one"))


def test_checkpoint_when_vocabularies_are_as_large_and_have_other_values_then_is_refused(tmp_path):
    days = {"one": ["aa", "bb", "cc"], "two": ["aa", "cc", "dd"], "three": ["bb", "cc", "aa"]}
    for day, values in days.items():
        rows = [f"{i % 2}\t" + "\t".join(["1"] * 13 + [x] * 26) for i, x in enumerate(values * 2)]
        (tmp_path / f"{day}.txt").write_text("\n".join(rows) + "\n")
        rules = Preprocessing(ids="vocabulary", min_count=1)
        prepare(tmp_path / day, [tmp_path / f"{day}.txt"], preprocessing=rules)
    state = checkpoint_of(tmp_path / "one")
    with pytest.raises(ValueError, match=r"the vocabulary of C1 is .* here and was .* there, and 25 more differ"):
        PreparedDataModule(root=tmp_path / "two").load_state_dict(state)
    PreparedDataModule(root=tmp_path / "three").load_state_dict(state)  # of the same values, which come as often


def test_checkpoint_when_other_rows_were_prepared_by_the_same_rules_then_is_taken(criteo, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(text(criteo_lines(100)))
    prepare(tmp_path / "one", [criteo])
    prepare(tmp_path / "two", [other], split=ByShare(0.2, 0.2))
    PreparedDataModule(root=tmp_path / "two").load_state_dict(checkpoint_of(tmp_path / "one"))
    PreparedDataModule(root=tmp_path / "two").load_state_dict({})  # of a version that did not tell
