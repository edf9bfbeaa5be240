"""Clusters in virtual time from the command line: one alone, and several in the figures of papers."""

from __future__ import annotations

import json

import pytest
from recipe_helpers import CONF, plain
from recipe_tools.build import build
from recipe_tools.figures import runs_of
from recipe_tools.pictures import draw
from simulate import simulate

from lightning_recsys.simulation import HETCluster, VirtualCluster

SMALL = ("data.batch_size=32", "data.val_rows=640", "evaluation.every=3200", "evaluation.rows=320")


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "cluster").glob("*.yaml")))
def test_cluster_builds(name, composed):
    assert isinstance(build(plain(composed("simulate", f"cluster={name}"))["cluster"]), VirtualCluster | HETCluster)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "figure").glob("*.yaml")))
def test_figure_then_opens_with_its_command_and_every_series_builds(name, composed):
    text = (CONF / f"figure/{name}.yaml").read_text()
    assert text.startswith(f"# @package _global_\n# python recipes/simulate.py figure={name}\n")
    figure = plain(composed("simulate", f"figure={name}"))["figure"]
    if figure["x"] is not None:
        figure["x"]["values"] = figure["x"]["values"][-1:]
    for added in runs_of(figure).values():
        config = plain(composed("simulate", *added, f"figure={name}"))
        assert isinstance(build(config["cluster"]), VirtualCluster | HETCluster)
        assert config["figure"]["paper"]


@pytest.mark.slow
def test_run_when_simulated_then_writes_what_came_out_and_draws_it(run_forked, tmp_path):
    command = ("cluster=asgd_1k", "cluster.workers_per_replica=20", "examples=6400", *SMALL, "hydra.run.dir=out")
    done = run_forked("simulate.py", *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    assert record["status"] == "completed"
    (run,) = json.loads((tmp_path / "out/simulation.json").read_text())["runs"].values()
    assert run["examples"] == 6400
    assert [point["examples"] for point in run["curve"]] == [3200, 6400]
    assert {"eps", "train/ne", "val/ne", "val/auc", "staleness/dense_mean"} <= run["metrics"].keys()
    assert run["traffic_bytes"]["dense pulled"] > 0
    assert 0.5 < run["utilization"]["workers"] < 1
    assert (tmp_path / "out/simulation.png").stat().st_size > 10_000
    done = run_forked("simulate.py", *command[:-1], "hydra.run.dir=again", folder=tmp_path)
    (again,) = json.loads((tmp_path / "again/simulation.json").read_text())["runs"].values()
    assert {**again, "wall": None} == {**run, "wall": None}


@pytest.mark.slow
def test_figure_when_drawn_then_has_every_series_at_every_place(run_forked, tmp_path):
    small = (*SMALL, "examples=1280", "cluster.workers_per_replica=2", "hydra.run.dir=out")
    done = run_forked("simulate.py", "figure=shadowsync_5", "figure.x.values=[2,3]", *small, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out/simulation.json").read_text())["runs"]
    assert list(runs) == [f"{name} @ {n}" for name in ("S-EASGD", "FR-EASGD-5", "FR-EASGD-30") for n in (2, 3)]
    assert runs["FR-EASGD-5 @ 3"]["counts"]["rounds"] > 0
    assert "The paper: Figure 5" in done.stdout


def test_data_when_they_are_no_clicks_then_refused_before_anything_is_read(composed):
    config = plain(composed("simulate", "data=cora", "model=graphsage"))
    with pytest.raises(ValueError, match=r"simulations are of clicks, but .*NodeDataModule is for .*NodeClass"):
        simulate(config, record=None, label="Cora")


def test_cluster_when_unknown_then_the_choices_are_named(run_forked, tmp_path):
    done = run_forked("simulate.py", "cluster=asgd_5k", folder=tmp_path)
    assert done.returncode == 1
    assert "Did you mean asgd_3k or asgd_1k?" in done.stderr or "Allowed: asgd_1k, asgd_3k" in done.stderr


def test_picture_when_a_figure_has_no_axis_then_its_metrics_are_drawn_by_run(tmp_path):
    font_manager = pytest.importorskip("matplotlib.font_manager")
    run = {"metrics": {"eps": 2.0}, "curve": [{"examples": 1, "val/ne": 0.9}]}
    figure = {"panels": ["eps", "ne"], "x": None, "title": "a"}
    path = draw(figure, {"one": run, "other": run}, tmp_path / "picture.png")
    font_manager._get_font.cache_clear()  # matplotlib's, which keeps the fonts' files open
    assert path.read_bytes().startswith(b"\x89PNG")
