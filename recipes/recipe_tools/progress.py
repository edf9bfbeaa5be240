"""A progress bar that keeps to one line, also of a terminal with 80 columns."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import rich
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.callbacks.progress.rich_progress import BatchesProcessedColumn, CustomBarColumn
from rich.progress import ProgressColumn, TextColumn, TimeRemainingColumn

FIRST = ("train/ne", "eps", "val/ne")  # what a narrow terminal shows; the rest follows as far as there is room
BAR = 8
BESIDES = len("Epoch 10/99") + BAR + len("1:00:00") + 5  # with a space after each column, of which there are five


class ProgressBar(RichProgressBar):
    """Lightning's Rich bar with time left (taken, at the end) and as many metrics as fit in the line.

    Lightning's own breaks the metrics over several lines where they do not fit.
    """

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
