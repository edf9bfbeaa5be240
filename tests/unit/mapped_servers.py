"""Several servers' stores, mapped by the test itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from lightning_recsys.stores import MappedStores


@contextmanager
def mapped_servers(folder: Path, count: int) -> Iterator[list[MappedStores]]:
    """The stores of so many servers, each in a folder of its own below this one."""
    with ExitStack() as opened:
        servers = []
        for number in range(count):
            own = folder / str(number)
            own.mkdir()
            servers.append(opened.enter_context(closing(MappedStores(own))))
        yield servers
