"""The store by which the processes of one machine find each other, where no other machine can connect to it."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"


def keep_store(port: int) -> TCPStore:
    """Keep the store of a launch in this process, which outlives any worker, until the last reference to it goes.

    Args:
        port: Port on loopback at which the store listens.

    Raises:
        OSError: somebody else listens there.
    """
    try:
        listening = socket.create_server((LOOPBACK, port), backlog=1024)  # reuses the address
    except OSError as error:
        where = f"workers cannot meet at {LOOPBACK}:{port} (MASTER_PORT, where it is set): {error.strerror}"
        raise OSError(error.errno, where) from None
    # libuv would leave a handler in this process, which closes two descriptors by their numbers in whatever is forked
    # from it, and from that, whatever these are there: not for the process of a user.
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        use_libuv=False,
    )


def join_store(port: int, *, timeout: timedelta, host: str = LOOPBACK) -> TCPStore:
    """Connect to a store that another process keeps, such as by :func:`keep_store`.

    Args:
        port: Port of the store.
        host: Where that process is.
        timeout: Time to wait for the store, and for each value that is not there yet.

    Raises:
        RuntimeError: nobody keeps a store there.
    """
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
