"""From a resolved config (plain containers) to live objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import ProgressBar
from torch import nn

from lightning_recsys.callbacks import CalibratedLogLoss, NormalizedEntropyMonitor
from lightning_recsys.checkpoints import FolderCheckpointIO, has_checkpoint
from lightning_recsys.data.tables.schema import FEATURES
from lightning_recsys.embeddings import EmbeddingBagCollection, TableBackend
from lightning_recsys.launchers import started_processes
from lightning_recsys.tasks import CTRTask, Task
from lightning_recsys.typed_yaml import load_yaml

Config = dict[str, Any]
SCHEMA_CHANGES = "schema_changes"  # in the configuration of data: what the command line changes of a schema file


def plain(cfg: DictConfig) -> Config:
    """A composed configuration in plain containers, without what depends on the folder it is read in."""
    return self_contained(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]


def self_contained(config: Config) -> Config:
    """The config without what depends on the folder it is read in: a data root is absolute, a schema file read in."""
    data = dict(config["data"])
    if isinstance(schema := data.get("schema"), str):
        data["root"] = data["root"] or str(Path(schema).parent)
        schema, changes = load_yaml(Path(schema)), data.pop(SCHEMA_CHANGES, {})
        data["schema"] = merged(by_name(schema), changes) if isinstance(schema, dict) else schema
    elif isinstance(schema, dict):
        data["schema"] = by_name(schema)
    if isinstance(data.get("root"), str):
        data["root"] = str(Path(data["root"]).expanduser().absolute())
    return {**config, "data": data}


def by_name(schema: Config) -> Config:
    """A schema in which what may be written short stands by its names, so that one of them can be changed alone.

    >>> by_name({"files": "a.csv", "label": "click", "dense": ["age"]})
    {'files': {'train': 'a.csv'}, 'label': {'column': 'click'}, 'dense': {'age': None}}
    >>> by_name({"files": {"path": "a.csv", "separator": ";"}})
    {'files': {'train': {'path': 'a.csv', 'separator': ';'}}}
    """
    long = dict(schema)
    for key, name in (("files", "train"), ("label", "column")):
        given = long.get(key)
        if isinstance(given, str | list) or (isinstance(given, dict) and "path" in given):
            long[key] = {name: given}
    for key in FEATURES:
        names = long.get(key)
        if isinstance(names, list) and all(isinstance(x, str) for x in names) and len(set(names)) == len(names):
            long[key] = dict.fromkeys(names)
    return long


def merged(before: Config, changes: Config) -> Config:
    """Nested dictionaries with some values changed."""
    both = {
        key: merged(before[key], value) if isinstance(value, dict) and isinstance(before.get(key), dict) else value
        for key, value in changes.items()
    }
    return {**before, **both}


def build(node: Config, *, partial: bool = False) -> Any:
    """The object that ``node["_target_"]`` names, or with ``partial`` a callable that awaits more arguments.

    Classes get plain containers, never OmegaConf's. What they raise is raised as it is.
    """
    try:
        return instantiate(node, _convert_="all", **({"_partial_": True} if partial else {}))
    except InstantiationException as error:
        if (cause := error.__cause__) is None:
            raise
        cause.add_note(f"Raised while building {node.get('_target_')} from its config.")
    raise cause  # out here, so that it keeps what it was raised from


def build_all(nodes: Config) -> list[Any]:
    """One object for each entry that has a ``_target_``."""
    return [build(node) for node in nodes.values() if node and "_target_" in node]


def build_callbacks(config: Config) -> list[pl.Callback]:
    """The callbacks that this run can use.

    The progress bar only where ``trainer.enable_progress_bar`` is on, else Lightning refuses it; normalized entropy
    only of clicks.
    """
    callbacks, unused = build_all(config["callbacks"]), []
    if not config["trainer"]["enable_progress_bar"]:
        unused.append(ProgressBar)
    if not issubclass(get_object(config["task"]["_target_"]), CTRTask):
        unused.append(NormalizedEntropyMonitor)
    return [callback for callback in callbacks if not isinstance(callback, tuple(unused))]


def build_datamodule(
    config: Config, *, checkpoint: dict[str, Any] | None = None, stage: str = "test"
) -> pl.LightningDataModule:
    """The data module, set up: it knows ``num_dense`` and ``fields``, which the model needs.

    With a checkpoint it knows them from there, and no training rows are read; it is set up for ``stage``.

    Raises:
        FileNotFoundError: a file is not there; a note says how to name the folder of the data sets.
    """
    datamodule: pl.LightningDataModule = build(config["data"])
    if checkpoint is not None and (state := checkpoint.get(type(datamodule).__qualname__)) is not None:
        datamodule.load_state_dict(state)
    try:
        datamodule.prepare_data()
        datamodule.setup("fit" if checkpoint is None else stage)
    except FileNotFoundError as error:
        if checkpoint is None and (root := config["data"].get("root")) is not None:  # a checkpoint has its data's root
            folder = Path(config["paths"]["data"]).expanduser().absolute()
            if Path(root).is_relative_to(folder):
                error.add_note(
                    f"Data sets lie below {folder}: name another folder by paths.data=FOLDER, or by the "
                    "environment variable LIGHTNING_RECSYS_DATA."
                )
        raise
    return datamodule


def build_task(config: Config, datamodule: Any) -> Task:
    """The model for these data, and the task that trains it. The checkpoint will carry ``config``.

    Raises:
        ValueError: the model is for graphs and the data are none, or the other way round.
    """
    optim, arguments = config["optim"], datamodule.model_arguments
    if "num_classes" in arguments and not arguments.keys() <= _parameters(config["model"]):
        raise ValueError(f"model: {config['model']['_target_']} cannot be trained on a graph: use model=graphsage.")
    if "num_classes" not in arguments and "num_classes" in required(config["model"]["_target_"]):
        raise ValueError(
            f"data: {config['model']['_target_']} needs a graph, and {config['data']['_target_']} has none: use "
            "data=cora, amazon_computers, graph, links or movielens_graph."
        )
    options = {"row_optimizer": build(optim["rows"]), **config["embeddings"]}
    if optim["first_order_rows"] is not None:
        options["first_order_optimizer"] = build(optim["first_order_rows"])
    model = build_model(config["model"], arguments, options)
    task: Task = build(config["task"], partial=True)(
        model,
        optimizer=build_dense_optimizer(optim["dense"]),
        scheduler=build(optim["scheduler"]) if optim["scheduler"] is not None else None,
        scheduler_config=optim["scheduler_config"],
        config=config,
    )
    return task


def build_model(node: Config, arguments: Config, options: Config) -> nn.Module:
    """The model, from its own arguments and those that data and embedding tables give it.

    Raises:
        TypeError: its signature is not that of a model here; the message names what is missing.
    """
    target = node["_target_"]
    lacks = sorted(arguments.keys() - _parameters(node))
    lacks += [name for name in options if not _takes(get_object(target), name)]
    if lacks:
        raise TypeError(
            f"model: {target} takes no {', '.join(lacks)}. A model is made with num_dense and fields, which the data "
            "know, and with the options of its embedding tables: end its __init__ with **options, and hand them on to "
            "field_embeddings(fields, embedding_dim, **options) (docs/own_model.md)."
        )
    model: nn.Module = build(node, partial=True)(**arguments, **options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {target} made {type(model).__name__}, which is no torch.nn.Module.")
    if "num_classes" not in arguments:  # those of graphs take their own
        try:
            inspect.signature(model.forward).bind(dense=None, sparse=None)
        except TypeError as error:
            raise TypeError(
                f"model: {target}.forward has to take (dense, sparse), numeric features [B, num_dense] and "
                f"SparseFeatures, and to return logits [B]: {error}."
            ) from None
    return model


def build_dense_optimizer(node: Config) -> Any:
    """A callable that awaits parameters; without ``fused``, which all leaves set, where there is no such kernel."""
    make = build(node)
    if isinstance(make, functools.partial) and not _takes(make.func, "fused"):
        options = {name: value for name, value in make.keywords.items() if name != "fused"}
        return functools.partial(make.func, *make.args, **options)
    return make


def required(target: str) -> set[str]:
    parameters = inspect.signature(get_object(target)).parameters.values()
    return {x.name for x in parameters if x.default is x.empty and x.kind is x.KEYWORD_ONLY}


def _parameters(node: Config) -> set[str]:
    return set(inspect.signature(get_object(node["_target_"])).parameters)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(x.name == name or x.kind == x.VAR_KEYWORD for x in parameters)


def seed_everything(seed: Any) -> None:
    """Seed Python, NumPy, torch and loader workers with the configuration's ``seed``.

    Raises:
        ValueError: it is no seed for all of them.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise ValueError(f"seed must be a whole number from 0 to {(1 << 32) - 1}, got {seed!r}.")
    pl.seed_everything(seed, workers=True, verbose=False)


