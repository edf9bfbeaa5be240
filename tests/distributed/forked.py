"""Processes for tests, from the fork server that launches use too: it has imported everything, once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from lightning_recsys.launchers.processes import fork_server_context


def run_processes(function: Callable[..., None], *args: Any, nprocs: int) -> None:
    """Call the function in so many processes, with each one's number before the arguments.

    Raises:
        ProcessRaisedException: one raised; has its traceback.
        ProcessExitedException: one died otherwise.
    """
    fork_server_context()
    mp.start_processes(function, args, nprocs, start_method="forkserver")
