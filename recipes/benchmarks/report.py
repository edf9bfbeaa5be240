"""Benchmark results as a table, JSON and a picture, with the machine that they were taken on."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from benchmarks.turns import Measurement
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One interleaved measurement: several variants of one workload, compared with a base."""

    workload: str
    measured: Measurement
    base: str

    def to_dict(self) -> dict[str, Any]:
        """Medians, ratios and every round's rate, as plain containers."""
        return {
            "workload": self.workload,
            "base": self.base,
            "examples_per_second": {name: round(self.measured.median(name)) for name in self.measured.rates},
            "ratio_to_base": {name: round(self.measured.ratio(name, self.base), 3) for name in self.measured.rates},
            "rounds": {name: [round(rate) for rate in rates] for name, rates in self.measured.rates.items()},
        }


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "pytorch-lightning", "lightning-recsys")},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _variants(rows: list[Row]) -> list[str]:
    """All variants, in the order in which they first come; not every row has every one."""
    return list(dict.fromkeys(name for row in rows for name in row.measured.rates))


def show(rows: list[Row]) -> None:
    """Print a table for each row: median rates, ratios to the base with their smallest and largest round."""
    for row in rows:
        table = Table(
            "variant", "examples/s", f"ratio to {row.base}", "range", title=row.workload, title_justify="left"
        )
        for name in row.measured.rates:
            low, high = row.measured.spread(name, row.base)
            ratio = f"{row.measured.ratio(name, row.base):.2f}"
            table.add_row(name, f"{row.measured.median(name):,.0f}", ratio, f"{low:.2f} to {high:.2f}")
        Console().print(table)


def write(rows: list[Row], folder: Path, *, suite: str, settings: dict[str, Any]) -> list[Path]:
    """Write ``<suite>.json`` and, where matplotlib is installed, ``<suite>.png``; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {"suite": suite, "machine": machine(), "settings": settings, "rows": [row.to_dict() for row in rows]}
    written = [folder / f"{suite}.json"]
    written[0].write_text(json.dumps(results, indent=2) + "\n")
    try:
        import matplotlib as mpl
    except ImportError:
        return written
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(1.5 + 1.6 * len(rows), 4), layout="constrained")
    variants = _variants(rows)
    for i, name in enumerate(variants):
        positions = [j + (i - (len(variants) - 1) / 2) * 0.8 / len(variants) for j in range(len(rows))]
        heights = [row.measured.median(name) if name in row.measured.rates else 0.0 for row in rows]
        axes.bar(positions, heights, 0.8 / len(variants), label=name)
    axes.set_xticks(range(len(rows)), [row.workload for row in rows])
    axes.set_ylabel("examples per second")
    axes.set_title(f"suite {suite}, {_processor()}, {torch.get_num_threads()} thread")
    axes.legend()
    written.append(folder / f"{suite}.png")
    figure.savefig(written[-1], dpi=120)
    plt.close(figure)
    return written
