"""How often a shadow thread without an interval runs rounds."""

import threading
import time

import torch

from lightning_recsys.strategies._drivers import ShadowThread
from lightning_recsys.strategies._rounds import Rounds
from lightning_recsys.sync import EASGD


class CostlyAtFirst(Rounds):
    """The first round computes for a while, as one that compiles does; the others hardly at all."""

    def __init__(self) -> None:
        super().__init__(EASGD(), torch.zeros(4))
        self.enough = threading.Event()

    def _exchange(self, *, leaving: bool):
        if leaving:
            return None
        end = time.thread_time() + (0.1 if self.count == 0 else 0.0)
        while time.thread_time() < end:
            pass
        if self.count == 3:
            self.enough.set()
        return torch.ones(4)


def test_shadow_thread_when_the_first_round_was_costly_then_the_others_do_not_wait_for_it():
    rounds = CostlyAtFirst()
    thread = ShadowThread(rounds)
    thread.start()
    try:
        assert rounds.enough.wait(15)  # paced by the first round, the second would come after 20 s
    finally:
        thread.stop()
    assert rounds.count >= 4
