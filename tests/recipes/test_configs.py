from __future__ import annotations

import csv
import importlib.util
import json
import math
import pickle
import pkgutil
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from recipe_helpers import CONF, plain, train_here
from recipe_tools.build import (
    build,
    build_all,
    build_callbacks,
    build_datamodule,
    build_model,
    build_task,
    build_trainer,
    check_calibrate,
    check_test_rows,
    check_train_rows,
    seed_everything,
)
from recipe_tools.config_types import check_types
from recipe_tools.epochs import take_auto_epochs
from recipe_tools.trained import load_checkpoint

from lightning_recsys.callbacks import NormalizedEntropyMonitor
from lightning_recsys.checkpoints import check_file
from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.errors import DamagedCheckpointError
from lightning_recsys.tasks import NodeClassificationTask

OWNER = {"suite": "benchmark", "cluster": "simulate", "figure": "simulate"}  # groups of other recipes than train
DOCS = CONF.parent / "docs"
ROOTS = (CONF, CONF / "prepare")  # each is a configuration folder of its own
LEAVES = sorted(
    (root.relative_to(CONF.parent).as_posix(), path.relative_to(root).with_suffix("").as_posix())
    for root in ROOTS
    for path in root.rglob("*.yaml")
    if root != CONF or ROOTS[1] not in path.parents
)
NEEDS = {"hparams_search/optuna": "optuna"}
NEEDS_DATA = ("movielens", "adult", "amazon", "cora")
GRAPH_MODELS = ("graphsage",)  # tested with the data that they are for


