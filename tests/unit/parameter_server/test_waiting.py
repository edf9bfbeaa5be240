"""Waiting for others: pauses grow, and a wait ends in time."""

import pytest

from lightning_recsys.parameter_server import client, waiting
from lightning_recsys.parameter_server.waiting import LONGEST_PAUSE, LOOK_SECONDS, PATIENCE_SECONDS, turns


class Clock:
    """In the place of the module ``time``: it goes on where somebody sleeps."""

    def __init__(self):
        self.now, self.pauses = 100.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (client, waiting):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_turns_when_nobody_cancels_then_pauses_grow_and_the_last_turn_is_at_the_end_of_the_time(clock):
    looks = [(clock.now, looks) for looks in turns(2.0)]
    assert looks[0] == (100.0, False)
    assert clock.now == pytest.approx(102.0)
    assert all(x <= y for x, y in zip(clock.pauses[:-1], clock.pauses[1:-1], strict=False))
    assert clock.pauses[-2] == max(clock.pauses) == LONGEST_PAUSE
    times = [now - 100.0 for now, is_look in looks if is_look]
    assert len(times) == 3
    assert all(
        LOOK_SECONDS < x - y < LOOK_SECONDS + 2 * LONGEST_PAUSE for x, y in zip(times, [0, *times], strict=False)
    )


def test_turns_when_there_is_no_time_then_there_is_one(clock):
    assert list(turns(0.0)) == [False]
    assert clock.pauses == []


def test_turns_when_cancelled_then_they_last_a_few_seconds_more_and_never_longer_than_their_time(clock):
    for _ in turns(cancelled=lambda: clock.now > 103.0):
        assert clock.now < 103.0 + PATIENCE_SECONDS + 2 * LONGEST_PAUSE
    assert clock.now > 103.0 + PATIENCE_SECONDS - LONGEST_PAUSE
    began = clock.now
    for _ in turns(1.0, lambda: True):
        pass
    assert clock.now == pytest.approx(began + 1.0)
