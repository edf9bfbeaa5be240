"""Commands of docs/results, read from the pages, at their smallest: every variant of a part, real links."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from omegaconf import OmegaConf
from recipe_helpers import CONF, ROOT

SCRIPT = Path(__file__).with_name("forked_benchmark_script.py")
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
QUALITY = "suite=quality"  # trains models to their end, and has its own tests (``test_quality_suite.py``)
COMMANDS = [
    shlex.split(line)[2:]
    for page in PAGES
    for line in page.read_text().splitlines()
    if line.startswith("    python recipes/benchmark.py suite=") and f" {QUALITY} " not in line
]

ONE_RUN = "[data=synthetic,data.train_rows=640,data.val_rows=64,data.test_rows=320,data.batch_size=32]"
# For each suite what makes all of its parts as small as they can be; it stands behind a command's own settings.
SMALLEST = {
    "single": "models=[dlrm] batch_sizes=[16] rows=4096 rounds=1 seconds=0.01",
    "kernels": "batch_sizes=[16] rounds=1 seconds=0.01",
    "data": "rows=4096 batch_sizes=[64] workers=[1,2] rounds=1 seconds=0.01 prepare_rows=2000",
    "shadowsync": "batch_size=16 rounds=1 seconds=0.1 store.shapes=[[16,16],[128,16]] store.rounds=1 store.seconds=0.01"
    " requests.rates=[1gbit] requests.batch_size=8 requests.dim=8 requests.rows=256 requests.warm_steps=5"
    f" requests.rounds=1 requests.seconds=0.1 quality.seeds=[0] quality.data.synthetic={ONE_RUN}"
    " ~quality.data.MovieLens-1M",
    "het": "traffic.rows=2560 traffic.skip_rows=1280 traffic.batch_sizes=[128] traffic.staleness=[10]"
    " operations.shapes=[[16,2048]] operations.rounds=1 operations.seconds=0.05"
    " misses.rows=2560 misses.skip_rows=1280 misses.fractions=[0.1]"
    " link.rates=[1gbit] link.at_least=[2.0] link.batch_size=16 link.dim=16 link.rounds=1"
    " link.seconds=0.1 link.warm_steps=20"
    " combined.batch_size=16 combined.dim=16 combined.rounds=1 combined.seconds=0.1 combined.warm_steps=20"
    " overhead.batch_sizes=[16] overhead.rounds=1 overhead.seconds=0.1"
    " nominal.batch_size=2 nominal.dim=16 nominal.steps=[2,4]"
    f" quality.staleness=[0,10,null] quality.seeds=[0] quality.data.synthetic={ONE_RUN} ~quality.data.MovieLens-1M",
    "des": "batch_sizes.paper=16 ~batch_sizes.Criteo rounds=1 seconds=0.2"
    f" quality.seeds=[0] quality.data.synthetic={ONE_RUN} ~quality.data.MovieLens-1M",
    "hierarchical": "batch_sizes=[16] rates=[1gbit] rounds=1 seconds=0.1"
    f" quality.seeds=[0] quality.data.MovieLens-1M={ONE_RUN}"
    " quality.rates={optim.rows.lr:[0.05],optim.dense.lr:[0.012]}",
    "graph": "sampling.num_nodes=2000 sampling.num_edges=20000 sampling.batch_size=16 sampling.rounds=1"
    " sampling.seconds=0.01 starving.num_nodes=2000 starving.num_edges=20000 starving.batch_size=16 starving.dim=4"
    " starving.rounds=1 starving.seconds=0.05 misses.num_nodes=2000 misses.num_edges=20000 misses.batch_size=4"
    " misses.steps=20 misses.skip=10 misses.fractions=[0.1] link.num_nodes=2000 link.num_edges=20000 link.dim=16"
    " link.exponents=[1.05] link.at_least=[4.36] link.batch_size=8 link.rounds=1 link.seconds=0.1 link.warm_steps=10"
    " quality.data.cora.epochs=1 quality.data.cora.patience=1 quality.data.cora.chosen_by=1"
    " quality.data.amazon_computers.epochs=1 quality.data.amazon_computers.patience=1"
    " quality.grid.rows=[[adagrad,0.02]] quality.grid.lr=[0.01]"
    " quality.grid.weight_decay=[0.0] quality.grid.dropout=[0.5] quality.seeds=1 quality.hidden=8",
    "async": "batch_size=16 rounds=1 seconds=0.1 quality.rates=[0.0002,0.0004] quality.examples=1280 quality.seeds=[0]"
    " quality.common=[model=deepfm_small,data=synthetic_100m,data.batch_size=16,evaluation.rows=320,"
    "data.val_rows=320,cluster.workers_per_replica=6]",
    "simulation": "twins.seeds=[0] twins.interval=0.01 twins.common=[name=simulation,model=dlrm,"
    "model.bottom_hidden=[8],model.top_hidden=[8],data.batch_size=32,data.train_rows=640,data.val_rows=64,data.test_rows=320,"
    "trainer.limit_val_batches=0,~callbacks.model_checkpoint,+trainer.enable_checkpointing=false]"
    " speed.common=[cluster=asgd_3k,cluster.workers_per_replica=3,data=synthetic,data.batch_size=16]"
    " speed.rounds=1 speed.seconds=0.01"
    " speed.command=[cluster=asgd_3k,cluster.workers_per_replica=3,data.batch_size=16,examples=320,data.val_rows=320]",
    "publishing": "training.batch_size=16 training.rows=64 training.every_seconds=0.2"
    " training.most_seconds=0 training.served_seconds=0.5 answers.cardinalities=[" + ",".join(["50"] * 26) + "]"
    " answers.batch_sizes=[2] answers.seconds=0.05 answers.rounds=1",
}


LEFT_OUT = ("The link is left out", "Requests over a link are left out")  # where there are no network namespaces


def smallest(command: list[str]) -> list[str]:
    """Hydra's overrides, but for models that the command names; in lists, what has an equals sign is quoted."""
    found, names_models = [], any(x.startswith("suite.models=") for x in command)
    for each in SMALLEST[suite_of(command)].split():
        name, _, value = each.partition("=")
        if name == "models" and names_models:
            continue
        if value.startswith("[") and "=" in value:
            value = "[" + ",".join(f"'{item}'" for item in value[1:-1].split(",")) + "]"
        found.append(f"~suite.{name[1:]}" if name[0] == "~" else f"suite.{name}={value}")
    return found


