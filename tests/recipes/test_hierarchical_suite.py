"""The suite of Hierarchical Training: its plans, and how its measurements are held against what is foretold."""

import re
from contextlib import nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.harness.jobs.hosts import Host, NoLinkError
from benchmarks.harness.workload import Workload
from benchmarks.suites.hierarchical import quality, training
from benchmarks.suites.hierarchical import suite as hierarchical

from lightning_recsys.compression import Compression
from lightning_recsys.placement.operator_plans.file import read_plan
from lightning_recsys.strategies import HierarchicalStrategy

OPTIONS = {
    "parts": ["steps"],
    "model": "deepfm",
    "placements": ["none", "exact"],
    "compressions": ["none", "int8, bf16"],
    "compressed_placement": "none",
    "batch_sizes": [32, 8],
    "rates": ["1gbit", "100mbit"],
    "num_servers": 2,
    "rounds": 1,
    "seconds": 0.0,
    "quality": {},
    "cache": "",
    "data": "",
}


class Pretended:
    """A job that makes a step in 10 ms in this process, and in 40 ms on two hosts."""

    def __init__(self, name, launchers, *, training, settings, folder, workers, warm_steps, environment=({},)):
        assert training == hierarchical.TRAINING
        assert len(launchers) == len(settings) == len(environment) == workers
        for own in settings:
            assert own.keys() <= signature(training_of_jobs).parameters.keys()
        self.folder, self.is_alone = folder, settings[0]["strategy"] is None
        self.batch_size = settings[0]["batch_size"]
        if not self.is_alone:
            groups = HierarchicalStrategy(**settings[0]["strategy"]).dense.groups
            assert (groups.world_size, groups.node_of(0)) == (workers, 0)
            assert [own.get("interface") for own in settings] == [None, "link-b"]
            assert read_plan(Path(settings[0]["plan"]))  # which every rank can read
            (folder / hierarchical.PLAN).write_text("measured: {wait_per_request: 0.001}")
            step = [1000.0 + 2 * 66, 2, 500 + 66, 1, 900, 600]
            np.cumsum([step] * 4, axis=0).tofile(folder / "traffic-1-7")

    def rates(self, batch_size, *, rank):
        assert (batch_size, rank) == (self.batch_size, 0 if self.is_alone else 1)
        return [batch_size / (0.01 if self.is_alone else 0.04)] * 3


training_of_jobs = training.train


@pytest.fixture
def pretended(monkeypatch):
    both = tuple(Host(name, f"10.0.0.{i}", f"link-{name}") for i, name in enumerate("ab"))
    monkeypatch.setattr(hierarchical, "linked_hosts", lambda rate: nullcontext(both))
    monkeypatch.setattr(hierarchical, "Job", Pretended)
    monkeypatch.setattr(hierarchical, "run_in_turns", lambda jobs, **_: None)
    monkeypatch.setattr(hierarchical, "encryption_seconds", lambda: 1e-9)
    monkeypatch.setattr(hierarchical, "Workload", partial(Workload, cardinalities=(500, 50)))


def test_run_then_every_variant_has_rates_a_prediction_and_bytes(pretended):
    *results, bars = hierarchical.run(**OPTIONS)
    told = [x.to_dict() for x in results]
    rows = [x for x in told if "examples_per_second" in x]
    first = {"one process", "none", "exact", "none, int8, bf16"}
    assert [set(x["examples_per_second"]) for x in rows] == [first, first, first - {"exact"}, first - {"exact"}]
    assert rows[0]["ratio_to_base"]["none"] == 0.25
    assert {bar.verdict for bar in bars.bars if "bytes" in bar.name} == {"pass"}
    # Two rates of three variants and of two, and each variant's bytes (exact's perhaps by rate).
    assert len([bar for bar in bars.bars if "step time" in bar.name and bar.value is not None]) == 2 * (3 + 2)
    (line, *_) = next(x["rows"] for x in told if "Bytes" in x.get("table", ""))
    assert (line["MB a step on the interface"], line["MB a step told"]) == ("0.002", "0.002")


def test_run_when_there_can_be_no_link_then_its_bars_say_not_measured(pretended, monkeypatch):
    def refuse(rate):
        raise NoLinkError("no root")

    monkeypatch.setattr(hierarchical, "linked_hosts", refuse)
    (bars,) = hierarchical.run(**{**OPTIONS, "batch_sizes": [8]})
    assert {bar.verdict for bar in bars.bars} == {"not measured"}
    assert len(bars.bars) == 2 * 3


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"parts": ["speed"]}, "suite.parts"),
        ({"placements": ["best"]}, "suite.placements"),
        ({"compressions": ["gzip"]}, "suite.compressions"),
        ({"compressed_placement": "greedy"}, "suite.compressed_placement"),
        ({"rates": ["10kbit"]}, "suite.rates"),
    ],
)
def test_run_when_asked_for_what_there_is_not_then_says_so(wrong, named):
    with pytest.raises(ValueError, match=named):
        hierarchical.run(**{**OPTIONS, **wrong})


