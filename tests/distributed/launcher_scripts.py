"""Main processes for test_launcher_processes.py: ``python launcher_scripts.py NAME``."""

import os
import signal
import sys
import time
from multiprocessing import forkserver, resource_tracker

import pytorch_lightning as pl
from served_strategy import ServedStrategy

from lightning_recsys.strategies import ForkserverDDPStrategy


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


def served_signals():
    signals(strategy=ServedStrategy)


def signals(strategy=ForkserverDDPStrategy):
    """A run for each line that is read: interrupted, then terminated, then killed, each in its middle."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    for _ in sys.stdin:
        try:
            launch(work_for_ever, strategy=strategy)
        except BaseException as error:
            server, tracker = forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid
            handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
            assert handlers == [signal.default_int_handler, signal.SIG_DFL]
            say("raised", type(error).__name__, *error.args, "server", server, tracker)


def joblib():
    """A run in a process of joblib, whose start method workers do not know."""
    from joblib.externals.loky import get_reusable_executor
    from launcher_scripts import launch, pids  # not from __main__, which is joblib's own over there

    executor = get_reusable_executor(max_workers=1)
    worker, server = executor.submit(launch, pids).result()
    executor.shutdown(wait=True)
    assert len({os.getpid(), worker, server}) == 3
    say("done")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
