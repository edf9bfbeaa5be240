from __future__ import annotations

import csv
import importlib.util
import json
import runpy

import pytest
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from recipe_helpers import CONF, RECIPES, TINY, plain, run_recipe, train_here
from recipe_tools.build import build_dense_optimizer, build_trainer, take_started
from recipe_tools.checkpoint import ModelCheckpoint
from recipe_tools.checkpoint_config import offer_checkpoint_config
from recipe_tools.jobs.exporting import export
from recipe_tools.overrides import explain
from recipe_tools.record import RunRecord, isolated_job
from recipe_tools.sweep import optimized_value, refuse_reexecution
from train import main

LABELS = ("EPS", "Train NE", "Eval NE", "AUC", "Log loss", "Log loss, calibrated", "Calibration", "Best possible NE")
LABELS += ("Dense parameters",)
METRICS = {f"{stage}/{name}" for stage in ("val", "test") for name in ("ne", "auc", "logloss", "calibration")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the command line, which the tests below look at from all sides."""
    folder = tmp_path_factory.mktemp("run")
    loggers = ["csv", "tensorboard"]
    overrides = []
    if importlib.util.find_spec("wandb") is not None:
        loggers.append("wandb")
        overrides.append("logger.wandb.offline=true")
    done = run_recipe(
        "train.py",
        *TINY,
        "hydra.run.dir=out",
        "calibrate=true",
        f"logger=[{','.join(loggers)}]",
        *overrides,
        folder=folder,
    )
    return folder, done


def record_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_run_closes_with_a_table(run):
    _, done = run
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [label for label in LABELS if not any(line.startswith(f"│ {label}") for line in table)] == []
    assert table[-1].split("│")[2].strip() == "out"  # as one would type it


def test_run_shows_one_progress_bar_and_what_to_try_and_nothing_else(run):
    _, done = run
    assert [line for line in done.stderr.splitlines() if not line.startswith("wandb:")] == []
    (bar,) = [line for line in done.stdout.splitlines() if "10/10" in line]
    assert "train/ne: " in bar
    assert "val/ne: " in bar
    assert len(bar) <= 80
    *rest, steps, ne = done.stdout.splitlines()
    assert len(rest) == 1 + len(LABELS) + 7  # title, two rules and four more rows
    assert steps == (
        "The run made 10 steps, and more of them would teach it more. Try data.batch_size=32 trainer.max_epochs=auto."
    )
    assert ne.startswith("The NE is 1.")
    assert ne.endswith(
        ": above 1, the share of positives predicts the test rows better than the model. More steps come first."
    )
    assert [line for line in done.stdout.splitlines() if "INFO" in line or "WARNING" in line] == []


def test_record_holds_what_ran_and_what_came_out(run):
    folder, _ = run
    record = record_of(folder / "out")
    assert record["status"] == "completed"
    assert record["error"] is None
    assert METRICS | {"eps", "train/ne"} <= record["metrics"].keys()
    assert record["config"]["data"]["train_rows"] == 1000
    assert record["config"]["paths"]["output_dir"] == str(folder / "out")
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "pytorch-lightning", "lightning-recsys"} <= record["versions"].keys()
    assert record["wall_time_s"] > 0
    assert (record["steps"], record["epochs"], record["best_epoch"]) == (10, 1, 1)
    assert record["best_score"] == pytest.approx(record["metrics"]["val/ne"])
    assert record["parameters"]["embedding_rows"] == sum(record["config"]["data"]["cardinalities"])
    assert record["parameters"]["embedding"] == 4 * record["parameters"]["embedding_rows"]
    assert 0 < record["best_normalized_entropy"] < record["metrics"]["test/ne"]


def test_loggers_wrote_training_and_test(run):
    folder, _ = run
    with (folder / "out/curves/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"train/ne", "val/auc", "test/ne"} <= {name for row in rows for name, value in row.items() if value}
    assert list((folder / "out/tensorboard").glob("events.*"))
    if importlib.util.find_spec("wandb") is not None:
        assert list((folder / "out/wandb").glob("offline-run-*/*.wandb"))


def test_evaluate_reproduces_the_test_metrics(run, run_forked, tmp_path):
    folder, _ = run
    checkpoint = folder / "out/checkpoints/best.ckpt"
    done = run_forked("evaluate.py", f"ckpt_path={checkpoint}", "hydra.run.dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = record_of(folder / "out")["metrics"]
    assert "test/calibrated_logloss" in expected
    assert record_of(tmp_path / "out")["metrics"] == {
        name: value for name, value in expected.items() if name.startswith("test/")
    }


def test_run_that_was_never_validated_is_complete(run_forked, tmp_path):
    """A sweep would have nothing to compare; a run alone needs no ``optimized_metric``."""
    done = run_forked("train.py", *TINY, "trainer.max_steps=2", "logger=none", "hydra.run.dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path / "out")
    assert record["status"] == "completed"
    assert "val/ne" not in record["metrics"]
    assert "test/ne" in record["metrics"]


def test_evaluate_checks_overrides_against_the_checkpoint(run):
    folder, _ = run
    offer_checkpoint_config([f"ckpt_path={folder}/out/checkpoints/best.ckpt"])
    (explained,) = explain(["data.test_row=100", "data.test_rows=100"], config_name="evaluate")
    assert explained.startswith("data.test_row: no such choice. Did you mean data.test_rows")
    assert explain(["strategy=ddp"], config_name="evaluate") == []  # Hydra itself refuses what is no choice here


@pytest.mark.parametrize(
    ("overrides", "root"),
    [
        ([], "/trained"),
        (["data.schema={folder}/new.yaml"], "{folder}"),
        (["data.schema={folder}/new.yaml", "data.root=/given"], "/given"),
    ],
)
def test_evaluate_finds_the_files_of_another_schema_beside_it(overrides, root, composed, tmp_path):
    (tmp_path / "new.yaml").write_text("files: new.csv\nlabel: y\n")
    trained = {"data": {"schema": {"files": "old.csv", "label": "y"}, "root": "/trained"}, "model": {"_target_": "a.B"}}
    torch.save({"hyper_parameters": {"config": trained}}, tmp_path / "best.ckpt")
    arguments = [x.format(folder=tmp_path) for x in (f"ckpt_path={tmp_path}/best.ckpt", *overrides)]
    offer_checkpoint_config(arguments)
    config = plain(composed("evaluate", *arguments))
    assert config["data"]["root"] == root.format(folder=tmp_path)


@pytest.mark.parametrize("installed", [True, False])
def test_export_refuses_what_cannot_be_written_as_onnx_before_it_publishes(installed, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    kind, message = (FileNotFoundError, "no folder .*/nowhere for") if installed else (ImportError, r"extra \[onnx\]")
    with pytest.raises(kind, match=message):
        export({"checkpoint": "nowhere.ckpt", "onnx": str(tmp_path / "nowhere/dense.onnx")})


def test_evaluate_names_a_checkpoint_that_is_not_there():
    with pytest.raises(SystemExit, match=r"there is no checkpoint nowhere\.ckpt"):
        offer_checkpoint_config(["ckpt_path=nowhere.ckpt"])
    with pytest.raises(SystemExit, match="ckpt_path: name the checkpoint"):
        offer_checkpoint_config([])


def test_train_names_a_checkpoint_that_is_not_there(composed, tmp_path):
    with pytest.raises(ValueError, match=r"^ckpt_path: there is no checkpoint nowhere/last\.ckpt, which would be /"):
        train_here(composed("train", *TINY, "ckpt_path=nowhere/last.ckpt"), tmp_path)


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ({}, {"num_nodes": 1, "devices": "auto"}),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}, {"num_nodes": 3, "devices": 2}),
    ],
)
def test_auto_then_nodes_and_devices_are_those_that_were_started(started, expected, monkeypatch):
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    trainer = {"num_nodes": "auto", "devices": "auto"}
    take_started(trainer)
    assert trainer == expected
    chosen = {"num_nodes": 1, "devices": 4}
    take_started(chosen)
    assert chosen == {"num_nodes": 1, "devices": 4}


def test_last_checkpoint_when_its_first_save_was_cut_off_then_there_is_none_to_go_on_from(tmp_path):
    (tmp_path / "last.ckpt").mkdir()
    callback = ModelCheckpoint(tmp_path)
    assert callback._find_last_checkpoints(pl.Trainer(logger=False, accelerator="cpu")) == set()
    (tmp_path / "last.ckpt").rmdir()
    (tmp_path / "last.ckpt").touch()
    assert callback._find_last_checkpoints(pl.Trainer(logger=False, accelerator="cpu")) == {str(tmp_path / "last.ckpt")}


def test_dense_optimizer_without_a_fused_kernel_is_built_without_it(composed):
    rmsprop, adam = "torch.optim.RMSprop", "torch.optim.Adam"
    nodes = [plain(composed("train", f"optim.dense._target_={name}"))["optim"]["dense"] for name in (rmsprop, adam)]
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    first, second = (build_dense_optimizer(node)(parameters).defaults for node in nodes)
    assert "fused" not in first
    assert first["lr"] == second["lr"] == 0.001
    assert second["fused"] is True


def test_resumed_run_ends_where_an_uninterrupted_one_does(run, tmp_path, composed):
    folder, _ = run
    overrides = [*TINY, "trainer.max_epochs=2", "logger=none", "callbacks/progress_bar=none"]
    metrics = {}
    for name, checkpoint in (("whole", "null"), ("resumed", folder / "out/checkpoints/last.ckpt")):
        config = composed("train", *overrides, f"ckpt_path={checkpoint}", f"paths.output_dir={tmp_path / name}")
        record = train_here(config, tmp_path / name)
        metrics[name] = {key: value for key, value in record.metrics.items() if key not in ("eps", "examples")}
    assert metrics["resumed"] == metrics["whole"]


def test_record_says_how_a_run_failed(tmp_path):
    record = RunRecord(tmp_path, config={}, overrides=[])

    def fail():
        with record:
            record.metrics["train/ne"] = float("nan")
            assert record_of(tmp_path)["status"] == "running"
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        fail()
    written = record_of(tmp_path)
    assert (written["status"], written["error"]) == ("failed", "RuntimeError: the disk is full")
    assert written["metrics"] == {"train/ne": None}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=???", "ValueError: data.batch_size has no default"),
        ("data.schema=/nowhere/schema.yaml", "FileNotFoundError: there is no schema file /nowhere/schema.yaml"),
        ("data.cache=${nowhere}", "InterpolationKeyError: Interpolation key 'nowhere' not found"),
    ],
)
def test_record_says_what_is_wrong_with_a_configuration(override, message, composed, tmp_path):
    config = composed("train", "data=tabular", "data.schema=a.yaml", override)
    with pytest.raises(Exception, match=r"batch_size|schema|nowhere"), isolated_job():
        main(config)
    written = record_of(tmp_path)
    assert written["status"] == "failed"
    assert written["error"].startswith(message)
    assert written["overrides"][-1] == override


def test_record_is_written_by_rank_zero_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with RunRecord(tmp_path, config={}, overrides=[]):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.distributed
def test_two_processes_that_run_the_recipe_leave_one_table_and_one_record(run_forked, tmp_path):
    """Lightning's own ddp: the second process runs the command line again."""
    overrides = ["trainer=cpu", "trainer.strategy=ddp", "trainer.devices=2", "logger=none"]
    done = run_forked(
        "train.py", *TINY, *overrides, "callbacks/progress_bar=none", "hydra.run.dir=out", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Eval NE") == 1
    record = record_of(tmp_path / "out")
    assert record["status"] == "completed"
    assert torch.load(record["checkpoint"], weights_only=True)["global_step"] == 5  # two workers: half of ten batches
    alone = run_forked("evaluate.py", f"ckpt_path={record['checkpoint']}", "hydra.run.dir=alone", folder=tmp_path)
    assert alone.returncode == 0, alone.stderr
    tested = {name: value for name, value in record["metrics"].items() if name.startswith("test/")}
    assert record_of(tmp_path / "alone")["metrics"] == tested


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_record_tells_an_interrupted_run_from_a_failed_one(interruption, tmp_path):
    with pytest.raises(interruption), RunRecord(tmp_path, config={}, overrides=[]):
        raise interruption
    assert record_of(tmp_path)["status"] == "interrupted"


def test_unknown_optimized_metric_is_named():
    with pytest.raises(ValueError, match=r"optimized_metric: this run logged no 'val/nee'\. It logged val/auc, val/ne"):
        optimized_value({"val/ne": 0.8, "val/auc": 0.7}, "val/nee")


def test_sweep_refuses_a_strategy_that_runs_the_command_line_again(composed):
    config = plain(composed("train", "trainer=cpu", "trainer.devices=2", "trainer.strategy=ddp"))
    trainer = build_trainer(config, logger=False)
    refuse_reexecution(trainer, sweeping=False)
    with pytest.raises(ValueError, match="DDPStrategy starts its workers by running the command line again"):
        refuse_reexecution(trainer, sweeping=True)


def test_help_names_groups_and_commands(run_forked, tmp_path):
    done = run_forked("train.py", "--help", folder=tmp_path)
    assert done.returncode == 0
    groups = dict(line.split(":", 1) for line in done.stdout.split("Common commands")[0].splitlines() if ":  " in line)
    models = [path.stem for path in sorted((CONF / "model").glob("*.yaml"))]
    assert groups["  model"].strip().split(", ") == models
    assert {"dlrm", "deepfm", "graphsage"} <= set(models)
    assert {"  data", "  optim", "  strategy", "  experiment"} <= groups.keys()
    assert "python recipes/train.py -m model=dlrm,deepfm seed=0,1" in done.stdout
    benchmark = run_forked("benchmark.py", "--help", folder=tmp_path).stdout
    assert "  suite:  " in benchmark
    assert "  strategy:" not in benchmark  # which this recipe does not know


def test_wrong_override_on_the_command_line_says_what_is_allowed(run_forked, tmp_path):
    done = run_forked("train.py", "trainer.max_epoch=1", folder=tmp_path)
    assert done.returncode == 1
    assert "trainer.max_epoch: no such choice. Did you mean trainer.max_epochs" in done.stderr
    assert "Allowed in trainer: accelerator, accumulate_grad_batches" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [(), ("-m", "model=lr,fm")])
def test_folder_of_runs_when_it_cannot_be_made_then_a_sentence_says_how_to_choose_another(
    run_forked, tmp_path, arguments
):
    (tmp_path / "file").touch()
    done = run_forked("train.py", *arguments, f"paths.logs={tmp_path / 'file'}", folder=tmp_path)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(str(tmp_path / "file"))
    assert " cannot be made: Not a directory. " in said
    assert "Choose another place: paths.logs=FOLDER" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=deepfn", r"model=deepfn: no such choice. Did you mean deepfm?"),
        ("model=dlrm,typo", "model=typo: no such choice.\nAllowed: dcn, dcn_v2"),
        (
            "modle=dlrm",
            "modle: no such choice. Did you mean model?\nAllowed: calibrate, callbacks, ckpt_path, data, debug",
        ),
        (
            "siute=single",
            "siute: no such choice.\nAllowed: calibrate, callbacks, ckpt_path, data, debug, embeddings, experiment",
        ),
        ("optim.rows.rate=1", "optim.rows.rate: no such choice.\nAllowed in optim.rows: lr"),
        ("seed.a=1", "seed.a: seed is one value (0), it has no keys. Write seed=... instead."),
        (
            "trainer.strategy.num_threads=2",
            "trainer.strategy.num_threads: trainer.strategy is taken from strategy. Write strategy.num_threads=...",
        ),
        ("hydra.run.dri=x", "hydra.run.dri: no such choice. Did you mean hydra.run.dir?"),
        ("~model", "~model: nothing runs without one. Choose another.\nAllowed: dcn, dcn_v2"),
        (
            "model=[dlrm,deepfm]",
            "model=[dlrm,deepfm]: a list makes one configuration of several files. Try one after the other: -m model=",
        ),
        ("launcher=null", "launcher=null: a group takes names, and [] for none of them.\nAllowed: ray, []"),
        (
            "optim/scheduler=null,cosine",
            "optim/scheduler=null: a group takes names, and [] for none of them.\nAllowed:",
        ),
    ],
)
def test_wrong_override_is_explained(override, message):
    (explained,) = explain([override], config_name="train")
    assert explained.startswith(message)


