"""A preparation that is killed goes on where it was, loses no finished shard, and needs little memory."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_recsys.data import PreparedDataModule
from lightning_recsys.data.prepared import Manifest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

Run = Callable[..., dict]
END = ("never", 0)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Prepares in a process of its own; see ``preparation_script.py``."""
    script = Path(__file__).with_name("preparation_script.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:

        def ask(out: Path, raw: Path, preprocessing: str, stop: tuple[str, int], shard_bytes: int = 100_000) -> dict:
            print(json.dumps([str(out), str(raw), preprocessing, shard_bytes, *stop]), file=server.stdin, flush=True)
            return json.loads(server.stdout.readline())

        yield ask


def line(rng: random.Random) -> str:
    dense = (str(rng.randrange(100)) for _ in range(13))
    categories = (f"{rng.randrange(50):08x}" for _ in range(26))
    return "\t".join([str(rng.randrange(2)), *dense, *categories])


@pytest.fixture
def raw(tmp_path) -> Path:
    rng = random.Random(0)
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{line(rng)}\n" for _ in range(3000)))
    return path


def finished_shards(out: Path) -> dict[Path, tuple[int, int]]:
    """Inode and time of each shard whose segment is on record."""
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in out.rglob("*/*.parquet")
        if (out / f".work/segment-{path.stem}.json").exists()
    }


@pytest.mark.parametrize("preprocessing", ["dlrm", "bars", "schema"])
def test_preparation_when_killed_anywhere_then_goes_on_and_ends_as_if_nothing_had_happened(
    preprocessing, raw, run, tmp_path
):
    whole = run(tmp_path / "whole", raw, preprocessing, END)
    assert whole["status"] == 0
    expected = Manifest.load(tmp_path / "whole")
    vocabularies = {"dlrm": 0, "bars": 39, "schema": 26}[preprocessing]
    assert whole["renames"] > 30 + vocabularies
    kills = [("write", 0), ("rename", 1), ("renamed", 1), ("write", 500), ("rename", 4), ("renamed", 3), ("rename", 9)]
    if vocabularies:  # the first is the plan's; then vocabularies, in one piece with what was learned; then shards
        kills = [("rename", 1), ("renamed", 1), ("learn", 1000), ("rename", 20), ("renamed", vocabularies + 1), *kills]
    if preprocessing == "schema":  # all rows are looked at before
        kills = [("survey", 1000), ("rename", 2), ("renamed", 2), *kills]
    out = tmp_path / "out"
    progress = []
    for kill in kills:
        before = finished_shards(out)
        assert run(out, raw, preprocessing, kill)["status"] == -signal.SIGKILL
        after = finished_shards(out)
        assert {path: after[path] for path in before} == before
        progress.append(len(after))
        with pytest.raises(ValueError, match="its preparation has not ended"):
            PreparedDataModule(root=out).setup()
    assert progress == sorted(progress)
    assert 0 < progress[-1] < len(list((tmp_path / "whole").rglob("*/*.parquet")))
    rest = run(out, raw, preprocessing, ("renamed", 10**6))
    assert rest["status"] == 0
    assert rest["renames"] < whole["renames"] - progress[-1]
    check_ended(out, expected)


@pytest.mark.parametrize("where", ["rename", "renamed"])
def test_preparation_when_killed_at_its_manifest_then_ends(where, raw, run, tmp_path):
    renames = run(tmp_path / "whole", raw, "dlrm", END)["renames"]
    out = tmp_path / "out"
    assert run(out, raw, "dlrm", (where, renames))["status"] == -signal.SIGKILL
    assert (out / "manifest.json").exists() == (where == "renamed")
    before = finished_shards(out)
    assert run(out, raw, "dlrm", END)["status"] == 0
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in before} == before
    check_ended(out, Manifest.load(tmp_path / "whole"))


def check_ended(out: Path, expected: Manifest) -> None:
    """All shards are there with the same checksums, and nothing else is."""
    assert Manifest.load(out) == expected
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    shards = {shard.path for shards in expected.splits.values() for shard in shards}
    vocabularies = {feature.vocabulary for feature in expected.features.values() if feature.vocabulary}
    assert names == {"manifest.json"} | shards | vocabularies
    data = PreparedDataModule(root=out)
    data.setup()
    assert sum(len(batch) for batch in data.train_dataloader()) == sum(x.rows for x in expected.splits["train"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("preprocessing", ["dlrm", "schema"])
def test_preparation_when_the_input_is_large_then_memory_does_not_grow_with_it(preprocessing, run, tmp_path):
    rng = random.Random(0)
    block = "".join(f"{line(rng)}\n" for _ in range(4000)).encode()
    path = tmp_path / "train.txt"
    with path.open("wb") as file:
        for _ in range(-(-(300 << 20) // len(block))):
            file.write(block)
    done = run(tmp_path / "out", path, preprocessing, END, 64 << 20)
    assert done["status"] == 0
    assert done["last_peak"] - done["early_peak"] < 80 << 10  # KiB; 200 MiB of text and 110 MiB of features later
    assert done["last_peak"] < 1 << 20
