"""How often a shadow thread without an interval runs rounds."""

import threading
import time

import pytest
import torch

from lightning_recsys.strategies.shadowsync.drivers import ShadowThread
from lightning_recsys.strategies.shadowsync.rounds import Rounds
from lightning_recsys.sync import EASGD


class Costly(Rounds):
    """Rounds that take a while of the processor: the first, as one that compiles does, or all, to move bytes."""

    def __init__(self, *, moves_bytes: bool) -> None:
        super().__init__(EASGD(), torch.zeros(4))
        self.enough = threading.Event()
        self._moves_bytes, self._moved = moves_bytes, 0.0

    @property
    def moving_seconds(self) -> float:
        return self._moved

    def _exchange(self, *, leaving: bool):
        began = time.thread_time()
        while (self._moves_bytes or self.count == 0) and time.thread_time() < began + 0.1:
            pass
        if self._moves_bytes:
            self._moved += time.thread_time() - began
        if self.count == 3:
            self.enough.set()
        return torch.ones(4), 0


@pytest.mark.parametrize("moves_bytes", [False, True], ids=["the first computes", "all move bytes"])
def test_shadow_thread_when_rounds_are_costly_otherwise_then_is_paced_by_what_they_usually_compute(moves_bytes):
    rounds = Costly(moves_bytes=moves_bytes)
    thread = ShadowThread(rounds)
    thread.start()
    try:
        assert rounds.enough.wait(15)  # paced by the rest as well, the next one would come after 28 s
    finally:
        thread.stop()
    assert rounds.count >= 4
