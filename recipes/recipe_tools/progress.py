"""A progress bar that keeps to one line, also of a terminal with 80 columns."""

from __future__ import annotations

import logging
import sys
from time import monotonic
from typing import Any

import pytorch_lightning as pl
import rich
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.callbacks.progress.rich_progress import BatchesProcessedColumn, CustomBarColumn
from rich.progress import ProgressColumn, TextColumn, TimeRemainingColumn

from lightning_recsys.callbacks import LeanCallback

FIRST = ("train/ne", "eps", "val/ne")  # what a narrow terminal shows; the rest follows as far as there is room
BAR = 8
BESIDES = len("Epoch 10/99") + BAR + len("1:00:00") + 5  # with a space after each column, of which there are five


class CurrentStream(logging.StreamHandler[Any]):
    """Writes to what ``sys.stdout`` or ``sys.stderr`` is when a message comes.

    While a bar is drawn, Rich stands there and puts the message above the bar. A usual handler has kept the stream from
    before, and its message begins in the bar's own line.

    Args:
        name: ``"stdout"`` or ``"stderr"``.
    """

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    @property
    def stream(self) -> Any:
        """The present one."""
        return getattr(sys, self._stream_name)


def log_above_bars() -> None:
    """Let the handlers of Hydra and of Lightning follow ``sys.stdout`` and ``sys.stderr``."""
    for logger in (logging.root, *map(logging.getLogger, ("pytorch_lightning", "lightning_fabric"))):
        for place, handler in enumerate(logger.handlers):
            name = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}.get(id(getattr(handler, "stream", None)))
            if type(handler) is logging.StreamHandler and name is not None:
                logger.handlers[place] = following = CurrentStream(name)
                following.setLevel(handler.level)
                following.setFormatter(handler.formatter)
                following.filters = handler.filters


class ProgressBar(LeanCallback, RichProgressBar):
    """Lightning's Rich bar with time left (taken, at the end) and as many metrics as fit in the line.

    Lightning's own breaks the metrics over several lines where they do not fit, and reads them at every batch, a few
    percent of a small step; this one when the line is drawn again.

    Args:
        refresh_rate: How often the line is drawn, a second.
        leave: Keep the bar of each epoch.
        console_kwargs: Of Rich's console.
    """

    def __init__(
        self, refresh_rate: int = 4, *, leave: bool = True, console_kwargs: dict[str, Any] | None = None
    ) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave, console_kwargs=console_kwargs)
        self._due, self._done = 0.0, 0

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's; the lines of a log stand above the bar."""
        log_above_bars()
        super().setup(*args, **kwargs)

    def on_train_batch_end(self, *args: Any) -> None:
        """Lightning's, for the batches at which the line is due."""
        self._done = args[-1] + 1
        if (now := monotonic()) >= self._due:
            self._due = now + 1 / max(self.refresh_rate, 1)
            super().on_train_batch_end(*args)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning's, with the last batches."""
        self._update(self.train_progress_bar_id, self._done)
        super().on_train_epoch_end(trainer, pl_module)

    def configure_columns(self, trainer: pl.Trainer) -> list[ProgressColumn]:
        """Description, bar, batches, time; Lightning adds the metrics."""
        return [
            TextColumn("{task.description}"),
            CustomBarColumn(bar_width=BAR),
            BatchesProcessedColumn(style=""),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        ]

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The metrics for which there is room, as short texts, the most telling first."""
        metrics = super().get_metrics(trainer, pl_module)
        batches = self.total_train_batches
        room = rich.get_console().width - BESIDES - len(f"{batches}/{batches}")
        shown = {}
        for name in sorted(metrics, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
            text = _short(metrics[name])
            room -= len(f"{name}: {text} ")
            if room < 0:
                break
            shown[name] = text
        return shown


def _short(value: Any) -> str:
    """Three decimals below 1000, none above."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
