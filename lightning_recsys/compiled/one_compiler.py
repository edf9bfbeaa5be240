"""One process compiles a loop where several need it at once; the others load what it has compiled from the cache."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock

PATIENCE_SECONDS = 300.0  # for another process that compiles; one that is stopped must not stop all others
PAUSE_SECONDS = 0.02  # between two tries to get the lock
NO_CACHE = (
    "Compiled loops cannot be kept, since neither the folder of this package nor the user's folder for caches can be"
    " written to: each process compiles its own, which takes it seconds. NUMBA_CACHE_DIR names another folder."
)
_held: set[Path] = set()  # locks of this process, whose compiler works for one thread at a time


def compile_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator like numba's with ``cache=True``, whose functions are compiled by one process at a time.

    Whoever comes second finds what the first one has left in the cache. Without this each process that starts with an
    empty cache compiles everything, and two that write to one function's index at once may leave it with a loop for
    other arguments than it says.

    The lock is a file's beside the cache, so it ends with a process that is killed. A function waits for the locks of
    those that it calls, and never the other way round, so processes do not wait for each other in a circle. Where there
    can be no lock (a folder that nobody may write to, a file system without locks), or no cache (neither the package's
    folder nor one of the user's can be written to), every process compiles by itself.

    Args:
        make: Makes a compiled function of a plain one, without a cache.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = make(function)
        if not hasattr(compiled, "enable_caching"):
            return compiled  # NUMBA_DISABLE_JIT leaves functions as they are
        try:
            compiled.enable_caching()
        except RuntimeError:  # numba knows no folder that it may write to
            if parent_process() is None:  # once, and not by every worker and server
                warnings.warn(NO_CACHE, RuntimeWarning, stacklevel=1)  # from one place: it is shown for one function
            return compiled
        name = f"{function.__module__}.{function.__qualname__}.lock".replace("<locals>", "locals")
        lock = Path(compiled.stats.cache_path, name)
        alone = compiled.compile

        @wraps(alone)
        def compile_locked(signature):  # noqa: ANN001, ANN202
            with global_compiler_lock, _locked(lock):
                try:
                    return alone(signature)
                except OSError:  # the cache had no room for it, such as on a full disk
                    return alone(signature)  # what was compiled is there, and is not compiled again

        compiled.compile = compile_locked
        return compiled

    return decorate


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes, or none where it cannot be had; who has it already goes on."""
    if path in _held:
        yield
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError:
        yield
        return
    _held.add(path)
    try:
        _await(descriptor)
        yield
    finally:
        _held.discard(path)
        with suppress(OSError):  # a child that was forked meanwhile has the file too, and would keep the lock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _await(descriptor: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_SECONDS)
        except OSError:  # a file system without locks
            return
        else:
            return