def leaves(group: str) -> list[str]:
    """The choices of a group of train.py."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def skip_unless_installed(leaf: str) -> None:
    module = NEEDS.get(leaf, "hydra")
    if importlib.util.find_spec(module.split(".")[0]) is None or importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize(("root", "leaf"), LEAVES)
def test_every_file_composes(root, leaf, composed):
    skip_unless_installed(leaf)
    group, _, name = leaf.rpartition("/")
    if leaf in ("evaluate", "predict", "export", "serve") or group == "hydra":
        pytest.skip("composed by its recipe, with a checkpoint")
    if not group:
        config = composed(name, folder=root)
    elif root.endswith("prepare"):
        config = composed("rows", "data=criteo", f"{group}={name}", folder=root)
    else:
        config = composed(OWNER.get(group, "train"), f"{group}={name}")
    plain_config = OmegaConf.to_container(config, resolve=True)  # all interpolations resolve
    if "trainer" in plain_config:
        take_auto_epochs(plain_config)
    check_types(plain_config)


def test_what_the_files_name_of_the_package_when_looked_up_then_is_there():
    """Comments too: they are copied to a command line."""
    text = "".join(path.read_text() for path in CONF.rglob("*.yaml"))
    names = set(re.findall(r"\blightning_recsys(?:\.[A-Za-z_]\w*)+", text))
    assert "lightning_recsys.stores.DynamicRows" in names
    for name in names:
        pkgutil.resolve_name(name)  # raises where it is not


def settings_of(page):
    """The settings that a page has in tables."""
    rows = re.findall(r"^\| (?:setting|option).*\n\|[-| ]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    first = (row.split("|")[1] for table in rows for row in table.splitlines())
    return {name for cell in first for name in re.findall(r"`([\w.]+)`", cell)}


@pytest.mark.parametrize("strategy", ["shadowsync", "het", "async_ps", "des", "hierarchical"])
def test_settings_when_a_page_names_them_then_the_command_line_takes_them_without_a_plus(strategy):
    written = {*yaml.safe_load((CONF / f"strategy/{strategy}.yaml").read_text())["strategy"]} - {"_target_"}
    named = settings_of(DOCS / f"settings/{strategy}.md") - {"trainer.devices"}
    of_every_strategy = settings_of(DOCS / "machines.md") | {"prefetch"}
    assert "num_embedding_servers" in named or strategy == "des"
    assert named <= written
    assert written <= named | of_every_strategy


@pytest.fixture
def datamodule():
    data = SyntheticDataModule(train_rows=64, val_rows=32, test_rows=32, batch_size=16, cardinalities=(10, 20))
    data.setup("fit")
    return data


@pytest.mark.parametrize("name", [name for name in leaves("model") if name not in GRAPH_MODELS])
def test_model_scores_a_batch(name, composed, datamodule):
    task = build_task(plain(composed("train", f"model={name}")), datamodule)
    batch = next(iter(datamodule.train_dataloader()))
    assert task(batch).shape == (16,)


@pytest.mark.parametrize("name", leaves("optim"))
def test_optim_trains_dense_part_and_rows(name, composed, datamodule):
    task = build_task(plain(composed("train", f"optim={name}", "model=wide_deep")), datamodule)
    before = {key: value.clone() for key, value in task.state_dict().items()}
    optimizer = task.configure_optimizers()
    batch = next(iter(datamodule.train_dataloader()))
    task.training_step(batch, 0)["loss"].backward()
    optimizer.step()
    after = task.state_dict()
    untouched = [key for key, value in before.items() if key.endswith("weight") and torch.equal(value, after[key])]
    assert not untouched


def test_scheduler_of_the_config_drives_dense_part_and_rows(composed, datamodule):
    scheduler = "{_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 1, gamma: 0.5}"
    config = plain(composed("train", f"optim.scheduler={scheduler}", "optim.scheduler_config={interval: epoch}"))
    configured = build_task(config, datamodule).configure_optimizers()
    optimizer, settings = configured["optimizer"], configured["lr_scheduler"]
    optimizer.step()
    settings["scheduler"].step()
    assert settings["interval"] == "epoch"
    assert [group["lr"] for group in optimizer.param_groups] == [0.0005, 0.01]


RATES = {  # of the rows, 0.02 at first, before each of 8 steps in 2 epochs
    "plateau": [0.02] * 4 + [0.002] * 4,
    "cosine": [0.01 * (1 + math.cos(math.pi * step / 8)) for step in range(8)],
    "one_cycle": None,
    "warmup": [0.02 * (0.01 + 0.99 * step / 1000) for step in range(8)],
}


@pytest.mark.parametrize("name", leaves("optim/scheduler"))
def test_scheduler_leaf_when_trained_with_then_drives_the_rows_as_it_says(name, composed, datamodule):
    config = plain(composed("train", f"optim/scheduler={name}", "trainer.max_epochs=2", "trainer=cpu"))
    config["optim"]["scheduler"] |= {"threshold": 1e9} if name == "plateau" else {}  # nothing is an improvement
    rates = []

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[-1]["lr"])

    config["trainer"] |= {"enable_progress_bar": False, "strategy": "auto", "log_every_n_steps": 1}
    callbacks = [Rates(), NormalizedEntropyMonitor()]
    trainer = build_trainer(config, callbacks=callbacks, logger=False, enable_checkpointing=False)
    trainer.fit(build_task(config, datamodule), datamodule=datamodule)
    if name == "one_cycle":
        assert rates[0] == pytest.approx(0.04 * 0.02)
        assert max(rates) == pytest.approx(0.02, rel=0.2)
        assert rates.index(max(rates)) in (1, 2)
        assert rates[-1] < rates[0]
    else:
        assert rates == pytest.approx(RATES[name])


def test_schedule_over_a_run_when_its_end_is_not_known_then_says_what_to_set(composed, datamodule):
    task = build_task(plain(composed("train", "optim/scheduler=cosine")), datamodule)
    with pytest.raises(ValueError, match=r"nobody knows how many steps that has: set trainer\.max_epochs"):
        task.configure_optimizers()


@pytest.mark.parametrize("name", leaves("callbacks"))
def test_callbacks_build(name, composed):
    for callback in build_callbacks(plain(composed("train", f"callbacks={name}"))):
        assert isinstance(callback, pl.Callback)


@pytest.mark.parametrize(
    "name", [name for name in leaves("logger") if name != "wandb"]
)  # it starts a process that stays
def test_logger_writes(name, composed, tmp_path):
    loggers = build_all(plain(composed("train", f"logger={name}"))["logger"])
    for logger in loggers:
        logger.log_metrics({"val/ne": 0.5}, step=1)
        logger.save()
        logger.finalize("success")
    assert bool(loggers) == any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["predict", "export", "serve"])
def test_recipe_when_it_has_no_folder_of_its_own_then_writes_no_log(name):
    ConfigStore.instance().store("checkpoint", node={})
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(name, return_hydra_config=True)
    assert config.hydra.run.dir == "."
    assert list(config.hydra.job_logging.handlers) == ["console"]


@pytest.mark.parametrize(
    ("ckpt_path", "kept"),
    [
        ("null", ["2"]),
        ("last", ["1", "2"]),
        ("${paths.output_dir}/checkpoints/last.ckpt", ["1", "2"]),
        ("elsewhere/checkpoints/last.ckpt", ["2"]),
    ],
)
def test_curves_when_a_folder_is_used_again_then_are_the_later_runs_unless_it_goes_on(
    ckpt_path, kept, composed, tmp_path
):
    config = plain(composed("train", f"ckpt_path={ckpt_path}"))
    for step in (1, 2):
        (logger,) = build_all(config["logger"])
        for later in (logger, pickle.loads(pickle.dumps(logger))):  # which a worker gets
            later.log_metrics({"val/ne": 0.5}, step=step)
            later.save()
    with (tmp_path / "curves/metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == [step for step in kept for _ in range(2)]
    # Nobody knows whose the curves are where the checkpoint is in another folder.
    aside = [path.name for path in tmp_path.rglob("*.csv") if path.name != "metrics.csv"]
    assert aside == (["metrics-1.csv"] if ckpt_path.startswith("elsewhere") else [])


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, None])
def test_seed_when_it_is_none_for_all_generators_then_refused_by_its_key(seed):
    with pytest.raises(ValueError, match=rf"^seed must be a whole number from 0 to 4294967295, got {seed}"):
        seed_everything(seed)


@pytest.mark.parametrize("name", ["shadowsync", "het", "het_hybrid", "async_ps", "hierarchical"])
def test_strategy_with_servers_then_the_config_says_how_often_they_are_started_again(name, composed):
    config = plain(composed("train", f"strategy={name}", "strategy.max_restarts=7"))
    assert build(config["strategy"]).max_restarts == 7


@pytest.mark.parametrize("strategy", leaves("strategy"))
@pytest.mark.parametrize("trainer", leaves("trainer"))
def test_trainer_builds(trainer, strategy, composed):
    workers = 1 if strategy == "single" else 2
    if trainer == "gpu" and torch.cuda.device_count() < workers:
        pytest.skip(f"needs {workers} GPUs")
    config = plain(composed("train", f"trainer={trainer}", f"strategy={strategy}"))
    built = build_trainer(config, callbacks=[], logger=False)
    assert built.world_size == workers


def test_workers_when_chosen_then_are_the_trainers(composed):
    def world_size(*overrides: str) -> int:
        return build_trainer(plain(composed("train", "trainer=cpu", *overrides)), callbacks=[], logger=False).world_size

    assert world_size("strategy=ddp", "trainer.devices=3") == 3
    assert world_size("strategy=shadowsync", "strategy.num_trainers=3", "strategy.workers_per_trainer=2") == 6
    assert world_size("strategy=shadowsync", "strategy.num_trainers=null", "trainer.devices=4") == 4
    with pytest.raises(ValueError, match=r"strategy\.num_trainers=2 .* but there is trainer\.devices=3"):
        world_size("strategy=shadowsync", "trainer.devices=3")


BARS = {
    "frappe": "user,item,daytime,weekday,isweekend,homework,cost,weather,country,city",
    "movielenslatest": "user_id,item_id,tag_id",
}


def bars_overrides(text: str, folder: Path) -> list[str]:
    """For a leaf about a data set of BARS: files of the same form; their own may not be handed on."""
    for name, columns in BARS.items():
        if name in text:
            generator = torch.Generator().manual_seed(0)
            for split, rows in {"train": 60, "valid": 30, "test": 30}.items():
                ids = torch.randint(0, 9, (rows, columns.count(",") + 1), generator=generator).tolist()
                lines = [",".join(map(str, [i % 2, *row])) for i, row in enumerate(ids)]
                (folder / f"{split}.csv").write_text("\n".join([f"label,{columns}", *lines, ""]))
            return [f"data.root={folder}", "data.checksums=null", f"data.cache={folder}/cache"]
    return []


def table_overrides(name, folder):
    """Tables of one's own, for the graphs that are made of such."""
    if name == "graph":
        (folder / "nodes.csv").write_text("id,kind,size\n" + "".join(f"n{i},{'ab'[i % 2]},{i}\n" for i in range(40)))
        (folder / "edges.csv").write_text("source,target\n" + "".join(f"n{i},n{i * 7 % 40}\n" for i in range(40)))
        return [
            f"data.root={folder}",
            "data.nodes.files=nodes.csv",
            "data.nodes.label=kind",
            "data.edges.files=edges.csv",
        ]
    if name == "links":
        (folder / "taken.csv").write_text("user,item\n" + "".join(f"u{i % 9},i{i % 11}\n" for i in range(90)))
        (folder / "users.csv").write_text("user,town\n" + "".join(f"u{i},{'xy'[i % 2]}\n" for i in range(9)))
        return [f"data.root={folder}", "data.file=taken.csv", "data.users.files=users.csv"]
    return []


