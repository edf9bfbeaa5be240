"""The benchmark's turns, and its command line on a workload too small to mean anything."""

import json
import threading
from itertools import count

import pytest
from benchmarks.turns import Measurement, Turn, in_turns
from recipe_helpers import run_recipe


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


def test_measurement_then_ratios_are_taken_round_by_round():
    measured = Measurement({"base": [10.0, 20.0, 40.0], "ours": [20.0, 50.0, 60.0]})
    assert measured.median("ours") == 50.0
    assert measured.ratio("ours", "base") == 2.0
    assert measured.spread("ours", "base") == (1.5, 2.5)


def test_command_line_then_table_json_and_picture(tmp_path):
    arguments = ["suite.models=[deepfm]", "suite.batch_sizes=[16]", "suite.rounds=1", "suite.seconds=0.01"]
    done = run_recipe("benchmark.py", *arguments, f"hydra.run.dir={tmp_path}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "deepfm, B=16" in done.stdout
    results = json.loads((tmp_path / "single.json").read_text())
    assert results["machine"]["threads"] == 1
    assert set(results["rows"][0]["examples_per_second"]) == {"floor", "ours", "lightning"}
    assert results["rows"][0]["ratio_to_base"]["floor"] == 1.0
    assert (tmp_path / "single.png").stat().st_size > 1000
