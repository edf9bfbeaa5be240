"""Process groups whose members are threads of the test: collectives without processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def on_threads(size: int, member: Callable[[int, Any], Any]) -> list[Any]:
    """What ``member(rank, group)`` returns for each rank of a gloo group."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(minutes=2))
        return member(rank, group), group  # which stays until the others have connected to it

    with ThreadPoolExecutor(size) as threads:
        return [future.result()[0] for future in [threads.submit(run, rank) for rank in range(size)]]
