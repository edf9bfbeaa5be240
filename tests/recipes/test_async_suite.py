"""The suite of asynchronous parameter servers: jobs take what it asks, and clusters are judged in pairs."""

from __future__ import annotations

from inspect import signature

import pytest
from benchmarks.harness.jobs.training import make_strategy
from benchmarks.suites.async_ps import quality, suite
from benchmarks.suites.shadowsync import training
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from recipe_helpers import CONF


def test_quality_when_clusters_are_simulated_then_the_best_rate_is_taken_and_finished_runs_are_kept(
    composed, tmp_path, monkeypatch
):
    settings = OmegaConf.to_container(OmegaConf.load(CONF / "suite/async.yaml").quality)
    composed("simulate")
    small = ["data.val_rows=320", "cluster.workers_per_replica=6"]
    arguments = {**settings, "common": [*settings["common"], *small], "examples": 1280, "rates": [1e-6, 1e-3]}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        (measured,), bars = quality.measure(**arguments | {"seeds": [0]}, cache=tmp_path, root=str(tmp_path))
        tried, rate, auc = (measured.details[name] for name in ("tried_at_few_workers", "rate", "auc"))
        assert rate == max(tried, key=tried.get)
        assert list(auc) == list(settings["settings"])
        assert auc["1000 workers, plain"][0] == tried[rate]
        monkeypatch.setattr("recipe_tools.jobs.simulation.simulate", None)
        again = quality.measure(**arguments | {"seeds": [0]}, cache=tmp_path, root=str(tmp_path))
    assert again == ([measured], bars)


def test_bars_then_they_are_mean_differences_of_pairs():
    auc = {
        "1000 workers, plain": [0.75, 0.76],
        "3000 workers, plain": [0.74, 0.75],
        "3000 workers, linear": [0.73, 0.70],
        "3000 workers, normalised": [0.7485, 0.7585],
    }
    bars = quality.bars_of(auc)
    assert [bar.value for bar in bars] == pytest.approx([-1.5, 8.5, 38.5])
    assert [bar.verdict for bar in bars] == ["FAIL", "pass", "pass"]
    assert bars[0].standard_error == pytest.approx(0)


def test_jobs_when_started_then_training_takes_their_settings():
    for strategy, options in suite.VARIANTS.values():
        signature(training.train).bind(folder="f", asker=1, batch_size=8, name=strategy, strategy=options)
        made = make_strategy(strategy, **options)
        taken = vars(made) | vars(made.dense)  # settings of the dense part are there
        assert {name: taken[name] for name in options} == options
