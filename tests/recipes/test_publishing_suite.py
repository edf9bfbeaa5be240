"""Suite publishing at the smallest size."""

import importlib.util
import shutil
from functools import partial

import pytest
from benchmarks.harness.ours import make_task
from benchmarks.harness.workload import Workload
from benchmarks.peers import torchrec
from benchmarks.suites.publishing import training
from benchmarks.suites.publishing.answers import OURS, PLAIN, TORCHREC
from benchmarks.suites.publishing.answers import measure as measure_answers
from benchmarks.suites.publishing.training import NONE, PUBLISHING, Published
from benchmarks.suites.publishing.training import measure as measure_training

from lightning_recsys.serving import dense, export
from lightning_recsys.serving.publishing import publisher


def test_training_when_measured_then_has_rates_bytes_and_delays(monkeypatch, tmp_path):
    work = Workload(rows=640, cardinalities=(500, 50))
    # Made before: the process that makes it is nice, and waits for its turn on a busy machine.
    dense._export(dense.DensePart(make_task(work, "wide_deep").model), work.num_dense, program := tmp_path / "p.pt2")
    monkeypatch.setattr(publisher, "export_apart", lambda part, num_dense, target: shutil.copyfile(program, target))
    monkeypatch.setattr(training, "Workload", partial(Workload, cardinalities=(500, 50)))
    sizes = {"batch_size": 64, "rows": 640, "seconds": 1.0, "rounds": 1, "every_seconds": 0.2}
    (row, published), (bar,) = measure_training(model="wide_deep", at_least=0.97, **sizes)
    assert set(row.measured.rates) == {NONE, PUBLISHING}
    assert bar.limit == 0.97
    found = published.to_dict()
    assert 0 < found["increment_over_base"] < 1
    assert 0 < found["delay_median_s"] <= found["delay_p99_s"]
    assert published.table().row_count == len(found) + 1
    assert Published(10, [], []).table().row_count == len(found) + 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("litserve") is None, reason="litserve is not installed (extra [serving])")
def test_answers_when_measured_then_both_servers_have_answered(monkeypatch):
    monkeypatch.setattr(export, "export_apart", dense._export)
    (answers,), bars = measure_answers(batch_sizes=[1, 3], cardinalities=[50, 20], seconds=0.2, rounds=1)
    assert bars == []
    servers = {OURS, PLAIN, TORCHREC} if torchrec.is_available() else {OURS, PLAIN}
    assert all(set(answered) == servers for answered in answers.to_dict().values())
    assert answers.table().row_count == 2 * len(servers)
