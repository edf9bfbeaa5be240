"""A trainer that waits for something to train makes the others' rounds in a thread, which may fail or hang."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_recsys.strategies.replicas.drivers import ForegroundHook
from lightning_recsys.strategies.replicas.rounds import Rounds
from lightning_recsys.sync import ModelAveraging, RoundSchedule

pytestmark = pytest.mark.timeout(30)


class Hanging(Rounds):
    """Rounds that end once the others answer, whom the test speaks for."""

    def __init__(self) -> None:
        super().__init__(ModelAveraging(), torch.zeros(1))
        self.has_begun, self.answers = threading.Event(), threading.Event()
        self.settings: tuple[int, float] | None = None
        self.thread: threading.Thread | None = None

    def _exchange(self, *, leaving: bool):
        self.settings = torch.get_num_threads(), (torch.tensor([1e-39]) * 1).item()
        self.thread = threading.current_thread()
        self.has_begun.set()
        self.answers.wait()
        return torch.zeros(1), 0


@pytest.fixture
def rounds():
    found = Hanging()
    yield found
    found.answers.set()
    found.thread.join()


def test_standing_in_when_the_wait_is_over_then_the_round_under_way_ends_and_no_other_begins(rounds):
    torch.set_num_threads(2)
    driver = ForegroundHook(rounds, schedule=RoundSchedule(gap=3))
    with driver.standing_in() as check:
        assert rounds.has_begun.wait(10)
        check()
        assert rounds.count == 0
        rounds.answers.set()
    made = rounds.count
    rounds.thread.join()
    assert rounds.count == made >= 1
    assert driver.is_active
    assert rounds.settings == (1, 0.0), "a thread has settings of its own"


def test_standing_in_when_the_block_is_interrupted_then_nobody_waits_for_a_round_that_does_not_end(rounds):
    driver = ForegroundHook(rounds, schedule=RoundSchedule(gap=3))

    def wait_for_work():
        with driver.standing_in():
            assert rounds.has_begun.wait(10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for_work()
    assert rounds.count == 0
    assert rounds.thread.is_alive()
    assert rounds.thread.daemon, "it would keep the process from its end"
    driver.abandon()  # as a run that has failed does: waits a moment only
    assert not driver.is_active
    rounds.answers.set()
    rounds.thread.join()
    assert rounds.count == 1, "it has ended with that round"
