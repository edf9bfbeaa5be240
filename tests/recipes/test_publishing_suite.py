"""Suite publishing at the smallest size."""

import importlib.util
import shutil
from functools import partial

import numpy as np
import pytest
from benchmarks.harness.ours import make_task
from benchmarks.harness.quadruples import Quadruples
from benchmarks.harness.turns import Stopped
from benchmarks.harness.workload import Workload
from benchmarks.peers import torchrec
from benchmarks.suites.publishing import training
from benchmarks.suites.publishing.answers import OURS, PLAIN, TORCHREC
from benchmarks.suites.publishing.answers import measure as measure_answers
from benchmarks.suites.publishing.switching import (
    NONE,
    PUBLISHING,
    TRAINING,
    WALL,
    PublicationSwitch,
    processor_seconds,
)
from benchmarks.suites.publishing.training import LEAST_QUADRUPLES, table_of
from benchmarks.suites.publishing.training import measure as measure_training

from lightning_recsys.serving import dense, export
from lightning_recsys.serving.publishing import publisher


def test_training_when_measured_then_has_rates_bytes_and_delays(monkeypatch, tmp_path):
    work = Workload(rows=640, cardinalities=(500, 50))
    # Made before: the process that makes it is nice, and waits for its turn on a busy machine.
    dense._export(dense.DensePart(make_task(work, "wide_deep").model), work.num_dense, program := tmp_path / "p.pt2")
    monkeypatch.setattr(publisher, "export_apart", lambda part, num_dense, target: shutil.copyfile(program, target))
    monkeypatch.setattr(training, "Workload", partial(Workload, cardinalities=(500, 50)))
    sizes = {"batch_size": 64, "rows": 640, "most_seconds": 0.1, "served_seconds": 1.0, "every_seconds": 0.2}
    (row, published), (bar,) = measure_training(model="wide_deep", at_least=0.97, **sizes)
    assert {name: len(rates) for name, rates in row.measured.rates.items()} == dict.fromkeys(
        (NONE, PUBLISHING), LEAST_QUADRUPLES
    )
    assert bar.limit == 0.97
    assert bar.standard_error > 0
    found = published.to_dict()
    assert 0 < found["increment_over_base"] < 1
    assert 0 < found["delay_median_s"] <= found["delay_p99_s"]
    assert published.table().row_count == table_of(10, [], []).table().row_count == 7


class ClockedPublisher:
    """Publishes at its first step in a period, and then writes for some steps, each of which takes longer."""

    every_seconds = 10.0

    def __init__(self) -> None:
        self.due, self.to_write, self.cuts = 0, 0, []
        self.writing_steps = 3
        self.on_train_batch_end = self.step

    @property
    def is_writing(self) -> bool:
        return self.to_write > 0

    def step(self, now: float) -> None:
        if not self.is_writing and now // 10 != self.due:
            self.due, self.to_write = now // 10, self.writing_steps
            self.cuts.append(now)


def test_publication_switch_then_each_block_with_has_one_publication_and_all_that_it_takes():
    """A step takes 0.3 s, and 0.1 s more while a version is written; one version takes longer than its period."""
    now, steps, publisher = 0.0, 0, ClockedPublisher()
    ended: list[tuple[int, float]] = []

    def is_enough(blocks: Quadruples, elapsed: float) -> bool:
        ended.append((len(blocks), elapsed))
        return len(blocks) == 6

    switch = PublicationSwitch(
        publisher,
        64,
        is_warm=lambda: len(publisher.cuts) == 2,
        is_enough=is_enough,
        clock=lambda: np.array([now, 0.5 * steps, now]),
    )

    def train() -> None:
        nonlocal now, steps
        while True:
            publisher.writing_steps = 40 if len(publisher.cuts) == 5 else 3
            now, steps = now + (0.4 if publisher.is_writing else 0.3), steps + 1
            publisher.to_write = max(publisher.to_write - 1, 0)
            switch.on_train_batch_end(None)
            if publisher.on_train_batch_end is not None:
                publisher.on_train_batch_end(now)

    with pytest.raises(Stopped):
        train()
    assert len(publisher.cuts) == 2 + 2 * 6  # one in each block with publications
    assert all(cut % 10 < 0.4 for cut in publisher.cuts)
    assert [count for count, _ in ended] == list(range(1, 7))
    assert ended[-1][1] >= (4 * 6 + 1) * 10 - 0.4  # the long one took two periods
    rates = switch.blocks.rates(WALL, on=PUBLISHING, off=NONE).rates
    assert rates[NONE] == [pytest.approx(64 / 0.3)] * 6
    per_quadruple = [1 - x / y for x, y in zip(rates[PUBLISHING], rates[NONE], strict=True)]
    usual, long = sorted(per_quadruple)[:5], max(per_quadruple)
    assert usual == [pytest.approx(2 * 3 * 0.1 / 20, abs=0.002)] * 5
    assert long == pytest.approx((40 + 3) * 0.1 / 26, abs=0.02)
    training = switch.blocks.rates(
        TRAINING, on=PUBLISHING, off=NONE
    )  # by the training thread's processor time all steps take the same
    assert training.rates == dict.fromkeys((NONE, PUBLISHING), [pytest.approx(64 / 0.5)] * 6)
    # By the fake clock a process's processor time is the wall's; what is no publication takes as much of both sides.
    assert processor_seconds(switch.blocks) == pytest.approx(0.1 * (11 * 3 + 40) / 12)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("litserve") is None, reason="litserve is not installed (extra [serving])")
def test_answers_when_measured_then_both_servers_have_answered(monkeypatch):
    monkeypatch.setattr(export, "export_apart", dense._export)
    (answers,), bars = measure_answers(batch_sizes=[1, 3], cardinalities=[50, 20], seconds=0.2, rounds=1)
    assert bars == []
    servers = {OURS, PLAIN, TORCHREC} if torchrec.is_available() else {OURS, PLAIN}
    assert all(set(answered) == servers for answered in answers.details.values())
    assert answers.table().row_count == 2 * len(servers)
