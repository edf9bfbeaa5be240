"""The wheel, unpacked where there is no repository: its commands do what the recipes do."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import pytest.__main__
from recipe_helpers import ROOT, TINY, recipe_server

from lightning_recsys.cli import RECIPES, main, usage

SOURCES = ("conf", "recipes", "lightning_recsys", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """A wheel of this repository, built in a copy, and unpacked as pip would."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    done = subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(target)
    return target


@pytest.fixture(scope="module")
def run_unpacked(unpacked) -> Iterator[Command]:
    """Runs scripts in forks of one process, which has imported what is in the wheel."""
    with recipe_server(unpacked) as run:
        yield run


@pytest.fixture
def command(unpacked, run_unpacked, tmp_path) -> Command:
    """``lightning-recsys`` of the wheel, in the test's folder, and at once."""
    return partial(run_unpacked, str(unpacked / "lightning_recsys/__main__.py"), folder=tmp_path)


def names_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("folder", ["conf", "recipes"])
def test_wheel_then_carries_all_configurations_and_recipes(unpacked, folder):
    carried = names_below(unpacked / "lightning_recsys" / folder)
    if folder == "recipes":  # the packages of it lie beside that of the library
        packages = ("recipe_tools", "hydra_plugins")
        carried |= {f"{package}/{name}" for package in packages for name in names_below(unpacked / package)}
    assert carried == {name for name in names_below(ROOT / folder) if "__pycache__" not in name}


def test_search_of_the_wheel_then_finds_its_sweeper(command, tmp_path):
    done = command("train", "hparams_search=optuna", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=out", *TINY)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/optimization_results.yaml").exists()


@pytest.mark.parametrize("site", ["repository", "wheel"])
def test_process_when_it_starts_without_the_folder_of_the_recipes_then_finds_what_a_sweep_sends_it(
    site, unpacked, tmp_path
):
    """As the jobs of submitit do: they get objects whose classes are in recipe_tools, and nobody's ``sys.path``."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if site == "wheel":
        environment["PYTHONPATH"] = str(unpacked)
    line = [sys.executable, "-c", "import recipe_tools; print(recipe_tools.__file__)"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        Path(done.stdout.strip()).parent == {"repository": ROOT / "recipes", "wheel": unpacked}[site] / "recipe_tools"
    )


def test_train_from_the_wheel_then_runs_with_its_own_configuration(unpacked, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "lightning_recsys", "train", *TINY, "trainer=cpu", "hydra.run.dir=run"]
    line += ["callbacks/progress_bar=none", "strategy=ddp", "trainer.devices=2"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/metrics.json").read_text())["status"] == "completed"
    assert "AUC" in done.stdout


STRATEGIES = ("single", "het", "hierarchical")  # rows in the process and on servers, and a model that is traced


@pytest.mark.distributed
@pytest.mark.slow
def test_new_project_then_trains_under_strategies_and_passes_its_own_test(command, run_unpacked, tmp_path):
    """Somebody's first hour: its model is in no library, and its configuration extends ours."""
    done = command("new", "clickers")
    assert done.returncode == 0, done.stderr
    assert not [path for path in (tmp_path / "clickers").rglob("*") if "my_project" in path.name]
    again = command("new", "clickers")
    assert (again.returncode, "clickers exists" in again.stderr) == (2, True)
    project = tmp_path / "clickers"
    # 200 rows each for two workers, or 100 for one: what the strategies make of it is their own tests' business
    own = ("--config-dir=conf", "--config-name=clickers")
    tiny = [x for x in TINY if x.startswith("data.")] + ["trainer=cpu", "callbacks/progress_bar=none", "logger=none"]
    strategies = f"strategy={','.join(STRATEGIES)}"
    done = command("train", *own, "-m", *tiny, "hydra.sweep.dir=out", strategies, folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(path.read_text()) for path in project.glob("out/*/metrics.json")]
    assert sorted(x["config"]["name"].rpartition("-")[2] for x in records) == sorted(STRATEGIES)
    assert {(x["status"], x["config"]["model"]["_target_"]) for x in records} == {
        ("completed", "clickers.model.MyModel")
    }
    assert all(x["metrics"]["test/auc"] > 0 for x in records)
    (checkpoint,) = project.glob("out/*single*/checkpoints/best.ckpt")
    done = command("predict", f"checkpoint={checkpoint}", "out=p.csv", folder=project)
    assert done.returncode == 0, done.stderr
    tested = run_unpacked(pytest.__main__.__file__, "-q", "-o", "pythonpath=.", folder=project)
    assert "1 passed" in tested.stdout, tested.stdout
    done = command("train", *own, "model.hiden=3", folder=project)
    assert "model.hiden: no such choice. Did you mean model.hidden?" in done.stderr


def test_new_project_when_its_name_cannot_be_one_then_says_why(command):
    done = command("new", "my-project")
    assert (done.returncode, "cannot name a Python package" in done.stderr) == (2, True)
    done = command("new", "json")
    assert (done.returncode, "is the name of another module" in done.stderr) == (2, True)


def test_help_from_the_wheel_then_names_commands_and_no_file_of_the_repository(command):
    done = command("train", "--help")
    assert "lightning-recsys train model=deepfm" in done.stdout
    assert "python recipes" not in done.stdout


def test_usage_then_names_all_recipes_of_the_repository(capsys):
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")} - {"__init__"}
    assert set(RECIPES) == recipes
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == usage()
    assert all(f"  {name} " in usage() for name in (*RECIPES, "server", "groups", "checkpoint"))


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [(("--help",), "1"), (("--help",), ""), (("train", "--help"), "")]
)
def test_help_when_its_reader_has_ended_then_ends_without_a_traceback(arguments, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [sys.executable, "-m", "lightning_recsys", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 128 + signal.SIGPIPE)
    process.stderr.close()


@pytest.mark.parametrize("stream", ["stdout", "stderr", "stdin"])
def test_command_when_started_without_a_stream_then_its_status_is_the_usual_one(stream, tmp_path):
    number = ("stdin", "stdout", "stderr").index(stream)
    words = f"{shlex.quote(sys.executable)} -m lightning_recsys"
    closed = f"{number}{'<' if stream == 'stdin' else '>'}&-"
    for arguments, status in (("--version", 0), ("trian", 2), (f"versions {shlex.quote(str(tmp_path))}", 1)):
        done = subprocess.run(["sh", "-c", f"{words} {arguments} {closed}"], capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False)


def test_broken_pipe_when_it_is_not_that_of_the_output_then_is_raised(monkeypatch):
    monkeypatch.setattr("lightning_recsys.cli.run_recipe", Mock(side_effect=BrokenPipeError("a socket's")))
    with pytest.raises(BrokenPipeError, match="a socket's"):
        main(["train"])


def test_command_when_unknown_then_status_2_and_the_known_ones(capsys):
    assert main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err


def test_tool_when_named_then_gets_the_other_arguments(tmp_path, capsys):
    assert main(["server", "--make-keys", str(tmp_path / "job.keys")]) == 0
    assert (tmp_path / "job.keys").exists()
    assert main(["checkpoint", "to-file", str(tmp_path / "none"), str(tmp_path / "file")]) == 1
