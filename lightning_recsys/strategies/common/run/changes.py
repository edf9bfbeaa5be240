"""Temporary patches to Lightning during `fit`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from types import FrameType
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint, ProgressBar, Timer
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_recsys.embeddings import EmbeddingBagCollection

T = TypeVar("T")

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class RunChanges:
    """Patches to a trainer that fits, one after another, until :meth:`undo`.

    Args:
        trainer: The trainer whose parts are replaced during the run.

    Attributes:
        asked_to_end: A SIGTERM has come, since :meth:`end_by_signal` was called.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.asked_to_end = False
        self._undoing = ExitStack()  # gives back what was patched, the last patch first

    def before_train_end(self, function: Callable[[], None]) -> None:
        """Call a function before the callbacks' ``on_train_end``; Lightning asks the strategy last of all."""
        self._insert(LambdaCallback(on_train_end=lambda *_: function()))

    def before_train_epoch_end(self, function: Callable[[], None]) -> None:
        """Call a function after an epoch's last batch, before callbacks and metrics meet those of other ranks."""
        self._insert(LambdaCallback(on_train_epoch_end=lambda *_: function()))

    def after_train_epoch_end(self, function: Callable[[], None]) -> None:
        """Call a function after an epoch's last batch, once the callbacks have been called that save nothing."""
        self._insert(LambdaCallback(on_train_epoch_end=lambda *_: function()), last=True)

    def _insert(self, callback: pl.Callback, *, last: bool = False) -> None:
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        callbacks.insert(len(callbacks) if last else 0, callback)
        self._undoing.callback(callbacks.remove, callback)

    def before_validation_data(self, function: Callable[[], None]) -> None:
        """Call a function before the ranks meet to set up validation loaders, which is before validation starts."""
        loop = self._trainer.fit_loop.epoch_loop.val_loop
        setup = loop.setup_data

        def call_and_set_up() -> None:
            function()
            setup()

        self._replace(loop, "setup_data", call_and_set_up)

    def go_by_own_clock(self, timer: Timer) -> None:
        """Let a timer tell its own worker after each batch that the time is up; Lightning's asks rank 0 each time."""

        def look(trainer: pl.Trainer, *_: Any) -> None:
            left = timer.time_remaining()
            if left is not None and left <= 0 and not trainer.should_stop:
                trainer.should_stop = True
                if timer._verbose and trainer.is_global_zero:
                    log.info("The time is up (%g s): training ends with this batch.", timer._duration)

        self._replace(timer, "on_train_batch_end", look)

    def end_by_signal(self, *, together: bool) -> None:
        """End by SIGTERM once it has come, whatever breaks before the loop looks for it.

        Servers and other ranks got it as well: some may be gone while this one is still in its batch.

        Args:
            together: All ranks end before the same batch, once any of them got the signal: they agree on it where
                Lightning 2.6 broadcasts at every batch what rank 0 got. (Lightning broadcasts in the signal's handler
                as well, and there each rank is at a collective of its own, so that all of them may wait for ever.)
                Otherwise a worker stops for its own SIGTERM only, after the batch that it is at. Whoever starts the
                workers sends the signal to all of them.
        """
        fit_loop, connector = self._trainer.fit_loop, self._trainer._signal_connector
        run, device = fit_loop.run, self._trainer.strategy.root_device

        def hear(number: int, frame: FrameType) -> None:
            self.asked_to_end = True
            connector.received_sigterm = not together

        def agree() -> None:
            heard = torch.tensor(int(self.asked_to_end), device=device)
            dist.all_reduce(heard, dist.ReduceOp.MAX)
            if heard:
                raise SIGTERMException

        def run_until_signal() -> None:
            try:
                run()
            except Exception as error:
                if not self.asked_to_end:
                    raise
                log.info("After SIGTERM: %s: %s", type(error).__name__, error)
                raise SIGTERMException from error

        self._replace(connector, "_sigterm_notifier_fn", hear)
        self._replace(fit_loop, "run", run_until_signal)
        self._replace(fit_loop.epoch_loop, "_broadcast_sigterm_tensor", agree if together else lambda: None)

    def log_through(self, function: Callable[..., None]) -> None:
        """Log values of the training loop by a function that gets Lightning's own and its arguments.

        What validation logs is left alone: Lightning collects that elsewhere.
        """
        results = self._trainer.fit_loop.epoch_loop._results
        self._replace(results, "log", partial(function, results.log))

    def rank_checkpoints_by(self, broadcast: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        """Let all ranks judge and name checkpoints by the values of rank 0, where each has logged its own.

        Lightning's ranks ask each other whether a name is free, once more for every checkpoint of it that they keep,
        and those that keep others would ask another number of times.
        """
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                own = callback._monitor_candidates

                def of_rank_0(
                    trainer: pl.Trainer, own: Callable[[pl.Trainer], dict[str, Tensor]] = own
                ) -> dict[str, Tensor]:
                    return broadcast({name: value.cpu() for name, value in own(trainer).items()})

                self._replace(callback, "_monitor_candidates", of_rank_0)

    def compute_metrics_by(self, together: Callable[[Callable[[], T]], T]) -> None:
        """Let the values that all ranks bring to a metric of an epoch come together by a function that calls another.

        This goes for torchmetrics' metrics, and for the values that Lightning keeps of ``self.log``. They are made
        anywhere in a model, so the classes have it until :meth:`undo`.
        """
        for owner, name in ((Metric, "_sync_dist"), (_ResultMetric, "compute")):
            original = vars(owner)[name]

            def by_function(metric: Any, *args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                return together(partial(original, metric, *args, **kwargs))

            self._replace_in_class(owner, name, by_function)

    def follow_toggling(self, collections: Sequence[EmbeddingBagCollection]) -> None:
        """Let rows train only while the optimizer that they follow may, where a module toggles one of several.

        Lightning toggles by the parameters that ask for a gradient, and rows are none of them.
        """
        module = self._trainer.lightning_module
        toggle, untoggle = module.toggle_optimizer, module.untoggle_optimizer
        resting: list[EmbeddingBagCollection] = []

        def toggle_rows(optimizer: Optimizer | LightningOptimizer) -> None:
            toggle(optimizer)
            own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
            for collection in collections:
                if collection.trainable and collection.attached_to not in (None, own):
                    collection.trainable = False
                    resting.append(collection)

        def untoggle_rows(optimizer: Optimizer | LightningOptimizer) -> None:
            untoggle(optimizer)
            while resting:
                resting.pop().trainable = True

        self._replace(module, "toggle_optimizer", toggle_rows)
        self._replace(module, "untoggle_optimizer", untoggle_rows)

    def show_batches(self, number: int) -> None:
        """Let progress bars show an epoch as this many batches, where Lightning itself is told no number.

        Bars ask a property of their class, so all bars of this process get the number until :meth:`undo`.
        """
        self._replace_in_class(ProgressBar, "total_train_batches", property(lambda _: number))

    def _replace(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        if not callable(getattr(type(owner), name, None)):
            raise RuntimeError(
                f"pytorch_lightning {version('pytorch_lightning')} has no {type(owner).__name__}.{name}: where its"
                " workers wait for each other is unknown. Use the version that this package asks for."
            )
        setattr(owner, name, function)
        self._undoing.callback(vars(owner).pop, name, None)  # one that was replaced twice is gone with the first

    def _replace_in_class(self, owner: type, name: str, new: object) -> None:
        self._undoing.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, new)

    def undo(self) -> None:
        """Leave the trainer as it was."""
        self._undoing.close()