def check_checkpoint(path: str | None) -> None:
    """See that the checkpoint of ``ckpt_path`` is there, unless it is a name that Lightning looks up.

    Raises:
        ValueError: there is none.
    """
    if path is None or path in ("best", "last", "hpc") or path.startswith("registry"):
        return
    if not has_checkpoint(path):
        where = "" if "://" in path else f", which would be {Path(path).absolute()}"
        raise ValueError(f"ckpt_path: there is no checkpoint {path}{where}.")


def take_started(trainer: Config) -> None:
    """Set ``auto`` of ``num_nodes`` and ``devices`` to what torchrun or SLURM has started.

    On a plain machine there is one node, and ``devices=auto`` is left to Lightning: one process on CPUs, all GPUs.

    Raises:
        ValueError: nodes run different numbers of processes.
    """
    asked = [name for name in ("num_nodes", "devices") if trainer[name] == "auto"]
    if not asked:
        return
    started = started_processes()
    told = {"num_nodes": 1} if started is None else {"num_nodes": started.num_nodes, "devices": started.devices}
    trainer |= {name: told[name] for name in asked if name in told}


def build_trainer(config: Config, **arguments: Any) -> pl.Trainer:
    """The trainer of the config, with arguments that the recipe decides. It loads folder checkpoints, too."""
    is_lightnings = isinstance(arguments.get("strategy", config["trainer"]["strategy"]), str)
    if is_lightnings and "plugins" not in config["trainer"]:  # ours can do it by themselves
        arguments["plugins"] = [FolderCheckpointIO()]
    trainer: pl.Trainer = build(config["trainer"], partial=True)(**arguments)
    return trainer


