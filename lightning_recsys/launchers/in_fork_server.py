"""Imported by fork servers, after all else, and by nobody else.

It does once what each process that the fork server forks would do for itself, and removes what the fork server leaves
when the process that started it has died.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from lightning_recsys.launchers.folders import SOCKETS

_OWN, _PARENT = os.getpid(), os.getppid()


def _remove_sockets() -> None:
    """Remove the folder of our socket, if who made it has died. Processes that we forked, and their own, leave it."""
    server: Any = forkserver._forkserver
    if os.getpid() != _OWN or server._forkserver_pid is not None or not server._forkserver_address:
        return
    folder = Path(server._forkserver_address).parent
    if folder.name.startswith(f"{SOCKETS}-") and _parent_has_died():
        shutil.rmtree(folder, ignore_errors=True)


def _parent_has_died() -> bool:
    """We end because its files were closed; the system closes those of a dying process a moment before it tells us."""
    deadline = time.monotonic() + 1.0
    while os.getppid() == _PARENT and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getppid() != _PARENT


def _import_what_is_imported_late() -> None:
    """Import what training imports in its first steps, and load numba's types, without which no loop can be called.

    Half a second of a processor for each worker of each launch.
    """
    late = ["omegaconf", "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks"]  # by Lightning
    if "lightning_recsys.strategies.served" in sys.modules:
        late += [f"lightning_recsys.parameter_server.{name}" for name in ("connect", "remote", "server")]
    for name in late:
        with suppress(ImportError):
            import_module(name)
    if "numba" in sys.modules:
        target: Any = import_module("numba.core.registry").cpu_target
        target.typing_context.refresh()
        target.target_context.refresh()


atexit.register(_remove_sockets)
_import_what_is_imported_late()
gc.collect()
gc.freeze()  # nothing that is here by now ever goes: those that we fork need not look through it, nor copy its pages
