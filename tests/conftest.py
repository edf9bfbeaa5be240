"""Fixtures of all tests. The automatic ones hold every test to this: leave the machine as you found it."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

# Before torch is imported, here and in the processes that tests start: its threads wait for each other in loops, which
# takes four times the processor time where three tests run on two CPUs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings
from lightning_fabric.plugins.environments import MPIEnvironment
from lightning_fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only

with suppress(ImportError):
    import s3fs  # noqa: F401 - which Lightning imports in rank 0 of each launch; a fork server imports it if we have it

DATA_VARIABLE = "LIGHTNING_RECSYS_DATA"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell has started the tests in the background. Processes that they start would inherit that, and go on after the
    # Ctrl-C that a test sends them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every Trainer asks MPI for the world's size where mpi4py is installed, which starts a daemon, threads and a port for
# as long as this process lives. They are there before the first test, so that none has left them behind: Open MPI ends
# a process whose daemon is killed, with status 195.
MPIEnvironment.detect()

settings.register_profile("however_busy_the_machine", deadline=None)
settings.load_profile("however_busy_the_machine")

collect_ignore_glob = ["*_script.py"]  # run in processes of their own; looking for doctests would run them too


# Prepared rows go into a cache of this run's own, in the processes that tests start too.
_CACHE = tempfile.TemporaryDirectory(prefix="lightning-recsys-tests-", ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHE.name


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets (``ml-1m``, ``adult``); the test is skipped where there is none."""
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        pytest.skip(f"set {DATA_VARIABLE} to a folder with real data sets to run this test")
    if not Path(folder).is_dir():
        pytest.fail(f"{DATA_VARIABLE}={folder} is not a folder")
    return Path(folder)


def pytest_collection_finish() -> None:
    """Collections of garbage no longer look through all that is imported, which takes a fifth of a second each time."""
    gc.collect()
    gc.freeze()


# --- What a test may leave behind, and why ---------------------------------------------------------------------------

ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST",  # pytest's own, changes between set-up and tear-down
    "PYTEST_VERSION",
    "PL_GLOBAL_SEED",  # seed_everything, which the main process of a run is free to call
    "PL_SEED_WORKERS",
    "CUBLAS_WORKSPACE_CONFIG",  # Trainer(deterministic=True)
    "KMP_INIT_AT_FORK",  # importing scikit-learn
    "KMP_DUPLICATE_LIB_OK",
    "RAY_CLIENT_MODE",  # importing ray
    "_RJEM_MALLOC_CONF",  # importing polars
}
# One of each for the life of the process; the last two are fsspec's.
ALLOWED_THREADS = re.compile(r"tqdm|TMonitor|pytest_timeout|^Dummy-|^fsspecIO$|^asyncio_0$")

SHARED_MEMORY = Path("/dev/shm")
GRACE_SECONDS = 5.0  # an ending thread or process gets this long before it counts as left behind
LOOKS = 20  # and is looked for so often at least
COLLECTION_SECONDS = 0.5  # between two collections of garbage meanwhile


def _after_grace(find: Callable[[], list[str]], seconds: float | None = None) -> list[str]:
    """What ``find`` still finds once it has had time to go; what waits for garbage collection is collected."""
    began, seconds = time.monotonic(), GRACE_SECONDS if seconds is None else seconds
    next_collection, looks = began + 0.1, 0  # most things that end do so at once, and need no collection
    # The time alone says little: where this process had no turn meanwhile, what is ending had none either.
    while (found := find()) and ((now := time.monotonic()) < began + seconds or looks < LOOKS):
        if now >= next_collection:
            gc.collect()  # takes a fifth of a second, or a whole one where the machine is busy
            next_collection = now + COLLECTION_SECONDS
        time.sleep(0.02)
        looks += 1
    return found


def _fail_if(left_behind: list[str], what: str) -> None:
    if left_behind:
        pytest.fail(f"the test left {what} behind: {', '.join(left_behind)}", pytrace=False)


@pytest.fixture(autouse=True)
def _environment_is_restored() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    _fail_if(
        [f"{name}={after.get(name)!r} (was {before.get(name)!r})" for name in sorted(changed - ALLOWED_VARIABLES)],
        "environment variables",
    )


