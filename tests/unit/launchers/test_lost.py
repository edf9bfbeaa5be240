"""A worker that died is an error, unless the others can do without it."""

import logging
import pickle
import signal
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
from pytorch_lightning.trainer.states import TrainerFn

from lightning_recsys.launchers import ServerSpec
from lightning_recsys.launchers import workers as watched
from lightning_recsys.launchers.sidecars import ServerLostError, Sidecars, _Server
from lightning_recsys.launchers.worker import Failure
from lightning_recsys.launchers.workers import Replacing, Worker, _try_to_lose
from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)


def a_dead_worker():
    return Worker(1, None, None, None, failure=Failure(RuntimeError("Worker 1 was ended by SIGKILL."), time=0.0))


def test_worker_when_the_others_can_do_without_it_then_it_is_lost_and_said_once(caplog):
    worker = a_dead_worker()
    with caplog.at_level(logging.WARNING):
        _try_to_lose(worker, 2, lambda rank, left: None if (rank, left) == (1, 2) else "no")
    assert worker.is_lost
    assert worker.failure is None
    assert not worker.is_busy
    (said,) = caplog.messages
    assert said == "Worker 1 was ended by SIGKILL. The other 2 go on. What worker 1 had not pushed is lost."


def test_worker_when_the_others_cannot_do_without_it_then_its_death_says_why():
    worker = a_dead_worker()
    _try_to_lose(worker, 2, lambda *_: "They are too few.")
    assert worker.failure.error.__notes__ == ["They are too few."]
    assert not worker.is_lost
    worker = a_dead_worker()
    _try_to_lose(worker, 2, lambda *_: "")
    assert not hasattr(worker.failure.error, "__notes__")


@pytest.fixture
def ended(monkeypatch):
    """The names of the processes that were ended, which takes those that were about to end by themselves as well."""
    found = []

    def end(processes, number):
        for process in processes:
            found.append(process.name)
            process.exitcode = process.ends_with(number)

    monkeypatch.setattr(watched, "end_processes", end)
    return found


def do_without(ranks, survive=lambda *_: None, *, results=None):
    """Rank 4 was lost before; where there are results, ranks 2 and 3 wrote theirs, and 2 comes to its end with them."""
    workers = []
    for rank in range(5):
        process = SimpleNamespace(exitcode=None, name=f"process {rank}", ends_with=lambda number: -number)
        workers.append(Worker(rank, process, None, results or Path("there is none")))
    workers[4].is_lost = True
    if results is not None:
        workers[2].process.ends_with = lambda _: 0
    watched._do_without(lost_server(ranks), workers, survive, signal.SIGINT)
    return workers


def lost_server(ranks):
    return ServerLostError(ServerSpec("group", 1, ranks=ranks), "Server group-1 was ended by SIGKILL.")


def test_server_when_only_some_need_it_then_they_end_and_the_others_go_on_and_it_is_said_once(ended, caplog):
    asked = []
    with caplog.at_level(logging.WARNING):
        workers = do_without(frozenset({2, 3, 4}), lambda rank, left: asked.append((rank, left)))
    assert ended == ["process 2", "process 3"]
    assert asked == [(2, 2), (3, 2)]
    assert [x.is_lost for x in workers] == [False, False, True, True, True]
    (said,) = caplog.messages
    assert said.startswith("Server group-1 was ended by SIGKILL. The workers that need it end, too (2, 3); the other 2")


def test_server_when_a_worker_that_needs_it_finishes_meanwhile_then_it_is_not_lost(ended, tmp_path, caplog):
    asked = []
    workers = do_without(frozenset({2, 3}), lambda rank, left: asked.append((rank, left)), results=tmp_path)
    assert ended == ["process 2", "process 3"]
    assert asked == [(3, 3)]
    assert [x.is_lost for x in workers] == [False, False, False, True, True]
    (said,) = caplog.messages
    assert "The workers that need it end, too (3); the other 3 go on" in said


