"""``torch.distributed.rpc`` as a server of rows.

``python -m benchmarks.peers.torch_rpc <endpoint> <rows> <width> <interface>``.
Both ends take the transports that RPC chooses between two machines. Left to itself it would find that these are two
network namespaces of one machine, and copy rows from one process's memory into the other's, past the link.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from lightning_recsys.runtime import configure_worker

_rows = torch.empty(0)


def lookup(rows_U: Tensor) -> Tensor:
    """What the server does for a lookup."""
    return _rows.index_select(0, rows_U)


def exchange(pushed_V: Tensor, updates_VD: Tensor, wanted_U: Tensor) -> Tensor:
    """What the server does for a row cache: add the updates that are pushed, and give the rows that are wanted."""
    _rows.index_add_(0, pushed_V, updates_VD)
    return lookup(wanted_U)


def serve(endpoint: str, num_rows: int, dim: int, *, interface: str) -> None:
    """Serve one client, and say when it may come; stays until it is ended, as the client leaves by what lies here."""
    global _rows
    configure_worker()  # as our servers do
    _rows = torch.randn(num_rows, dim)
    sys.stdout.write(f"ready: {endpoint}\n")
    sys.stdout.flush()
    _join("server", endpoint, interface)
    rpc.shutdown()
    signal.pause()


@contextmanager
def client(endpoint: str, *, interface: str) -> Iterator[None]:
    """Inside, :func:`look_up` and :func:`push_and_pull` ask the server at the endpoint."""
    _join("client", endpoint, interface)
    yield
    rpc.shutdown()


def look_up(rows_U: Tensor) -> Tensor:
    """A lookup by the server; waits for it."""
    rows_UD: Tensor = rpc.rpc_sync("server", lookup, args=(rows_U,))
    return rows_UD


def push_and_pull(pushed_V: Tensor, updates_VD: Tensor, wanted_U: Tensor) -> Tensor:
    """An exchange with the server; waits for it."""
    rows_UD: Tensor = rpc.rpc_sync("server", exchange, args=(pushed_V, updates_VD, wanted_U))
    return rows_UD


def _join(name: str, endpoint: str, interface: str) -> None:
    # Whose address is told to the other end: by RPC's own connections, and by those over which the two meet.
    os.environ |= {"TP_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=endpoint,
            rpc_timeout=3600,  # seconds; calls are under way while their process is stopped, in the turns of others
            _transports=["uv"],
            _channels=["mpt_uv", "basic"],
        )
        rpc.init_rpc(name, rank=("server", "client").index(name), world_size=2, rpc_backend_options=options)


if __name__ == "__main__":
    from benchmarks.peers import torch_rpc  # whose functions the client can name

    torch_rpc.serve(sys.argv[1], *map(int, sys.argv[2:4]), interface=sys.argv[4])
