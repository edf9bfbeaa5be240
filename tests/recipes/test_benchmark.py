"""The benchmark's turns, and its command line on a workload too small to mean anything."""

import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import benchmarks
import numpy as np
import pytest
import torch
from benchmarks.harness.apart import Apart
from benchmarks.harness.bars import Bar, Bars
from benchmarks.harness.estimates import trimmed_mean
from benchmarks.harness.jobs.training import StepTimes
from benchmarks.harness.quadruples import Quadruples
from benchmarks.harness.report import Curves, Drawn, fill, markdown, show
from benchmarks.harness.turns import Measurement, Stopped, Turn, in_turns
from benchmarks.harness.workload import Workload
from benchmarks.suites.single import roofline
from benchmarks.suites.single import suite as single
from benchmarks.suites.single.watching import PROCESSOR, WALL, WARM_UP, Switch, cost, rates
from omegaconf import OmegaConf
from pytorch_lightning import Callback
from recipe_tools.build import build

BENCHMARK = Path(benchmarks.__file__).parents[1] / "benchmark.py"


def endless(turn: Turn, log: list[str], name: str) -> None:
    for _ in count():
        log.append(name)
        turn.step_done(10)


def test_readme_then_its_tables_name_every_file_and_no_other():
    room = Path(benchmarks.__file__).parent
    named = set()
    for line in (room / "README.md").read_text().partition("**Promises**")[0].splitlines():
        if heading := re.match(r"\| `(\w+)/` \|", line):
            part = heading[1]
        elif line.startswith("| `"):
            named |= {f"{part}/{name}" for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[1])}
    files = {str(path.relative_to(room)) for path in room.rglob("*.py") if path.name != "__init__.py"}
    assert named == files


def test_in_turns_then_one_variant_at_a_time_and_each_once_a_round():
    log: list[str] = []
    variants = {name: (lambda turn, name=name: endless(turn, log, name)) for name in "abc"}
    measured = in_turns(variants, rounds=4, seconds=0.0)
    assert {name: len(rates) for name, rates in measured.rates.items()} == dict.fromkeys("abc", 4)
    # A turn of 0 seconds is one step; round i starts with variant i, and a stopped variant takes no further step.
    assert "".join(log) == "abc" + "bca" + "cab" + "abc" + "bca"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("variant")]


def test_in_turns_when_a_variant_fails_then_its_error_is_the_cause():
    def broken(turn: Turn) -> None:
        turn.step_done(1)
        raise ZeroDivisionError("inside")

    with pytest.raises(RuntimeError, match="variant 'broken' ended in round 1") as error:
        in_turns({"broken": broken}, rounds=2, seconds=0.0)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_apart_when_the_other_process_fails_then_says_what_it_said():
    with pytest.raises(RuntimeError, match="variant 'peer' ended in round 0") as error:
        in_turns({"peer": Apart(in_turns)(Workload(rows=1), "deepfm", 1)}, rounds=1, seconds=0.0)  # makes no variant
    assert "benchmarks.harness.turns in_turns failed" in str(error.value.__cause__)
    assert "TypeError" in str(error.value.__cause__)


