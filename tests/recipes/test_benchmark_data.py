from __future__ import annotations

from functools import partial

from benchmarks.harness.workload import Workload
from benchmarks.suites.data import preparation, suite
from omegaconf import OmegaConf
from recipe_tools.build import build


def test_data_suite_when_run_then_measures_every_reader_at_every_shape(composed, monkeypatch):
    for module in (preparation, suite):
        monkeypatch.setattr(module, "Workload", partial(Workload, cardinalities=(100,) * 26))
    small = [
        "suite.rows=5000",
        "suite.prepare=[bars]",
        "suite.prepare_rows=2000",
        "suite.batch_sizes=[64]",
        "suite.workers=[1,2]",
        "suite.rounds=1",
        "suite.seconds=0.01",
    ]
    *rows, bars = build(OmegaConf.to_container(composed("benchmark", "suite=data", *small).suite))
    assert [row.workload for row in rows] == ["B=64, 1 workers", "B=64, 2 workers"]
    for row in rows:
        assert len(row.measured.rates) == 5
        assert all(rate > 0 for rates in row.measured.rates.values() for rate in rates)
    speed, memory = bars.bars
    assert 0 < speed.value < 10_000  # rows a second: the command's start takes more than half a second
    assert 100 < memory.value < 2048
