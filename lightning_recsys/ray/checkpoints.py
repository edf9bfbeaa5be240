"""Checkpoints of a run of Ray Train: written into its storage by all ranks, reported to Ray, and found again."""

from __future__ import annotations

from typing import Any

import pyarrow.fs
import pytorch_lightning as pl
import ray.train
from pytorch_lightning.callbacks import Checkpoint as CheckpointCallback
from ray.train import Checkpoint, CheckpointUploadMode

NAME = "checkpoint.ckpt"  # in the folder of each checkpoint of Ray, as Ray's own callback has it
_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "abfs", "hdfs": "hdfs"}


class ReportCheckpoints(CheckpointCallback):
    """Saves a checkpoint in the run's storage at the end of each epoch, and reports it to Ray with the epoch's metrics.

    All ranks write their part straight into ``RunConfig(storage_path=...)``, a path that all nodes share or the URL of
    an object store. (Ray's own callback lets each rank write into a folder of its own machine. There the rows of other
    machines are lost.) All ranks report equally often, at the ends of epochs. Rank 0 reports the
    checkpoint, so Ray knows of it when all of it is written, and starts from it after a failure.

    Raises:
        ValueError: the run has a ``storage_filesystem`` that no URL names.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and report; all ranks do."""
        storage = ray.train.get_context().get_storage()
        # It ends like others that are made of the same step after a restart, and those replace it.
        name = f"checkpoint_{trainer.current_epoch:06}_{trainer.global_step:09}"
        checkpoint = Checkpoint(storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
        trainer.save_checkpoint(path_in(checkpoint))
        metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
        ray.train.report(
            metrics | {"epoch": trainer.current_epoch, "step": trainer.global_step},
            checkpoint=checkpoint if trainer.is_global_zero else None,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )


def path_in(checkpoint: Checkpoint) -> str:
    """The path or URL of Lightning's checkpoint in one of Ray, such as ``Result.checkpoint``, for ``ckpt_path``.

    Raises:
        ValueError: it is on a filesystem that no URL names.
    """
    filesystem: Any = checkpoint.filesystem
    path = f"{checkpoint.path}/{NAME}"
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
    storage; ``None`` where there is none.
    """
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else path_in(checkpoint)
