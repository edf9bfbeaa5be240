"""The numbers that each worker of a run tells Prometheus while it trains."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from lightning_recsys.callbacks._callback import LeanCallback
from lightning_recsys.callbacks.examples_per_second import batch_size_of
from lightning_recsys.callbacks.telemetry_monitor import WAITING, telemetry_of
from lightning_recsys.monitoring import Monitored, MonitoringEndpoint, announce

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX = "lightning_recsys_worker"
REFRESH_SECONDS = 1.0  # between two looks at what the strategy and the other callbacks know

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


@dataclass
class _Told:
    """The state that a scrape reads, written by the thread that trains; each field is replaced as a whole."""

    steps: int = 0
    examples: int = 0
    data_seconds: float = 0.0
    examples_per_second: float | None = None
    entropies: dict[str, float] = field(default_factory=dict)
    telemetry: list[tuple[str, str, float]] = field(default_factory=list)  # name, statistic, value


class PrometheusMetrics(LeanCallback):
    """Tells Prometheus how this worker trains, at a port of its own, from the start of training to its end.

    Every worker has an endpoint (:class:`~lightning_recsys.monitoring.MonitoringEndpoint`), and says in a line where.
    It is ready while the worker trains. A scrape is answered by a thread beside the one that trains, from numbers that
    this one leaves: it never waits for a scrape, and nothing is asked of other workers.

    The metrics, each with the label ``rank``: ``lightning_recsys_worker_steps_total``, ``..._examples_total``,
    ``..._examples_per_second``, ``..._normalized_entropy`` (of ``NormalizedEntropyMonitor``, where there is one),
    ``..._waiting_seconds_total`` (for data, and for answers of servers) and ``..._telemetry`` (all numbers that the
    strategy tells, such as staleness and the gap between synchronisations). The docs have a table of them
    (``docs/watching.md``).

    Args:
        port: Port of rank 0; that of each other worker is its rank higher. 0: each takes a free one.
        host: Address to listen at: ``0.0.0.0`` for all of the machine's. Whoever reaches it may read.
        folder: The run's folder, where a file for each worker says where it can be asked (``lightning-recsys top``).
            The files are removed at the end. Default: none is written.

    Raises:
        ValueError: ``port`` is out of range.
        ModuleNotFoundError: ``prometheus-client`` is not installed, as training starts.
        OSError: the port is taken, as training starts.

    >>> from pytorch_lightning import Trainer
    >>> callback = PrometheusMetrics(port=9200)
    >>> trainer = Trainer(callbacks=callback, accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1", folder: str | Path | None = None) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port must be from 0 (a free one) to 65535, got {port}. 9200 is a usual choice.")
        self.port = port
        self.host = host
        self.folder = None if folder is None else Path(folder)
        self._endpoint: MonitoringEndpoint | None = None
        self._files: list[Path] = []
        self._told = _Told()
        self._rank = 0
        self._ended: float | None = None  # when the last step ended; None where what came since was not training
        self._refreshed = 0.0  # when the last look was, and how many examples there were then
        self._refreshed_examples = 0

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of a run travels to other processes."""
        return vars(type(self)(self.port, host=self.host, folder=self.folder))

    @property
    def url(self) -> str | None:
        """Where this worker tells its metrics, while it trains."""
        return None if self._endpoint is None else self._endpoint.url

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen, and say where."""
        self._rank, self._told, self._ended = trainer.global_rank, _Told(), None
        self._refreshed, self._refreshed_examples = perf_counter(), 0
        port = self.port + self._rank if self.port else 0
        self._endpoint = MonitoringEndpoint(host=self.host, port=port, collect=self._collect)
        self._endpoint.set_ready()
        log.info("Worker %d tells metrics at %s/metrics", self._rank, self._endpoint.url)
        self._announce(trainer)
        self.on_train_batch_start = self._begin_batch

    def _begin_batch(self, *_: Any) -> None:
        """The time since the last step went by waiting for data."""
        if self._ended is not None:
            self._told.data_seconds += perf_counter() - self._ended
        else:  # validation, a checkpoint or the end of an epoch came between: the rate is measured anew
            self._refreshed, self._refreshed_examples = perf_counter(), self._told.examples

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and look once a second at what others know."""
        told, now = self._told, perf_counter()
        told.steps += 1
        told.examples += batch_size_of(batch)
        if now - self._refreshed >= REFRESH_SECONDS or told.steps == 1:
            self._refresh(trainer, now)
            now = perf_counter()
        self._ended = now

    def on_validation_start(self, *_: Any) -> None:
        """Count no wait from here on: the time that follows is not spent on data."""
        self._ended = None

    def on_save_checkpoint(self, *_: Any) -> None:
        """Count no wait from here on: the time that follows is not spent on data."""
        self._ended = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the last values of an epoch."""
        self._ended = None
        self._refresh(trainer, perf_counter())

    def on_train_end(self, *_: Any) -> None:
        """Stop listening, and remove the files."""
        self._close()

    def on_exception(self, *_: Any) -> None:
        """The same where training fails."""
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The same, however the run ends."""
        self._close()

    def _close(self) -> None:
        self.on_train_batch_start = None
        files, self._files = self._files, []
        for path in files:
            path.unlink(missing_ok=True)
        if files:
            with suppress(OSError):  # others' are there
                files[0].parent.rmdir()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def _refresh(self, trainer: pl.Trainer, now: float) -> None:
        told = self._told
        seconds, examples = now - self._refreshed, told.examples - self._refreshed_examples
        if examples and seconds > 0 and told.steps > 1:
            told.examples_per_second = examples / seconds
        self._refreshed, self._refreshed_examples = now, told.examples
        known = trainer.callback_metrics
        names = {"run": "train/ne", "window": "train/window_ne"}
        told.entropies = {over: float(known[name]) for over, name in names.items() if name in known}
        told.telemetry = telemetry_of(trainer)

    def _announce(self, trainer: pl.Trainer) -> None:
        if self.folder is None or self._endpoint is None:
            return
        processes = [Monitored(f"worker-{self._rank}", self._endpoint.url)]
        if trainer.is_global_zero:
            servers = getattr(trainer.strategy, "run_servers", None)
            processes += [] if servers is None else servers.monitored()
        self._files = [announce(self.folder, process) for process in processes]

    def _collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        told, rank = self._told, str(self._rank)
        steps = CounterMetricFamily(f"{PREFIX}_steps", "Training batches so far", labels=["rank"])
        steps.add_metric([rank], told.steps)
        examples = CounterMetricFamily(f"{PREFIX}_examples", "Training examples so far", labels=["rank"])
        examples.add_metric([rank], told.examples)
        rate = GaugeMetricFamily(f"{PREFIX}_examples_per_second", "Training examples a second of late", labels=["rank"])
        if told.examples_per_second is not None:
            rate.add_metric([rank], told.examples_per_second)
        entropy = GaugeMetricFamily(
            f"{PREFIX}_normalized_entropy",
            "Progressive normalized entropy over the run, or over the last examples",
            labels=["rank", "over"],
        )
        for over, value in told.entropies.items():
            entropy.add_metric([rank, over], value)
        waiting = CounterMetricFamily(
            f"{PREFIX}_waiting_seconds", "Time spent waiting, by what for", labels=["rank", "waits_for"]
        )
        waiting.add_metric([rank, "data"], told.data_seconds)
        telemetry = GaugeMetricFamily(
            f"{PREFIX}_telemetry", "What the strategy tells of this worker", labels=["rank", "name", "statistic"]
        )
        for name, statistic, value in told.telemetry:
            if name == WAITING:
                waiting.add_metric([rank, "servers"], value)
            else:
                telemetry.add_metric([rank, name, statistic], value)
        yield from (steps, examples, rate, entropy, waiting, telemetry)
