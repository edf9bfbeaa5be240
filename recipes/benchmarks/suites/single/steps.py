"""Where a training step's time goes: the step built up part by part, in turns; its operators from torch's profiler."""

# Shape suffixes: B batch, F features, D embedding dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from benchmarks.harness.jobs.training import Batches
from benchmarks.harness.ours import Ours, TaskAlone, make_task
from benchmarks.harness.report import Columns, Result
from benchmarks.harness.trainer import StepsToTurn, quiet_trainer
from benchmarks.harness.turns import Measurement, Turn, in_turns
from benchmarks.harness.workload import Workload
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import Backend, EmbeddingBagCollection, SparseFeatures, Ticket
from lightning_recsys.tasks import CTRTask

Variant = Callable[[Turn], None]

PROFILED_STEPS = 30


class FixedRows(Backend):
    """Looks nothing up and trains nothing."""

    def __init__(self, shape_BFD: tuple[int, int, int]) -> None:
        super().__init__()
        self.pooled = torch.randn(shape_BFD) * 0.01

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:
        return self.pooled.detach(), Ticket(sparse)

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:
        pass


def table_of_parts(title: str, measured: Measurement, batch_size: int) -> Columns:
    """Milliseconds of a step, part by part, from variants that each have one part more than the one before."""
    times = {name: 1e3 * batch_size / measured.median(name) for name in measured.rates}
    first, *_, last = times
    parts = {after: times[after] - times[before] for before, after in pairwise(times)}
    milliseconds = {first: times[first], **parts, "the whole step": times[last]}
    lines = [[name, f"{value:.3f}", f"{value / times[last]:.1%}"] for name, value in milliseconds.items()]
    return Columns(title, ("part", "ms", "share"), lines, {"milliseconds": milliseconds})


def measure(root: Path, work: Workload, model: str, batch_size: int, *, rounds: int, seconds: float) -> list[Result]:
    """Both tables for one model."""
    name = f"{model}, B={batch_size}"
    steps = Steps(root, work, model, batch_size)
    # Short turns and many of them: some parts are a few percent of the step.
    measured = in_turns(steps.variants(), rounds=3 * rounds, seconds=seconds / 3)
    return [table_of_parts(f"parts of a step, {name}", measured, batch_size), steps.operators(f"operators, {name}")]


@dataclass(frozen=True)
class Steps:
    """A step of ours, part by part.

    Args:
        root: Prepared rows.
        work: The same, in memory.
        model: What is trained.
        batch_size: Examples a step.
        bfloat16: Its products are in bfloat16, as under ``bf16-mixed``.
    """

    root: Path
    work: Workload
    model: str
    batch_size: int
    bfloat16: bool = False

    def variants(self) -> dict[str, Variant]:
        """Each has one part more than the one before."""
        return {
            "dense part, forward and backward": self._loop(rows=False, optimizer=False),
            "dense optimizer": self._loop(rows=False),
            "embeddings: checks, lookup, update": self._loop(),
            "Lightning's loop": self._through_trainer,
            "reader": Ours(self.root, metrics=False)(self.work, self.model, self.batch_size),
            "metrics, callbacks, logger": Ours(self.root)(self.work, self.model, self.batch_size),
        }

    def operators(self, title: str, *, most: int = 12) -> Columns:
        """From torch's profiler, which costs a few microseconds a call itself; compiled loops do not show."""
        step = self._step(make_task(self.work, self.model))
        batches = cycle(self.work.batches(self.batch_size))
        for _ in range(PROFILED_STEPS):
            step(next(batches))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED_STEPS):
                step(next(batches))
        events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)[:most]
        lines = [
            [x.key, f"{round(x.count / PROFILED_STEPS, 1):g}", f"{x.self_cpu_time_total / 1e3 / PROFILED_STEPS:.3f}"]
            for x in events
        ]
        return Columns(title, ("operator", "calls a step", "ms a step"), lines)

    def _loop(self, *, rows: bool = True, optimizer: bool = True) -> Variant:
        """A plain loop over ready batches."""

        def run(turn: Turn) -> None:
            task = make_task(self.work, self.model)
            if not rows:
                self._fix_rows(task)
            step = self._step(task, optimizer=optimizer)
            for batch in cycle(self.work.batches(self.batch_size)):
                step(batch)
                turn.step_done(self.batch_size)

        return run

    def _step(self, task: CTRTask, *, optimizer: bool = True) -> Callable[[Batch], None]:
        dense: Any = task.configure_optimizers() if optimizer else None

        def step(batch: Batch) -> None:
            task.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
                logits = task.model(batch.dense, batch.sparse)
            F.binary_cross_entropy_with_logits(logits.float(), batch.labels).backward()
            if dense is not None:
                dense.step()

        return step

    def _fix_rows(self, task: CTRTask) -> None:
        for module in task.modules():
            if isinstance(module, EmbeddingBagCollection):
                module.check_ids = False
                shape = (self.batch_size, len(module.feature_names), module.embedding_dim)
                module.embedding_bags = FixedRows(shape)

    def _through_trainer(self, turn: Turn) -> None:
        task: pl.LightningModule = make_task(self.work, self.model, kind=TaskAlone)
        loader: Any = Batches(self.work.batches(self.batch_size))
        quiet_trainer(StepsToTurn(turn, self.batch_size)).fit(task, loader)
