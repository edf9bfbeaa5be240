"""Processes for tests, from the fork server that launches use too: it has imported everything, once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from lightning_recsys.launchers.processes import fork_server_context


def run_processes(function: Callable[..., None], *args: Any, nprocs: int) -> None:
    """Call the function in so many processes, with each one's number before the arguments.

    They have the environment of the test that asks. The fork server has that of the one which started it, and a seed of
    Lightning's in there would be every later process's.

    Raises:
        ProcessRaisedException: one raised; has its traceback.
        ProcessExitedException: one died otherwise.
    """
    fork_server_context()
    mp.start_processes(_call, (dict(os.environ), function, *args), nprocs, start_method="forkserver")


def _call(rank: int, environment: dict[str, str], function: Callable[..., None], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *args)
