"""A training, from its configuration to its results: what ``recipes/train.py`` does."""

from __future__ import annotations

import secrets
import signal

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig
from pytorch_lightning.utilities.exceptions import SIGTERMException
from recipe_tools.advice import print_advice
from recipe_tools.baseline import logistic_regression
from recipe_tools.build import (
    Config,
    build,
    build_all,
    build_callbacks,
    build_datamodule,
    build_task,
    build_trainer,
    check_calibrate,
    check_checkpoint,
    check_monitored,
    check_train_rows,
    count_parameters,
    seed_everything,
    take_started,
    test_on_one_device,
    to_floats,
)
from recipe_tools.config_types import check_types
from recipe_tools.curves import draw_run
from recipe_tools.epochs import take_auto_epochs
from recipe_tools.on_ray import refuse_one_process, worker_arguments
from recipe_tools.precision import choose_precision
from recipe_tools.record import RunRecord
from recipe_tools.report import print_results, unknown_ids
from recipe_tools.sweep import optimized_value, recipe_job, refuse_reexecution

from lightning_recsys.data import CTRDataModule, TabularDataModule
from lightning_recsys.runtime import configure_worker


def run(cfg: DictConfig) -> float | None:
    """Train as ``cfg`` says, show the results; in a sweep, the value that it compares."""
    if cfg.seed is None:
        cfg.seed = secrets.randbits(32)
    with recipe_job(cfg) as record:
        try:
            launch(record)
        except SIGTERMException:  # Lightning would end with status 0, as if the run were complete
            raise SystemExit(128 + signal.SIGTERM) from None
        if rank_zero_only.rank == 0:
            print_results(cfg.name, record)
            if not record.sweeping:
                draw_run(record.path.parent)
            if (training_rows := record.details["training_rows"]) is not None:
                print_advice(record, training_rows=training_rows)
        # Alone there is nothing to compare with, and a run that max_steps ends may not have been validated.
        return optimized_value(record.metrics, record.config["optimized_metric"]) if record.sweeping else None


def launch(record: RunRecord) -> None:
    """Train in this process and those that its strategy launches, or where ``launcher`` says."""
    launcher = record.config.get("launcher")
    if launcher is None:
        train(record.config, record)
    else:
        take_auto_epochs(record.config)
        check_types(record.config)  # here, and not in each worker and at each of their starts
        build(launcher)(train, record)


def train(config: Config, record: RunRecord) -> None:
    """Fit, test the best checkpoint; the results stand in ``record``.

    Where several processes run the recipe, as under ``torchrun``, all of them fit, and rank 0 does the rest.
    """
    take_started(config["trainer"])
    take_auto_epochs(config)
    check_types(config)
    check_checkpoint(config["ckpt_path"])
    seed_everything(config["seed"])
    configure_worker()

    datamodule = build_datamodule(config)
    check_train_rows(datamodule)
    task = build_task(config, datamodule)
    check_calibrate(config, task, datamodule)
    check_monitored(config, datamodule, sweeping=record.sweeping)
    record.details["parameters"] = count_parameters(task.model, datamodule)
    record.details |= choose_precision(config, task, datamodule, sweeping=record.sweeping)

    loggers = build_all(config["logger"])
    trainer = build_trainer(config, callbacks=build_callbacks(config), logger=loggers, **worker_arguments(config))
    refuse_one_process(trainer, config)
    refuse_reexecution(trainer, sweeping=record.sweeping)

    trainer.fit(task, datamodule=datamodule, ckpt_path=config["ckpt_path"])
    record.metrics |= to_floats(trainer.callback_metrics)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else the test would wait for the others to add their counts
    if rank_zero_only.rank != 0:
        return
    best = getattr(trainer.checkpoint_callback, "best_model_path", "") or None
    record.details["checkpoint"] = best
    record.details["steps"] = trainer.global_step
    record.details["epochs"] = trainer.current_epoch  # completed ones
    record.details["best_epoch"] = getattr(trainer.checkpoint_callback, "best_epoch", None)
    score = getattr(trainer.checkpoint_callback, "best_model_score", None)
    record.details["best_score"] = None if score is None else float(score)  # of that epoch, by the monitored metric
    if score is not None:  # the epoch that is tested, and that a sweep compares, may not be the last one
        record.metrics[trainer.checkpoint_callback.monitor] = float(score)

    record.metrics |= test_on_one_device(
        config,
        task,
        datamodule,
        ckpt_path=best,
        calibrate=config["calibrate"],
        logger=loggers,
        enable_progress_bar=False,
    )
    if isinstance(datamodule, TabularDataModule) and not record.sweeping:
        record.details["baseline"] = logistic_regression(datamodule)
    record.details["best_normalized_entropy"] = datamodule.best_normalized_entropy
    record.details["skipped_rows"] = getattr(datamodule, "skipped_rows", {})  # by file, with on_bad_row=skip
    record.details["rows_read"] = getattr(datamodule, "rows_read", {})  # by file: rows = used + skipped + comments
    record.details["unknown_ids"] = unknown_ids(datamodule)
    is_ctr = isinstance(datamodule, CTRDataModule)
    record.details["training_rows"] = len(datamodule.rows("train")) if is_ctr else None
