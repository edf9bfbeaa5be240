"""The suite of the planner: its bars, and workloads that are kept. The whole of it runs in ``test_every_suite.py``."""

import json

import pytest
from benchmarks.suites.plan import suite
from benchmarks.suites.plan.suite import Held

SETTINGS = {
    "parts": ["link"],
    "models": ["dlrm", "deepfm"],
    "methods": ["ddp", "het"],
    "batch_sizes": [8],
    "dims": [4],
    "rates": ["1gbit"],
    "rows": 100,
    "rounds": 1,
    "seconds": 0.1,
    "local_seconds": 0.1,
    "warm_steps": {},
}


def held(method, foretold, measured, workload="one"):
    return Held(workload, method, foretold, measured, "trainers' ports")


def test_bars_when_forecasts_are_off_then_they_have_median_largest_and_pairs_in_the_wrong_order():
    found = [
        held("ddp", 110.0, 100.0),
        held("het", 105.0, 150.0),  # 50 % faster than ddp, and foretold slower
        held("des", 96.0, 120.0),  # no more than 20 % faster than ddp
        held("het", 200.0, 100.0, workload="other"),
    ]
    median, largest, wrong = suite._bars(found)
    assert median.value == pytest.approx((20 + 30) / 2)
    assert largest.value == pytest.approx(100)
    # het and des: 25 % apart, in their order. het and ddp are the one wrong pair; des and ddp are not far enough apart.
    assert wrong.value == 1


def test_workloads_when_the_suite_was_interrupted_then_finished_ones_are_taken_as_they_were(tmp_path, monkeypatch):
    asked = []

    def measured(settings, **_):
        asked.append(settings["model"])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [held("ddp", 1.0, 2.0, workload=settings["model"])]

    monkeypatch.setattr(suite, "_held", measured)
    with pytest.raises(KeyboardInterrupt):
        suite.run(**SETTINGS, cache=str(tmp_path))
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text())[0]["foretold"] == 1.0
    results = suite.run(**SETTINGS, cache=str(tmp_path))
    assert asked == ["dlrm", "deepfm", "deepfm"]
    (table,) = [x for x in results if isinstance(x, suite.Columns)]
    assert [row[:4] for row in table.rows] == [["dlrm", "ddp", "1", "2"], ["deepfm", "ddp", "1", "2"]]
    suite.run(**{**SETTINGS, "rounds": 2}, cache=str(tmp_path))
    assert asked[3:] == ["dlrm", "deepfm"], "other settings are measured anew"
