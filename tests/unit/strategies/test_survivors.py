"""Rounds of trainers, as threads of one process, of which some die at the worst moments."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_recsys.launchers.loopback import LOOPBACK
from lightning_recsys.strategies.common.workers import meeting
from lightning_recsys.strategies.replicas.survivors import Council, SurvivorRounds
from lightning_recsys.sync import BMUF, ModelAveraging

pytestmark = pytest.mark.timeout(60)

WAITING = {"timeout": timedelta(seconds=30), "cancelled": lambda: False}


class Trainers:
    """Members 0, 1 and 2, each with a replica of one number; ``together`` lets them act at the same time."""

    def __init__(self, make, values=(0.0, 3.0, 6.0)):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.lost = set()
        self.rounds = [self.member(rank, make, value) for rank, value in enumerate(values)]
        self.set_leaders(0, 1, 2)

    def member(self, rank, make, value, **options):
        replica, algorithm = torch.tensor([value]), make()
        algorithm.start(torch.zeros(1))
        council = Council(self.store.clone(), rank=rank, host=LOOPBACK, lost=lambda: self.lost, **WAITING)
        return SurvivorRounds(algorithm, replica, council=council, **options)

    def set_leaders(self, *ranks):
        for rank in ranks:
            self.rounds[rank].set_leaders(ranks)

    def together(self, *actions):
        with ThreadPoolExecutor(len(actions)) as threads:
            return [x.result(30) for x in [threads.submit(action) for action in actions]]

    def run(self, *ranks, leaving=False):
        return self.together(*(lambda x=x: self.rounds[x].run(leaving=leaving) for x in ranks))

    def replicas(self, *ranks):
        return [float(self.rounds[rank].replica) for rank in ranks]

    def die(self, rank, *, during=None):
        """Let a member end, in what it does as the last thing."""
        rounds = self.rounds[rank]
        try:
            if during is not None:
                during(rounds)
        finally:
            rounds._leave_group()
            self.lost.add(rank)

    def close(self):
        for rounds in self.rounds:
            rounds.close()
        self.rounds.clear()
        del self.store  # which listens


@pytest.fixture
def make_trainers():
    made = []

    def make(*args, **kwargs):
        made.append(Trainers(*args, **kwargs))
        return made[-1]

    yield make
    for trainers in made:
        trainers.close()


def lose_next_exchange(rounds, monkeypatch):
    """Cut a member off behind its next exchange, before it has taken what the others sent."""
    exchange = rounds._exchange

    def exchange_and_fail(*, leaving):
        monkeypatch.setattr(rounds, "_exchange", exchange)
        exchange(leaving=leaving)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(rounds, "_exchange", exchange_and_fail)


def make_bmuf():
    return BMUF(alpha=0.5, eta=0.5, block_momentum=0.5)


def test_rounds_when_a_member_is_dead_then_are_made_among_those_left_and_weigh_them_equally(make_trainers):
    trainers = make_trainers(ModelAveraging)
    assert trainers.run(0, 1, 2) == [False] * 3
    assert trainers.replicas(0, 1, 2) == [1.5, 3.0, 4.5]  # half way to 3
    sent = trainers.rounds[0].exchanged_bytes
    assert sent == int(2 * 2 / 3 * 8)  # of two numbers, the vote among them
    trainers.die(1)
    assert trainers.run(0, 2) == [False] * 2
    assert [trainers.rounds[rank].num_trainers for rank in (0, 2)] == [2, 2]
    assert trainers.replicas(0, 2) == [2.25, 3.75]  # half way to 3, the mean of 1.5 and 4.5
    assert trainers.rounds[0].exchanged_bytes - sent == 8
    assert trainers.run(0, 2, leaving=True) == [True] * 2
    assert trainers.run(0, 2) == [False] * 2  # and after a pause


@pytest.mark.parametrize("dies", ["before it reports", "before it decides", "behind its decision"])
def test_decision_when_who_makes_it_dies_then_the_others_hear_of_one_and_agree_again(make_trainers, dies, monkeypatch):
    trainers = make_trainers(ModelAveraging)
    trainers.run(0, 1, 2)
    council = trainers.rounds[0]._council

    def end(rounds):
        if dies == "before it decides":
            monkeypatch.setattr(council, "_wait", lambda _: (_ for _ in ()).throw(SystemExit))
        elif dies == "behind its decision":  # and before it has written that there is another generation
            store = SimpleNamespace(**{name: getattr(council.store, name) for name in ("check", "get", "compare_set")})
            sets = iter([council.store.set])
            store.set = lambda *args: next(sets)(*args)
            monkeypatch.setattr(council, "store", store)
        with suppress(SystemExit, StopIteration):
            if dies != "before it reports":
                rounds._agree(has_stopped=False)

    decide = [lambda x=x: trainers.rounds[x]._agree(has_stopped=False) for x in (1, 2)]
    first, second, _ = trainers.together(*decide, lambda: trainers.die(0, during=end))
    assert first == second
    assert first.members == ((0, 1, 2) if dies == "behind its decision" else (1, 2))
    assert trainers.store.get("generation") == b"2"
    first, second = trainers.together(*decide)
    assert first == second
    assert first.members == (1, 2)
    assert trainers.store.get("generation") == b"3"


@pytest.mark.parametrize("make", [ModelAveraging, make_bmuf], ids=["ma", "bmuf"])
def test_round_when_cut_off_behind_the_sum_then_who_lacks_the_mean_folds_it_in_once(make_trainers, make, monkeypatch):
    """The second member dies when the first one has the sum, and the third one has not."""
    trainers, whole = make_trainers(make), make_trainers(make)
    trainers.run(0, 1, 2)
    behind = trainers.rounds[2]
    lose_next_exchange(behind, monkeypatch)

    def twice(rounds):
        return [rounds.run(leaving=False) for _ in range(2)]

    ahead, lacks, _ = trainers.together(
        lambda: twice(trainers.rounds[0]),
        lambda: twice(behind),
        lambda: trainers.die(1, during=lambda rounds: rounds._exchange(leaving=False)),
    )
    assert (ahead, lacks) == ([False, False], [False, False])
    for _ in range(2):
        whole.run(0, 1, 2)
    whole.die(1)
    whole.run(0, 2)
    assert [x.count for x in (trainers.rounds[0], behind)] == [3, 3]
    assert trainers.replicas(0, 2) == whole.replicas(0, 2)
    states = [trainers.rounds[rank].algorithm.state_dict() for rank in (0, 2)]
    for name, tensor in whole.rounds[0].algorithm.state_dict().items():
        assert torch.equal(states[0][name], tensor)
        assert torch.equal(states[1][name], tensor)


def test_rounds_when_one_has_seen_that_all_want_to_stop_then_who_was_cut_off_stops_too(make_trainers, monkeypatch):
    trainers = make_trainers(ModelAveraging)
    trainers.run(0, 1, 2)
    before = trainers.replicas(0, 2)
    behind = trainers.rounds[2]
    lose_next_exchange(behind, monkeypatch)
    stopped = trainers.together(
        lambda: trainers.rounds[0].run(leaving=True),
        lambda: behind.run(leaving=True),
        lambda: trainers.die(1, during=lambda rounds: rounds._exchange(leaving=True)),
    )
    assert stopped == [True, True, None]
    assert trainers.replicas(0, 2) == before
    trainers.set_leaders(0, 2)
    assert trainers.run(0, 2) == [False, False]
    assert trainers.replicas(0, 2) == [2.25, 3.75]


def test_rounds_when_a_member_dies_before_it_connects_then_the_others_try_again_without_it(make_trainers, monkeypatch):
    trainers = make_trainers(ModelAveraging)
    council = trainers.rounds[0]._council
    agree, seconds = council.agree, iter([2, 60])  # for the meeting that nobody but the two comes to, and for their own

    def agree_on_members(**options):
        monkeypatch.setattr(meeting, "MEETING_TIME", timedelta(seconds=next(seconds)))
        return agree(**options)

    monkeypatch.setattr(council, "agree", agree_on_members)

    def report(rounds):
        rounds._agree(has_stopped=False)

    assert trainers.together(
        lambda: trainers.rounds[0].run(leaving=False),
        lambda: trainers.die(1, during=report),
        lambda: trainers.rounds[2].run(leaving=False),
    ) == [False, None, False]
    assert trainers.replicas(0, 2) == [1.5, 4.5]


def test_rounds_when_nobody_has_died_then_say_why_the_group_has_failed(make_trainers, monkeypatch):
    trainers = make_trainers(ModelAveraging)
    trainers.run(0, 1, 2)

    def fail(*, leaving):
        raise RuntimeError("no memory")

    monkeypatch.setattr(trainers.rounds[1], "_exchange", fail)

    def raises(rank, match):
        with pytest.raises(RuntimeError, match=match):
            trainers.rounds[rank].run(leaving=False)

    closed = "onnection"
    trainers.together(*(lambda x=x: raises(x, "no memory" if x == 1 else closed) for x in range(3)))


def test_rounds_when_another_worker_makes_those_of_a_trainer_then_it_learns_what_the_algorithm_remembers(make_trainers):
    trainers = make_trainers(make_bmuf)
    trainers.run(0, 1, 2)
    trainers.die(2)
    trainers.rounds.append(trainers.member(3, make_bmuf, trainers.replicas(2)[0], joins=True))
    # Rounds stop before anybody joins.
    assert trainers.run(0, 1, leaving=True) == [True, True]
    trainers.set_leaders(0, 1, 3)
    assert trainers.run(0, 1, 3) == [False] * 3
    states = [trainers.rounds[rank].algorithm.state_dict() for rank in (0, 1, 3)]
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor)
        assert torch.equal(states[2][name], tensor)
    assert [trainers.rounds[rank].count for rank in (0, 1, 3)] == [2] * 3
    assert states[0]["momentum"].abs() > 0


def test_rounds_when_all_that_knew_the_last_one_are_dead_then_those_that_are_new_begin_at_what_one_of_them_has(
    make_trainers,
):
    trainers = make_trainers(make_bmuf)
    trainers.run(0, 1, 2)
    trainers.rounds += [trainers.member(rank, make_bmuf, value, joins=True) for rank, value in ((3, 2.0), (4, 6.0))]
    assert trainers.run(0, 1, 2, leaving=True) == [True] * 3
    for rank in range(3):
        trainers.die(rank)
    trainers.set_leaders(3, 4)
    assert trainers.run(3, 4) == [False] * 2
    for rank in (3, 4):  # half way from 2 to the mean, 4
        state = trainers.rounds[rank].algorithm.state_dict()
        assert {name: float(tensor) for name, tensor in state.items()} == {"global": 3.0, "momentum": 1.0}
        assert trainers.rounds[rank].count == 1
    assert trainers.replicas(3, 4) == [2.5, 4.5]
    assert trainers.run(3, 4, leaving=True) == [True] * 2
