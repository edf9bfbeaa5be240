"""Plans from the command line: measured once, kept, and compared again for other machines."""

import dataclasses
import json
import re

from recipe_tools.plan_picture import lines_of

from lightning_recsys.planning import Measured, StepCost, compare, machines_from

SHORT = ("data.train_rows=4096", "data.batch_size=64", "strategies=[single,shadowsync]", "seconds=0.2")


def test_plan_when_asked_twice_then_measures_once_and_prints_a_command_that_train_takes(run_forked, tmp_path):
    (tmp_path / "machines.yaml").write_text("cpu: {number: 4, cores: 2, price: 0.5}\n")
    words = ["machines=machines.yaml", "cache=kept", "model=deepfm", *SHORT]
    first = run_forked("plan.py", *words, "hydra.run.dir=first", folder=tmp_path)
    (file,) = (tmp_path / "kept").iterdir()
    measured = file.read_text()
    told = " ".join(first.stdout.split())
    started = r" train model=deepfm data\.train_rows=4096 data\.batch_size=64 strategy"
    assert re.search(started, told)
    plan = json.loads((tmp_path / "first/plan.json").read_text())
    assert {each["strategy"] for each in plan["forecasts"]} == {"single", "shadowsync"}, told
    assert plan["forecasts"][0]["examples_per_second"] > 0
    assert (tmp_path / "first/plan.png").stat().st_size > 1000
    second = run_forked("plan.py", *words, "exact=true", "metric=cost", "hydra.run.dir=second", folder=tmp_path)
    assert "Steps were measured before" in second.stdout
    assert "shadowsync: left out by exact=true" in second.stdout
    assert file.read_text() == measured


def test_plan_when_the_machines_are_wrong_then_says_so_before_it_measures(run_forked, tmp_path):
    (tmp_path / "machines.yaml").write_text("cpu: {cores: 0}\n")
    words = ["machines=machines.yaml", "cache=kept", "hydra.run.dir=run"]
    found = run_forked("plan.py", *words, folder=tmp_path)
    assert found.returncode != 0
    assert "machines.yaml.cpu.cores must be at least 1, got 0." in found.stderr
    assert not (tmp_path / "kept").exists()


def test_plan_when_a_narrowing_is_wrong_then_says_so_before_it_measures(run_forked, tmp_path):
    found = run_forked("plan.py", "metric=cost", "cache=kept", "hydra.run.dir=run", folder=tmp_path)
    assert found.returncode != 0
    assert "metric=cost needs a price of some kind of machine" in found.stderr
    assert not (tmp_path / "kept").exists()


def test_lines_of_a_picture_then_have_the_best_that_so_many_machines_give():
    numbers = {
        "batch_size": 10,
        "dense_floats": 10,
        "waiting_seconds": 0.0,
        "worker_seconds": 0.01,
        "server_seconds": 0.004,
    }
    rest = [x.name for x in dataclasses.fields(StepCost) if x.name not in ("workers", "ahead", *numbers)]
    cost = StepCost(workers=1, **numbers, **dict.fromkeys(rest, 0.0))
    found = compare(Measured({"async_ps": {1: cost}}, {}, 1.0), machines_from({"cpu": {"number": 6, "cores": 2}}))
    (line,) = lines_of(found).values()
    numbers_of_machines = [each.layout.num_machines for each in line]
    assert numbers_of_machines == sorted(set(numbers_of_machines))
    for each in line:
        fewer = [x for x in found.forecasts if x.layout.num_machines <= each.layout.num_machines]
        assert each.examples_per_second == max(x.examples_per_second for x in fewer)
    assert line[-1].examples_per_second == found.best.examples_per_second
