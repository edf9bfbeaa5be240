"""A process that takes the place of a dead worker: what the first worker leaves for it, and how it joins the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from pytorch_lightning.trainer.call import _call_callbacks_load_state_dict, _call_callbacks_state_dict
from torch import Tensor

from lightning_recsys.checkpoints.places import place_of, remove, whole_file
from lightning_recsys.launchers.results import load_progress
from lightning_recsys.parameter_server.meetings import Joined, MeetingPlace, Meetings, WaitingPlace
from lightning_recsys.parameter_server.waiting import turns
from lightning_recsys.strategies.common.stored_rows import rows_left_out
from lightning_recsys.strategies.common.workers.process_group import MeetingGroup

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from lightning_recsys.strategies.common.base import RecsysStrategy

STATE = "state-of-the-run.pt"  # in the folder of the launch

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

_told: set[str] = set()  # the reasons that this process has given

# The new process starts as every worker did, alone: its collectives give it back what it brought. What all others
# agreed on at the start, and what the first of them knows of the run by now, is in the state that this one leaves;
# rows, and what the dense part has on servers, are there. It takes part from one request to the server on
# (`WaitingPlace.join`), with which it has a lease of the epoch: killed before that, it leaves nothing; killed behind
# it, what every worker leaves.


@dataclass(frozen=True)
class RunState:
    """The state of a run, as its first worker has it between two steps.

    Args:
        weights: The dense part and the buffers of the model, as it has them.
        optimizers: State dicts of the optimizers.
        schedulers: State dicts of the schedulers of learning rates.
        callbacks: State dicts of the callbacks.
        progress: State dict of the fit loop: epochs and steps.
        parts: What the parts of the strategy tell, by their classes' names.
    """

    weights: dict[str, Any]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    callbacks: dict[str, Any]
    progress: dict[str, Any]
    parts: dict[str, dict[str, Any]]


def leave_state(strategy: RecsysStrategy) -> int:
    """Leave the state of the run, on its first worker, between two steps: the pass that it is from, 0 if it could not.

    It cannot be ahead of an epoch's first step, in which all workers may meet; nor in a run whose shares are fixed,
    where there is nothing that another worker could train, or in one in which a callback averages weights.
    """
    trainer = strategy.task.trainer
    if strategy.dealer is None:
        return _stays_empty("the shares of its epochs are fixed, so nobody else could train a part of them")
    if strategy.averages is not None:
        return _stays_empty("a callback averages weights, and a new worker would bring an average over its steps alone")
    if not trainer.fit_loop.epoch_loop.batch_progress.current.completed:
        return 0
    group = dist.group.WORLD
    assert isinstance(group, MeetingGroup)
    assert strategy.launched is not None
    with rows_left_out(strategy.task):
        weights = strategy.task.state_dict()
    with group.alone():  # the state of some callbacks is the sum of all workers'
        callbacks = _call_callbacks_state_dict(trainer)
    progress = trainer.fit_loop.state_dict()
    progress["state_dict"].pop("combined_loader", None)  # the position of this worker
    state = RunState(
        weights=weights,
        optimizers=[x.state_dict() for x in strategy.optimizers],
        schedulers=[x.scheduler.state_dict() for x in trainer.lr_scheduler_configs],
        callbacks=callbacks,
        progress=progress,
        parts={type(x).__name__: x.agreed() for x in (strategy.dense, strategy.rows)},
    )
    try:
        with whole_file(place_of(strategy.launched.folder) / STATE) as file:
            torch.save(state, file)
    except Exception as error:  # no room for it, or something that cannot be pickled: the run goes on all the same
        return _stays_empty(f"what a new one needs could not be written ({type(error).__name__}: {error})")
    return strategy.dealer.number


def forget_state(strategy: RecsysStrategy) -> None:
    """Remove what was left for others, at the end of the run, from where it would stay."""
    if strategy.launched is not None:
        remove(place_of(strategy.launched.folder) / STATE)


def _stays_empty(why: str) -> Literal[0]:
    if why not in _told:
        _told.add(why)
        log.warning("No process can take the place of a worker that died in this run: %s.", why)
    return 0


class Joining:
    """The way of this process into a run that others train, from its start to its first batch.

    Args:
        strategy: The strategy of this process.
        place: The server where the workers meet.
        folder: The folder or URL where the first worker leaves the state of the run.

    Attributes:
        joined: How the run stands, once this process takes part.
    """

    state: RunState

    def __init__(self, strategy: RecsysStrategy, place: MeetingPlace, folder: Path | str) -> None:
        self._strategy, self._path = strategy, place_of(folder) / STATE
        self._cancelled = strategy.run_servers.is_asked_to_end
        self._waiting = WaitingPlace(place, rank=strategy.global_rank, cancelled=self._cancelled)
        self.joined: Joined | None = None
        self._trainer: pl.Trainer | None = None  # kept from doing what is done at a run's start alone, until `end`
        self._sanity_steps: int | float = 0  # its own

    def wait(self) -> None:
        """Return when the state of the run is there, and keep Lightning from what is done at a run's start alone.

        Raises:
            TimeoutError: this process was asked to end.
            RunOverError: the others have come to the end of the run.
        """
        self._place = self._waiting.wait_for_state()
        self.state = self._load()
        self._trainer = trainer = self._strategy.task.trainer
        self._sanity_steps, trainer.num_sanity_val_steps = trainer.num_sanity_val_steps, 0
        # The checkpoint that the run went on from is older than what the others have, and may be gone.
        trainer._checkpoint_connector.resume_start = lambda *_, **__: None  # type: ignore[method-assign]

    def end(self) -> None:
        """The run is over: what this process does next, with the others, it does as they do."""
        if self._trainer is not None:
            self._trainer.num_sanity_val_steps = self._sanity_steps
            del self._trainer._checkpoint_connector.resume_start  # the class has it
            self._trainer = None

    def _load(self) -> RunState:
        with self._path.open("rb") as file:
            state: RunState = torch.load(file, map_location="cpu", weights_only=False)
        return state

    def take_agreed(self, trainer: pl.Trainer) -> None:
        """Have the callbacks, and what the parts agreed on, as the first worker has them."""
        self._agree()
        _call_callbacks_load_state_dict(trainer, {"callbacks": self.state.callbacks})

    def _agree(self) -> None:
        for part in (self._strategy.dense, self._strategy.rows):
            part.agree(self.state.parts[type(part).__name__])

    @property
    def passes(self) -> int:
        """Epochs that the run has begun before the one in which this process takes part first."""
        assert self.joined is not None
        return self.joined.number - 1

    @contextmanager
    def at_start(self, trainer: pl.Trainer) -> Iterator[None]:
        """Join the others, once there is something to train; meanwhile do alone what all of them did at the start.

        Raises:
            TimeoutError: this process was asked to end.
        """
        strategy, group = self._strategy, dist.group.WORLD
        assert isinstance(group, MeetingGroup)
        self._take_progress(trainer)  # what fails here fails ahead of taking part, and so for this process alone
        before = self.state
        self.joined = self._join()
        self._waiting.close()
        patience = strategy.patience.total_seconds()
        place, rank = self._waiting.place, strategy.global_rank
        group.join(Meetings(place, rank=rank, timeout=patience, cancelled=self._cancelled, joined=self.joined))
        if self.state is not before:
            self._take_progress(trainer)
        with group.alone():
            yield
        log.warning("A new process trains in the place of worker %d, from epoch %d on.", rank, trainer.current_epoch)

    def _join(self) -> Joined:
        for _ in turns(cancelled=self._cancelled):
            if (joined := self._waiting.join(self._place)) is not None:
                return joined
            if (place := self._waiting.wait_for_state()) != self._place:
                self._place, self.state = place, self._load()
        raise TimeoutError(f"worker {self._strategy.global_rank} was asked to end before it took part.")

    def _take_progress(self, trainer: pl.Trainer) -> None:
        """Have weights, optimizers, schedulers and counts as the first worker had them, at the start of its epoch."""
        state, loop = self.state, trainer.fit_loop
        self._agree()
        with rows_left_out(self._strategy.task), torch.no_grad():
            for name, tensor in self._strategy.task.state_dict().items():
                if isinstance(tensor, Tensor) and name in state.weights:
                    tensor.copy_(state.weights[name])  # not by load_state_dict, by which all workers replace rows
        for optimizer, own in zip(self._strategy.optimizers, state.optimizers, strict=True):
            optimizer.load_state_dict(own)
        for config, own in zip(trainer.lr_scheduler_configs, state.schedulers, strict=True):
            config.scheduler.load_state_dict(own)
        load_progress(loop, state.progress)
        for counts in (loop.epoch_progress.total, loop.epoch_progress.current):
            counts.ready = counts.started = counts.processed = counts.completed  # type: ignore[attr-defined]
        assert loop._combined_loader is not None
        for loader in loop._combined_loader.flattened:
            loader.set_epoch(trainer.current_epoch)