@pytest.mark.parametrize("name", leaves("data"))
def test_data_reads_a_batch(name, composed, request, tmp_path):
    made = bars_overrides(name, tmp_path) or table_overrides(name, tmp_path)
    if "???" in (CONF / f"data/{name}.yaml").read_text() and not made:
        pytest.skip("needs a file of the user's own")
    if name.startswith(NEEDS_DATA) and not made:
        request.getfixturevalue("data_root")
    config = plain(composed("train", f"data={name}", *made))
    datamodule = build_datamodule(config)
    batch = next(iter(datamodule.train_dataloader()))
    assert batch.dense.shape[1] == datamodule.num_dense
    if "num_classes" not in datamodule.model_arguments:
        assert batch.sparse.keys == tuple(datamodule.fields)
        return
    assert (*batch.nodes.keys, *batch.sparse.keys) == tuple(datamodule.fields)
    config |= {"model": plain(composed("train", "model=graphsage"))["model"]}
    task = build_task(config, datamodule)
    assert task.training_step(batch, 0)["loss"].isfinite()
    assert config["monitor"]["metric"] in [f"val/{metric}" for metric in task.val_metrics]


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("dlrm", "cora", r"model: lightning_recsys\.models\.DLRM cannot be trained on a graph: use model=graphsage"),
        ("graphsage", "synthetic", r"data: .*GraphSAGE needs a graph.*use data=cora"),
    ],
)
def test_model_when_it_does_not_fit_the_data_then_says_so(model, data, message, composed, request):
    if data.startswith(NEEDS_DATA):
        request.getfixturevalue("data_root")
    config = plain(composed("train", f"model={model}", f"data={data}"))
    with pytest.raises(ValueError, match=message):
        build_task(config, build_datamodule(config))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("cora", r"^data\.file: there is no file or folder .*/none/graphs/cora\.npz\. Relative paths start from"),
        ("movielens_graph", r"^data\.file: there is no file or folder .*/none/ml-1m/ratings_800k\.csv"),
        ("movielens", r"^schema\.files\.train: there is no file .*/none/ml-1m/ratings_800k\.csv"),
    ],
)
def test_data_when_they_are_not_there_then_says_where_they_are_looked_for(data, message, composed, tmp_path):
    config = plain(composed("train", f"data={data}", f"paths.data={tmp_path / 'none'}"))
    with pytest.raises(FileNotFoundError, match=message) as caught:
        build_datamodule(config)
    assert any("paths.data=FOLDER, or" in note for note in caught.value.__notes__)
    with pytest.raises(FileNotFoundError, match=message) as caught:
        build_datamodule(config, checkpoint={})
    assert not hasattr(caught.value, "__notes__")  # evaluation goes by the checkpoint's data.root


