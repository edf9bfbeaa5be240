"""Predictions of a checkpoint into a file: what ``recipes/predict.py`` does."""

from __future__ import annotations

import logging
from pathlib import Path

from hydra.utils import get_object
from omegaconf import DictConfig
from pytorch_lightning.callbacks import ProgressBar
from recipe_tools.build import (
    Config,
    build_callbacks,
    build_datamodule,
    build_task,
    build_trainer,
    plain,
    seed_everything,
)
from recipe_tools.config_types import check_complete, check_types
from recipe_tools.jobs.graph_predictions import predict_graph
from recipe_tools.quiet import be_quiet
from recipe_tools.record import isolated_job
from recipe_tools.report import print_predictions
from recipe_tools.trained import load_checkpoint, makes_rows, without_tables

from lightning_recsys.callbacks import PredictionWriter
from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.files import find_files
from lightning_recsys.runtime import configure_worker
from lightning_recsys.tasks import CTRTask, LinkPredictionTask, NodeClassificationTask, load_for_prediction

log = logging.getLogger("predict")


def run(cfg: DictConfig) -> None:
    """Predict as ``cfg`` says, or end the program with a sentence that says what to do."""
    be_quiet()
    check_complete(cfg)
    config = plain(cfg)
    if Path(config["out"]).exists() and not config["overwrite"]:
        raise SystemExit(f"{config['out']} exists. Choose another out=, or overwrite=true.")
    try:
        with isolated_job():
            predict(config)
    except (ValueError, FileNotFoundError, ImportError) as error:
        # Of what was named, or of the rows: a sentence that says what to do. Of a model of one's own it may be another
        # error, whose place `hydra.verbose=predict` tells.
        log.debug("It was raised here:", exc_info=error)
        raise SystemExit("\n".join([str(error), *getattr(error, "__notes__", ())])) from None


def predict(config: Config) -> None:
    """Write the predictions, and print what they are of."""
    check_types(config)
    kind = get_object(target := config["task"]["_target_"])
    if issubclass(kind, NodeClassificationTask | LinkPredictionTask):
        predict_graph(config)
        return
    if not issubclass(kind, CTRTask):
        raise ValueError(
            "checkpoint: predictions are of clicks, of classes of nodes, and of items for users, but this model was "
            f"trained by {target}."
        )
    if config["id"] is not None and config["rows"] is None:
        raise ValueError(f"id={config['id']} is a column of the rows that data= names, of which there are none here.")
    seed_everything(config["seed"])
    configure_worker()
    if config["rows"] is not None:
        if get_object(config["data"]["_target_"]) is not TabularDataModule:
            raise ValueError(f"data: the model was trained on {config['data']['_target_']}, not on files of a table.")
        files = [str(path.absolute()) for path in find_files(config["rows"], name="data")]
        config["data"]["schema"]["files"]["predict"] = files
    datamodule = build_datamodule(config, checkpoint=load_checkpoint(config["checkpoint"]), stage="predict")
    if not datamodule.has(datamodule.predicted_split):
        raise ValueError("data: the run has no test rows to predict. Name others, as in data=new.csv.")
    if makes_rows(config):  # which rows there are, its strategy knows
        task, arguments = build_task(config, datamodule), {}
    else:
        task = load_for_prediction(build_task(without_tables(config), datamodule), config["checkpoint"])
        arguments = {"strategy": "auto"}
    rows = None
    if config["rows"] is not None:
        rows = datamodule.predicted_rows(config["id"])
        next(iter(rows), None)  # a column that is not there is told here, and not by a worker
    writer = PredictionWriter(config["out"], rows, columns=(config["id"] or "row", "prediction"))
    bars = [callback for callback in build_callbacks(config) if isinstance(callback, ProgressBar)]
    trainer = build_trainer(
        config,
        devices=1,
        num_nodes=1,
        callbacks=[*bars, writer],
        logger=False,
        enable_checkpointing=False,
        profiler=None,
        **arguments,
    )
    path = None if arguments else config["checkpoint"]
    trainer.predict(task, datamodule=datamodule, ckpt_path=path, return_predictions=False)
    log.info("Wrote %s: %s predictions.", writer.path, f"{writer.num_rows:,}")
    print_predictions(config["out"], writer.num_rows, datamodule)
