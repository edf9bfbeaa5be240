"""Preparing raw rows with ``recipes/prepare.py``, as a user runs it: rate and memory of the whole command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from benchmarks.harness.bars import Bar, Bars
from benchmarks.harness.processes import RECIPES, python, watched
from benchmarks.harness.workload import Workload
from pyarrow import csv

PRESETS = ("dlrm", "torchrec", "bars")
"""Of ``preprocessing``, those for Criteo's rows."""


def measure(folder: Path, *, rows: int, presets: list[str]) -> Bars:
    """Write Criteo's text and prepare it with each preset of ``preprocessing``.

    The command's start counts as well. Its memory is the peak of its resident set.
    """
    raw = write_text(Workload(rows=rows), folder / "train.txt")
    bars = []
    for preset in presets:
        options = ["data=criteo", f"raw={raw}", f"out={folder / preset}", f"preprocessing={preset}"]
        _, run = watched(f"preparing with preprocessing={preset}", python(str(RECIPES / "prepare.py"), *options))
        mib = None if run.gib is None else 1024 * run.gib
        bars += [
            Bar(f"rows prepared a second, preprocessing={preset}", rows / run.seconds, "at least", 100_000),
            Bar(f"memory of preparing, preprocessing={preset}", mib, "at most", 2048, " MiB"),
        ]
    return Bars(tuple(bars))


def write_text(work: Workload, path: Path) -> Path:
    """The rows of a workload as Criteo's text; a dense value in five is missing."""
    names = [np.array([f"{(field << 24) + i:08x}" for i in range(n)]) for field, n in enumerate(work.cardinalities)]
    values = [pa.array(each) for each in names]
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with path.open("wb") as file:
        for batch in work.loader(65_536):
            columns = [pa.array(batch.labels.numpy().astype(np.int8))]
            for dense in batch.dense.numpy().T:
                columns.append(pa.array((np.exp(dense + 2)).astype(np.int32), mask=dense < -0.84))
            for field, ids in zip(values, batch.sparse.values.view(len(values), -1).numpy(), strict=True):
                columns.append(field.take(pa.array(ids)))
            csv.write_csv(pa.table(columns, [str(i) for i in range(len(columns))]), file, options)
    return path
