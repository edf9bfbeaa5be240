"""The suite that holds a virtual cluster beside the real one, with the real runs' metrics made up."""

from __future__ import annotations

import pytest
from benchmarks.suites import simulation
from hydra import initialize_config_dir
from recipe_helpers import CONF, TINY

OPTIONS = ["name=simulation", "model=dlrm", *TINY, "trainer.limit_val_batches=0"]


def test_suite_when_real_runs_are_given_then_virtual_ones_are_as_fast_as_the_one_and_judged(
    composed, tmp_path, monkeypatch
):
    composed("benchmark")
    made = []

    def trained(name, overrides, *, cache, root):
        made.append(name)
        trainers = 2 if "strategy.num_trainers=2" in overrides else 1
        return {"eps": 1000.0 * trainers, "test/ne": 1.0, "sync/gap": 5.0}

    monkeypatch.setattr(simulation, "trained", trained)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        twins, bars = simulation.run(common=OPTIONS, interval=0.5, seeds=[0], cache=str(tmp_path), data=str(tmp_path))
    assert made == ["trainers1-seed0", "trainers2-seed0"]
    speed_up = twins.rows()["speed-up by the second trainer"]
    assert speed_up[0] == 2.0
    assert speed_up[1] == pytest.approx(2.0, rel=0.25)  # ten batches: a worker's late start counts
    # A batch takes 0.1 s, and half a second passes between two rounds.
    assert twins.rows()["sync gap"][1] == pytest.approx(5.0, rel=0.5)
    assert [bar.limit for bar in bars.bars] == [0.3, 20.0, 20.0]
    assert 0.3 < twins.rows()["test NE"][1] < 3
