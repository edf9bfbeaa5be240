"""How often a shadow thread without an interval runs rounds."""

import threading
import time

import torch

from lightning_recsys.strategies.replicas.drivers import ShadowThread
from lightning_recsys.strategies.replicas.rounds import Rounds
from lightning_recsys.sync import EASGD


class Costly(Rounds):
    """Rounds of which the first takes a while of the processor, as one that compiles does."""

    def __init__(self) -> None:
        super().__init__(EASGD(), torch.zeros(4))
        self.enough = threading.Event()

    def _exchange(self, *, leaving: bool):
        began = time.thread_time()
        while self.count == 0 and time.thread_time() < began + 0.1:
            pass
        if self.count == 3:
            self.enough.set()
        return torch.ones(4), 0


def test_shadow_thread_when_the_first_round_is_costly_then_is_paced_by_the_others():
    rounds = Costly()
    thread = ShadowThread(rounds)
    thread.start()
    try:
        assert rounds.enough.wait(15)  # paced by the first one as well, the next would come after 34 s
    finally:
        thread.stop()
    assert rounds.count >= 4
