"""Memory of a training beyond its rows, in a process of its own.

``python -m benchmarks.harness.memory <prepared rows> <model> <batch>`` is that process.

Counted is the peak of the process's resident set (``VmHWM``): the interpreter, torch, Lightning and this package with
the pages of their libraries that were touched, the dense part and its optimizer, activations, the reader's window and
its batches, metrics, the logger. Less the bytes of all embedding rows and of their optimizer state.

The installation is that of ``pip install lightning-recsys``: torchmetrics imports SciPy and matplotlib where it finds
them, which takes 90 MiB, and only the extras of this package bring them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.processes import environment, python

STEPS = 100
_STATUS = Path("/proc/self/status")


def beyond_rows_mib(root: Path, model: str, batch_size: int) -> float | None:
    """MiB that a training of :data:`STEPS` steps needs beyond its rows; ``None`` where the system does not tell."""
    if not _STATUS.exists():
        return None
    command = python("-m", "benchmarks.harness.memory", str(root), model, str(batch_size))
    done = subprocess.run(  # noqa: S603 - this file, in this interpreter
        command, capture_output=True, text=True, env=environment()
    )
    if done.returncode:
        raise RuntimeError(f"the training of {model!r} whose memory was to be measured failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def main(root: str, model: str, batch_size: str) -> None:
    """Train and print the number."""
    _hide("scipy", "matplotlib")
    from benchmarks.harness.ours import Ours, make_task
    from benchmarks.harness.turns import Stopped, Turn
    from benchmarks.harness.workload import Workload

    from lightning_recsys.embeddings import LocalBackend
    from lightning_recsys.runtime import configure_worker

    class Steps(Turn):
        """A turn that ends with a number of steps."""

        left = STEPS

        def step_done(self, num_examples: int) -> None:
            self.left -= 1
            if not self.left:
                raise Stopped

    configure_worker()
    work = Workload()
    try:
        Ours(Path(root))(work, model, int(batch_size))(Steps(0))
    except Stopped:
        peak = next(int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if "VmHWM" in line)
    backends = [module for module in make_task(work, model).modules() if isinstance(module, LocalBackend)]
    rows = sum(tensor.nbytes for backend in backends for tensor in (backend.rows, *backend.row_state.values()))
    print((peak - rows) / 2**20)


def _hide(*packages: str) -> None:
    """Let packages look as if they were not installed, to whoever asks in one of the usual ways."""
    find_spec, version = importlib.util.find_spec, importlib.metadata.version

    def version_of(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.util.find_spec = lambda name, package=None: None if name in packages else find_spec(name, package)
    importlib.metadata.version = version_of
    sys.modules.update(dict.fromkeys(packages))  # importing them raises


if __name__ == "__main__":
    main(*sys.argv[1:])
