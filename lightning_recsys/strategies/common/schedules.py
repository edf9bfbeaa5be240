"""The schedules that would make workers that run free wait for each other after all, or wait for ever."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from torch import nn
from torchmetrics import Metric

from lightning_recsys.embeddings import EmbeddingBagCollection, LocalBackend
from lightning_recsys.embeddings.replication import num_replicas
from lightning_recsys.strategies.common.workers.living import among_the_living


def clocks_of_steps(trainer: pl.Trainer) -> list[Timer]:
    """The timers that look at each batch whether the time is up, such as that of ``trainer.max_time``."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    timers = [x for x in callbacks if isinstance(x, Timer)]
    return [x for x in timers if x._interval == "step" and x._duration is not None]


def stops_within_epochs(trainer: pl.Trainer) -> list[str]:
    """The settings by which ranks meet, or end, after numbers of steps within an epoch."""
    validates = trainer.enable_validation
    reasons = {
        "trainer.val_check_interval": validates and not _is_one_epoch(getattr(trainer, "val_check_interval", None)),
        "trainer.check_val_every_n_epoch=None": validates and trainer.check_val_every_n_epoch is None,
        "every_n_train_steps of ModelCheckpoint": any(
            isinstance(x, ModelCheckpoint) and x._every_n_train_steps for x in trainer.checkpoint_callbacks
        ),
        "trainer.max_steps": trainer.max_steps >= 0,
        "trainer.min_steps": bool(trainer.min_steps),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _is_one_epoch(interval: object) -> bool:
    return isinstance(interval, float) and interval == 1.0  # the whole number 1 is a batch; a time is not kept there


def refuse_clocks(trainer: pl.Trainer) -> None:
    """Lightning asks rank 0 at every batch whether a time is up, which would keep all workers in step.

    Raises:
        ValueError: with more than one worker, the trainer, or a callback, saves or validates by the time, or training
            ends by the time and ranks stop at numbers of steps as well.
    """
    if trainer.world_size == 1:
        return
    reasons = {
        "train_time_interval of ModelCheckpoint": any(
            isinstance(x, ModelCheckpoint) and x._train_time_interval is not None for x in trainer.checkpoint_callbacks
        ),
        "a time as trainer.val_check_interval": getattr(trainer, "_val_check_time_interval", None) is not None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(
            f"{found[0]} makes every worker wait for all others at every batch. Count epochs or steps instead"
            " (every_n_epochs, every_n_train_steps, check_val_every_n_epoch)."
        )
    others = stops_within_epochs(trainer)
    if others and clocks_of_steps(trainer):
        raise ValueError(
            f"trainer.max_time (a Timer with interval='step') ends training at each worker's own step, and {others[0]}"
            " stops workers at equal steps: some would wait for others that have ended. Set one of the two, or use a"
            " Timer with interval='epoch'."
        )


def refuse_metrics_of_all_ranks(module: nn.Module) -> None:
    """A metric with ``dist_sync_on_step`` reduces over all ranks at every step.

    Raises:
        ValueError: the module has one.
    """
    found = [path for path, x in module.named_modules() if isinstance(x, Metric) and x.dist_sync_on_step]
    if found:
        raise ValueError(
            f"{found[0]} has dist_sync_on_step=True, which makes every worker wait for all others at every step. Leave"
            " it out: a metric's value of an epoch is that of all workers."
        )


def refuse_rows_of_all_ranks(module: nn.Module, *, strategy: str) -> None:
    """Tables in the workers' memory gather the gradients of all ranks at every update.

    Args:
        module: The model, its tables bound to what a run trains them in.
        strategy: Name of its class, for the message.

    Raises:
        ValueError: the module trains such a table.
    """
    trained = {path: x for path, x in module.named_modules() if isinstance(x, EmbeddingBagCollection) and x.trainable}
    for path, collection in trained.items():
        backend = collection.embedding_bags
        if isinstance(backend, LocalBackend) and num_replicas(backend.replica_group) > 1:
            raise ValueError(
                f"{strategy} is asynchronous, and the rows of {path} are in every worker's memory, where each update"
                " gathers the gradients of all ranks: no worker could run ahead of another. Keep them on servers"
                " (derive the strategy from ServedStrategy, and name embedding servers in server_specs), bind them to"
                " a backend of your own in bind_backends, or freeze them (requires_grad_(False))."
            )


def refuse_saving_by_steps(trainer: pl.Trainer, *, setting: str) -> None:
    """One that waits in a round that another began at another step waits for ever, if that one waits to save.

    Args:
        trainer: The trainer, whose workers wait for each other by the time.
        setting: The setting of the strategy that makes them so, for the message.

    Raises:
        ValueError: a callback saves after numbers of steps.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps:
            raise ValueError(
                f"{setting} in the foreground has trainers wait for each other by the time, and"
                f" callbacks.model_checkpoint.every_n_train_steps={callback._every_n_train_steps} by steps: each would"
                " wait for the other. Count steps from round to round (strategy.gap, strategy.interval=null), or save"
                " at the end of epochs (every_n_epochs)."
            )


@dataclass(frozen=True)
class _Schedule:
    """A setting of the trainer by which a rank stops within an epoch.

    Args:
        setting: Its name and value.
        times: How often it does so in the first epoch.
        drifts: It goes on counting from one epoch to the next.
    """

    setting: str
    times: int
    drifts: bool = True


def refuse_different_schedules(trainer: pl.Trainer) -> None:
    """Let ranks have unequal numbers of batches, but not of occasions on which they wait for each other.

    All ranks call this together, once they know their numbers of batches.

    Raises:
        ValueError: they would come to such an occasion different numbers of times, or at different times.
    """
    own = trainer.num_training_batches
    if math.isinf(own):  # on all ranks, as Lightning asks them; nobody knows what comes
        return
    schedules = list(_schedules(trainer, int(own)))

    def gather() -> list[tuple[int, list[int]]]:
        per_rank: list[tuple[int, list[int]]] = [(0, [])] * dist.get_world_size()
        dist.all_gather_object(per_rank, (int(own), [x.times for x in schedules]))
        return per_rank

    per_rank = among_the_living(gather)
    steps = [_steps(trainer, batches) for batches, _ in per_rank]
    if len({batches for batches, _ in per_rank}) == 1 or _ends_before(trainer, min(steps)):
        return
    for schedule, *times in zip(schedules, *(times for _, times in per_rank), strict=True):
        if schedule.drifts and not _has_one_epoch(trainer):
            raise ValueError(
                f"{schedule.setting} counts steps over all epochs, of which the ranks have {steps} in each: they would"
                " stop for it at different times, each waiting for all others. Count epochs instead"
                " (trainer.max_epochs, trainer.val_check_interval=1.0, every_n_epochs)."
            )
        if len(set(times)) > 1:
            raise ValueError(
                f"with {schedule.setting} the ranks, whose numbers of training batches differ, would stop"
                f" {times} times in an epoch, each waiting for all others. Stop at the end of epochs only"
                " (trainer.val_check_interval=1.0, no every_n_train_steps, no max_steps)."
            )


def _schedules(trainer: pl.Trainer, batches: int) -> Iterator[_Schedule]:
    """The same ones in the same order on all ranks."""
    steps = _steps(trainer, batches)
    validation = trainer.val_check_batch if trainer.enable_validation else None
    if validation and not math.isinf(validation):
        over_epochs = trainer.check_val_every_n_epoch is None
        yield _Schedule(f"trainer.val_check_interval={int(validation)}", batches // int(validation), over_epochs)
    for number, callback in enumerate(trainer.checkpoint_callbacks):
        if isinstance(callback, ModelCheckpoint) and (period := callback._every_n_train_steps):
            yield _Schedule(f"ModelCheckpoint {number}'s every_n_train_steps={period}", steps // period)
    if trainer.min_steps:  # some have made them at the end of an epoch at which others go on
        yield _Schedule(f"trainer.min_steps={trainer.min_steps}", 0)
    if trainer.max_steps >= 0:  # stops some within an epoch that others complete
        yield _Schedule(f"trainer.max_steps={trainer.max_steps}", int(steps <= trainer.max_steps))


def _steps(trainer: pl.Trainer, batches: int) -> int:
    """Optimizer steps in an epoch; the last one takes what is left."""
    return -(-batches // trainer.accumulate_grad_batches)


def _ends_before(trainer: pl.Trainer, steps: int) -> bool:
    """Whether the run ends before any rank has made so many steps."""
    return trainer.global_step == 0 and 0 <= trainer.max_steps < steps


def _has_one_epoch(trainer: pl.Trainer) -> bool:
    """Whether the run begins and ends with the same epoch, so that all ranks begin to count at the same batch."""
    return trainer.global_step == 0 and trainer.max_epochs == 1


def refuse_unequal_batches(trainer: pl.Trainer) -> None:
    """Refuse ranks with unequal numbers of training batches; all ranks call this.

    Raises:
        ValueError: the ranks have unequal numbers of them.
    """
    per_rank: list[int | float] = [0] * trainer.world_size
    dist.all_gather_object(per_rank, trainer.num_training_batches)  # inf where a loader has no length
    if len(set(per_rank)) > 1:
        raise ValueError(
            "every rank needs the same number of training batches, or the first to finish leaves the others waiting for"
            f" ever; got {per_rank} on ranks 0 to {trainer.world_size - 1}. Drop or repeat batches in the loader, or"
            f" set trainer.limit_train_batches={min(per_rank)}."
        )