@pytest.mark.parametrize(
    ("ranks", "answer", "says"),
    [
        (None, None, []),
        (frozenset({2, 3}), "They are too few.", ["They are too few."]),
        (frozenset({2, 3}), "", []),
    ],
    ids=["all_need_it", "too_few", "not_training"],
)
def test_server_when_the_others_cannot_do_without_it_then_its_end_says_why(ranks, answer, says, ended):
    with pytest.raises(ServerLostError, match="Server group-1 was ended") as raised:
        do_without(ranks, lambda *_: answer)
    notes = getattr(raised.value, "__notes__", [])
    assert len(notes) == len(says)
    assert all(note.startswith(text) for note, text in zip(notes, says, strict=True))


def test_server_when_lost_in_a_process_of_a_sweep_then_its_error_arrives_as_it_was():
    error = lost_server(frozenset({2}))
    error.add_note("They are too few.")
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is ServerLostError
    assert arrived.spec == ServerSpec("group", 1, ranks=frozenset({2}))
    assert arrived.text == str(arrived) == "Server group-1 was ended by SIGKILL."
    assert arrived.__notes__ == ["They are too few."]


class Process:
    """One that the launcher watches; its sentinel is ready once it has ended."""

    def __init__(self) -> None:
        self.exitcode = None
        self.sentinel, self._sender = Pipe(duplex=False)
        self.pid = 2**22 + 1  # of nobody

    def end(self, code):
        self.exitcode = code
        self._sender.close()

    def send(self, number):
        self.end(-number)

    def wait_for_end(self, timeout=None):
        assert self.exitcode is not None

    def goes_on(self):
        return self.exitcode is None


def a_worker(rank, folder):
    receiver, _ = Pipe(duplex=False)
    worker = Worker(rank, Process(), receiver, folder / f"results-{rank}")
    worker.results.touch()
    return worker


@pytest.mark.parametrize("state", ["succeeded", "raised", "busy"])
def test_server_when_it_is_lost_then_is_looked_at_once_while_the_others_go_on(state, tmp_path, monkeypatch, caplog):
    """Rank 0 works on for a while; ranks 1 and 2, who need the server, have come to an end, or work as well."""
    workers = [a_worker(rank, tmp_path) for rank in range(3)]
    for worker in workers[1:]:
        if state == "succeeded":
            worker.succeeded = True
        elif state == "raised":
            worker.failure = Failure(ZeroDivisionError("in a net"), time=1.0)
    sidecars = Sidecars([ServerSpec("group", 0, ranks=frozenset({1, 2}))], max_restarts=0)
    sidecars.folder = tmp_path
    (tmp_path / "group-0").mkdir()
    sidecars._servers = [_Server(sidecars.specs[0], Process(), "ipc://group-0")]
    sentinel = sidecars.sentinels[0]
    sidecars._servers[0].process.end(-9)
    waited_for = []

    def wait(objects, timeout):
        waited_for.append(objects)
        if len(waited_for) == 4:
            workers[0].process.end(0)

    monkeypatch.setattr(watched, "wait", wait)
    monkeypatch.setattr(watched, "SETTLE_SECONDS", 60.0)
    if state == "raised":
        with pytest.raises(ZeroDivisionError, match="in a net"):
            watched.join(workers, sidecars, lambda *_: None, signal.SIGTERM, Replacing(None, 0, set))
    else:
        watched.join(workers, sidecars, lambda *_: None, signal.SIGTERM, Replacing(None, 0, set))
    assert [sentinel in objects for objects in waited_for] == [True, False, False, False]
    assert workers[0].succeeded
    assert [x.is_lost for x in workers] == [False] + 2 * [state == "busy"]
    assert not (tmp_path / "group-0").exists()
    said = [message for message in caplog.messages if "Server group-0" in message]
    assert len(said) == (state == "busy")


class Start:
    """Starts processes, of which each does what it is told to when the main process next waits."""

    def __init__(self, folder, *acts):
        self.folder, self.acts, self.started = folder, list(acts), []

    def replacement(self, rank):
        worker = a_worker(rank, self.folder)
        worker.replaces = worker.joins = True
        self.started.append(worker)
        return worker


