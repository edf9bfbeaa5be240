"""What ``recipes/serve.py`` leaves of a server's processes."""

import multiprocessing
import time

import pytest
from serve import run


class Interrupted:
    """A server that has started a process when something ends it, and does not know of that process yet.

    LitServe returns without an error where Ctrl-C comes while it starts the processes that answer.
    """

    def __init__(self, error=None):
        self.error = error

    def run(self, **_):
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
        if self.error is not None:
            raise self.error


@pytest.mark.timeout(60)
def test_server_when_ended_while_it_starts_then_no_process_is_left():
    for interrupted in (Interrupted(), Interrupted(KeyboardInterrupt())):
        run(interrupted, host="127.0.0.1", port=8000)
        assert multiprocessing.active_children() == []
    with pytest.raises(SystemExit, match="was killed"):
        run(Interrupted(RuntimeError("a process was killed")), host="127.0.0.1", port=8000)
    assert multiprocessing.active_children() == []