def suite_of(command: list[str]) -> str:
    return command[0].partition("=")[2]


def parts_of(command: list[str]) -> list[str]:
    """Those that a command measures; none where its suite has no parts."""
    chosen = [x for x in command if x.startswith("suite.parts=")]
    settings = OmegaConf.load(CONF / "suite" / f"{suite_of(command)}.yaml")
    return re.findall(r"\w+", chosen[0].partition("=")[2]) if chosen else list(settings.get("parts", []))


def parts_of_suite(suite: str) -> tuple[str, ...]:
    """All that there are, whether or not the suite measures them by default."""
    settings = OmegaConf.load(CONF / "suite" / f"{suite}.yaml")
    module = importlib.import_module(settings["_target_"].rpartition(".")[0])
    return get_args(module.Part) if hasattr(module, "Part") else tuple(settings.get("parts", ()))


def page_of(command: list[str]) -> Path:
    """The page that a command fills; one without it has no place."""
    return ROOT / next(x.partition("=")[2] for x in command if x.startswith("page="))


def test_pages_then_each_has_the_commands_of_its_own_suite_and_they_fill_it():
    suites = {path.stem for path in (CONF / "suite").glob("*.yaml")}
    assert {page.stem for page in PAGES} == suites | {"index"}
    for page in PAGES:
        commands = re.findall(
            r"^    python recipes/benchmark.py suite=(\w+) .*page=(\S+)$", page.read_text(), re.MULTILINE
        )
        assert set(commands) == ({(page.stem, f"docs/results/{page.name}")} if page.stem != "index" else set())


def test_commands_then_all_suites_and_all_of_their_parts_are_among_them():
    measured = {(suite_of(x), part) for x in COMMANDS for part in parts_of(x)}
    suites = {path.stem for path in (CONF / "suite").glob("*.yaml")} - {"quality"}
    assert {suite_of(x) for x in COMMANDS} == suites == SMALLEST.keys()
    assert {(suite, part) for suite in suites for part in parts_of_suite(suite)} == measured


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2]).replace("suite.", ""))
def test_command_of_the_page_when_run_at_its_smallest_then_fills_the_page(command, run_forked, tmp_path, request):
    if suite_of(command) == "graph" and "quality" in parts_of(command):
        pytest.importorskip("torch_geometric.nn")
        data = request.getfixturevalue("data_root")
    else:
        data = tmp_path
    original = page_of(command)
    page = tmp_path / original.relative_to(ROOT)
    page.parent.mkdir(parents=True)
    page.write_text(original.read_text())
    own = [f"hydra.run.dir={tmp_path / 'run'}", f"paths.logs={tmp_path / 'logs'}", f"paths.data={data}"]
    done = run_forked(str(SCRIPT), *command, *smallest(command), *own, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    name = next((x.partition("=")[2] for x in command if x.startswith("name=")), suite_of(command))
    results = json.loads((tmp_path / "run" / f"{name}.json").read_text())["rows"]
    assert results
    assert page.read_text() != original.read_text()
    said = " ".join((done.stdout + done.stderr).split())
    has_links = not any(x in said for x in LEFT_OUT)
    assert has_links or os.geteuid() != 0, "root can have network namespaces"
    # Bars of other projects, which are not installed everywhere, are for larger batches than these.
    unmeasured = [x["name"] for x in results[-1].get("bars", []) if x["verdict"] == "not measured"]
    assert not (has_links and unmeasured), unmeasured
