"""Processes for tests, from the fork server that launches use too: it has imported everything, once for all tests."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing as mp


def fork_context() -> ForkServerContext:
    """The fork server's; if it is still to be started, it imports what a launch would have it import."""
    context = multiprocessing.get_context("forkserver")
    ours = sorted(module for module in sys.modules if module.partition(".")[0] == "lightning_recsys")
    context.set_forkserver_preload(["pytorch_lightning", *ours])
    return context


def run_processes(function: Callable[..., None], *args: Any, nprocs: int) -> None:
    """Call the function in so many processes, with each one's number before the arguments.

    Raises:
        ProcessRaisedException: one raised; has its traceback.
        ProcessExitedException: one died otherwise.
    """
    fork_context()
    mp.start_processes(function, args, nprocs, start_method="forkserver")
