"""Which runs lease their epochs a piece at a time, and what Lightning has to be told for that."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.callbacks import GradientAccumulationScheduler

from lightning_recsys.data import BatchLoader
from lightning_recsys.parameter_server.meetings import ShareDealer
from lightning_recsys.strategies.common.look_ahead import unwrapped
from lightning_recsys.strategies.common.run.changes import RunChanges
from lightning_recsys.strategies.common.schedules import stops_within_epochs
from lightning_recsys.strategies.common.workers.living import among_the_living, living_ranks

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy


def deal_shares(strategy: RecsysStrategy) -> ShareDealer | None:
    """Let workers lease the batches of an epoch, so that how many each of them trains is not known before.

    Lightning is told what it is told of a loader without a length: it looks one batch ahead to know the last one, and
    validates behind that. Progress bars show the share that each worker would have had. Shares stay fixed where ranks
    meet after numbers of steps within an epoch, where a learning rate follows the steps of its worker (a schedule that
    was made for so many may refuse another one), where a part of the epoch is trained, and where the data are not ours.

    Args:
        strategy: The strategy of this worker, as training starts.

    Returns:
        The object that deals the shares; ``None`` where shares stay fixed.
    """
    trainer, changes, place = strategy.task.trainer, strategy.changes, strategy.run_servers.meeting_place()
    if place is None or changes is None:
        return None
    loop = trainer.fit_loop
    combined, fetcher = loop._combined_loader, loop._data_fetcher
    if combined is None or fetcher is None or len(combined.flattened) != 1:
        return None
    (loader,) = combined.flattened
    if not isinstance(unwrapped(loader), BatchLoader) or not _trains_whole_epochs(trainer):
        return None
    living = dist.get_world_size()  # the loader was made when these, or more, shared the rows
    if not (loader.num_shares == place.size or max(living, 2) <= loader.num_shares < place.size):
        return None
    if loader.is_within_epoch:  # of a run that is resumed: the ranks go on where they were
        return None
    dealer = ShareDealer(
        place,
        rank=trainer.global_rank,
        accumulated=_accumulated(trainer),
        cancelled=strategy.run_servers.is_asked_to_end,
        tells=lambda: trainer.is_global_zero,
        passes=0 if strategy.joining is None else strategy.joining.passes,
    )
    loader.deal(dealer, rank=trainer.global_rank, num_shares=place.size)
    share = loader.share_length
    combined.limits = [math.inf]
    loop.max_batches = trainer.val_check_batch = math.inf
    changes.show_batches(share)
    if trainer.current_epoch == 0 or loop.is_resuming or loop.epoch_loop.restarting:
        iter(fetcher)  # as Lightning does itself at the start of other epochs; this one has begun with a length
    return dealer


def share_validation(strategy: RecsysStrategy, changes: RunChanges) -> None:
    """Let the workers that live share all rows of each validation, and bring their metrics together.

    Args:
        strategy: The strategy of this worker, before a fit.
        changes: The run's temporary changes to Lightning, to which these are added.
    """
    validating: tuple[int, ...] = ()

    def share() -> None:
        nonlocal validating
        strategy.barrier("who validates")
        living = living_ranks()
        # One that has joined does not know who validated last, and loaders are asked for by all workers together.
        if strategy.reduce_boolean_decision(living != validating, all=False):
            validating = living
            loop = strategy.task.trainer.fit_loop.epoch_loop.val_loop
            loop._combined_loader = None  # Lightning asks for them again

    changes.compute_metrics_by(among_the_living)
    changes.before_validation_data(share)


def _accumulated(trainer: pl.Trainer) -> int:
    """The most batches whose gradients make one update, in any epoch."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    schedules = [x.scheduling for x in callbacks if isinstance(x, GradientAccumulationScheduler)]
    return max([trainer.accumulate_grad_batches, *(number for each in schedules for number in each.values())])


def _trains_whole_epochs(trainer: pl.Trainer) -> bool:
    """Whether ranks meet at the end of epochs only, nothing counts a worker's steps, and each epoch has all rows."""
    return (
        trainer.limit_train_batches == 1.0
        and isinstance(trainer.limit_train_batches, float)
        and not trainer.overfit_batches  # type: ignore[attr-defined]  # set by a connector
        and not trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set by a connector
        and not stops_within_epochs(trainer)
        and all(config.interval == "epoch" for config in trainer.lr_scheduler_configs)
    )