@pytest.fixture(autouse=True)
def _files_stay_out_of_the_working_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each test runs in an empty directory of its own, which is still empty at the end."""
    before = Path.cwd()
    own = Path(tempfile.mkdtemp(prefix="cwd-", dir=tmp_path_factory.getbasetemp()))
    os.chdir(own)
    yield
    os.chdir(before)
    left_behind = sorted(path.name for path in own.iterdir())
    if not left_behind:
        own.rmdir()
    _fail_if(left_behind, "files in the working directory (use tmp_path)")


@pytest.fixture(autouse=True)
def _files_are_closed() -> Iterator[None]:
    def find() -> list[str]:
        # matplotlib keeps the fonts open that it has drawn with.
        return sorted({x.path for x in process.open_files() if "/mpl-data/fonts/" not in x.path} - before)

    process = psutil.Process()
    before = {x.path for x in process.open_files()}
    yield
    _fail_if(_after_grace(find), "open files")


@pytest.fixture(autouse=True)
def _ports_are_closed() -> Iterator[None]:
    def listening() -> set[int]:
        return {x.laddr.port for x in process.net_connections("inet") if x.status == psutil.CONN_LISTEN}

    process = psutil.Process()
    before = listening()
    yield
    _fail_if(_after_grace(lambda: sorted(str(port) for port in listening() - before)), "listening ports")


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    def find() -> list[str]:
        new = set(threading.enumerate()) - before
        return sorted(x.name for x in new if not ALLOWED_THREADS.search(x.name))

    before = set(threading.enumerate())
    yield
    _fail_if(_after_grace(find), "threads")


@pytest.fixture(autouse=True)
def _processes_end() -> Iterator[None]:
    """Every process below this one ends, but for two that Python keeps for as long as this process lives.

    Those are the fork server, which serves all launches of a process, and multiprocessing's resource tracker. Both read
    a pipe whose other end we hold, and end when we do.
    """

    def find() -> list[psutil.Process]:
        allowed = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
        found = [x for x in psutil.Process().children(recursive=True) if x.pid not in allowed and x not in before]
        return [x for x in found if goes_on(x)]

    def goes_on(process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:  # it ended as we looked
            return False

    def describe() -> list[str]:
        described = []
        for process in find():
            with suppress(psutil.NoSuchProcess):
                described.append(f"{process.pid} ({' '.join(process.cmdline())[:80]})")
        return described

    before = set(psutil.Process().children(recursive=True))
    yield
    left_behind = _after_grace(describe)
    for process in find() if left_behind else ():  # finding takes milliseconds: it reads of every process there is
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _fail_if(left_behind, "processes")


@pytest.fixture(autouse=True)
def _shared_memory_is_unlinked() -> Iterator[None]:
    def entries() -> set[str]:
        return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()

    def owner(name: str) -> int | None:
        """Torch and our own code put the process's id in the name."""
        numbers = re.findall(r"\d+", name)
        return int(numbers[0]) if numbers else None

    def find() -> list[str]:
        """What is new, but for what belongs to living processes that are not ours."""
        new = {name: owner(name) for name in entries() - before}
        return sorted(name for name, pid in new.items() if pid is None or pid in ours or not psutil.pid_exists(pid))

    before = entries()
    yield
    if entries() <= before:
        return
    ours = {os.getpid(), *(x.pid for x in psutil.Process().children(recursive=True))}
    left_behind = _after_grace(find)
    if "PYTEST_XDIST_WORKER" in os.environ and not ours & {owner(name) for name in left_behind}:
        # Perhaps of a process that a test beside this one has killed, and will clean up after.
        left_behind = _after_grace(find, seconds=60.0)
    _fail_if(left_behind, "shared memory")


@pytest.fixture(autouse=True)
def _signal_handlers_are_restored() -> Iterator[None]:
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    catchable -= {signal.SIGALRM}  # pytest-timeout's
    before = {number: signal.getsignal(number) for number in catchable}
    yield
    changed = [number for number, handler in before.items() if signal.getsignal(number) != handler]
    for number in changed:
        signal.signal(number, before[number])
    _fail_if([signal.Signals(number).name for number in changed], "signal handlers")


@pytest.fixture(autouse=True)
def _process_group_is_destroyed(_ports_are_closed: None) -> Iterator[None]:
    """Silently, as Lightning itself leaves the group of an in-process run for the life of the process.

    It ends before the ports are looked at: that fixture is set up earlier, so it ends later.
    """
    ranks = fabric_rank_zero_only.rank, rank_zero_only.rank
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    fabric_rank_zero_only.rank, rank_zero_only.rank = ranks


@pytest.fixture(autouse=True)
def _torch_settings_are_restored() -> Iterator[None]:
    """Settings that a training process is free to change; the next test starts from torch's own."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True)
def _random_numbers_repeat() -> None:
    """A test draws the same numbers alone, in the suite and in any order."""
    random.seed(0)
    np.random.seed(0)
    # without a GPU torch.manual_seed would keep a stack trace for each call, for the time when there is one
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def _logging_is_restored() -> Iterator[None]:
    """Hydra configures the root logger of a process that runs an application."""
    level, handlers, disabled = logging.root.level, list(logging.root.handlers), logging.root.manager.disable
    yield
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.disable(disabled)