def test_switch_then_a_slowing_machine_falls_on_both_sides_alike():
    """A step takes 3 % more with the callback, and each takes longer than the one before; the first do not count."""
    now, steps = 0.0, 0
    watcher = Callback()
    ended: list[tuple[int, float]] = []

    def is_enough(blocks: Quadruples, elapsed: float) -> bool:
        ended.append((len(blocks), elapsed))
        return len(blocks) == 12

    switch = Switch(5, 1, is_enough=is_enough, clock=lambda: np.array([now]))
    trainer = SimpleNamespace(callbacks=[watcher, switch], loggers=["csv"])
    switch.on_train_start(trainer, None)
    sides, times = [], []

    def step() -> None:
        nonlocal now, steps
        on = watcher in trainer.callbacks
        assert (trainer.loggers, trainer.callbacks[-1]) == (["csv"] if on else [], switch)
        steps += 1
        took = (1 + 0.01 * steps) * (1.03 if on else 1)
        now += took
        sides.append(on)
        times.append(took)
        switch.on_train_batch_end(trainer, None)

    quadruple = 4 * 5
    for _ in range((WARM_UP + 12) * quadruple - 1):
        step()
    with pytest.raises(Stopped):
        step()
    orders = {tuple(sides[start : start + quadruple : 5]) for start in range(0, len(sides), quadruple)}
    assert orders == {(True, False, False, True), (False, True, True, False)}
    assert sides == [sides[i // 5 * 5] for i in range(len(sides))]
    on, off = (np.array(switch.blocks.taken[side]) for side in (True, False))
    assert on[:, 0].tolist() == off[:, 0].tolist() == [10.0] * 12
    assert on[:, 1] / off[:, 1] == pytest.approx([1.03] * 12)
    counted = times[WARM_UP * quadruple :]
    assert on[:, 1].sum() + off[:, 1].sum() == pytest.approx(sum(counted))
    assert ended == [(i, pytest.approx(sum(counted[: i * quadruple]))) for i in range(1, 13)]


def test_rates_then_each_clock_has_its_own_cost():
    """3 % more on the wall and 1 % more of the processor, in quadruples of which each is slower than the one before."""
    blocks = Quadruples(batch_size=16)
    for i in range(9):
        for _ in range(4):
            more = np.array([1 / 0.97, 1 / 0.99]) if blocks.on else 1.0
            is_whole = blocks.add(4, np.array([1.0 + i, 0.5 + i]) / 2 * more)
        assert is_whole
    assert len(blocks) == 9
    assert rates(blocks, WALL).rates["no metrics"][0] == 2 * 64
    for clock, percent in ((WALL, 3.0), (PROCESSOR, 1.0)):
        estimate = cost(rates(blocks, clock))
        assert estimate.value == pytest.approx(percent)
        assert estimate.standard_error == pytest.approx(0.0, abs=1e-9)
    blocks.forget()
    assert len(blocks) == 0


class Looking(StepTimes):
    """Looks whether training is over after a step, and times none."""

    def __init__(self, folder: Path, *, rank: int, asynchronous: bool) -> None:
        super().__init__(folder, asker=os.getpid())
        strategy = SimpleNamespace(asynchronous=asynchronous)
        self._run = {"world_size": 2, "is_global_zero": rank == 0, "global_rank": rank, "strategy": strategy}

    def is_last(self, step: int) -> bool:
        return self.is_over(SimpleNamespace(global_step=step, **self._run))


def test_end_of_a_job_when_one_worker_in_step_hears_of_it_first_then_all_end_at_one_step(tmp_path):
    first, second = (Looking(tmp_path, rank=rank, asynchronous=False) for rank in range(2))
    assert not first.is_last(7)
    (tmp_path / "stop").touch()
    assert not second.is_last(7)  # the first one is at its eighth step, and waits there for the second one
    assert not first.is_last(8)
    assert not second.is_last(8)
    assert not second.is_last(9)
    assert not first.is_last(9)
    assert first.is_last(10)
    assert second.is_last(10)


def test_end_of_a_job_when_workers_are_free_then_each_ends_where_it_hears_of_it(tmp_path):
    first, second = (Looking(tmp_path, rank=rank, asynchronous=True) for rank in range(2))
    assert not first.is_last(7)
    (tmp_path / "stop").touch()
    assert second.is_last(3)
    assert first.is_last(8)


def test_trimmed_mean_then_value_and_error_are_those_of_the_formula():
    values = [7.0, 1.0, 100.0, 2.0, 4.0]
    # Without the ends 2, 4, 7. With them put on the last ones kept: 2, 2, 4, 7, 7, of variance 25.2 / 4.
    estimate = trimmed_mean(values, share=0.2)
    assert estimate.value == pytest.approx(13 / 3)
    assert estimate.standard_error == pytest.approx((25.2 / 4) ** 0.5 / (0.6 * 5**0.5))
    whole = trimmed_mean(values, share=0.19)  # not one whole value
    assert whole.value == pytest.approx(statistics.mean(values))
    assert whole.standard_error == pytest.approx(statistics.stdev(values) / 5**0.5)
    with pytest.raises(ValueError, match="at least two values, got 1"):
        trimmed_mean([1.0])


def test_trimmed_mean_when_some_repetitions_are_disturbed_then_error_is_the_spread_of_repetitions():
    random = np.random.default_rng(0)
    drawn = random.normal(0.02, 0.05, (400, 100)) + (random.random((400, 100)) < 0.05) * random.normal(0, 1, (400, 100))
    estimates = [trimmed_mean(row.tolist()) for row in drawn]
    spread = statistics.stdev(each.value for each in estimates)
    assert statistics.mean(each.standard_error for each in estimates) == pytest.approx(spread, rel=0.15)
    assert spread < 0.5 * drawn.mean(1).std()
    assert statistics.mean(each.value for each in estimates) == pytest.approx(0.02, abs=4 * spread / 400**0.5)


def test_measurement_then_ratios_are_taken_round_by_round():
    measured = Measurement({"base": [10.0, 20.0, 40.0], "ours": [20.0, 50.0, 60.0]})
    assert measured.median("ours") == 50.0
    assert measured.ratio("ours", "base") == 2.0
    assert measured.spread("ours", "base") == (1.5, 2.5)


def test_measurement_then_an_estimate_is_of_the_geometric_mean():
    measured = Measurement({"base": [10.0, 20.0, 40.0], "ours": [10.0, 40.0, 160.0]})
    estimate = measured.estimate("ours", "base")
    assert estimate.value == pytest.approx(2.0)
    assert estimate.standard_error == pytest.approx(2.0 * math.log(2) / 3**0.5)


SMALL = ["suite.models=[deepfm]", "suite.batch_sizes=[16]", "suite.rounds=1", "suite.seconds=0.01", "suite.rows=4096"]


def test_command_line_when_ended_by_sigterm_then_nothing_is_left(tmp_path):
    command = [sys.executable, str(BENCHMARK), *SMALL, "suite.seconds=60", f"hydra.run.dir={tmp_path / 'run'}"]
    (temporary := tmp_path / "temporary").mkdir()

    def is_prepared():
        with suppress(FileNotFoundError):  # a folder went as it was looked into
            return bool(list(temporary.rglob("*.json")))
        return False

    with subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(temporary)}, stderr=subprocess.PIPE, process_group=0
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not is_prepared():  # then the first turns, a minute each, begin
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.terminate()
            assert process.wait(120) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["suite.models=[fooo,dlrm]"], r"suite\.models must be some of dlrm, deepfm, wide_deep, dcn, got 'fooo'\."),
        (["suite.models=[deepfn]"], "got 'deepfn'. Did you mean 'deepfm'"),
        (["suite.models=deepfm"], r"got 'deepfm'\. Give a list, such as 'suite\.models=\[dlrm\]'"),
        (["suite.models=[]"], r"suite\.models must be some of .*, got \[\]"),
        (["suite.batch_sizes=[0]"], r"suite\.batch_sizes must be a list of whole numbers of at least 1, got \[0\]"),
        (["suite.rounds=1.5"], "suite.rounds must be a whole number of at least 1, got 1.5"),
        (["suite.rounds=0"], "suite.rounds must be a whole number of at least 1, got 0"),
        (["suite.rows=100"], "suite.rows must be a whole number of at least 2048, got 100"),
        (["suite=kernels", "suite.dims=[]"], r"suite\.dims must be a list of whole numbers .*, got \[\]"),
        (["suite=data", "suite.prepare=[schema]"], "suite.prepare must be some of dlrm, torchrec, bars, got 'schema'"),
        (["suite=data", "suite.workers=[two]"], r"suite\.workers must be a list of whole numbers .*, got \['two'\]"),
        (["suite=des", "suite.models=[dlrm]"], "suite.models must be some of LR, W&D, DeepFM, got 'dlrm'"),
        (
            ["suite=des", "+suite.batch_sizes.criteo=1"],
            "suite.batch_sizes must be .* got 'criteo'. Did you mean 'Criteo'",
        ),
        (["suite=quality", "suite.models=[dcnv2]"], "suite.models must be some of .*Did you mean 'dcn_v2'"),
        (["suite=quality", "suite.experiments=[movielens]"], "suite.experiments must be some of .*got 'movielens'"),
        (["suite=quality", "suite.libraries=[torchrec]"], "suite.libraries must be some of ours, fuxictr, got"),
        (["suite=het", "suite.link.models=[foo]"], "suite.link.models must be some of WDL, .*, got 'foo'"),
        (["suite=het", "suite.overhead.model=foo"], "suite.overhead.model must be some of dlrm, .*, got 'foo'"),
        (["suite=het", "suite.misses.policies=[fifo]"], "suite.misses.policies must be some of lru, .*, got 'fifo'"),
        (["suite=shadowsync", "suite.parts=[links]"], "suite.parts must be some of .*Did you mean 'link'"),
    ],
)
def test_suite_when_asked_for_what_there_is_not_then_says_so_before_it_measures(composed, arguments, message):
    paths = {"logs": "logs", "data": "data"}
    suite = OmegaConf.create({"suite": composed("benchmark", *arguments).suite, "paths": paths}).suite
    config = OmegaConf.to_container(suite, resolve=True)
    with pytest.raises(ValueError, match=message):
        build(config)