def replaced(folder, monkeypatch, *acts, at_most, lost):
    """Rank 1 of three dies; then one act after another happens, each ahead of the next look at all of them."""
    workers, start = [a_worker(rank, folder) for rank in range(3)], Start(folder)
    acts = iter([lambda _: workers[1].process.end(-9), *acts])
    monkeypatch.setattr(watched, "wait", lambda *_: next(acts)(start.started))
    told = []

    def survive(rank, left):
        told.append((rank, left))
        lost.add(rank)

    replacing = Replacing(start, at_most, lambda: lost)
    return workers, told, lambda: watched.join(workers, Sidecars(()), survive, signal.SIGTERM, replacing)


def finish(*workers):
    for worker in workers:
        worker.process.end(0)


def test_worker_when_it_is_replaced_then_the_other_counts_once_it_takes_part_and_may_die_as_well(
    tmp_path, monkeypatch, caplog
):
    lost = set()
    acts = [
        lambda started: started[0].process.end(-9),  # before it took part
        lambda started: (lost.discard(1), started[1].process.end(-11)),  # behind that
        lambda started: finish(*workers[:1], *workers[2:3]),
        lambda started: pytest.fail("nothing is left to wait for"),
    ]
    workers, told, join = replaced(tmp_path, monkeypatch, *acts, at_most=2, lost=lost)
    with caplog.at_level(logging.WARNING):
        join()
    assert [(x.rank, x.replaces, x.succeeded, x.is_lost) for x in workers] == [
        (0, False, True, False),
        (1, False, False, True),
        (2, False, True, False),
        (1, True, False, True),
        (1, True, False, True),
    ]
    assert told == [(1, 2), (1, 2), (1, 2)]
    starts = [x for x in caplog.messages if "is to take the place" in x]
    assert starts == [
        f"Another process is to take the place of worker 1 (replacement {number} of at most 2)." for number in (1, 2)
    ]
    assert sum("No process has taken the place of worker 1" in x for x in caplog.messages) == 1
    assert sum("was ended by SIGSEGV" in x and "The other 2 go on" in x for x in caplog.messages) == 1


def test_process_when_it_raises_before_it_takes_part_then_no_other_is_tried_and_the_others_go_on(
    tmp_path, monkeypatch, caplog
):
    def raises(started):
        look = Worker.look

        def hear(worker):
            if worker in started:
                worker.failure = Failure(ZeroDivisionError("in its setup"), time=1.0)
            else:
                look(worker)

        monkeypatch.setattr(Worker, "look", hear)

    acts = [raises, lambda _: finish(workers[0], workers[2])]
    workers, _, join = replaced(tmp_path, monkeypatch, *acts, at_most=3, lost=set())
    join()
    assert len(workers) == 4
    assert [x.succeeded for x in workers] == [True, False, True, False]
    (said,) = [x for x in caplog.messages if "No process" in x]
    assert said == "No process has taken the place of worker 1: ZeroDivisionError: in its setup"


def test_process_when_all_others_have_finished_before_it_takes_part_then_it_is_ended(tmp_path, monkeypatch):
    acts = [lambda _: finish(workers[0], workers[2])]
    workers, _, join = replaced(tmp_path, monkeypatch, *acts, at_most=1, lost=set())
    join()
    assert [x.succeeded for x in workers] == [True, False, True, False]
    assert workers[3].is_lost
    assert workers[3].process.exitcode is not None


def test_process_when_the_last_of_its_servers_dies_before_it_takes_part_then_it_ends_with_them(tmp_path, monkeypatch):
    """It would take part all the same, and then ask servers that are gone."""
    lost = set()
    acts = [lambda _: workers[2].process.end(-9), lambda _: finish(workers[0])]
    workers, told, _ = replaced(tmp_path, monkeypatch, *acts, at_most=2, lost=lost)
    start = Start(tmp_path)
    sidecars = Sidecars([ServerSpec("group", 0, ranks=frozenset({1, 2}))])

    def survive(rank, left):
        told.append((rank, left))
        lost.add(rank)

    watched.join(workers, sidecars, survive, signal.SIGTERM, Replacing(start, 2, lambda: lost))
    (new,) = start.started
    assert new.is_lost
    assert new.process.exitcode is not None
    assert told == [(1, 2), (2, 1), (1, 1)]
    assert [x.succeeded for x in workers] == [True, False, False, False]