class NoOptions(torch.nn.Module):
    def __init__(self, num_dense, fields, *, hidden=8):
        super().__init__()


class NoFields(torch.nn.Module):
    def __init__(self, num_dense, **options):
        super().__init__()


class OneInput(NoOptions):
    def __init__(self, num_dense, fields, **options):
        super().__init__(num_dense, fields)

    def forward(self, features):
        return features


def no_module(num_dense, fields, **options):
    return "model"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "NoOptions",
            r"NoOptions takes no row_optimizer, kernel, check_ids, pooling.*end its __init__ with \*\*options",
        ),
        ("NoFields", r"NoFields takes no fields\."),
        (
            "OneInput",
            r"OneInput\.forward has to take \(dense, sparse\).*: missing a required argument: 'features'|unexpected",
        ),
        ("no_module", r"no_module made str, which is no torch\.nn\.Module"),
    ],
)
def test_model_when_its_signature_is_wrong_then_what_is_missing_is_named(target, message, datamodule):
    node = {"_target_": f"{__name__}.{target}"}
    options = dict.fromkeys(["row_optimizer", "kernel", "check_ids", "pooling"])
    with pytest.raises(TypeError, match=message):
        build_model(node, datamodule.model_arguments, options)


@pytest.mark.parametrize("name", ["frappe_x1", "movielenslatest_x1"])
def test_published_data_when_a_file_is_another_then_refused(name, composed, tmp_path):
    root, _, cache = bars_overrides(name, tmp_path)
    with pytest.raises(ValueError, match=r"train\.csv is not the published file: its MD5 sum is \w{32}, not \w{32}"):
        build_datamodule(plain(composed("train", f"data={name}", root, cache)))