def test_roofline_then_it_has_the_products_rows_and_copies_of_a_step():
    fields, num_dense, dim, batch_size, hidden = 4, 3, 8, 16, (400, 400)
    work = Workload(cardinalities=(10,) * fields, num_dense=num_dense, dim=dim, rows=64)
    step = roofline.Work.of_step(work, "wide_deep", batch_size)
    layers = list(pairwise([num_dense + fields * dim, *hidden, 1]))
    forward = sum(2 * batch_size * inputs * outputs for inputs, outputs in layers)
    no_gradient = 2 * batch_size * num_dense * hidden[0]  # of the numbers that come in
    assert sum(product.operations for product in step.products) == 3 * forward - no_gradient
    assert sorted(step.widths) == [1, dim]
    assert sum(step.copied) == 2 * batch_size * (fields * (dim + 1) + sum(hidden))
    assert len(step.ids) == batch_size * fields
    assert [field for field in range(fields) for _ in range(batch_size)] == (step.ids // 10).tolist()


@pytest.mark.parametrize("groups", [1, 3])
def test_roofline_then_every_way_to_a_product_is_of_the_product_itself(groups):
    product = roofline.Product(groups, rows=5, inner=4, columns=6)
    for way in product._ways(torch.float32):
        assert torch.as_tensor(way()).numel() == groups * 5 * 6
    assert product.operations == 2 * groups * 5 * 4 * 6


def test_roofline_then_the_share_is_that_of_the_parts_time():
    rates = {"products": [10.0, 8.0], "rows": [20.0, 16.0], "copies": [20.0, 16.0], "ours": [4.0, 3.2]}
    assert roofline._share(Measurement(rates)) == pytest.approx(0.8)


def test_bar_then_the_limit_itself_passes_and_what_is_not_measured_says_so():
    assert [Bar("a", value, "at least", 0.9).verdict for value in (0.9, 0.89)] == ["pass", "FAIL"]
    assert [Bar("a", value, "at most", 3.0).verdict for value in (3.0, 3.1)] == ["pass", "FAIL"]
    assert Bar("a", None, "at most", 3.0).verdict == "not measured"


def test_bars_when_a_standard_error_is_known_then_it_stands_beside_the_value():
    bars = Bars((Bar("a", 1.234, "at most", 3.0, " %", standard_error=0.31), Bar("b", 1.0, "at most", 3.0)))
    table = bars.table()
    assert list(table.columns[1].cells) == ["1.23 ± 0.31 %", "1.00"]
    first, second = bars.to_dict()["bars"]
    assert first["standard_error"] == 0.31
    assert "standard_error" not in second


def test_bars_when_there_are_none_then_have_no_heading(capsys):
    assert "Bars:" in markdown([Bars((Bar("a", 1.0, "at most", 3.0),))])
    assert "Bars" not in markdown([Bars(())])
    show([Bars(())])
    assert not capsys.readouterr().out


def test_command_line_when_the_page_has_no_place_then_says_so_before_it_measures(run_forked, tmp_path):
    page = tmp_path / "page.md"
    for how, message in (
        (lambda: None, f"page={page} is no file"),
        (
            lambda: page.write_text("<!-- suite=data -->\n"),
            "needs the lines <!-- suite=single --> and <!-- end of suite",
        ),
    ):
        how()
        done = run_forked("benchmark.py", *SMALL, f"page={page}", f"hydra.run.dir={tmp_path}", folder=tmp_path)
        assert done.returncode == 1
        assert message in done.stderr
        assert not list(tmp_path.glob("single*"))


def test_curves_when_drawn_then_each_has_its_numbers():
    rows = [["3%", "0.4", "0.3 ± 0.01"], ["5%", "0.25", "0.2 ± 0.02"]]
    about = {"drawn": ["lfu"], "label": "miss rate", "name": "misses"}
    curves = Curves("Miss rates", ("cached", "lru", "lfu"), rows, **about)
    assert isinstance(curves, Drawn)
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    curves.draw(axes)
    assert [list(container[0].get_ydata()) for container in axes.containers] == [[0.3, 0.2]]


def test_fill_when_results_have_pictures_then_the_page_shows_them(tmp_path):
    (run := tmp_path / "run").mkdir()
    (run / "het.md").write_text("| |\n")
    (run / "het-misses.png").write_bytes(b"picture")
    (run / "het.png").write_bytes(b"rates")
    page = tmp_path / "page.md"
    page.write_text("<!-- suite=het -->\n<!-- end of suite=het -->\n")
    fill(page, run, suite="het")
    shown = "| |\n\n![het-misses](images/het-misses.png)\n"
    assert page.read_text() == f"<!-- suite=het -->\n{shown}<!-- end of suite=het -->\n"
    assert (tmp_path / "images" / "het-misses.png").read_bytes() == b"picture"
    assert not (tmp_path / "images" / "het.png").exists(), "the page shows no rates"
    page.write_text(page.read_text() + "![rates](images/het.png)\n")
    fill(page, run, suite="het")
    assert (tmp_path / "images" / "het.png").read_bytes() == b"rates"


def test_share_of_weight_decay_then_is_what_the_kernel_takes_longer_over_a_step():
    kernels = Measurement(
        {"numba": [1e6, 1.25e6], "numba, weight decay": [0.8e6, 1e6]}
    )  # 0.25 and 0.2 us an example more
    steps = Measurement({"ours": [40_000.0, 44_000.0, 20_000.0]})  # 25 us an example
    assert single._share_of_weight_decay(kernels, steps) == pytest.approx(0.225 / 25)
