"""Checkpoints of a run of Ray Train: written into its storage by all ranks, reported to Ray, and found again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pyarrow.fs
import pytorch_lightning as pl
import ray.train
from pytorch_lightning.callbacks import Checkpoint as CheckpointCallback
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, Result

from lightning_recsys.checkpoints.folder import has_checkpoint
from lightning_recsys.ray.backend import REPLACES

NAME = "checkpoint.ckpt"  # in the folder of each checkpoint of Ray, as Ray's own callback has it
METRICS = "metrics.json"  # beside it, where Ray is not told of it
PREFIX = "checkpoint_"
_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "abfs", "hdfs": "hdfs"}


class ReportCheckpoints(CheckpointCallback):
    """Saves a checkpoint in the run's storage at the end of each epoch, and reports it to Ray with the epoch's metrics.

    All ranks write their part straight into ``RunConfig(storage_path=...)``, a path that all nodes share or the URL of
    an object store. (Ray's own callback lets each rank write into a folder of its own machine. There the rows of other
    machines are lost.) All ranks report equally often, at the ends of epochs. Rank 0 reports the
    checkpoint, so Ray knows of it when all of it is written, and starts from it after a failure.

    Where workers are replaced one by one nothing is reported, since all ranks would have to, and some may be missing.
    The first worker writes the metrics beside the checkpoint then.

    Args:
        config: Which checkpoints are kept where nothing is reported.

    Raises:
        ValueError: the run has a ``storage_filesystem`` that no URL names.
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self._config = config or CheckpointConfig()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and report; all ranks do."""
        storage = ray.train.get_context().get_storage()
        # It ends like others that are made of the same step after a restart, and those replace it.
        name = f"{PREFIX}{trainer.current_epoch:06}_{trainer.global_step:09}"
        checkpoint = Checkpoint(storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
        trainer.save_checkpoint(path_in(checkpoint))
        metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if not _replaces_workers():
            ray.train.report(
                metrics,
                checkpoint=checkpoint if trainer.is_global_zero else None,
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
        elif trainer.is_global_zero:
            with storage.storage_filesystem.open_output_stream(f"{checkpoint.path}/{METRICS}") as file:
                file.write(json.dumps(metrics).encode())
            _remove_all_but_the_best(
                saved_checkpoints(storage.storage_filesystem, storage.experiment_fs_path), self._config
            )


def path_in(checkpoint: Checkpoint) -> str:
    """The path or URL of Lightning's checkpoint in one of Ray, such as ``Result.checkpoint``, for ``ckpt_path``.

    Raises:
        ValueError: it is on a filesystem that no URL names.
    """
    return f"{url_of(checkpoint.filesystem, checkpoint.path)}/{NAME}"


def url_of(filesystem: Any, path: str) -> str:
    """The path, or the URL, by which others than pyarrow know a place of one of its filesystems.

    Raises:
        ValueError: no URL names the filesystem.
    """
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return path
    if (scheme := _SCHEMES.get(filesystem.type_name)) is None:
        raise ValueError(
            f"checkpoints cannot be written to {filesystem!r}. Give RunConfig a storage_path that all nodes share, or a"
            " URL such as s3://bucket/runs, and no storage_filesystem."
        )
    return f"{scheme}://{path}"


def last_checkpoint() -> str | None:
    """The path or URL of the checkpoint that this run goes on from, for ``trainer.fit(ckpt_path=...)``, in a worker.

    That is the last one that was reported, by this run before a failure or by an earlier one of the same name and
    storage; ``None`` where there is none. Where workers are replaced one by one it is the last that is there.
    """
    checkpoint: Checkpoint | None
    if _replaces_workers():
        storage = ray.train.get_context().get_storage()
        saved = saved_checkpoints(storage.storage_filesystem, storage.experiment_fs_path)
        checkpoint = saved[-1][0] if saved else None
    else:
        checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else path_in(checkpoint)


def saved_checkpoints(filesystem: Any, folder: str) -> list[tuple[Checkpoint, dict[str, Any]]]:
    """The checkpoints in a run's storage that are whole, in the order of their steps, with their metrics.

    Args:
        filesystem: A filesystem of pyarrow's.
        folder: Path of the run's folder there.
    """
    saved = []
    for found in filesystem.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True)):
        checkpoint = Checkpoint(found.path, filesystem)
        if found.base_name.startswith(PREFIX) and has_checkpoint(path_in(checkpoint)):
            metrics = f"{found.path}/{METRICS}"
            is_there = filesystem.get_file_info(metrics).type == pyarrow.fs.FileType.File
            content = filesystem.open_input_stream(metrics).read() if is_there else b"{}"
            saved.append((checkpoint, json.loads(content)))
    return sorted(saved, key=lambda each: each[0].path)


def with_saved(result: Result) -> Result:
    """The result of a run that has reported nothing, with the checkpoints that are in its storage."""
    saved = saved_checkpoints(result.filesystem, result.path)
    if saved:
        result.checkpoint, result.metrics = saved[-1]
        result.best_checkpoints = saved
    return result


def _replaces_workers() -> bool:
    """Whether Ray replaces single workers of this one's run."""
    return REPLACES in os.environ


def _remove_all_but_the_best(saved: list[tuple[Checkpoint, dict[str, Any]]], config: CheckpointConfig) -> None:
    """Remove what Ray would remove if it knew of these checkpoints: it keeps the last one, whatever its score."""
    if config.num_to_keep is None:
        return
    *before, _ = saved
    score = config.checkpoint_score_attribute
    if score is not None:
        sign = -1 if config.checkpoint_score_order == "min" else 1
        before.sort(key=lambda each: _number(each[1], score, sign))
    surplus = before[: max(len(saved) - config.num_to_keep, 0)]
    for checkpoint, _ in surplus:
        filesystem: Any = checkpoint.filesystem
        filesystem.delete_dir(checkpoint.path)


def _number(metrics: Mapping[str, Any], name: str, sign: int) -> float:
    return sign * float(metrics[name]) if name in metrics else float("-inf")