@pytest.mark.parametrize("name", [x for x in leaves("experiment") if x.startswith("bars") and x.count("_") > 1])
def test_published_settings_when_built_then_the_model_has_them(name, composed):
    config = plain(composed("train", f"experiment={name}"))
    assert config["optim"]["rows"]["_target_"] == "lightning_recsys.optim.RowAdam"
    assert (config["data"]["batch_size"], config["model"]["embedding_dim"]) == (4096, 10)
    assert (config["optim"]["scheduler"]["factor"], config["callbacks"]["early_stopping"]["patience"]) == (0.1, 2)
    if not name.endswith("_fm"):
        assert config["model"]["hidden" if "hidden" in config["model"] else "top_hidden"] == [400, 400, 400]
        assert config["model"]["normalization"] == "batch"
        assert config["optim"]["rows"]["weight_decay"] > 0


# The others differ from these in numbers alone.
@pytest.mark.parametrize(
    "name",
    [
        x
        for x in leaves("experiment")
        if not x.startswith("bars") or x.endswith(("frappe", "frappe_dlrm", "latest_dcn"))
    ],
)
def test_experiment_runs_one_batch(name, composed, tmp_path, request):
    text = (CONF / f"experiment/{name}.yaml").read_text()
    assert text.startswith(f"# @package _global_\n# python recipes/train.py experiment={name}\n")
    made = bars_overrides(name, tmp_path)
    if any(data in text for data in NEEDS_DATA) and not made:
        request.getfixturevalue("data_root")
    overrides = [f"experiment={name}", "trainer=cpu", "trainer.fast_dev_run=true", "callbacks/progress_bar=none"]
    record = train_here(composed("train", *overrides, *made), tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text())["status"] == "completed"
    metric = plain(composed("train", f"experiment={name}"))["monitor"]["metric"].removeprefix("val/")
    assert f"test/{metric}" in record.metrics
    assert ("test/calibrated_logloss" in record.metrics) == ("calibrate: true" in text or "  - bars_" in text)