def check_calibrate(config: Config, task: Task, datamodule: Any) -> None:
    """See that what ``calibrate`` learns from will be there after the training.

    Raises:
        ValueError: it is not.
    """
    if not config["calibrate"]:
        return
    if not isinstance(task, CTRTask):
        raise ValueError(f"calibrate=true is for the log loss of clicks, and {type(task).__name__} predicts others.")
    if not _is_validated(config, datamodule):
        raise ValueError("calibrate=true learns from validation rows, and there are none: set it to false.")


def check_monitored(config: Config, datamodule: Any, *, sweeping: bool) -> None:
    """See that there will be a metric of validation rows for what goes by one.

    Raises:
        ValueError: there are no validation rows.
    """
    if _is_validated(config, datamodule):
        return
    callbacks = config["callbacks"] or {}
    waiting = {f"callbacks.{x}": y for x, y in callbacks.items() if str(y.get("_target_")).endswith("EarlyStopping")}
    monitored = {name: callback.get("monitor") for name, callback in waiting.items()}
    monitored["optim.scheduler_config"] = (config["optim"].get("scheduler_config") or {}).get("monitor")
    monitored["optimized_metric"] = config["optimized_metric"] if sweeping else None
    for name, metric in monitored.items():
        if str(metric).startswith("val/"):
            raise ValueError(
                f"{name} goes by {metric}, and there are no validation rows: hold some back, leave"
                " trainer.limit_val_batches above 0, or choose a metric of training."
            )


def _is_validated(config: Config, datamodule: Any) -> bool:
    return bool(datamodule.has("validation") and config["trainer"].get("limit_val_batches") != 0)


def check_train_rows(datamodule: Any) -> None:
    """See that there is something to train on.

    Raises:
        ValueError: there are no training rows.
    """
    if not datamodule.has("train"):
        raise ValueError(
            "data: there are no training rows. Let data.train_rows be above 0 with data=synthetic, and elsewhere name"
            " files or a split that leaves some."
        )


def check_test_rows(config: Config, datamodule: Any) -> None:
    """See that there is something to evaluate.

    Raises:
        ValueError: there are no test rows.
    """
    if not datamodule.has("test") or config["trainer"].get("limit_test_batches") == 0:
        raise ValueError(
            "there are no test rows to evaluate: name files of them, as by +data.schema.files.test=FILE with "
            "data=tabular, or hold some rows back, and leave trainer.limit_test_batches above 0."
        )


def test_on_one_device(
    config: Config,
    task: Task,
    datamodule: pl.LightningDataModule,
    *,
    ckpt_path: str | None,
    calibrate: bool,
    **arguments: Any,
) -> dict[str, float]:
    """Metrics on the test rows, each row counted exactly once: several workers would have to share them evenly.

    Tables without rows (``embeddings.device=meta``) are where the run's strategy has them. With ``calibrate`` the
    validation rows come first, from which the calibrated log loss learns.
    """
    if not any(isinstance(module, TableBackend) and module.is_meta for module in task.modules()):
        arguments["strategy"] = "auto"
    arguments |= {"devices": 1, "num_nodes": 1, "enable_checkpointing": False, "profiler": None}
    if calibrate:
        arguments["callbacks"] = [*arguments.get("callbacks", []), CalibratedLogLoss()]
        unlogged = build_trainer(config, **arguments | {"logger": False})  # its metrics stand in the log already
        unlogged.validate(task, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False)
    trainer = build_trainer(config, **arguments)
    trainer.test(task, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False)
    return to_floats(trainer.callback_metrics)


def to_floats(metrics: Any) -> dict[str, float]:
    """Lightning's tensors as numbers."""
    return {name: float(value) for name, value in metrics.items()}


def count_parameters(model: nn.Module, datamodule: Any) -> dict[str, int]:
    """Dense parameters, embedding rows (ids of all fields) and the numbers that those rows hold."""
    tables = [
        table for module in model.modules() if isinstance(module, EmbeddingBagCollection) for table in module.tables
    ]
    return {
        "dense": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "embedding": sum(table.num_embeddings * table.embedding_dim for table in tables),
        "embedding_rows": sum(datamodule.fields.values()),
    }
