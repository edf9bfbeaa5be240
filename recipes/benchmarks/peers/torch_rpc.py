"""``torch.distributed.rpc`` as a server of rows: ``python -m benchmarks.peers.torch_rpc <port> <rows> <width>``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from multiprocessing.connection import Connection

import torch
import torch.distributed.rpc as rpc
from benchmarks.harness.hosts import free_port
from benchmarks.harness.processes import environment, python
from torch import Tensor

from lightning_recsys.runtime import configure_worker

_rows = torch.empty(0)


def lookup(rows_U: Tensor) -> Tensor:
    """What the server does."""
    return _rows.index_select(0, rows_U)


def serve(port: int, num_rows: int, dim: int) -> None:
    """Serve until the client leaves."""
    global _rows
    configure_worker()  # as our servers do
    _rows = torch.randn(num_rows, dim)
    _join("server", port)
    rpc.shutdown()


@contextmanager
def lookups(wanted: list[Tensor], num_rows: int, dim: int, *, warm_lookups: int) -> Iterator[Callable[[float], int]]:
    """A client and a server, over the library's own choice of transports, which stand still but for their turns.

    In each of the two a thread looks for messages in shared memory without a pause, asked or not. It would take the
    processors from whoever is measured in between; so both are stopped then.

    Args:
        wanted: Rows of each lookup, again and again.
        num_rows: Of the server.
        dim: Width of a row.
        warm_lookups: Before the first turn.

    Yields:
        A function that looks rows up for so many seconds and returns how often it did.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    client = context.Process(target=_look_up, args=(theirs, wanted, num_rows, dim, warm_lookups))
    client.start()
    theirs.close()
    assert client.pid is not None

    def run(seconds: float) -> int:
        os.killpg(client.pid, signal.SIGCONT)
        ours.send(seconds)
        done: int = ours.recv()
        os.killpg(client.pid, signal.SIGSTOP)
        return done

    try:
        ours.recv()  # warm
        os.killpg(client.pid, signal.SIGSTOP)
        yield run
        os.killpg(client.pid, signal.SIGCONT)
        ours.close()  # it leaves then
        client.join(30)
    finally:
        with suppress(ProcessLookupError):  # both have ended
            os.killpg(client.pid, signal.SIGKILL)
        client.join()


def _look_up(turns: Connection, wanted: list[Tensor], num_rows: int, dim: int, warm_lookups: int) -> None:
    """The client's process, which starts the server's. The two are a group, to be stopped as one."""
    os.setpgid(0, 0)  # where the benchmark is killed while they are stopped, the system ends the group
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends it
    configure_worker()
    port = free_port()
    command = python("-m", "benchmarks.peers.torch_rpc", str(port), str(num_rows), str(dim))
    with subprocess.Popen(command, env=environment()) as server:  # noqa: S603
        try:
            _join("client", port)
            for rows_U in islice(cycle(wanted), warm_lookups):
                rpc.rpc_sync("server", lookup, args=(rows_U,))
            turns.send(0)
            with suppress(EOFError):  # no more turns
                while True:
                    turns.send(_turn(wanted, turns.recv()))
            rpc.shutdown()
        except BaseException:
            server.kill()
            raise


def _turn(wanted: list[Tensor], seconds: float) -> int:
    deadline = time.perf_counter() + seconds
    for done, rows_U in enumerate(cycle(wanted)):
        if time.perf_counter() >= deadline:
            return done
        rpc.rpc_sync("server", lookup, args=(rows_U,))
    raise AssertionError("there are rows to look up")


def _join(name: str, port: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        rpc.init_rpc(name, rank=("client", "server").index(name), world_size=2, rpc_backend_options=options)


if __name__ == "__main__":
    from benchmarks.peers import torch_rpc  # which the client can name

    torch_rpc.serve(*map(int, sys.argv[1:]))