@pytest.mark.parametrize(("limit", "has_test"), [(0, True), (1.0, False)])
def test_evaluation_when_there_are_no_test_rows_then_refused(limit, has_test):
    data = RowsOrNone(has_test=has_test)
    with pytest.raises(ValueError, match=r"there are no test rows to evaluate: name files of them"):
        check_test_rows({"trainer": {"limit_test_batches": limit}}, data)
    check_test_rows({"trainer": {"limit_test_batches": 5}}, RowsOrNone(has_test=True))


@pytest.mark.parametrize("group", ["callbacks", "logger"])
@pytest.mark.parametrize("override", ["{}=[]", "~{}"])
def test_group_when_nothing_is_chosen_then_there_is_nothing_of_it(composed, group, override):
    assert plain(composed("train", override.format(group)))[group] == {}


def test_training_when_there_are_no_training_rows_then_refused():
    data = SyntheticDataModule(batch_size=8, train_rows=0, val_rows=8, test_rows=8)
    with pytest.raises(ValueError, match=r"data: there are no training rows\. Let data\.train_rows be above 0"):
        check_train_rows(data)
    check_train_rows(RowsOrNone(has_test=False))


class RowsOrNone:
    """A data module of which it is known whether it has test rows."""

    def __init__(self, *, has_test: bool) -> None:
        self._has_test = has_test

    def has(self, split: str) -> bool:
        return split != "test" or self._has_test


def test_checkpoint_when_it_is_empty_then_every_reader_says_so(tmp_path):
    (tmp_path / "empty.ckpt").touch()
    with pytest.raises(DamagedCheckpointError, match=r"empty\.ckpt: the file is empty: its writing was cut off"):
        check_file(tmp_path / "empty.ckpt")
    with pytest.raises(SystemExit, match=r"ckpt_path: .*empty\.ckpt is empty, and no checkpoint"):
        load_checkpoint(str(tmp_path / "empty.ckpt"))


def test_calibrate_when_it_could_not_be_told_after_training_then_refused_before(composed, tmp_path):
    cfg = composed("train", "calibrate=true", "trainer=cpu", "data.train_rows=200", "trainer.limit_val_batches=0")
    with pytest.raises(ValueError, match="calibrate=true learns from validation rows, and there are none"):
        train_here(cfg, tmp_path)
    with pytest.raises(ValueError, match="is for the log loss of clicks, and NodeClassificationTask predicts"):
        check_calibrate({"calibrate": True}, object.__new__(NodeClassificationTask), None)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("callbacks=[default,early_stopping]", "callbacks.early_stopping"),
        ("optim/scheduler=plateau", "optim.scheduler_config"),
    ],
)
def test_validation_when_there_is_none_then_what_goes_by_it_is_refused_before_training(
    composed, tmp_path, override, name
):
    cfg = composed("train", override, "trainer=cpu", "data.train_rows=200", "trainer.limit_val_batches=0")
    with pytest.raises(ValueError, match=f"{name} goes by val/ne, and there are no validation rows"):
        train_here(cfg, tmp_path)


@pytest.mark.parametrize("name", ["default", "fast", "overfit", "profiler"])
def test_debug_runs_on_the_main_process_alone(name, composed):
    config = plain(composed("train", f"debug={name}"))
    assert config["trainer"]["devices"] == 1
    assert build_all(config["logger"]) == []


def test_library_classes_get_plain_containers(composed, datamodule):
    model = build(plain(composed("train", "model=dlrm"))["model"], partial=True)
    assert type(model.keywords["bottom_hidden"]) is list
