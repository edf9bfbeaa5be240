"""When trainers may stop, what a round leaves, and when the next one is: closed forms, in virtual time."""

import numpy as np
import pytest
import torch

from lightning_recsys.sync import BMUF, EASGD, ModelAveraging, ReplicaRounds, RoundSchedule, ShadowPace
from lightning_recsys.sync.pacing import RECENT, ROUND_SHARE, SOCKET_FACTOR
from lightning_recsys.sync.rounds import DIVERGENCE_PERIOD


def replicas(*starts, algorithm=ModelAveraging):
    made = []
    for start in starts:
        rule = algorithm(alpha=1.0)
        rule.start(torch.tensor([0.0]))
        made.append(ReplicaRounds(rule, torch.tensor([start]), num_trainers=len(starts)))
    return made


def run_together(rounds, leaving):
    """One all-reduce of all trainers; which of them may stop."""
    assert all(one.takes_part(leaving=wants) for one, wants in zip(rounds, leaving, strict=True))
    mean = torch.stack([one.replica for one in rounds]).mean(0)
    return [one.finish(mean.clone(), num_leaving=sum(leaving)) for one in rounds]


@pytest.mark.parametrize("algorithm", [ModelAveraging, BMUF])
def test_trainers_when_they_finish_at_different_rounds_then_all_leave_after_the_same_one(algorithm):
    rounds = replicas(0.0, 6.0, 3.0, algorithm=algorithm)
    finished_after = [1, 4, 2]
    left = [run_together(rounds, [number >= last for last in finished_after]) for number in range(5)]
    assert left == [[False] * 3] * 4 + [[True] * 3], "nobody before the last, and nobody after it"
    assert [one.count for one in rounds] == [4, 4, 4], "the round in which all leave is none"
    assert [one.replica.item() for one in rounds] == [3.0] * 3


def test_trainer_with_a_center_when_it_wants_to_leave_then_needs_nobody():
    rounds = ReplicaRounds(EASGD(alpha=0.25), torch.tensor([4.0]))
    assert rounds.takes_part(leaving=False)
    assert not rounds.finish(torch.tensor([0.0]))
    assert rounds.replica.item() == 3.0
    assert not rounds.takes_part(leaving=True)


def test_divergence_then_is_that_before_the_fold_of_every_tenth_round():
    rounds = ReplicaRounds(EASGD(alpha=0.5), torch.tensor([3.0, 4.0]))
    seen = []
    for _ in range(2 * DIVERGENCE_PERIOD + 1):
        rounds.finish(torch.tensor([6.0, 8.0]))
        seen.append(rounds.divergence)
    # Half of the distance is left after each round: at first |(3, 4)| / |(6, 8)|, ten rounds later 2**-10 of it.
    expected = [0.5 * 0.5 ** (DIVERGENCE_PERIOD * (number // DIVERGENCE_PERIOD)) for number in range(len(seen))]
    assert seen == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("over_sockets", "factor"), [(False, 1), (True, SOCKET_FACTOR)], ids=["mapped", "sockets"])
def test_pace_when_rounds_cost_the_same_then_all_that_they_take_is_the_share_of_a_core(over_sockets, factor):
    pace, cost = ShadowPace(over_sockets=over_sockets), 0.002
    assert pace.pause_after(1000 * cost) == 0.0, "the first round compiles"
    pause = pace.pause_after(cost)
    assert factor * cost / (cost + pause) == pytest.approx(ROUND_SHARE)


def test_pace_when_single_rounds_are_costly_then_goes_by_the_median_of_the_last():
    pace = ShadowPace()
    pace.pause_after(0.0)
    usual = pace.pause_after(1.0)
    assert pace.pause_after(1.0) == pace.pause_after(100.0) == usual
    pauses = [pace.pause_after(2.0) for _ in range(RECENT)]
    assert pauses[0] < 2 * usual
    assert pauses[-1] == 2 * usual, "what was longer ago than that is forgotten"


def test_pace_when_an_interval_is_given_then_costs_do_not_count():
    assert [ShadowPace(interval=0.5).pause_after(cost) for cost in (0.0, 10.0)] == [0.5, 0.5]


def test_schedule_when_it_counts_steps_then_rounds_follow_the_gap_and_time_does_not_count():
    steps = np.zeros(1, dtype=np.int64)
    schedule, due = RoundSchedule(gap=3, steps=steps), []
    schedule.begin(0.0)
    for number in range(7):
        due.append(schedule.is_due_after_step(1e9 * number))
        if due[-1]:
            schedule.finish_round(1e9 * number)
    assert due == [False, False, True] * 2 + [False]
    schedule.begin(1e12)
    assert steps.tolist() == [1], "a pause leaves the step before it"
    resumed = RoundSchedule(gap=3, steps=steps)
    assert [resumed.is_due_after_step(0.0) for _ in range(2)] == [False, True]


def test_schedule_when_it_counts_seconds_then_from_the_end_of_the_last_round_or_pause():
    schedule = RoundSchedule(gap=1, interval=10.0)
    schedule.begin(100.0)
    assert [schedule.is_due_after_step(now) for now in (109.0, 110.0)] == [False, True]
    schedule.finish_round(115.0)
    assert [schedule.is_due_after_step(now) for now in (124.0, 125.0)] == [False, True]
    schedule.begin(1000.0)
    assert not schedule.is_due_after_step(1009.0)
