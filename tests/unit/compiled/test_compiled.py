"""What all compiled loops share."""

import multiprocessing
import sys
import threading
import time

import numba
from numba.core.compiler_lock import global_compiler_lock

from lightning_recsys.optim import compiled


def compile_one():
    assert compiled.AHEAD
    sys.exit(numba.njit(lambda x: x + 1)(41))


def test_fork_when_another_thread_compiles_then_the_new_process_can_compile_too():
    compiling = threading.Event()

    def compile_for_a_while():
        with global_compiler_lock:
            compiling.set()
            time.sleep(0.3)

    thread = threading.Thread(target=compile_for_a_while)
    thread.start()
    compiling.wait()
    process = multiprocessing.get_context("fork").Process(target=compile_one)
    process.start()
    process.join(100)
    process.kill()
    process.join()
    thread.join()
    assert process.exitcode == 42
