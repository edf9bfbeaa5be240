"""Main processes for test_launcher_processes.py: ``python launcher_scripts.py NAME``."""

import os
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytorch_lightning as pl
from served_strategy import ServedStrategy

from lightning_recsys.launchers.processes import end_with_parent, start_process
from lightning_recsys.strategies import ForkserverDDPStrategy

STRATEGIES = {"plain": ForkserverDDPStrategy, "served": ServedStrategy}


def launch(function, *args, devices=2, strategy=ForkserverDDPStrategy):
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy(), logger=False)
    return trainer.strategy.launcher.launch(function, *args)


def say(*words):
    """A line in one piece: workers talk at the same time, and print writes word by word where stdout is unbuffered."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def pids():
    return [os.getpid(), os.getppid()]


def work_for_ever():
    say("worker", os.getpid())
    time.sleep(1000)


def signals():
    """A run for each line that is read, which names its strategy; somebody signals this process in its middle."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    for line in sys.stdin:
        try:
            launch(work_for_ever, strategy=STRATEGIES[line.strip()])
        except BaseException as error:
            server, tracker = forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid
            handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
            assert handlers == [signal.default_int_handler, signal.SIG_DFL]
            say("raised", type(error).__name__, *error.args, "server", server, tracker)


def end_with_us(folder):
    end_with_parent(folder)
    time.sleep(1000)


def forks():
    """A process from the fork server, and one that inherits what this one holds of it."""
    folder = Path(tempfile.gettempdir(), "used")
    folder.mkdir()
    worker = start_process(end_with_us, [folder], name="one", started=[])
    if forked := os.fork():
        say("worker", worker.pid, forked)
    time.sleep(1000)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
