"""The benchmark's turns, and its command line on a workload too small to mean anything."""

import json
import threading
from itertools import count
from types import SimpleNamespace

import pytest
from benchmarks.apart import Apart
from benchmarks.bars import Bar
from benchmarks.curves import Curves
from benchmarks.het_cache import Columns
from benchmarks.report import Drawn, fill
from benchmarks.turns import Measurement, Stopped, Turn, in_turns
from benchmarks.watching import BLOCK, Switch
from benchmarks.workload import Workload
from pytorch_lightning import Callback


def endless(turn: Turn, log: list[str], name: str) -> None:
    for _ in count():
        log.append(name)
        turn.step_done(10)


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
    assert "benchmarks.turns in_turns failed" in str(error.value.__cause__)
    assert "TypeError" in str(error.value.__cause__)


def test_switch_then_blocks_come_in_pairs_and_each_time_belongs_to_what_was_on():
    """A step takes 3 s with the callback and 2 s without; the first pair is left out by the caller."""
    now = 0.0
    watcher = Callback()
    switch = Switch(lambda pairs, seconds: pairs == 4 and seconds == 4 * 5 * BLOCK, clock=lambda: now)
    trainer = SimpleNamespace(callbacks=[watcher, switch], loggers=["csv"])
    switch.on_train_start(trainer, None)
    sides = []

    def step() -> None:
        nonlocal now
        on = watcher in trainer.callbacks
        assert (trainer.loggers, trainer.callbacks[-1]) == (["csv"] if on else [], switch)
        now += 3 if on else 2
        sides.append(on)
        switch.on_train_batch_end(trainer, None)

    for _ in range(10 * BLOCK - 1):
        step()
    with pytest.raises(Stopped):
        step()
    assert switch.seconds == {True: [3 * BLOCK] * 5, False: [2 * BLOCK] * 5}
    pairs = [(sides[start], sides[start + BLOCK]) for start in range(0, len(sides), 2 * BLOCK)]
    assert set(pairs) == {(True, False), (False, True)}


def test_measurement_then_ratios_are_taken_round_by_round():
    measured = Measurement({"base": [10.0, 20.0, 40.0], "ours": [20.0, 50.0, 60.0]})
    assert measured.median("ours") == 50.0
    assert measured.ratio("ours", "base") == 2.0
    assert measured.spread("ours", "base") == (1.5, 2.5)


SMALL = ["suite.models=[deepfm]", "suite.batch_sizes=[16]", "suite.rounds=1", "suite.seconds=0.01", "suite.rows=4096"]


def test_command_line_then_every_bar_stands_in_table_json_page_and_picture(run_forked, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- suite=single -->\nold\n<!-- end of suite=single -->\nafter\n")
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    done = run_forked("benchmark.py", *SMALL, folder, f"page={page}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "deepfm, B=16" in done.stdout
    results = json.loads((tmp_path / "run" / "single.json").read_text())
    assert results["machine"]["threads"] == 1
    assert {"floor", "ours", "lightning"} <= set(results["rows"][0]["examples_per_second"])
    assert results["rows"][0]["ratio_to_base"]["floor"] == 1.0
    bars = results["rows"][-1]["bars"]
    assert {bar["verdict"] for bar in bars} <= {"pass", "FAIL", "not measured"}
    for part in ("reader alone", "metrics and callbacks", "numba Adam", "numba FTRL", "memory beyond rows"):
        assert [bar["name"] for bar in bars if bar["name"].startswith(part)], part
    memory = next(bar["value"] for bar in bars if bar["name"].startswith("memory"))
    assert 200 < memory < 1500  # MiB: an interpreter with torch, and not the tables, whose size is known
    before, *tables, after = page.read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert "old" not in tables
    assert any(line.startswith("| deepfm, B=16 |") for line in tables)
    assert (tmp_path / "images" / "single.png").stat().st_size > 1000


def test_command_line_when_asked_for_a_profile_then_parts_add_up_to_the_step(run_forked, tmp_path):
    run_dir = f"hydra.run.dir={tmp_path}"
    done = run_forked("benchmark.py", *SMALL, "suite.profile=true", run_dir, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    parts, operators = json.loads((tmp_path / "single.json").read_text())["rows"]
    *milliseconds, whole = parts["milliseconds"].values()
    assert len(milliseconds) == 6
    assert sum(milliseconds) == pytest.approx(whole, abs=0.01)
    assert all(operator["calls"] > 0 for operator in operators["per_step"].values())


def test_bar_then_the_limit_itself_passes_and_what_is_not_measured_says_so():
    assert [Bar("a", value, "at least", 0.9).verdict for value in (0.9, 0.89)] == ["pass", "FAIL"]
    assert [Bar("a", value, "at most", 3.0).verdict for value in (3.0, 3.1)] == ["pass", "FAIL"]
    assert Bar("a", None, "at most", 3.0).verdict == "not measured"


def test_fill_when_the_page_has_no_place_then_names_the_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- suite=data -->\n")
    (tmp_path / "data.md").write_text("| |\n")
    with pytest.raises(ValueError, match="needs the lines <!-- suite=data --> and <!-- end of suite=data -->"):
        fill(page, tmp_path, suite="data")


def test_curves_when_drawn_then_each_has_its_numbers():
    rows = [["3%", "0.4", "0.3 ± 0.01"], ["5%", "0.25", "0.2 ± 0.02"]]
    curves = Curves(Columns("Miss rates", ("cached", "lru", "lfu"), rows), ["lfu"], "miss rate", "misses")
    assert isinstance(curves, Drawn)
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    curves.draw(axes)
    assert [list(container[0].get_ydata()) for container in axes.containers] == [[0.3, 0.2]]


def test_fill_when_results_have_pictures_then_the_page_shows_them(tmp_path):
    (run := tmp_path / "run").mkdir()
    (run / "het.md").write_text("| |\n")
    (run / "het-misses.png").write_bytes(b"picture")
    page = tmp_path / "page.md"
    page.write_text("<!-- suite=het -->\n<!-- end of suite=het -->\n")
    fill(page, run, suite="het")
    shown = "| |\n\n![het-misses](images/het-misses.png)\n"
    assert page.read_text() == f"<!-- suite=het -->\n{shown}<!-- end of suite=het -->\n"
    assert (tmp_path / "images" / "het-misses.png").read_bytes() == b"picture"