@pytest.mark.parametrize(
    "override",
    [
        "~logger",
        "~callbacks",
        "callbacks=[default,prometheus]",
        "model=dlrm",
        "model=dlrm,deepfm",
        "trainer.max_epochs=2",
        "+trainer.detect_anomaly=true",
        "-m",
        "a b",
    ],
)
def test_right_override_needs_no_explanation(override):
    assert explain([override], config_name="train") == []


def test_override_is_judged_by_the_chosen_groups():
    assert explain(["model=deepfm", "model.hidden=[8]"], config_name="train") == []
    assert len(explain(["model=dlrm", "model.hidden=[8]"], config_name="train")) == 1


def test_override_when_a_group_is_given_a_list_then_each_of_its_items_is_a_choice_and_brings_its_keys():
    published = ["callbacks=[default,model_publisher]", "callbacks.model_publisher.url=versions"]
    assert explain(published, config_name="train") == []
    assert explain(["callbacks=[default],[default,model_publisher]"], config_name="train") == []
    (explained,) = explain([*published, "callbacks.model_publisher.keeep=1"], config_name="train")
    assert explained.startswith(
        "callbacks.model_publisher.keeep: no such choice. Did you mean callbacks.model_publisher.keep?"
    )
    (explained,) = explain(["callbacks=[default,model_publishr]"], config_name="train")
    assert explained.startswith("callbacks=model_publishr: no such choice. Did you mean model_publisher?")


def test_importing_the_recipes_says_how_to_run_them():
    with pytest.raises(ImportError, match=r"run `python recipes/train.py --help`"):
        runpy.run_path(str(RECIPES / "__init__.py"))
