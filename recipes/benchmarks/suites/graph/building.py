"""Building a graph from undirected edges, in a process of its own: its time, and its memory beside the edges.

``python -m benchmarks.suites.graph.building <nodes> <edges>`` is that process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.processes import environment, python
from benchmarks.harness.report import Columns

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SMALL = np.array([[0, 1], [1, 2]])  # edges that compile the loops first


def measure(*, num_nodes: int, num_edges: int, seconds: float, times_as_large: float) -> Measured:
    """Time and memory of ``CSRGraph.from_edge_index(..., undirected=True)``.

    Args:
        num_nodes: Of the graph.
        num_edges: Drawn at random; each goes both ways.
        seconds: Bar: at most, of the processor, which a machine that others use does not change much.
        times_as_large: Bar: the peak of the resident set beside the edges, at most so many times the graph.
    """
    command = python("-m", "benchmarks.suites.graph.building", str(num_nodes), str(num_edges))
    done = subprocess.run(command, capture_output=True, text=True, env=environment())  # noqa: S603 - this file
    if done.returncode:
        raise RuntimeError(f"building a graph of {num_nodes} nodes and {num_edges} edges failed:\n{done.stderr}")
    found = json.loads(done.stdout)
    ratio = None if found["peak"] is None else found["peak"] / found["graph"]
    shown = "" if ratio is None else f"{found['peak'] / 1e6:,.0f}"
    line = [f"{found['wall']:.2f}", f"{found['processor']:.2f}", f"{found['graph'] / 1e6:,.0f}", shown]
    title = f"a graph of {num_nodes:,} nodes and {num_edges:,} undirected edges"
    columns = ("seconds", "of the processor", "MB of the graph", "MB at its peak, beside the edges")
    bars = [
        Bar("seconds of the processor for the graph", found["processor"], "at most", seconds, " s"),
        Bar("memory of building it / of the graph", ratio, "at most", times_as_large, " x"),
    ]
    return [Columns(title, columns, [line], found)], bars


def main(num_nodes: int, num_edges: int) -> None:
    """Build it and print what it took."""
    from lightning_recsys.data.graph import CSRGraph

    CSRGraph.from_edge_index(_SMALL, num_nodes=3, undirected=True)
    edges = np.random.default_rng(0).integers(0, num_nodes, (2, num_edges))
    before = _resident("VmRSS")
    if before is not None:
        _RESET.write_text("5")  # the peak so far is forgotten
    wall, processor = time.perf_counter(), time.process_time()
    graph = CSRGraph.from_edge_index(edges, num_nodes=num_nodes, undirected=True)
    took = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
    after = _resident("VmHWM")
    peak = None if before is None or after is None else after - before
    print(json.dumps({**took, "graph": graph.indptr.nbytes + graph.indices.nbytes, "peak": peak}))


def _resident(key: str) -> int | None:
    """Bytes of the resident set, or its peak; ``None`` where the system does not tell."""
    if not _STATUS.exists():
        return None
    return next(int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if line.startswith(key))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
