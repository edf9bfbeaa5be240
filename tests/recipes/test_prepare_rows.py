"""``recipes/prepare.py data=... raw=... out=...`` from the command line to a training run."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import random
import re
import time
from pathlib import Path

import pyarrow as pa
import pytest
from omegaconf import OmegaConf
from recipe_helpers import train_here
from recipe_tools.jobs.prepare_rows import prepare_rows
from recipe_tools.row_cache import show_cache
from rich.console import Console

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.preparation import Progress
from lightning_recsys.data.preparation.progress import progress_bar


def criteo_line(rng: random.Random) -> str:
    dense = ("" if rng.random() < 0.2 else str(rng.randrange(100)) for _ in range(13))
    return "\t".join([str(rng.randrange(2)), *dense, *(f"{rng.randrange(50):08x}" for _ in range(26))])


@pytest.fixture
def raw(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress("".join(f"{criteo_line(rng)}\n" for _ in range(400)).encode()))
    return path


def prepare(composed, tmp_path, raw, *overrides):
    overrides = [f"raw={raw}", f"out={tmp_path / 'rows'}", *overrides]
    config = composed("rows", *overrides, folder="conf/prepare")
    return prepare_rows(OmegaConf.to_container(config, resolve=True))


@pytest.mark.parametrize("preprocessing", ["dlrm", "torchrec", "bars"])
@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_prepared_rows_when_trained_on_then_every_preprocessing_works(preprocessing, model, composed, tmp_path, raw):
    prepare(composed, tmp_path, raw, f"preprocessing={preprocessing}")
    if (preprocessing, model) == ("bars", "dlrm"):
        pytest.skip("DLRM needs dense features, and bars leaves none")
    small = ["model.embedding_dim=4", *(["model.bottom_hidden=[8]", "model.top_hidden=[8]"] if model == "dlrm" else [])]
    overrides = ["data=prepared", f"data.root={tmp_path / 'rows'}", "data.batch_size=50", f"model={model}", *small]
    config = composed("train", *overrides, "trainer=cpu", "callbacks/progress_bar=none")
    record = train_here(config, tmp_path)
    assert record.metrics["test/ne"] > 0


def test_progress_bar_then_tells_share_rows_a_second_and_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress_bar(console) as show:
        for rows in (1000, 2000):
            show(Progress("write", rows=rows, bytes=rows, total_bytes=4000))
            time.sleep(0.01)
    assert re.search(r"Writing shards .* 50 % .*2,000 rows, [\d,]+/s .*0:00:\d\d", console.file.getvalue())


def test_progress_bar_when_it_never_appears_then_writes_nothing():
    console = Console(file=io.StringIO())  # no terminal
    with progress_bar(console, delay=60.0, transient=True) as show:
        show(Progress("write", rows=1000, bytes=1000, total_bytes=4000))
    assert not console.file.getvalue()


def test_command_line_when_given_raw_text_then_writes_shards_and_says_what_came_of_it(run_forked, tmp_path, raw):
    done = run_forked(
        "prepare.py", "data=criteo", f"raw={tmp_path}/day_*.gz", "out=my rows", "split.validation=null", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "400 rows" in done.stdout
    assert "Train: python recipes/train.py data=prepared 'data.root=my rows'" in done.stdout
    splits = json.loads((tmp_path / "my rows/manifest.json").read_text())["splits"]
    assert splits["train"]["rows"] + splits["test"]["rows"] == 400
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0.gz", "my rows"]


def test_command_line_when_a_row_is_bad_then_ends_with_a_sentence(composed, tmp_path, capsys):
    path = tmp_path / "train.txt"
    path.write_text(criteo_line(random.Random(0)) + "\nbad\n")
    with pytest.raises(ValueError, match=r"train.txt, row 2 \(line 2\): 40 columns expected, got 1"):
        prepare(composed, tmp_path, path, "split.by=file", "split.validation=null", "split.test=null")
    with pytest.raises(ValueError, match="another on_bad_row: error then, skip now"):
        prepare(
            composed, tmp_path, path, "on_bad_row=skip", "split.by=file", "split.validation=null", "split.test=null"
        )
    overrides = [
        "on_bad_row=skip",
        "split.by=file",
        "split.validation=null",
        "split.test=null",
        f"out={tmp_path / 'b'}",
    ]
    prepare(composed, tmp_path, path, *overrides)
    assert ": skipped 1 of " in capsys.readouterr().out


def write_table(folder, num_rows: int = 300) -> None:
    rng = random.Random(0)
    lines = [f"{rng.randrange(2)},{rng.random():.3f},u{rng.randrange(9)}" for _ in range(num_rows)]
    (folder / "clicks.csv.gz").write_bytes(gzip.compress("\n".join(["click,price,user", *lines]).encode()))


def test_command_line_when_a_table_has_a_schema_then_its_rows_train_as_from_memory(composed, run_forked, tmp_path):
    write_table(tmp_path)
    schema = "files: clicks.csv.gz\nlabel: click\ndense: [price]\ncategorical: [user]\n"
    (tmp_path / "clicks.yaml").write_text(schema)
    done = run_forked("prepare.py", "data=tabular", "data.schema=clicks.yaml", "out=rows", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Counting rows" in done.stdout
    metrics = []
    for data in (
        ("data=prepared", f"data.root={tmp_path / 'rows'}"),
        ("data=tabular", f"data.schema={tmp_path}/clicks.yaml"),
    ):
        out = tmp_path / data[0].removeprefix("data=")
        overrides = [
            *data,
            f"paths.output_dir={out}",
            "data.batch_size=240",
            "model=lr",
            "trainer=cpu",
            "callbacks/progress_bar=none",
        ]
        metrics.append(train_here(composed("train", *overrides), out).metrics)
    prepared, tabular = metrics
    assert prepared["test/ne"] == pytest.approx(tabular["test/ne"], rel=1e-5)  # one batch an epoch: order is nothing


def test_table_when_its_schema_is_guessed_or_known_then_needs_no_schema_file(composed, tmp_path, data_root):
    write_table(tmp_path)
    raw = tmp_path / "clicks.csv.gz"
    manifest = prepare(composed, tmp_path, raw, "data=tabular", "data.schema=guess")
    assert list(manifest.features) == ["user"]
    assert (tmp_path / "rows/schema.yaml").is_file()
    config = OmegaConf.to_container(
        composed("rows", "data=tabular", "data.schema=adult", f"out={tmp_path / 'adult'}", folder="conf/prepare"),
        resolve=True,
    )
    config["data"]["root"] = str(data_root)
    assert sum(shard.rows for shard in prepare_rows(config).splits["test"]) == 16_281


def test_cache_when_listed_and_cleared_then_says_what_is_in_it(tmp_path, capsys):
    write_table(tmp_path)
    cache = ["--folder", str(tmp_path / "cache")]
    schema = {"files": "clicks.csv.gz", "label": "click", "dense": ["price"], "categorical": ["user"]}
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    data.setup("fit")
    show_cache(cache)
    assert re.search(r"300 .* in use .*clicks\.csv\.gz", capsys.readouterr().out)
    del data
    gc.collect()
    show_cache([*cache, "--clear"])
    cleared = r"removed 1 entries and 0 copies of tables, [\d,]+ bytes.*is empty"
    assert re.search(cleared, capsys.readouterr().out, re.DOTALL)


def test_cache_when_cleared_then_copies_of_tables_go_but_those_in_use_or_of_this_hour(tmp_path, capsys):
    cache, folder = ["--folder", str(tmp_path)], tmp_path / "frames"
    frames = [pa.table({"click": [0, 1] * 50, "user": list("abcde") * 20, "price": [x] * 100}) for x in range(3)]
    in_use, forgotten, just_made = (
        TabularDataModule.from_frame(frame, label="click", cache=tmp_path) for frame in frames
    )
    for data in (in_use, forgotten):
        data.setup("fit")
    paths = [Path(data.schema.files["train"][0]) for data in (in_use, forgotten, just_made)]
    for path in paths[:2]:
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    size = paths[1].stat().st_size
    del forgotten, data
    gc.collect()
    show_cache(cache)
    told = f"3 copies of tables that from_frame was given, {sum(x.stat().st_size for x in paths):,} bytes"
    assert told in squeezed(capsys)
    show_cache([*cache, "--clear"])
    output = squeezed(capsys)
    freed = int(re.search(r"removed 1 entries and 1 copies of tables, ([\d,]+) bytes", output)[1].replace(",", ""))
    assert freed > size
    assert sorted(folder.iterdir()) == sorted([paths[0], paths[2]])
    just_made.setup("fit")  # its rows are prepared later, and are those of its table
    assert just_made.train_dataloader() is not None


def squeezed(capsys):
    return " ".join(capsys.readouterr().out.split())


def bars_folder(folder, header, line):
    folder.mkdir()
    for split, rows in {"train": 80, "valid": 30, "test": 20}.items():
        (folder / f"{split}.csv").write_text("".join(f"{x}\n" for x in [header, *(line() for _ in range(rows))]))
    return folder


CRITEO_HEADER = ",".join(["Label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
AVAZU_HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


@pytest.mark.parametrize("name", ["criteo_x4", "avazu_x4"])
def test_published_splits_when_prepared_then_each_file_is_a_split_and_other_files_are_refused(name, composed, tmp_path):
    rng = random.Random(0)
    lines = {
        "criteo_x4": lambda: criteo_line(rng).replace("\t", ","),
        "avazu_x4": lambda: f"{rng.randrange(10**6)},{rng.randrange(2)},141021{rng.randrange(24):02}" + ",ab12" * 21,
    }
    headers = {"criteo_x4": CRITEO_HEADER, "avazu_x4": AVAZU_HEADER}
    folder = bars_folder(tmp_path / "raw", headers[name], lines[name])
    overrides = [f"data={name}", f"folder={folder}", f"out={tmp_path / 'rows'}"]

    def prepared(*more):
        config = composed("rows", *overrides, *more, folder="conf/prepare")
        return prepare_rows(OmegaConf.to_container(config, resolve=True))

    with pytest.raises(ValueError, match=r"train\.csv is not the published file"):
        prepared()
    manifest = prepared("checksums=null", "preprocessing.min_count=1")
    assert {split: sum(x.rows for x in shards) for split, shards in manifest.splits.items()} == {
        "train": 80,
        "validation": 30,
        "test": 20,
    }
    (folder / "train.csv").write_text("Label,I1\n")
    with pytest.raises(ValueError, match="the header must be"):
        prepared("checksums=null", f"out={tmp_path / 'other'}")
