"""The DES suite: its rows, what it expects to be sent, parts whose jobs only pretend to train, the command line."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from inspect import signature
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.harness.jobs import job as jobs
from benchmarks.harness.jobs.hosts import Host, NoLinkError
from benchmarks.harness.jobs.job import Job
from benchmarks.harness.jobs.training import make_strategy
from benchmarks.suites.des import processors as des_processors
from benchmarks.suites.des import quality as des_quality
from benchmarks.suites.des import suite as des
from benchmarks.suites.des import training as des_training
from benchmarks.suites.des.prediction import ALL_REDUCE, DES, GLOO_BYTES, LIGHTNING_BYTES, PS, dense_floats, predict
from benchmarks.suites.des.processors import Share, encryption_seconds
from benchmarks.suites.des.rows import CriteoRows, HeldRows, PaperRows, distinct, join

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.monitoring.processes import processor_seconds

SMALL = PaperRows(num_fields=5, ids=50, hidden=(8, 4))


# --- Rows ------------------------------------------------------------------------------------------------------------


def test_paper_rows_when_as_large_as_the_papers_then_they_have_its_features_and_distinct_features():
    (batch,) = PaperRows().pieces(1, 512)
    assert batch.sparse.values.numel() / 512 == pytest.approx(950, rel=0.02)
    assert distinct(batch) == pytest.approx(147_664, rel=0.02)


def test_paper_rows_then_bags_hold_distinct_ids_and_come_again():
    first, again = (SMALL.pieces(2, 64)[1] for _ in range(2))
    bags = first.sparse.values.split(first.sparse.bag_lengths().tolist())
    assert {len(bag) for bag in bags} == {1, 2, 3}
    assert all(len(bag.unique()) == len(bag) for bag in bags)
    assert torch.equal(first.sparse.values, again.sparse.values)
    assert torch.equal(first.labels, again.labels)


def test_distinct_then_equal_ids_of_two_fields_are_two_features():
    sparse = SparseFeatures(("a", "b"), torch.tensor([1, 1, 1, 2]))
    assert distinct(Batch(torch.zeros(2, 0), sparse, torch.zeros(2))) == 3


def take(rows, *, num_replicas, rank=0, fields=None):
    """The first batches that a process gets."""
    data = HeldRows(rows, batch_size=8, num_batches=2)
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": num_replicas, "rank": rank})
    data.select_fields(fields)
    return list(islice(data.train_dataloader(), 3))


@pytest.mark.parametrize("rows", [SMALL, CriteoRows()], ids=["paper", "Criteo"])
def test_held_rows_then_shares_of_data_parallel_processes_make_up_the_batch_that_des_has(rows):
    whole = take(rows, num_replicas=1)
    halves = [take(rows, num_replicas=2, rank=rank) for rank in range(2)]
    for batch, *parts in zip(whole, *halves, strict=True):
        joined = join(parts)
        assert len(batch) == 8
        assert torch.equal(batch.sparse.values, joined.sparse.values)
        assert torch.equal(batch.labels, joined.labels)
    assert torch.equal(whole[0].labels, whole[2].labels)  # without end


def test_held_rows_when_fields_are_selected_then_batches_have_them_only():
    batch, *_ = take(SMALL, num_replicas=1, fields=["c1", "c3"])
    assert batch.sparse.keys == ("c1", "c3")
    assert len(batch) == 8


# --- What is expected ------------------------------------------------------------------------------------------------


def one_id_each(num_fields: int, size: int) -> Batch:
    """Every id comes once."""
    ids = torch.arange(num_fields * size)
    sparse = SparseFeatures(tuple(f"c{i}" for i in range(num_fields)), ids, lengths=torch.ones(len(ids)).long())
    return Batch(torch.zeros(size, 0), sparse, torch.zeros(size))


def test_predict_when_it_can_be_counted_by_hand_then_it_is_that():
    # Two processes, 5 fields, 3 examples each, D = 8, H = 8, then 4 and 1.
    expected = predict("DeepFM", SMALL, [one_id_each(5, 3)] * 2, num_processes=2)
    dense = 5 * 8 * 8 + 8 + 8 * 4 + 4 + 4 + 1
    assert dense_floats("DeepFM", SMALL) == dense
    assert expected.distinct == (15, 15)
    headers = 2 * GLOO_BYTES + LIGHTNING_BYTES
    sent = {name: traffic.sent_bytes for name, traffic in expected.traffic.items()}
    assert sent[DES] == 4 * 6 * (1 + 8 + 9) + 3 * 2 * GLOO_BYTES + LIGHTNING_BYTES
    # Of 15 rows half are on the other host: number, clock, row, one float of state. Both processes have the same rows,
    # so each trains and pushes half of them, and sends its gradients of the others, and all numbers, to the other.
    stored = (4 + 4 + 4 * (1 + 1)) + (4 + 4 + 4 * (8 + 1))
    assert sent[PS] == 4 * dense + headers + (7.5 + 7.5 / 2) * stored + 7.5 * 4 * (1 + 8) + 2 * 15 * 4
    # Ids and lengths of 15 bags for each collection, and their gradients.
    assert sent[ALL_REDUCE] == 4 * dense + headers + 2 * GLOO_BYTES + 15 * (8 + 8 + 4 * 1) + 15 * (8 + 8 + 4 * 8)
    # The paper: weights once with 8 bytes of key, the first layer's block, and their gradients back.
    assert expected.paper[PS].sent_bytes == 7.5 * 2 * (8 + 4 + 8 + 4 * 8) + 4 * 5 * 8 * 8


# --- Parts whose jobs only pretend to train --------------------------------------------------------------------------


class Pretended:
    """A job of which nothing is started; what it is asked to do is checked. DES is twice as fast as the others."""

    def __init__(self, name, launchers, *, training, settings, folder, workers, environment):
        assert training == "benchmarks.suites.des.training"
        assert len(launchers) == len(settings) == len(environment) == workers
        for own in settings:
            assert own.keys() <= signature(des_training.train).parameters.keys()
            make_strategy(**own["strategy"])
        self.is_des = own["strategy"]["name"] == "des"
        self.folder = folder
        step = np.array([[0.1, 2000.0 if self.is_des else 4000.0, 10.0]] * 5)
        step[2] = [9.0, 10**7, 10**4]  # other jobs' turns
        for rank in range(workers):
            np.cumsum(step, axis=0).tofile(folder / f"traffic-{rank}")

    def rates(self, batch_size):
        return [batch_size * (2.0 if self.is_des else 1.0)] * 3

    def told_per_step(self, *names):
        assert names == ("comm/sent_bytes", "comm/received_bytes")
        return 4e6

    def processor_per_step(self):
        return 9.0, 0.3


@pytest.fixture
def suite(monkeypatch):
    both = tuple(Host(name, f"10.0.0.{i}", f"link-{name}") for i, name in enumerate("ab"))
    monkeypatch.setattr(des, "linked_hosts", lambda rate: nullcontext(both))
    monkeypatch.setattr(jobs, "Job", Pretended)
    monkeypatch.setattr(jobs, "run_in_turns", lambda given, *, rounds, seconds: None)
    monkeypatch.setattr(des, "ROWS", {"paper": SMALL})
    monkeypatch.setattr(des, "encryption_seconds", lambda: 1e-7)
    return des.Suite(batch_sizes={"paper": 40}, models=["LR"], rounds=1, seconds=0.0)


def test_link_then_rates_bytes_and_forecasts_have_their_bars(suite):
    (row, sent, forecasts, shares), bars = suite.link()
    assert row.to_dict()["ratio_to_base"] == {DES: 2.0, PS: 1.0, ALL_REDUCE: 1.0}
    (counted,) = sent.to_dict()["sent_bytes"].values()
    assert counted["counted"] == {DES: 2000 - 660, PS: 4000 - 660, ALL_REDUCE: 4000 - 660}
    (forecast,) = forecasts.to_dict()["forecasts"].values()
    assert forecast["steps"] == {DES: 1000.0, PS: 2000.0, ALL_REDUCE: 2000.0}
    (share,) = shares.to_dict()["processors"].values()
    assert (share["servers"], share["encryption"], share["paper"]) == pytest.approx((300, 200, 1.55))
    assert share["ratios"]["measured"] == pytest.approx(2.0)
    assert share["ratios"]["without servers' time"] == pytest.approx(2.0 - 0.3 - 0.2)
    verdicts = {bar.name: (bar.value, bar.verdict) for bar in bars}
    assert len(verdicts) == 5
    assert all(value is not None for value, _ in verdicts.values())


def test_link_when_there_can_be_none_then_its_bars_say_not_measured(suite, monkeypatch):
    def refuse(rate):
        raise NoLinkError("no root")

    monkeypatch.setattr(des, "linked_hosts", refuse)
    results, bars = suite.link()
    assert results == []
    assert {bar.verdict for bar in bars} == {"not measured"}


def test_forecast_then_those_with_longer_steps_are_beaten():
    forecast = des.Forecast("rows", {DES: 2.0, PS: 1.0, ALL_REDUCE: 3.0}, {DES: 2.0, PS: 4.0, ALL_REDUCE: 5.0})
    assert forecast.beaten() == ([ALL_REDUCE], [PS, ALL_REDUCE])


def test_share_then_each_ratio_has_less_of_what_only_servers_take():
    share = Share("rows", {DES: 40.0, PS: 200.0}, {DES: 10.0, PS: 90.0}, servers=50.0, encryption=30.0, paper=None)
    assert share.ratios() == {"measured": 5.0, "link alone": 3.0, "without servers' time": 3.0}


def test_encryption_seconds_then_it_is_what_encrypted_messages_take_more(monkeypatch):
    taken = iter([5.0, 3.0, 4.0, 2.0, 6.0, 2.5])  # encrypted and not, in turns
    monkeypatch.setattr(des_processors, "_transfer_seconds", lambda *, encrypted: next(taken))
    assert encryption_seconds() == pytest.approx((4.0 - 2.0) / (100 * 2**20))


def test_transfer_seconds_when_encrypted_then_messages_arrive_as_well(monkeypatch):
    monkeypatch.setattr(des_processors, "_MESSAGES", 3)
    assert des_processors._transfer_seconds(encrypted=True) > 0


def test_processor_seconds_then_it_is_what_the_process_counts_itself():
    began = time.process_time()
    while time.process_time() < began + 0.05:
        pass
    assert processor_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)


def test_job_then_processor_time_and_telemetry_are_by_the_steps_of_all_workers(tmp_path):
    job = Job("made", [], training="none", settings=[], folder=tmp_path, workers=2)
    for rank in range(2):  # a step every half second in which the job runs
        times = [np.arange(begin + 0.25, begin + 2, 0.5) for begin in (0, 10, 20, 30)]
        np.concatenate([*times, [40.25]]).tofile(tmp_path / f"steps-{rank}-1")
    job._runs = [(0.0, 2.0), (10.0, 12.0), (20.0, 22.0), (30.0, 32.0), (40.0, 40.5)]  # its start, three turns, its end
    used = [(0.0, 0.0), (9.0, 9.0), (4.0, 0.8), (4.0, 0.8)]  # two turns count
    job._processor = [(np.zeros(2), np.array(seconds)) for seconds in used]
    job.telemetry = {0: {"sent": 20.0, "received": 6.0}, 1: {"sent": 10.0, "received": 3.0}}
    assert job.processor_per_step() == pytest.approx((0.5, 0.1))  # of 8 steps
    assert job.told_per_step("sent", "received") == pytest.approx(39 / 34)


def test_suite_when_a_part_is_unknown_then_the_parts_are_named():
    with pytest.raises(ValueError, match=r"suite\.parts must be some of rows, link, quality, got 'links'"):
        des.run(
            parts=["links"], batch_sizes={}, models=[], rounds=1, seconds=1.0, quality={}, cache="none", data="none"
        )


# --- Quality ---------------------------------------------------------------------------------------------------------


def test_quality_then_the_bar_is_the_difference_of_the_means():
    def runs(*values: float) -> list[dict[str, float]]:
        return [{"test/auc": value, "test/logloss": 1 - value} for value in values]

    found = {"LR": {"DES": runs(0.70, 0.72), "PS": runs(0.71, 0.72)}}
    (bar,) = des_quality.bars_of("rows", found)
    assert bar.value == pytest.approx(-5)
    assert bar.verdict == "FAIL"
    (cells,) = des_quality.compared("rows", found).rows
    assert cells == [
        "LR",
        "0.7150 (0.7100 to 0.7200)",
        "0.2850 (0.2800 to 0.2900)",
        "0.7100 (0.7000 to 0.7200)",
        "0.2900 (0.2800 to 0.3000)",
    ]
