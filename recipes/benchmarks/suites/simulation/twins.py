"""A virtual cluster beside the real one: two trainers of ShadowSync, by ``recipes/train.py`` and in virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.recipe_runs import Metrics, configuration, trained
from benchmarks.harness.report import Columns
from recipe_tools.build import build_datamodule, build_task

from lightning_recsys.metrics import NormalizedEntropy
from lightning_recsys.simulation import Normal, Synchronization, VirtualCluster, Workers

NE_TOLERANCE = 0.3  # percent
TOLERANCE = 20.0  # percent, of sync gap and speed-up


Kinds = Mapping[str, Sequence[Metrics]]
"""Metrics of each seed: ``alone`` of one real trainer, from which the virtual workers' times are taken; ``real`` of
two; ``virtual`` of two in virtual time."""


def rows_of(found: Kinds) -> dict[str, tuple[float, float]]:
    """What is compared: real, virtual."""

    def mean(kind: str, metric: str) -> float:
        return statistics.mean(metrics[metric] for metrics in found[kind])

    pairs = {name: (mean("real", name), mean("virtual", name)) for name in ("test/ne", "sync/gap", "eps")}
    alone, (real, virtual) = mean("alone", "eps"), pairs["eps"]
    return {
        "test NE": pairs["test/ne"],
        "sync gap": pairs["sync/gap"],
        "speed-up by the second trainer": (real / alone, virtual / alone),
    }


def measure(*, common: Sequence[str], interval: float, seeds: Sequence[int], cache: Path, root: str) -> Measured:
    """Train one and two real trainers, then two virtual ones that are as fast as the one.

    Args:
        common: Overrides of ``recipes/train.py``.
        interval: Seconds between a trainer's rounds.
        seeds: Seeds of start values and the order of rows; a run each.
        cache: Where finished runs are kept.
        root: Folder of the data sets, for ``paths.data``.
    """
    found: dict[str, list[Metrics]] = {"alone": [], "real": [], "virtual": []}
    for seed in seeds:
        overrides = [*common, f"seed={seed}", "strategy=shadowsync", f"strategy.interval={interval}"]
        for trainers, kind in ((1, "alone"), (2, "real")):
            chosen = [*overrides, f"strategy.num_trainers={trainers}"]
            found[kind].append(trained(f"trainers{trainers}-seed{seed}", chosen, cache=cache, root=root))
        config = configuration(overrides, folder=cache, root=root)
        found["virtual"].append(simulated(config, eps=found["alone"][-1]["eps"], interval=interval))
    rows = rows_of(found)
    lines = [[name, f"{real:.4f}", f"{virtual:.4f}"] for name, (real, virtual) in rows.items()]
    table = Columns("a virtual cluster beside the real one", ("two trainers", "real", "virtual"), lines, found)
    limits = {name: NE_TOLERANCE if name == "test NE" else TOLERANCE for name in rows}
    return [table], [
        Bar(f"{name}, virtual from real", 100 * abs(virtual / real - 1), "at most", limits[name], " %")
        for name, (real, virtual) in rows.items()
    ]


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
