"""Suite ``het``: what a cache of embedding rows saves and costs, on a slow link and without one, and its quality."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.harness.bars import Bar
from benchmarks.harness.choices import check_choices
from benchmarks.harness.jobs.job import ran_in_turns
from benchmarks.harness.ours import MODELS
from benchmarks.harness.parts import Measured, measure_parts
from benchmarks.harness.processes import python
from benchmarks.harness.recipe_runs import trained_from_seeds
from benchmarks.harness.report import Curves, Result, Row
from benchmarks.harness.turns import Measurement
from benchmarks.suites.het.cache import misses as count_misses
from benchmarks.suites.het.cache import operations as measure_operations
from benchmarks.suites.het.cache import traffic as measure_traffic
from benchmarks.suites.het.link import TRAINING, measure_combined
from benchmarks.suites.het.link import measure as measure_link
from benchmarks.suites.het.nominal import measure as measure_nominal
from benchmarks.suites.het.training import PAPERS_MODELS

from lightning_recsys.row_cache import CachePolicy

Part = Literal["traffic", "operations", "misses", "link", "combined", "overhead", "nominal", "quality"]

ROWS = 65_536  # examples in memory of each job


def run(
    *,
    parts: list[Part],
    traffic: Mapping[str, Any],
    operations: Mapping[str, Any],
    misses: Mapping[str, Any],
    link: Mapping[str, Any],
    combined: Mapping[str, Any],
    overhead: Mapping[str, Any],
    nominal: Mapping[str, Any],
    quality: Mapping[str, Any],
    cache: str,
    data: str,
) -> list[Result]:
    """Measure the parts that are asked for; see ``conf/suite/het.yaml`` for the arguments.

    Raises:
        ValueError: a model or a policy that there is not.
    """
    if "link" in parts:
        check_choices("suite.link.models", link["models"], PAPERS_MODELS)
    if "combined" in parts:
        check_choices("suite.combined.model", [combined["model"]], PAPERS_MODELS)
    if "overhead" in parts:
        check_choices("suite.overhead.model", [overhead["model"]], MODELS)
    if "misses" in parts:
        check_choices("suite.misses.policies", misses["policies"], get_args(CachePolicy))
    measures = {
        "traffic": lambda: measure_traffic(**traffic),
        "operations": lambda: measure_operations(**operations),
        "misses": lambda: count_misses(**misses),
        "link": lambda: measure_link(**link, rows=ROWS),
        "combined": lambda: measure_combined(**combined, rows=ROWS),
        "overhead": lambda: measure_overhead(**overhead),
        "nominal": lambda: measure_nominal(**nominal),
        "quality": lambda: measure_quality(**quality, cache=Path(cache), root=data),
    }
    return measure_parts(parts, measures)


def measure_overhead(*, model: str, batch_sizes: Sequence[int], dim: int, rounds: int, seconds: float) -> Measured:
    """Rows in shared memory, where a cache cannot help: beside workers that train the stores' rows themselves."""
    results: list[Result] = []
    bars = []
    for batch_size in batch_sizes:
        settings = {"model": model, "batch_size": batch_size, "dim": dim, "rows": ROWS}
        variants = {"plain stores": None, "het": {"algorithm": "het", "staleness": 100}}
        told = {name: {"settings": [{**settings, "strategy": strategy}]} for name, strategy in variants.items()}
        common = {"launchers": [python()], "training": TRAINING, "workers": 1, "warm_steps": 40}
        with ran_in_turns(told, rounds=rounds, seconds=seconds, **common) as jobs:
            measured = Measurement({name: job.rates(batch_size) for name, job in jobs.items()})
        results.append(Row(f"one machine, {model}, B={batch_size}, D={dim}", measured, base="plain stores"))
        ratio = measured.ratio("het", "plain stores")
        bars.append(Bar(f"het / plain stores in shared memory, B={batch_size}", ratio, "at least", 0.85))
    return results, bars


def measure_quality(
    *,
    data: Mapping[str, Sequence[str]],
    staleness: Sequence[int | None],
    common: Sequence[str],
    seeds: Sequence[int],
    cache: Path,
    root: str,
) -> Measured:
    """Test AUC against staleness, as in the paper's Table 2."""
    results: list[Result] = []
    for name, rows in data.items():
        lines = []
        means: dict[str, float] = {}
        for s in staleness:
            label = "inf" if s is None else str(s)
            own = [*rows, *common, f"strategy.staleness={'null' if s is None else s}"]
            runs = trained_from_seeds(f"{name}-s{label}", own, seeds, cache=cache, root=root)
            aucs = [metrics["test/auc"] for metrics in runs]
            means[label] = statistics.mean(aucs)
            spread = statistics.stdev(aucs) if len(aucs) > 1 else 0.0
            loss = 100 * (means[next(iter(means))] - means[label])
            entropy = statistics.mean(metrics["test/ne"] for metrics in runs)
            lines.append([label, f"{means[label]:.5f} ± {spread:.5f}", f"{loss:+.3f}", f"{entropy:.5f}"])
        header = ("staleness", "test AUC", "points below s=0", "test NE")
        drawn = {"drawn": ["test AUC"], "label": "test AUC", "name": f"auc-{name.lower()}"}
        results.append(Curves(f"test AUC, {name}", header, lines, **drawn))
    return results, []
