"""Who does what rank 0 does, where that may die: the first worker of those that live, as of the last meeting."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_only

from lightning_recsys.strategies.common.workers.continuing_writer import ContinuingWriter
from lightning_recsys.strategies.common.workers.joining import Joining, leave_state
from lightning_recsys.strategies.common.workers.process_group import MeetingGroup, use_meetings

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from lightning_recsys.parameter_server.meetings import MeetingPlace
    from lightning_recsys.strategies.common.base import RecsysStrategy

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

# Everything that only rank 0 does asks `is_global_zero` at that moment, or `rank_zero_only`, and what that needs is
# there on all ranks or comes from servers. From a death to the next look, or meeting, nobody is the first: nothing is
# logged for all meanwhile, and nothing is saved, which all meet for. Two cannot be: the launcher tells of deaths alone.


def meet_at(place: MeetingPlace, strategy: RecsysStrategy) -> str:
    """Let the workers of a run meet at a server, by which they can do without any that dies; the backend's name.

    One that is to take the place of another, which has died, meets them once it has joined them. Where they had not met
    at all before that death, it is there from the start.
    """

    def look() -> None:
        if isinstance(group := dist.group.WORLD, MeetingGroup):
            group.look_who_lives()

    strategy.run_servers.checks.append(look)  # before each step
    launched = strategy.launched
    if launched is not None and launched.replaces:
        if place.lose(strategy.global_rank):  # which an engine tells nobody
            strategy.joining = Joining(strategy, place, launched.folder)
        else:
            strategy.launched = replace(launched, replaces=False)
    return use_meetings(
        place,
        cancelled=strategy.run_servers.is_asked_to_end,
        take_first_place=partial(_take_first_place, strategy),
        leave_state=partial(leave_state, strategy) if strategy.max_replacements else None,
        joins=strategy.joining is not None,
    )


def _take_first_place(strategy: RecsysStrategy) -> None:
    """Log and save from now on: all workers before this one have died."""
    strategy._has_first_place = True
    rank_zero_only.rank = 0  # type: ignore[attr-defined]  # Lightning sets it so, too
    if strategy.lightning_module is None:
        return
    trainer = strategy.task.trainer
    log.warning("Worker %d does from now on what rank 0 did: it logs, and writes checkpoints.", strategy.global_rank)
    _go_on_logging(trainer)


def _go_on_logging(trainer: pl.Trainer) -> None:
    """Let loggers go on with what the worker before this one has written, which Lightning's own for CSV removes."""
    for logger in trainer.loggers:
        if type(logger) is CSVLogger and logger._experiment is None:
            logger._experiment = ContinuingWriter(logger.log_dir)
