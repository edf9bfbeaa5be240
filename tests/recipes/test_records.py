"""Kept runs that are trained again one by one, and the page that has all of them."""

from __future__ import annotations

import json

import pytest
from recipe_helpers import RECIPES, train_here
from recipe_tools.jobs import kept_runs
from recipe_tools.records import END, START, allowed, records_table, redo, write_page

ROOT = RECIPES / "results"
PAGE = ROOT.parents[1] / "docs/records.md"
SMALL = ["trainer=cpu", "data.train_rows=600", "data.val_rows=200", "data.test_rows=200", "callbacks/progress_bar=none"]
SMALL += ["data.batch_size=100", "model=lr", "data.cardinalities=[20,30]"]


@pytest.fixture
def kept(composed, tmp_path):
    """A folder with one kept run."""
    train_here(composed("train", *SMALL, "seed=3"), tmp_path / "run")
    path = tmp_path / "run/metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"overrides": [*SMALL, "seed=3"]}))
    kept_runs.keep(tmp_path / "run", "synthetic/lr", tmp_path / "kept")
    return tmp_path / "kept"


@pytest.mark.slow
def test_run_when_redone_then_says_whether_it_agrees(kept, run_forked):
    done = run_forked("results.py", "--root", str(kept), "redo", "synthetic/lr", folder=kept)
    assert done.returncode == 0, done.stderr
    assert "synthetic/lr, seed 3: agrees." in done.stdout
    assert "+0.00000" in done.stdout
    path = kept / "synthetic/lr/seed-3.json"
    record = json.loads(path.read_text())
    record["metrics"]["test/auc"] += 0.01
    record["versions"]["numpy"] = "0.1"
    path.write_text(json.dumps(record))
    done = run_forked("results.py", "--root", str(kept), "redo", "synthetic/lr", folder=kept)
    assert done.returncode == 1
    assert "synthetic/lr, seed 3: DIFFERS." in done.stdout
    assert done.stdout.count("DIFFERS") == 2, "log loss and NE agree"
    assert "Other versions: numpy 0.1 then" in done.stdout


def test_run_when_it_is_not_kept_or_fails_then_says_so(capsys):
    runs = {1: {"metrics": {"test/auc": 0.5}, "versions": {}}}
    with pytest.raises(ValueError, match="a/b has no seed 2, but 1"):
        redo("a/b", runs, [], seed=2)
    assert not redo("a/b", runs, ["data=nothing_like_this"], seed=None)
    assert "a/b, seed 1: the run failed" in capsys.readouterr().out


def test_difference_when_three_seeds_are_kept_then_is_allowed_as_far_as_they_differ():
    runs = {seed: {"metrics": {"test/auc": 0.8 + seed / 1000}} for seed in range(3)}
    assert allowed("test/auc", runs) == pytest.approx(0.003)
    assert allowed("test/auc", {0: runs[0], 1: runs[1]}) == 0.0005
    assert allowed("test/auc", dict.fromkeys(range(3), runs[0])) == 0.0005


def test_table_then_has_means_of_seeds_and_what_was_not_run(tmp_path):
    (tmp_path / "published.yaml").write_text("far: {lr: {auc: 0.9, logloss: 0.3}, fm: {auc: 0.91, logloss: 0.2}}\n")
    run = {"versions": {"torch": "2.13"}, "metrics": {"test/auc": 0.8, "test/logloss": 0.5, "test/ne": 0.7}}
    other = {"versions": {"torch": "2.13"}, "metrics": {"test/auc": 0.82, "test/logloss": 0.5, "test/ne": 0.7}}
    lines = records_table({"far/fm": {0: run}, "near/lr": {0: run, 2: other}}, tmp_path).splitlines()
    assert lines[2:] == [
        "| far/lr | 0.9000 | 0.3000 | not run |  |  |  |  |",
        "| far/fm | 0.9100 | 0.2000 | 0.8000 | 0.5000 | 0.7000 | 0 | 2.13 |",
        "| near/lr |  |  | 0.8100 ± 0.0141 | 0.5000 ± 0.0000 | 0.7000 ± 0.0000 | 0, 2 | 2.13 |",
    ]
    assert {line.count("|") for line in lines} == {9}


def test_page_when_it_has_no_marks_then_is_refused_and_else_only_what_is_between_them_changes(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(f"above\n{START}\nold\n{END}\nbelow\n")
    write_page(page, "| new |")
    assert page.read_text() == f"above\n{START}\n| new |\n{END}\nbelow\n"
    page.write_text("above")
    with pytest.raises(ValueError, match="must have a line <!-- records -->"):
        write_page(page, "| new |")


def test_page_then_has_the_runs_that_are_kept_and_these_are_of_every_model_and_tell_versions_and_logs():
    table = records_table(kept_runs.by_name([], ROOT), ROOT)
    assert f"{START}\n{table}\n{END}" in PAGE.read_text(), "python recipes/results.py page docs/records.md"
    models = {"lr", "fm", "wide_deep", "deepfm", "dcn", "dcn_v2", "dlrm"}
    for data in ("adult", "movielens"):
        assert {path.name for path in (ROOT / data).iterdir()} == models
    for path in ROOT.glob("*/*/seed-*.json"):
        record = json.loads(path.read_text())
        assert {"torch", "python", "lightning-recsys"} <= record["versions"].keys()
        assert {"test/auc", "test/logloss", "test/ne"} <= record["metrics"].keys()
        assert "val/auc" in path.with_suffix(".csv").read_text()
