"""Predictions per second and latency over HTTP: published rows, plain ``nn.Embedding`` and TorchRec under LitServe."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from benchmarks.harness.jobs.hosts import free_port
from benchmarks.harness.ours import make_task
from benchmarks.harness.parts import Measured
from benchmarks.harness.processes import RECIPES, environment, python
from benchmarks.harness.report import Columns
from benchmarks.harness.workload import Workload
from benchmarks.peers import torchrec

from lightning_recsys.serving import export_model

OURS, PLAIN, TORCHREC = "ours", "nn.Embedding", "TorchRec"
_START_SECONDS = 120.0


def table_of(latencies: Mapping[int, Mapping[str, Sequence[float]]]) -> Columns:
    """What servers have answered, one client asking one request after another: rates and quantiles.

    Args:
        latencies: Seconds of each request, by batch size and server.
    """
    lines, details = [], {}
    for batch, servers in latencies.items():
        found = {}
        for name, seconds in servers.items():
            rate, (p50, p99) = batch * len(seconds) / sum(seconds), 1e3 * np.quantile(seconds, (0.5, 0.99))
            found[name] = {"predictions_per_second": rate, "p50_ms": float(p50), "p99_ms": float(p99)}
            lines.append([f"B={batch}", name, f"{rate:,.0f}", f"{p50:.3f} ms", f"{p99:.3f} ms"])
        details[f"B={batch}"] = found
    header = ("rows of a request", "server", "predictions/s", "p50", "p99")
    return Columns("DLRM over HTTP", header, lines, details)


def measure(*, batch_sizes: list[int], cardinalities: list[int] | None, seconds: float, rounds: int) -> Measured:
    """Ask the servers in turns; TorchRec's where it is installed.

    Args:
        batch_sizes: Rows of a request.
        cardinalities: Ids of each field; those of the other suites by default.
        seconds: Of each server and batch size in each round.
        rounds: How often.
    """
    work = Workload(rows=max(batch_sizes), **({} if cardinalities is None else {"cardinalities": tuple(cardinalities)}))
    (batch,) = work.batches(max(batch_sizes))
    ids_BF = batch.sparse.values.view(work.num_fields, -1).t().tolist()
    rows = [
        {"dense": dense, **dict(zip(work.fields, ids, strict=True))}
        for dense, ids in zip(batch.dense.tolist(), ids_BF, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        export_model(make_task(work, "dlrm").model, folder, num_dense=work.num_dense)
        sizes = ",".join(map(str, work.cardinalities))
        commands = {
            OURS: (str(RECIPES / "serve.py"), f"url={folder}", "port={port}"),
            PLAIN: ("-m", "benchmarks.peers.plain_serving", "{port}", sizes),
        }
        if torchrec.is_available():
            commands[TORCHREC] = ("-m", "benchmarks.peers.torchrec_serving", "{port}", sizes)
        ports = {name: stack.enter_context(_server(folder, *command)) for name, command in commands.items()}
        found: dict[int, dict[str, list[float]]] = {size: {name: [] for name in ports} for size in batch_sizes}
        for size in batch_sizes:
            body = json.dumps({"rows": rows[:size]}).encode()
            for port in ports.values():
                _ask(port, body, 0.5 * seconds, wait=_START_SECONDS)
            for number in range(rounds):
                for name in list(ports)[:: 1 if number % 2 else -1]:
                    found[size][name] += _ask(ports[name], body, seconds)
    return [table_of(found)], []


@contextmanager
def _server(folder: str, *arguments: str) -> Iterator[int]:
    """A server on a free port, until the end; it ends with all that it has started, and its temporary files go."""
    port = free_port()
    command = python(*(argument.replace("{port}", str(port)) for argument in arguments))
    # The processes of its group end at once, and none of them removes what it has for another one.
    with open(os.devnull, "w") as quiet, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        options: dict[str, Any] = {"cwd": folder, "stdout": quiet, "stderr": quiet, "start_new_session": True}
        variables = environment() | {"OMP_NUM_THREADS": "1", "TMPDIR": temporary}
        process = subprocess.Popen(command, env=variables, **options)  # noqa: S603 - our own interpreter
        try:
            yield port
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ask(port: int, body: bytes, seconds: float, *, wait: float = 0.0) -> list[float]:
    """Ask again and again for some seconds; returns what each answer took.

    Raises:
        RuntimeError: an answer is none.
    """
    connection, deadline = http.client.HTTPConnection("127.0.0.1", port, timeout=60), time.monotonic() + wait
    latencies: list[float] = []
    ends: float | None = None
    while ends is None or time.monotonic() < ends:
        began = time.perf_counter()
        try:
            connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except OSError:
            connection.close()
            if ends is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
            continue
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {content[:200]!r}")
        ends = time.monotonic() + seconds if ends is None else ends
        latencies.append(time.perf_counter() - began)
    connection.close()
    return latencies
