"""The process-wide settings that a training process runs with, and how they travel to a worker process."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def configure_worker(num_threads: int = 1) -> None:
    """Set this process up for click-through-rate training: threads, denormal numbers taken as zero, memory kept.

    One thread per worker is the right number more often than not: embedding kernels gain little from OpenMP threads and
    lose a factor of ten or more where two workers' threads share a core. Denormals appear as soon as rows decay towards
    zero, and a multiplication by one takes the CPU about a hundred times as long.

    Memory that a step has freed is kept for the next one. By default glibc decides from the sizes that it has seen
    freed so far; activations of a few megabytes may then go back to the system after each step and come again page by
    page (measured: 500 faults and 8 % of the time of a step of a million parameters at 512 examples).

    Args:
        num_threads: Threads of torch's CPU operators (OpenMP and MKL) in this process, at least 1.

    Raises:
        ValueError: ``num_threads`` is below 1.

    >>> configure_worker(num_threads=1)
    >>> torch.get_num_threads(), (torch.tensor([1e-39]) * 1).item()
    (1, 0.0)
    """
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}. 1 is the usual choice.")
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)  # False where the CPU cannot; nothing breaks then
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # where its own rule ends up, and as far as it goes
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


@cache
def fork_between_threads() -> None:
    """From now on a fork of this process waits for a native thread that is about to run Python for the first time.

    Such a thread, as gloo's and ZeroMQ's are, holds a lock of the interpreter meanwhile, and may lose the processor
    with it. CPython 3.11 leaves that lock taken in the child, which then waits for ever: a worker of a data loader that
    never starts. So the lock is taken and given back just before a fork. That leaves a moment in which another
    thread may take it: beside threads that began all the time 17 of 5,700 children hung, and with this none of 25,000;
    of a larger process 2 of 1,694, and with this 1 of 3,592. Python 3.12 frees the lock in the child.
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=sys._current_frames)  # which reads the list of threads that the lock is for


def process_end(pid: int) -> list[int]:
    """A file descriptor, where the system has such, that becomes readable when a process has ended.

    The end of a pipe that the other process holds is no such sign: all that it has forked, such as the workers of a
    data loader, hold it, too, and may outlive it.

    Args:
        pid: A process of this machine; need not be a child.

    Returns:
        The descriptor, which the caller closes; none on other systems than Linux, or where it is forbidden.

    Raises:
        ProcessLookupError: there is no such process, or no longer.
    """
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return []


@dataclass(frozen=True)
class ProcessState:
    """The state that a process inherits by fork and a worker of a fork server does not, since another process forks it.

    Args:
        environ: Environment variables.
        warning_filters: :data:`warnings.filters`.
        log_levels: Loggers that have a level of their own; the root logger's name is empty.
        rng_states: Generators of torch (CPU), NumPy and :mod:`random`.
        deterministic: :func:`torch.are_deterministic_algorithms_enabled`.
        deterministic_warn_only: :func:`torch.is_deterministic_algorithms_warn_only_enabled`.
        cudnn_benchmark: ``torch.backends.cudnn.benchmark``.
        matmul_precision: :func:`torch.get_float32_matmul_precision`.
        default_dtype: :func:`torch.get_default_dtype`.
        start_method: How :mod:`multiprocessing` starts processes where the user's code or a data loader asks for some;
            ``None`` is the platform's default.
        ignores_ctrl_c: It ignores SIGINT, as what a shell starts in the background (``&``) of a script does.
        next_hook: The number that torch gives the next hook of a module or tensor. Hooks travel under theirs, and a
            worker that counted from 0 would put others in their place.
    """

    environ: dict[str, str]
    warning_filters: list[Any]
    log_levels: dict[str, int]
    rng_states: dict[str, Any]
    deterministic: bool
    deterministic_warn_only: bool
    cudnn_benchmark: bool
    matmul_precision: str
    default_dtype: torch.dtype
    start_method: str | None
    ignores_ctrl_c: bool
    next_hook: int

    @classmethod
    def capture(cls) -> ProcessState:
        """The state of this process."""
        from lightning_fabric.utilities.seed import _collect_rng_states  # servers run by hand do without Lightning

        loggers = [
            logging.root,
            *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger)),
        ]
        start_method = multiprocessing.get_start_method(allow_none=True)
        return cls(
            environ=dict(os.environ),
            warning_filters=list(warnings.filters),
            log_levels={x.name if x is not logging.root else "": x.level for x in loggers if x.level},
            rng_states=_collect_rng_states(include_cuda=False),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            # joblib's own, for one, exists in its processes only
            start_method=start_method if start_method in multiprocessing.get_all_start_methods() else None,
            ignores_ctrl_c=signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            next_hook=RemovableHandle.next_id,
        )

    def restore(self) -> None:
        """Give this process the captured state, but for signals."""
        from lightning_fabric.utilities.seed import _set_rng_states

        os.environ.clear()
        os.environ.update(self.environ)
        warnings.resetwarnings()
        warnings.filters.extend(self.warning_filters)  # type: ignore[attr-defined]  # a Sequence to typeshed, a list
        for name, level in self.log_levels.items():
            logging.getLogger(name).setLevel(level)
        _set_rng_states(self.rng_states)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_default_dtype(self.default_dtype)
        RemovableHandle.next_id = max(RemovableHandle.next_id, self.next_hook)
        multiprocessing.set_start_method(self.start_method, force=True)  # multiprocessing has set its own way to us
