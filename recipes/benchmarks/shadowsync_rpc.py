"""``torch.distributed.rpc`` as a server of rows: ``python -m benchmarks.shadowsync_rpc <port> <rows> <width>``."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from benchmarks.hosts import free_port
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
def client(num_rows: int, dim: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """A function that looks rows up in a server of its own, over the library's own choice of transports."""
    port = free_port()
    search = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks.shadowsync_rpc", str(port), str(num_rows), str(dim)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": search}) as server:  # noqa: S603
        try:
            _join("client", port)
            try:
                yield lambda rows_U: rpc.rpc_sync("server", lookup, args=(rows_U,))
            finally:
                rpc.shutdown()
        except BaseException:
            server.kill()
            raise


def _join(name: str, port: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        rpc.init_rpc(name, rank=("client", "server").index(name), world_size=2, rpc_backend_options=options)


if __name__ == "__main__":
    from benchmarks import shadowsync_rpc  # which the client can name

    shadowsync_rpc.serve(*map(int, sys.argv[1:]))
