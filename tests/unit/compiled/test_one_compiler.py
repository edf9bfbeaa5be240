"""Several processes that need the same compiled loop at once, and a lock that cannot be had."""

import errno
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from numba.core import caching

from lightning_recsys.compiled import one_compiler

LOOPS = """
from lightning_recsys.compiled.loops import compile_loop, compile_rule

@compile_rule
def doubled(x):
    return 2 * x

@compile_loop
def total(values):
    found = 0.0
    for value in values:
        found += doubled(value)
    return found
"""
HOLD = (
    "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX);"
    " print(1, flush=True); time.sleep(600)"
)


@pytest.fixture
def loops(tmp_path):
    """A module of compiled loops that nobody has compiled yet."""
    (tmp_path / "loops_of_this_test.py").write_text(LOOPS)
    return tmp_path / "loops_of_this_test.py"


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where numba's cache looks for it
    try:
        spec.loader.exec_module(module)
        assert module.total(np.arange(4.0)) == 12.0
    finally:
        del sys.modules[path.stem]
    return module


def misses(module):
    return [sum(x.stats.cache_misses.values()) for x in (module.total, module.doubled)]


def lock_of(path):
    return path.parent / "__pycache__" / f"{path.stem}.total.lock"


def test_loop_when_three_processes_need_it_at_once_then_one_compiles_it(loops):
    begin, go = os.pipe()
    ends = []
    for _ in range(3):
        reading, writing = os.pipe()
        ends.append((reading, pid := os.fork()))
        if not pid:
            os.close(go)
            os.read(begin, 1)  # until all of them are there
            status = 1
            try:
                os.write(writing, bytes(misses(module_at(loops))))
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
    os.close(begin)
    os.close(go)
    counts = [tuple(os.read(reading, 2)) for reading, _ in ends]
    assert [os.waitpid(pid, 0)[1] for _, pid in ends] == [0, 0, 0]
    for reading, _ in ends:
        os.close(reading)
    assert sorted(counts) == [(0, 0), (0, 0), (1, 1)]


@pytest.fixture
def holder(loops):
    """A process that has the lock of a loop."""
    lock_of(loops).parent.mkdir()
    lock_of(loops).touch()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock_of(loops))], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        yield process
        process.kill()


def test_loop_when_the_process_that_compiled_it_is_killed_then_another_compiles_it(loops, holder):
    holder.send_signal(signal.SIGKILL)
    assert misses(module_at(loops)) == [1, 1]


def test_loop_when_the_process_that_has_the_lock_is_stopped_then_another_compiles_it_in_the_end(
    loops, holder, monkeypatch
):
    monkeypatch.setattr(one_compiler, "PATIENCE_SECONDS", 0.1)
    assert misses(module_at(loops)) == [1, 1]
    with lock_of(loops).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("what", ["folder", "locks"])
def test_loop_when_there_can_be_no_lock_then_is_compiled_all_the_same(loops, what, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EROFS if what == "folder" else errno.ENOLCK, "not here")

    if what == "folder":
        monkeypatch.setattr(one_compiler, "os", SimpleNamespace(open=refuse, O_RDONLY=os.O_RDONLY, O_CREAT=os.O_CREAT))
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)
    assert misses(module_at(loops)) == [1, 1]


def test_loop_when_no_folder_for_caches_can_be_written_to_then_it_is_compiled_and_a_line_says_so(loops, monkeypatch):
    def refuse(locator):
        raise OSError(errno.EROFS, "not here")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR names another folder"):
        assert misses(module_at(loops)) == [1, 1]
    assert not lock_of(loops).exists()


def test_loop_when_the_cache_has_no_room_then_it_is_compiled_once_all_the_same(loops, monkeypatch):
    def refuse(*args):
        refused.append(args)
        raise OSError(errno.ENOSPC, "no room")

    refused = []
    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", refuse)
    module = module_at(loops)
    assert [len(x.overloads) for x in (module.total, module.doubled)] == [1, 1]
    assert len(refused) == 2  # and no loop is compiled, or offered to the cache, again
    with lock_of(loops).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lock_when_a_child_was_forked_meanwhile_then_the_child_does_not_keep_it(tmp_path):
    lock, (wait, end) = tmp_path / "loop.lock", os.pipe()
    with one_compiler._locked(lock):
        child = os.fork()
        if not child:
            os.close(end)
            os.read(wait, 1)  # until the parent closes its end, or dies
            os._exit(0)
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(end)
        os.waitpid(child, 0)
        os.close(wait)