@pytest.mark.parametrize(("ranks", "starts"), [({0, 1}, 1), ({1}, 0)], ids=["another_one_lives", "none_lives"])
def test_worker_when_its_servers_end_with_it_then_it_is_not_replaced(tmp_path, monkeypatch, ranks, starts):
    workers, _, _ = replaced(tmp_path, monkeypatch, at_most=1, lost={1})
    sidecars = Sidecars([ServerSpec("group", 0, ranks=frozenset(ranks))])
    start = Start(tmp_path)
    workers[1].failure = Failure(RuntimeError("killed"), time=0.0)
    watched._look_at_failure(workers[1], workers, sidecars, lambda *_: None, Replacing(start, 1, lambda: {1}))
    assert len(start.started) == starts == len(workers) - 3


@pytest.mark.parametrize(
    ("strategy", "left", "says"),
    [
        (AsyncParameterServerStrategy(), 1, None),
        (AsyncParameterServerStrategy(min_workers=2), 1, "1 workers, fewer than strategy.min_workers=2"),
        (ShadowSyncStrategy(min_workers=2), 2, None),
        (ShadowSyncStrategy(algorithm="ma", min_workers=3), 2, "2 workers, fewer than strategy.min_workers=3"),
        (ShadowSyncStrategy(algorithm="bmuf", num_trainers=1, workers_per_trainer=3), 2, None),
        (HETStrategy(), 2, ""),
    ],
    ids=["async_ps", "async_ps-too_few", "shadowsync", "ma-trainers", "bmuf-one_trainer", "het"],
)
def test_strategy_when_a_worker_has_died_then_says_whether_the_others_go_on(strategy, left, says, monkeypatch):
    trainer = pl.Trainer(
        accelerator="cpu", devices=3, strategy=strategy, logger=False, enable_checkpointing=False, barebones=True
    )
    assert trainer.strategy.run_servers.survive(trainer, 1, left) == ""  # it does not train
    trainer.state.fn = TrainerFn.FITTING
    place = SimpleNamespace(lose=lambda rank: rank == 1) if strategy.asynchronous else None
    monkeypatch.setattr(trainer.strategy.run_servers, "meeting_place", lambda: place)
    answer = trainer.strategy.run_servers.survive(trainer, 1, left)
    assert answer is None if says is None else says in answer
    if says is None:
        assert "before all workers had met" in trainer.strategy.run_servers.survive(trainer, 2, left)


@pytest.mark.parametrize("rounds", ["background", "foreground"])
def test_replacements_when_workers_share_a_replica_then_they_are_refused(rounds):
    strategy = ShadowSyncStrategy(num_trainers=1, workers_per_trainer=2, rounds=rounds, max_replacements=1)
    with pytest.raises(ValueError, match=r"strategy\.max_replacements=1: Replicas can have no other process"):
        pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, barebones=True)


@pytest.mark.parametrize("make", [AsyncParameterServerStrategy, ShadowSyncStrategy, HierarchicalStrategy])
def test_replacements_when_they_are_no_number_then_they_are_refused(make):
    with pytest.raises(ValueError, match=r"strategy\.max_replacements must be at least 0, got -1. 0 replaces none"):
        make(max_replacements=-1)


@pytest.mark.parametrize("make", [AsyncParameterServerStrategy, ShadowSyncStrategy])
def test_min_workers_when_it_is_no_number_of_workers_then_is_refused(make):
    with pytest.raises(ValueError, match=r"strategy\.min_workers must be at least 1, got 0"):
        make(min_workers=0)
