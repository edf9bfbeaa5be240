"""From an endpoint to its stores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_recsys.compression import make_codec
from lightning_recsys.parameter_server.access.keys import ClientKeys, JobKeys, Token, load_client_keys
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.endpoints import endpoints_of, is_endpoint
from lightning_recsys.parameter_server.journal import read_nonce
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.stores.folders.locality import why_not_local
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.stores.mapped import MappedStores

Transport = Literal["auto", "tcp"]


def connect(
    endpoint: str,
    *,
    keys: ClientKeys | JobKeys | Token | Path | str | None = None,
    timeout: float = 10.0,
    retries: int = 5,
    window: int = 32,
    transport: Transport = "auto",
    compression: str = "none",
    cancelled: Callable[[], bool] = lambda: False,
) -> Stores:
    """The stores behind an endpoint.

    * ``shm:///folder``: the folder's files are mapped into this process; no server is asked, none need run.
    * ``ipc:///socket``, ``tcp://host:port``: a server is asked, on this machine or anywhere. Where its folder is this
      machine's own (:mod:`.locality`), its files are mapped all the same, except for those of stores with dynamic rows,
      which the server alone may open.

    Args:
        endpoint: Where the stores are: ``shm://``, ``ipc://`` or ``tcp://``, as above.
        keys: For a server that listens on TCP: the clients' half, all keys of the job or the server's token, or the
            path of the file that has them.
        timeout: Seconds without any answer after which an attempt has failed.
        retries: Attempts after the first, with growing pauses between them.
        window: Pushes that may be on their way before the next one waits.
        transport: ``auto`` maps the files of a server on this machine; ``tcp`` goes
            through the server all the same.
        compression: How embedding rows and their gradients travel: ``none`` or ``bf16``. What is mapped does not
            travel, and stays float32.
        cancelled: Asked while an answer is waited for; once ``True``, the attempt is the last and ends within two
            seconds. For processes that are asked to end.

    Raises:
        ValueError: the endpoint or an option is none.
        FileNotFoundError: there is no such folder.
        ServerUnreachableError: there is no such server, or it has other keys.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stores = connect(f"shm://{folder}")
    ...     stores.create_dense_store("center", torch.ones(3)).pull()
    tensor([1., 1., 1.])
    """
    if transport not in get_args(Transport):
        raise ValueError(f"transport must be one of {list(get_args(Transport))}, got {transport!r}.")
    codec = make_codec(compression, "rows")
    if endpoint.startswith("shm:///"):
        return MappedStores(endpoint.removeprefix("shm://"))
    if not is_endpoint(endpoint):
        if len(several := endpoints_of(endpoint)) > 1:
            raise ValueError(f"{endpoint} names {len(several)} servers, each with stores of its own: connect to each.")
        raise ValueError(f"an endpoint is shm:///folder, ipc:///socket or tcp://host:port, got {endpoint!r}.")
    options: dict[str, Any] = {
        "keys": client_keys(keys),
        "timeout": timeout,
        "retries": retries,
        "window": window,
        "cancelled": cancelled,
    }
    connection = Connection(endpoint, **options)
    try:
        hello = connection.request("hello").value
    except BaseException:
        connection.close()
        raise
    reason = "as was asked for" if transport == "tcp" else _why_not_mapped(hello)
    if reason is not None:
        return RemoteStores(connection, reason=reason, rows=codec)
    connection.close()
    server = partial(connect, endpoint, **options, transport="tcp", compression=compression)
    return MappedStores(Path(hello["folder"]), server=server)


def _why_not_mapped(hello: dict[str, Any]) -> str | None:
    """Why the files of the server that said this are not mapped; ``None`` where they are to be."""
    folder = Path(hello["folder"])
    reason = why_not_local(folder, hello["place"])
    if reason is None and read_nonce(folder) != hello["nonce"]:
        return f"this process may not read and write {folder}"
    return reason


def client_keys(keys: ClientKeys | JobKeys | Token | Path | str | None) -> ClientKeys | Token | None:
    """The keys that a client needs, out of all keys or a file."""
    if isinstance(keys, str | Path):
        return load_client_keys(Path(keys))
    return keys.client if isinstance(keys, JobKeys) else keys
