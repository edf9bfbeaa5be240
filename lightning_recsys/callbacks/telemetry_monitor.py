"""The numbers that a strategy tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import pytorch_lightning as pl

from lightning_recsys.callbacks._callback import LeanCallback
from lightning_recsys.callbacks._logging import log_epoch, log_step, should_log

WAITING = "comm/waiting_seconds"  # in telemetry: time that this process has waited for answers of servers


class Histogram(Protocol):
    """Many observations of one quantity; a floating 1-D tensor of them is one."""

    def mean(self) -> Any:
        """Their mean."""

    def quantile(self, q: float, /) -> Any:
        """The value that the share ``q`` of them does not exceed."""

    def max(self) -> Any:
        """The largest."""


class TelemetryMonitor(LeanCallback):
    """Logs ``trainer.strategy.telemetry()``: staleness, synchronisation gaps, cache hits, bytes sent.

    ``telemetry()`` maps names to numbers or to a :class:`Histogram`, which becomes ``<name>/mean``, ``<name>/p99`` and
    ``<name>/max``. It is called on every process at log steps and at the end of each epoch, and must not communicate:
    asynchronous workers get there at different times. The logger gets what rank 0 knows. The values are also in
    ``trainer.callback_metrics``, for ``EarlyStopping`` or a sweep.

    A strategy without ``telemetry()``, such as Lightning's own, logs nothing.

    >>> from pytorch_lightning import Trainer
    >>> callback = TelemetryMonitor()
    >>> trainer = Trainer(callbacks=callback, accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    on_train_batch_end: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look at steps only where the strategy has something to tell."""
        self.on_train_batch_end = self._log_step if callable(getattr(trainer.strategy, "telemetry", None)) else None

    def _log_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at log steps."""
        if should_log(trainer):
            log_step(trainer, _telemetry(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log, so that the last values are there when the run ends."""
        log_epoch(pl_module, _telemetry(trainer))


def _telemetry(trainer: pl.Trainer) -> dict[str, float]:
    told = telemetry_of(trainer)
    return {name if statistic == "value" else f"{name}/{statistic}": value for name, statistic, value in told}


def telemetry_of(trainer: pl.Trainer) -> list[tuple[str, str, float]]:
    """The strategy's numbers of this process now: name, statistic (``value``, ``mean``, ``p99``, ``max``), number."""
    telemetry = getattr(trainer.strategy, "telemetry", None)
    values: Mapping[str, float | Histogram] = telemetry() if callable(telemetry) else {}
    numbers: list[tuple[str, str, float]] = []
    for name, value in values.items():
        if isinstance(value, (float, int)):
            numbers.append((name, "value", float(value)))
        else:
            numbers += [
                (name, "mean", float(value.mean())),
                (name, "p99", float(value.quantile(0.99))),
                (name, "max", float(value.max())),
            ]
    return numbers