def test_predictions_when_the_link_is_slower_then_a_step_takes_what_its_bytes_take_more(pretended, tmp_path):
    suite = hierarchical.Suite("dlrm", 32, num_servers=2, rounds=1, seconds=0.0)
    graph = suite.timed_operators()
    links = {rate: hierarchical.Network(hierarchical.bytes_per_second(rate)) for rate in ("100mbit", "1gbit")}
    variants = [hierarchical.Variant("none"), hierarchical.Variant("none", "bf16")]
    slow, slow_half, fast, fast_half = suite.plan(graph, variants, links, tmp_path)
    assert slow.plan == slow_half.plan == fast.plan
    times = [x.seconds(graph, {}) for x in (slow, slow_half, fast, fast_half)]
    more, more_half = times[0] - times[2], times[1] - times[3]
    assert more > 0
    assert fast.seconds(graph, {"wait_per_request": 1e-3}) > times[2] + 2e-3
    assert more_half == pytest.approx(more / 2, rel=0.02)  # bfloat16 has half the bytes


@pytest.mark.parametrize("name", hierarchical.COMPRESSIONS)
def test_compressions_then_the_strategy_takes_them(name):
    compression = Compression.from_option(hierarchical.COMPRESSIONS[name], top_k_fraction=0.1)
    assert {compression.activations.name, compression.gradients.name} >= set(name.split(", "))


def test_waits_when_the_end_is_asked_for_then_stops(tmp_path):
    (tmp_path / "stop").touch()
    waits = training.Waits(tmp_path, asker=1)
    trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=training.WARM_STEPS, should_stop=False)
    waits.on_train_start(trainer)
    waits.on_train_batch_end(trainer)
    assert trainer.should_stop
    waits._file.close()


# --- Quality ---------------------------------------------------------------------------------------------------------

LAYOUTS = {"one process": ["strategy=single"], "2 x (2 + 2)": ["strategy=hierarchical"]}


def of_records(monkeypatch, best_score, test):
    """What the part measures when runs end like this; and the runs that it asked for."""
    asked = []

    def run_record(name, overrides, *, cache, root):
        assert re.fullmatch(r"[\w.-]+", name)  # it is part of an override, which may not have brackets
        told = dict(x.split("=") for x in overrides)
        run = told["strategy"], float(told["rows"]), float(told["dense"])
        asked.append((*run, int(told["seed"])))
        return {"best_score": best_score(*run), "metrics": {"test/ne": test(*run, int(told["seed"]))}}

    monkeypatch.setattr(quality, "run_record", run_record)
    rates = {"rows": [0.2, 0.1, 0.4], "dense": [0.01, 0.02]}
    options = {"data": {"rows": ["data=movielens"]}, "layouts": LAYOUTS, "common": [], "rates": rates}
    return asked, lambda **own: quality.measure(**options, **own, cache=Path(), root="")


def test_quality_then_validation_alone_chooses_rates_for_each_layout(monkeypatch):
    best = {"single": (0.2, 0.02), "hierarchical": (0.4, 0.01)}

    def best_score(strategy, rows, dense):
        return 0.8 + abs(rows - best[strategy][0]) + abs(dense - best[strategy][1])

    def tested(strategy, rows, dense, seed):  # rates have another order; one seed has groups behind, the other before
        return 0.8 * (1.0 if strategy == "single" else (1.01, 0.995)[seed]) + ((rows, dense) == best[strategy])

    asked, measure = of_records(monkeypatch, best_score, tested)
    (found,), (bar,) = measure(seeds=[0, 1], chosen_by=1)
    sides = found.details["sides"]
    assert {name: tuple(side["rates"].values()) for name, side in sides.items()} == {
        "one process": best["single"],
        "2 x (2 + 2)": best["hierarchical"],
    }
    assert [side["at_edge"] for side in sides.values()] == [["dense"], ["rows", "dense"]]
    behind = [100 * (1.808 / 1.8 - 1), 100 * (1.796 / 1.8 - 1)]
    assert bar.value == pytest.approx(sum(behind) / 2)
    assert bar.standard_error == pytest.approx((behind[0] - behind[1]) / 2)
    assert bar.verdict == "pass"
    assert {run[:3] for run in asked if run[3] == 1} == {(strategy, *rates) for strategy, rates in best.items()}
    assert found.rows[1][2] == "0.4 (edge), 0.01 (edge)"


def test_quality_when_groups_are_behind_or_a_rate_diverges_then_it_is_told(monkeypatch):
    _, measure = of_records(
        monkeypatch,
        best_score=lambda strategy, rows, dense: None if rows == 0.1 else rows + dense,  # null: it was not finite
        test=lambda strategy, rows, dense, seed: 0.8 if strategy == "single" else 0.8032,
    )
    (found,), (bar,) = measure(seeds=[0], chosen_by=1)
    assert found.details["sides"]["one process"]["rates"] == {"rows": 0.2, "dense": 0.01}
    assert bar.value == pytest.approx(0.4)
    assert (bar.verdict, bar.standard_error) == ("FAIL", None)


@pytest.mark.parametrize("chosen_by", [0, 3])
def test_quality_when_no_such_number_of_seeds_can_choose_then_says_so(monkeypatch, chosen_by):
    _, measure = of_records(monkeypatch, best_score=None, test=None)
    with pytest.raises(ValueError, match=r"suite\.quality\.chosen_by must be between 1 and 2"):
        measure(seeds=[0, 1], chosen_by=chosen_by)
