"""Imported by fork servers, and by nobody else: what one leaves when the process that started it has died."""

from __future__ import annotations

import atexit
import os
import shutil
import time
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


atexit.register(_remove_sockets)
