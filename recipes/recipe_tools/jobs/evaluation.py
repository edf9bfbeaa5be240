"""The test of a checkpoint: what ``recipes/evaluate.py`` does."""

from __future__ import annotations

from omegaconf import DictConfig
from pytorch_lightning.callbacks import ProgressBar
from recipe_tools.build import (
    Config,
    build_callbacks,
    build_datamodule,
    build_task,
    check_calibrate,
    check_test_rows,
    count_parameters,
    seed_everything,
    test_on_one_device,
)
from recipe_tools.config_types import check_types
from recipe_tools.record import RunRecord
from recipe_tools.report import print_results, unknown_ids
from recipe_tools.sweep import recipe_job
from recipe_tools.trained import load_checkpoint

from lightning_recsys.runtime import configure_worker


def run(cfg: DictConfig) -> None:
    """Test as ``cfg`` says."""
    with recipe_job(cfg) as record:
        evaluate(record.config, record)


def evaluate(config: Config, record: RunRecord) -> None:
    """Test the checkpoint, print; the results stand in ``record``."""
    check_types(config)
    seed_everything(config["seed"])
    configure_worker()
    datamodule = build_datamodule(config, checkpoint=load_checkpoint(config["ckpt_path"]))
    check_test_rows(config, datamodule)
    task = build_task(config, datamodule)
    check_calibrate(config, task, datamodule)
    record.details["parameters"] = count_parameters(task.model, datamodule)
    progress = [callback for callback in build_callbacks(config) if isinstance(callback, ProgressBar)]
    record.metrics |= test_on_one_device(
        config,
        task,
        datamodule,
        ckpt_path=config["ckpt_path"],
        calibrate=config["calibrate"],
        logger=False,
        callbacks=progress,
    )
    record.details["best_normalized_entropy"] = datamodule.best_normalized_entropy
    record.details["rows_read"] = getattr(datamodule, "rows_read", {})
    record.details["unknown_ids"] = unknown_ids(datamodule, ["test"])
    print_results(config["name"], record)
