"""Kept runs: what is copied of a run, and that a check sees whether it comes out as before."""

from __future__ import annotations

import json

import pytest
from recipe_helpers import plain, train_here
from recipe_tools.jobs import kept_runs

SMALL = ["trainer=cpu", "data.train_rows=600", "data.val_rows=200", "data.test_rows=200", "callbacks/progress_bar=none"]
SMALL += ["data.batch_size=100", "model=lr", "data.cardinalities=[20,30]"]


@pytest.fixture
def run(composed, tmp_path):
    train_here(composed("train", *SMALL, "seed=3"), tmp_path)
    path = tmp_path / "metrics.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"overrides": [*SMALL, "seed=3"]}))
    return tmp_path


def test_run_when_kept_then_its_folder_tells_all_but_paths_and_a_check_redoes_it(run, run_forked, tmp_path):
    root = tmp_path / "kept"
    folder = kept_runs.keep(run, "synthetic/lr", root)
    assert sorted(x.name for x in folder.iterdir()) == ["config.yaml", "seed-3.csv", "seed-3.json"]
    kept = (run / "metrics.json").read_text()
    other = json.loads(kept.replace('"seed": 3', '"seed": 4'))
    (run / "metrics.json").write_text(json.dumps(other))
    kept_runs.keep(run, "synthetic/lr", root)
    (folder / "seed-4.json").unlink()
    text = "".join(x.read_text() for x in folder.iterdir())
    assert str(tmp_path) not in text
    assert "${paths.output_dir}/checkpoints" in text
    assert "val/auc" in (folder / "seed-3.csv").read_text()
    path = folder / "seed-3.json"
    record = json.loads(path.read_text())
    record["metrics"]["test/auc"] += 0.01
    path.write_text(json.dumps(record))
    done = run_forked("results.py", "--root", str(root), "check", "synthetic/lr", folder=root)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("synthetic/lr") == 3
    assert done.stdout.count("DIFFERS") == 1, "log loss and NE come out as before"


def test_run_when_it_cannot_be_kept_or_found_then_says_why(run, composed, tmp_path):
    root = tmp_path / "kept"
    kept_runs.keep(run, "synthetic/lr", root)
    record = json.loads((run / "metrics.json").read_text())
    record["config"]["data"] = plain(composed("train", "data=synthetic"))["data"]
    (run / "metrics.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="has runs of another configuration"):
        kept_runs.keep(run, "synthetic/lr", root)
    (run / "metrics.json").write_text(json.dumps(record | {"status": "failed"}))
    with pytest.raises(ValueError, match="is failed: only completed runs are kept"):
        kept_runs.keep(run, "synthetic/other", root)
    with pytest.raises(ValueError, match=r"there is no metrics\.json in .*nowhere"):
        kept_runs.keep(tmp_path / "nowhere", "synthetic/other", root)
    with pytest.raises(ValueError, match=r"nothing is kept as a/b. There are synthetic/lr"):
        list(kept_runs.kept_runs(["a/b"], root))
