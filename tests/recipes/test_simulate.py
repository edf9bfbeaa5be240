"""Clusters in virtual time from the command line: one alone, and several in the figures of papers."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from hydra import initialize_config_dir
from recipe_helpers import CONF, plain
from recipe_tools import figures
from recipe_tools.build import build
from recipe_tools.figures import RUN, check_overrides, check_panels, run_all, runs_of
from recipe_tools.jobs.simulation import simulate
from recipe_tools.on_machines import on_machines
from recipe_tools.pictures import draw
from recipe_tools.record import RunRecord
from recipe_tools.simulated import simulated
from rich.console import Console

from lightning_recsys.simulation import HETCluster, VirtualCluster

SMALL = ("data.batch_size=32", "data.val_rows=640", "evaluation.every=3200", "evaluation.rows=320")


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "cluster").glob("*.yaml")))
def test_cluster_builds_and_many_workers_have_low_rates(name, composed):
    config = plain(composed("simulate", f"cluster={name}"))
    cluster = build(config["cluster"])
    assert isinstance(cluster, VirtualCluster | HETCluster)
    if cluster.num_workers > 100:
        assert config["optim"]["dense"]["lr"] == 0.0001
        assert config["optim"]["rows"]["lr"] == 0.001


MACHINES = (
    "fast: {cores: 4, port_gbit: 8, latency_us: 30, gflops: 50}\nslow: {cores: 2, port_gbit: 1, latency_us: 100}\n"
)
CARRIED = 1448 / 1514  # of a full packet


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "cluster").glob("*.yaml")))
def test_cluster_when_on_machines_of_a_file_then_has_their_ports(name, composed, tmp_path):
    (file := tmp_path / "machines.yaml").write_text(MACHINES)
    config = plain(composed("simulate", f"cluster={name}"))
    before = build(config["cluster"])
    made = build(on_machines(config["cluster"], {"file": str(file), "workers": "fast", "servers": "slow"}))
    assert made.link.bandwidth == pytest.approx(1e9 * CARRIED)
    assert made.link.latency == pytest.approx(15e-6)
    links = [made.servers.link]
    if (rounds := getattr(made, "synchronization", None)) is not None:
        links.append(rounds.servers.link)
    assert [x.bandwidth for x in links] == pytest.approx([1.25e8 * CARRIED] * len(links))
    assert [x.latency for x in links] == pytest.approx([50e-6] * len(links))
    assert made.num_workers == before.num_workers
    assert build(on_machines(config["cluster"], {"file": None, "workers": None, "servers": None})) == before


def test_group_when_on_machines_of_a_file_then_its_steps_take_their_time(composed, tmp_path):
    (file := tmp_path / "machines.yaml").write_text("machine: {cores: 18, port_gbit: 25, gflops: 15}\n")
    config = plain(composed("simulate", "cluster=ht_10"))
    chosen = {"file": str(file), "workers": None, "servers": None}
    group = on_machines(config["cluster"], chosen)["group"]
    assert (group["cores"], group["flops"]) == (18, 15e9)
    assert config["cluster"]["group"]["flops"] == 30e9, "the configuration itself stays"


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ({"workers": None, "servers": "slow"}, r"machines\.workers must be a kind of .*: fast, slow; got None\."),
        ({"workers": "fast", "servers": "cheap"}, r"machines\.servers must be a kind of .*; got cheap\."),
        ({"file": None, "workers": "fast", "servers": None}, r"machines\.workers .*add machines\.file="),
    ],
)
def test_machines_when_a_kind_is_not_there_then_one_sentence_names_the_key(chosen, sentence, composed, tmp_path):
    (file := tmp_path / "machines.yaml").write_text(MACHINES)
    cluster = plain(composed("simulate"))["cluster"]
    with pytest.raises(ValueError, match=sentence):
        on_machines(cluster, {"file": str(file), **chosen})


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "figure").glob("*.yaml")))
def test_figure_then_opens_with_its_command_and_every_series_builds(name, composed):
    text = (CONF / f"figure/{name}.yaml").read_text()
    assert text.startswith(f"# @package _global_\n# python recipes/simulate.py figure={name}\n")
    figure = plain(composed("simulate", f"figure={name}"))["figure"]
    if figure["x"] is not None:
        figure["x"]["values"] = figure["x"]["values"][-1:]
    for added in runs_of(figure).values():
        config = plain(composed("simulate", *added, f"figure={name}"))
        assert isinstance(build(config["cluster"]), VirtualCluster | HETCluster)
        assert config["figure"]["paper"]


def test_report_when_runs_do_not_fit_the_console_then_every_name_and_number_is_whole(tmp_path, monkeypatch):
    page = Console(width=80, file=io.StringIO())
    monkeypatch.setattr(figures, "console", lambda: page)
    names = [f"staleness/dense_{kind}" for kind in ("mean", "max", "p99", "variance")]
    runs = {
        f"10 trainers @ {i}": {"metrics": {x: 1e5 * i + k for k, x in enumerate(names)}, "curve": []} for i in range(10)
    }
    monkeypatch.setattr(figures.pictures, "draw", lambda *_: None)
    record = RunRecord(tmp_path, config={}, overrides=[])
    figures.report(RUN | {"title": "Many", "series": dict.fromkeys(runs)}, runs, record)
    printed = page.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    tables = printed.count("metric")
    assert 2 <= tables <= 5
    for name in names:
        assert printed.count(name) == tables
    for run in runs.values():
        assert all(f" {value:,.5g} " in printed for value in run["metrics"].values())


@pytest.mark.slow
def test_run_when_simulated_then_writes_what_came_out_and_draws_it(run_forked, tmp_path):
    command = ("cluster=asgd_1k", "examples=6400", *SMALL, "cluster.workers_per_replica=20", "hydra.run.dir=out")
    done = run_forked("simulate.py", *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    assert record["status"] == "completed"
    (run,) = json.loads((tmp_path / "out/simulation.json").read_text())["runs"].values()
    assert run["examples"] == 6400
    assert [point["examples"] for point in run["curve"]] == [3200, 6400]
    assert {"eps", "train/ne", "val/ne", "val/auc", "staleness/dense_mean"} <= run["metrics"].keys()
    assert run["traffic_bytes"]["dense pulled"] > 0
    assert 0.5 < run["utilization"]["workers"] < 1
    assert (tmp_path / "out/simulation.png").stat().st_size > 10_000
    assert record["metrics"] == run["metrics"]
    sweep = (
        "-m",
        *command[:-2],
        "cluster.workers_per_replica=20,-1",
        "hydra.sweep.dir=sweep",
        "hydra.sweep.subdir=${hydra.job.num}",
    )
    done = run_forked("simulate.py", *sweep, folder=tmp_path)
    (again,) = json.loads((tmp_path / "sweep/0/simulation.json").read_text())["runs"].values()
    assert {**again, "wall": None} == {**run, "wall": None}
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "1 of 2 jobs failed; see above, or error in comparison.csv"
    with (tmp_path / "sweep/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["cluster.workers_per_replica"] for row in rows] == ["20", "-1"]
    assert [row["status"] for row in rows] == ["completed", "failed"]
    assert float(rows[0]["staleness/dense_mean"]) == run["metrics"]["staleness/dense_mean"]
    assert "workers_per_replica must be" in rows[1]["error"]
    header = (tmp_path / "sweep/comparison.md").read_text().splitlines()[0]
    assert "| val/ne | EPS | Train NE | val/auc | staleness/dense_mean |" in header


@pytest.mark.slow
def test_figure_when_drawn_then_has_every_series_at_every_place_and_goes_on_from_its_cache(run_forked, tmp_path):
    small = (*SMALL, "examples=1280", "cluster.workers_per_replica=2", "figure.cache=kept", "hydra.run.dir=out")
    run_forked("simulate.py", "figure=shadowsync_5", "figure.x.values=[2]", *small, folder=tmp_path)
    first = json.loads((tmp_path / "out/simulation.json").read_text())["runs"]
    done = run_forked("simulate.py", "figure=shadowsync_5", "figure.x.values=[2,3]", *small, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out/simulation.json").read_text())["runs"]
    assert list(runs) == [f"{name} @ {n}" for name in ("S-EASGD", "FR-EASGD-5", "FR-EASGD-30") for n in (2, 3)]
    assert done.stdout.count("taken from") == 3
    assert {label: runs[label] for label in first} == first
    assert runs["FR-EASGD-5 @ 3"]["counts"]["rounds"] > 0
    assert "The paper: Figure 5" in done.stdout
    assert "6 runs" in done.stdout


def test_override_when_a_figure_sets_it_itself_then_refused(composed):
    refused = {
        "shadowsync_5": {
            "cluster.num_replicas=5": r"x axis of the figure sets .* figure.x.values=\[",
            "++cluster.synchronization={gap: 5}": "series 'FR-EASGD-5' of the figure sets cluster.sync",
        },
        "het_table_1": {"model=dlrm": "series 'DeepFM, hybrid' of the figure sets model.* figure.series"},
        "asgd_5": {
            "cluster=asgd_1k": "series '1x' of the figure sets cluster",
            "cluster.staleness.target=3000": "sets cluster.staleness",
            "cluster.workers.elsewhere.mean=9": r"differ in it \(0.1 with cluster=asgd_1k, 0.3 with cluster=asgd_3k",
            "optim.dense.lr=1": r"the figure sets it for each run. Choose figure.rates=",
            "seed=1": r"Choose figure.seeds=",
        },
    }
    for name, messages in refused.items():
        figure = {**RUN, **plain(composed("simulate", f"figure={name}"))["figure"]}
        with initialize_config_dir(str(CONF), version_base="1.3"):
            check_overrides(figure, [f"figure={name}", "examples=9", "cluster.link.latency=1", "model.embedding_dim=4"])
            for override, message in messages.items():
                with pytest.raises(ValueError, match=message):
                    check_overrides(figure, [override])


def test_figure_when_a_panel_or_a_later_series_is_wrong_then_refused_before_the_first_run(composed):
    composed("simulate")  # what Hydra knows of the command
    check_panels({"panels": ["ne", "val/ne", "eps"]})
    with pytest.raises(ValueError, match=r"figure\.panels has 'nee'; it takes ne, auc, .* such as eps"):
        check_panels({"panels": ["ne", "nee"]})
    with initialize_config_dir(str(CONF), version_base="1.3"):
        with pytest.raises(Exception, match="num_replica") as caught:
            figures.composed("mine", ["cluster.num_replica=5"])
        assert caught.value.__notes__ == ["In the run 'mine' of the figure, with cluster.num_replica=5."]
        with pytest.raises(TypeError, match=r"data\.batch_size must be int, got 'x'"):
            figures.composed("mine", ["data.batch_size=x"])


def test_examples_when_none_then_refused_by_name(composed):
    config = plain(composed("simulate"))
    for key, value in (
        ("examples", 0),
        ("examples", -5),
        ("examples", 1.5),
        ("evaluation.every", 0),
        ("evaluation.rows", 0),
    ):
        wrong = (
            {"evaluation": config["evaluation"] | {key.removeprefix("evaluation."): value}}
            if "." in key
            else {key: value}
        )
        with pytest.raises(ValueError, match=f"{key} must be a whole number of at least 1, got {value}"):
            simulate(config | wrong, record=None, label="none")


@pytest.mark.parametrize("entropy", [math.nan, math.inf, 7.5])
def test_figure_when_a_run_diverges_and_it_is_interrupted_then_what_is_there_is_kept_and_said(
    entropy, tmp_path, capsys
):
    def make(label):
        if label == "last":
            raise KeyboardInterrupt
        return {"metrics": {"val/ne": entropy if label == "wild" else 1.0}}

    with (
        pytest.raises(KeyboardInterrupt),
        RunRecord(tmp_path, config={}, overrides=[]) as record,
    ):
        run_all({**RUN, "series": {"good": [], "wild": [], "last": []}}, ["good", "wild", "last"], make, record)
    assert "Warning: wild: val/ne is" in capsys.readouterr().out
    runs = json.loads((tmp_path / "simulation.json").read_text())["runs"]
    assert [("warning" in run) for run in runs.values()] == [False, True]
    kept = json.loads((tmp_path / "metrics.json").read_text())
    assert kept["metrics"]["good/val/ne"] == 1.0
    assert "at the end" in kept["warnings"]["wild"]


def test_figure_when_rates_are_tried_then_the_best_by_validation_is_repeated_with_the_other_seeds(tmp_path):
    made = []

    def make(label, overrides):
        made.append(overrides)
        rate, seed = (float(x.split("=")[1]) for x in (overrides[1], overrides[3]))
        entropy = math.nan if rate == 4 else (rate - 2.0) ** 2 + 0.5 + seed / 8
        return {"metrics": {"val/ne": entropy, "val/auc": seed}, "curve": [{"examples": 5, "val/ne": entropy}]}

    figure = {
        **RUN,
        "series": {"a": [], "b": []},
        "rates": {"a": [4.0, 2, 1], "b": [1]},
        "rows_rate": 10,
        "seeds": [0, 2],
    }
    plain_, swap = {"dense": {}, "rows": {}}, {"dense": {"inner": {}}, "rows": {"inner": {}}}
    configs = {"a": {"optim": plain_}, "b": {"optim": swap}}
    figures.check_rates(figure)
    with RunRecord(tmp_path, config={}, overrides=[]) as record:
        runs = figures.run_at_best_rates(figure, {"a": ["x=1"], "b": ["x=2"]}, configs, make, record)
    assert [x[1:] for x in made if x[0] == "x=1"] == [
        [f"optim.dense.lr={rate}", f"optim.rows.lr={10 * rate}", f"seed={seed}"]
        for rate, seed in ((1, 0), (2, 0), (4, 0), (2, 2))
    ]
    assert made[-1] == ["x=2", "optim.dense.inner.lr=1", "optim.rows.inner.lr=10", "seed=2"]
    assert runs["a"]["metrics"] == pytest.approx(
        {"val/ne": 0.625, "val/auc": 1.0, "rate": 2, "val/ne_deviation": 0.25 / 2**0.5, "val/auc_deviation": 2**0.5}
    )
    assert runs["a"]["curve"] == [{"examples": 5, "val/ne": 0.625}]
    assert "warning" not in runs["a"]
    assert "at an end of those tried" in runs["b"]["warning"]
    for wrong, message in (
        ({"seeds": [1]}, "figure.seeds must be"),
        ({"rates": {"a": [1]}}, "none for the series 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            figures.check_rates(figure | wrong)


def test_simulation_when_finished_before_then_taken_with_all_its_numbers(composed, tmp_path):
    found = {"metrics": {"val/ne": math.nan, "eps": 2.0}, "curve": [{"examples": 1}]}
    made = []

    def make(config, record, *, label):
        made.append((config["seed"], label))
        return found

    composed("simulate")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for seed in (1, 1, 2):
            got = simulated(make, "S-EASGD @ 5, a", [f"seed={seed}", "name=x"], cache=tmp_path, root="/")
            assert got["metrics"] == pytest.approx(found["metrics"], nan_ok=True)
            assert got["curve"] == found["curve"]
    assert made == [(1, "S-EASGD @ 5, a"), (2, "S-EASGD @ 5, a")]
    assert len(list(tmp_path.glob("S-EASGD-5-a-*"))) == 2


def test_simulation_when_its_rows_have_changed_since_then_is_made_anew(composed, tmp_path, capsys):
    rows, schema = tmp_path / "rows.csv", tmp_path / "rows.yaml"
    rows.write_text("y,c\n" + "0,a\n1,b\n" * 50)
    schema.write_text("files: rows.csv\nlabel: y\ncategorical: [c]\n")
    made = []

    def make(config, record, *, label):
        made.append(label)
        return {"metrics": {"val/ne": float(len(made))}}

    def found() -> float:
        overrides = ["data=tabular", f"data.schema={schema}", "name=x"]
        return simulated(make, "A", overrides, cache=tmp_path / "kept", root="/")["metrics"]["val/ne"]

    composed("simulate")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert [found(), found()] == [1.0, 1.0]
        rows.write_text(rows.read_text() + "0,b\n")
        assert [found(), found()] == [2.0, 2.0]
        assert "made anew, since" in capsys.readouterr().out
        (file,) = tmp_path.glob("kept/*/metrics.json")
        kept = json.loads(file.read_text())
        file.write_text(json.dumps(kept | {"inputs": kept["inputs"] | {"version": "0.0.0"}}))
        assert found() == 3.0
        rows.unlink()
        assert found() == 3.0  # a figure can be drawn where the rows are not


def test_data_when_they_are_no_clicks_then_refused_before_anything_is_read(composed):
    config = plain(composed("simulate", "data=cora", "model=graphsage"))
    with pytest.raises(ValueError, match=r"simulations are of clicks, but .*NodeDataModule is for .*NodeClass"):
        simulate(config, record=None, label="Cora")


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("scheduler", ["warmup", "cosine", "one_cycle"])
def test_schedule_when_it_goes_over_the_whole_run_then_is_told_the_number_of_pushes(
    composed, tmp_path, monkeypatch, scheduler, drop_last
):
    """Epochs of 70 rows, of which the last batch has 6, or is left out; the run ends within the third."""
    small = ("cluster.workers_per_replica=2", "examples=150", "data.train_rows=70", *SMALL)
    config = plain(composed("simulate", "data=synthetic", f"optim/scheduler={scheduler}", *small))
    config["data"]["drop_last"] = drop_last
    record, told, train = RunRecord(tmp_path, config=config, overrides=[]), [], VirtualCluster.train

    def noting(cluster, task, *args, **options):
        told.append(task.total_steps)
        return train(cluster, task, *args, **options)

    monkeypatch.setattr(VirtualCluster, "train", noting)
    found = simulate(config, record, label=scheduler)
    assert told == [found["counts"]["pushes"]] == [5 if drop_last else 7]


def test_schedule_when_it_asks_for_epochs_then_refused_in_a_sentence(composed, tmp_path):
    config = plain(composed("simulate", "data=synthetic", "optim/scheduler=plateau", "data.train_rows=64", *SMALL))
    record = RunRecord(tmp_path, config=config, overrides=[])
    with pytest.raises(TypeError, match=r"a virtual cluster has no epochs.*scheduler=warmup, cosine and one_cycle do"):
        simulate(config, record, label="plateau")


def test_data_when_there_are_no_rows_to_be_judged_by_then_refused_before_training(composed, tmp_path):
    config = plain(composed("simulate", "data=synthetic", "data.val_rows=0", "data.test_rows=0"))
    record = RunRecord(tmp_path, config=config, overrides=[])
    with pytest.raises(ValueError, match="judged by validation rows, or by test rows, and these data have neither"):
        simulate(config, record, label="none")


def test_cluster_when_unknown_then_the_choices_are_named(run_forked, tmp_path):
    done = run_forked("simulate.py", "cluster=asgd_5k", folder=tmp_path)
    assert done.returncode == 1
    assert "Did you mean asgd_3k or asgd_1k?" in done.stderr or "Allowed: asgd_1k, asgd_3k" in done.stderr


def test_picture_when_a_figure_has_no_axis_then_its_metrics_are_drawn_by_run(tmp_path):
    font_manager = pytest.importorskip("matplotlib.font_manager")
    run = {"metrics": {"eps": 2.0}, "curve": [{"examples": 1, "val/ne": 0.9}], "staleness": {"dense": {"count": 0}}}
    figure = {"panels": ["eps", "ne", "staleness"], "x": None, "title": "a"}
    path = draw(figure, {"one": run, "other": run}, tmp_path / "picture.png")
    font_manager._get_font.cache_clear()  # matplotlib's, which keeps the fonts' files open
    assert path.read_bytes().startswith(b"\x89PNG")
