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
    "servers": "batch_sizes=[16] rows=4096 rounds=1 seconds=0.05",
    "data": "rows=4096 batch_sizes=[64] workers=[1,2] rounds=1 seconds=0.01 prepare_rows=2000",
    "shadowsync": "batch_size=16 rounds=1 seconds=0.1 store.shapes=[[16,16],[128,16]] store.rounds=1 store.seconds=0.01"
    " requests.rates=[1gbit] requests.batch_size=128 requests.dim=16 requests.rows=1024 requests.warm_steps=5"
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
    "plan": "models=[dlrm,graphsage] methods=[shadowsync,hierarchical] batch_sizes=[16] dims=[16] rates=[1gbit]"
    " rows=4096 rounds=1 seconds=0.1 local_seconds=0.2",
    "hierarchical": "batch_sizes=[16] rates=[1gbit] rounds=1 seconds=0.1"
    f" quality.seeds=[0] quality.data.MovieLens-1M={ONE_RUN}"
    " quality.rates={optim.rows.lr:[0.05],optim.dense.lr:[0.012]}",
    "graph": "building.num_nodes=2000 building.num_edges=20000"
    " sampling.num_nodes=2000 sampling.num_edges=20000 sampling.batch_size=16 sampling.rounds=1"
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


def split_at(name: str, page: str) -> tuple[str, str, str]:
    """What stands before, between and behind the lines that say where a command's tables are."""
    before, _, rest = page.partition(f"<!-- suite={name} -->\n")
    table, end, after = rest.partition(f"<!-- end of suite={name} -->")
    assert end, "the page has no place for them"
    return before, table, after


def test_pages_then_each_has_the_commands_of_its_own_suite_and_they_fill_it():
    suites = {path.stem for path in (CONF / "suite").glob("*.yaml")}
    own = {"roofline": "single"}  # parts with a page of their own
    assert {page.stem for page in PAGES} == suites | {"index"} | own.keys()
    for page in PAGES:
        commands = re.findall(
            r"^    python recipes/benchmark.py suite=(\w+) .*page=(\S+)$", page.read_text(), re.MULTILINE
        )
        suite = own.get(page.stem, page.stem)
        assert set(commands) == ({(suite, f"docs/results/{page.name}")} if page.stem != "index" else set())


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
    told = json.loads((tmp_path / "run" / f"{name}.json").read_text())
    results = told["rows"]
    assert results
    assert told["machine"]["threads"] == 1
    before, table, after = split_at(name, page.read_text())
    old_before, old_table, old_after = split_at(name, original.read_text())
    assert (before, after) == (old_before, old_after)
    assert table != old_table
    said = " ".join((done.stdout + done.stderr).split())
    has_links = not any(x in said for x in LEFT_OUT)
    assert has_links or os.geteuid() != 0, "root can have network namespaces"
    # Bars of other projects, which are not installed everywhere, are for larger batches than these.
    unmeasured = [x["name"] for x in results[-1].get("bars", []) if x["verdict"] == "not measured"]
    assert not (has_links and unmeasured), unmeasured
    for part in parts_of(command):
        if has_links and (check := CHECKS.get((suite_of(command), part))) is not None:
            check(results)


def check_steps_of_single(results) -> None:
    """All that is compared is there, each with its bar."""
    assert {"floor", "ours", "lightning"} <= set(results[0]["examples_per_second"])
    assert results[0]["ratio_to_base"]["floor"] == 1.0
    bars = results[-1]["bars"]
    for part in ("reader alone", "metrics and callbacks", "numba Adam", "numba FTRL", "memory beyond rows"):
        assert [x["name"] for x in bars if x["name"].startswith(part)], part
    memory = next(x["value"] for x in bars if x["name"].startswith("memory"))
    assert 200 < memory < 1500  # MiB: an interpreter with torch, and not the tables, whose size is known


def check_profile_of_single(results) -> None:
    """The parts of a step add up to the whole."""
    parts, operators, *_ = results
    *milliseconds, whole = parts["milliseconds"].values()
    assert len(milliseconds) == 6
    assert sum(milliseconds) == pytest.approx(whole, abs=0.01)
    assert all(float(row["calls a step"]) > 0 for row in operators["rows"])


def check_overhead_of_shadowsync(results) -> None:
    """Both jobs train, and one of them synchronises, over the wire."""
    rates = [x["examples_per_second"] for x in results if "examples_per_second" in x]
    (both,) = (x for x in rates if set(x) == {"not synchronised", "S-EASGD"})
    assert min(both.values()) > 0
    (gaps,) = (x["telemetry"] for x in results if set(x.get("telemetry", ())) == {"S-EASGD"})
    assert set(gaps["S-EASGD"]) == {"0", "1"}
    assert all(trainer["comm/sent_bytes"] > 4e6 for trainer in gaps["S-EASGD"].values())


def check_requests_of_shadowsync(results) -> None:
    """All of them cross the link with the bytes expected."""
    (table,) = (x["rows"] for x in results if any("MB a step on the interface" in row for row in x.get("rows", ())))
    assert len(table) == 6  # lookups and operations of caches, by three variants
    bars = [
        x for x in results[-1]["bars"] if x["name"].startswith("bytes on the interface off those expected, lookups")
    ]
    assert [x["verdict"] for x in bars] == ["pass"] * 3


def check_link_of_des(results) -> None:
    """Logistic regression trains on two hosts under all strategies, with the bytes expected."""
    assert any(len(x.get("examples_per_second", ())) == 3 for x in results)
    (sent,) = (x["sent_bytes"] for x in results if "sent_bytes" in x)
    for setting, bytes_of in sent.items():
        expected = bytes_of["expected"]["traffic"]["DES"]["sent_bytes"]
        # What frames carry besides is a tenth of the smallest message, a logit for each of 16 examples.
        assert bytes_of["counted"]["DES"] == pytest.approx(expected, rel=0.02, abs=100), setting


def check_steps_of_hierarchical(results) -> None:
    """The bytes that cross the link are those told, but for what TCP adds to messages as small as these."""
    off = [x["value"] for x in results[-1]["bars"] if x["name"].startswith("bytes on the interface off those told")]
    # One of each way to compress; how many placements there are besides is for the operators' measured times to say.
    assert 4 <= len(off) <= 7
    assert max(off) < 10  # percent


CHECKS = {
    ("single", "steps"): check_steps_of_single,
    ("single", "profile"): check_profile_of_single,
    ("shadowsync", "overhead"): check_overhead_of_shadowsync,
    ("shadowsync", "requests"): check_requests_of_shadowsync,
    ("des", "link"): check_link_of_des,
    ("hierarchical", "steps"): check_steps_of_hierarchical,
}
