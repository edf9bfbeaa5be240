"""A virtual cluster beside the real one: two trainers of ShadowSync, by ``recipes/train.py`` and in virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.recipe_runs import Metrics, configuration, trained
from recipe_tools.build import build_datamodule, build_task
from rich.table import Table

from lightning_recsys.metrics import NormalizedEntropy
from lightning_recsys.simulation import Normal, Synchronization, VirtualCluster, Workers

NE_TOLERANCE = 0.3  # percent
TOLERANCE = 20.0  # percent, of sync gap and speed-up


@dataclass(frozen=True)
class Twins:
    """Two trainers, real and virtual, of each seed.

    Args:
        alone: Metrics of one real trainer: what the virtual workers' times are taken from.
        real: Of two.
        virtual: Of two in virtual time.
    """

    alone: Sequence[Metrics]
    real: Sequence[Metrics]
    virtual: Sequence[Metrics]

    def mean(self, kind: str, metric: str) -> float:
        """Over the seeds."""
        return statistics.mean(metrics[metric] for metrics in getattr(self, kind))

    def rows(self) -> dict[str, tuple[float, float]]:
        """What is compared: real, virtual."""
        alone = self.mean("alone", "eps")
        return {
            "test NE": (self.mean("real", "test/ne"), self.mean("virtual", "test/ne")),
            "sync gap": (self.mean("real", "sync/gap"), self.mean("virtual", "sync/gap")),
            "speed-up by the second trainer": (self.mean("real", "eps") / alone, self.mean("virtual", "eps") / alone),
        }

    def bars(self) -> list[Bar]:
        """How far the virtual ones are from the real ones, in percent."""
        return [
            Bar(
                f"{name}, virtual from real",
                100 * abs(virtual / real - 1),
                "at most",
                NE_TOLERANCE if name == "test NE" else TOLERANCE,
                " %",
            )
            for name, (real, virtual) in self.rows().items()
        ]

    def table(self) -> Table:
        """Real beside virtual."""
        table = Table("two trainers", "real", "virtual", title="a virtual cluster beside the real one")
        table.title_justify = "left"
        for name, (real, virtual) in self.rows().items():
            table.add_row(name, f"{real:.4f}", f"{virtual:.4f}")
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        return {kind: [dict(metrics) for metrics in getattr(self, kind)] for kind in ("alone", "real", "virtual")}


def measure(*, common: Sequence[str], interval: float, seeds: Sequence[int], cache: Path, root: str) -> Measured:
    """Train one and two real trainers, then two virtual ones that are as fast as the one.

    Args:
        common: Overrides of ``recipes/train.py``.
        interval: Seconds between a trainer's rounds.
        seeds: Seeds of start values and the order of rows; a run each.
        cache: Where finished runs are kept.
        root: The folder of the data sets, for ``paths.data``.
    """
    alone, real, virtual = [], [], []
    for seed in seeds:
        overrides = [*common, f"seed={seed}", "strategy=shadowsync", f"strategy.interval={interval}"]
        for trainers, found in ((1, alone), (2, real)):
            chosen = [*overrides, f"strategy.num_trainers={trainers}"]
            found.append(trained(f"trainers{trainers}-seed{seed}", chosen, cache=cache, root=root))
        config = configuration(overrides, folder=cache, root=root)
        virtual.append(simulated(config, eps=alone[-1]["eps"], interval=interval))
    twins = Twins(alone, real, virtual)
    return [twins], twins.bars()


def simulated(config: dict[str, Any], *, eps: float, interval: float) -> Metrics:
    """Two trainers in virtual time.

    Args:
        config: As ``recipes/train.py`` has it.
        eps: Examples per second of one trainer alone: an input. That rounds cost next to nothing is another: the
            centre is in this machine's memory.
        interval: Seconds between a trainer's rounds.
    """
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    datamodule = build_datamodule(config)
    task = build_task(config, datamodule)
    seconds = datamodule.batch_size / eps
    cluster = VirtualCluster(
        num_replicas=2,
        dense_on_servers=False,
        workers=Workers(compute=Normal(seconds, deviation=0.05 * seconds)),
        synchronization=Synchronization("easgd", interval=interval),
    )
    results = cluster.train(task, datamodule.train_dataloader(), seed=config["seed"])
    entropy = NormalizedEntropy(from_logits=True)
    task.eval()
    with torch.no_grad():
        for batch in datamodule.test_dataloader():
            entropy.update(task(batch), batch.labels)
    return {**results.metrics, "test/ne": float(entropy.compute())}
