"""Meetings at a server and leases from it, past all sockets: nothing is lost with the server."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_recsys.errors import RequestRefusedError, RunOverError, WorkerLostError
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.meetings import Joined, MeetingPlace, Meetings, ShareDealer, WaitingPlace
from lightning_recsys.parameter_server.messages.wire import Limits, Request, Status, decode_reply, encode_request
from lightning_recsys.parameter_server.requests.kept import KeptBytes
from lightning_recsys.strategies.common.workers.living import among_the_living
from lightning_recsys.strategies.common.workers.process_group import MeetingGroup
from lightning_recsys.strategies.replicas.drivers import ForegroundHook
from lightning_recsys.strategies.replicas.rounds import Rounds
from lightning_recsys.sync import ModelAveraging, RoundSchedule


class Served:
    """A server and the connections to it, without sockets; it may be killed and started again over the same files."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.has_come = threading.Event()  # somebody, to a meeting
        self.handler = RequestHandler(folder)

    def restart(self):
        with self.lock:
            self.handler.close()
            self.handler = RequestHandler(self.folder)

    def request(self, operation, *, arguments, arrays=()):
        request = Request(operation, 1, bytes(range(16)), 0, "", arguments, list(arrays))
        frames = [bytearray(x) for x in encode_request(request)]
        with self.lock:
            answer = [bytearray(frame) for frame in self.handler.handle(frames)]
            if operation == "meet":
                self.has_come.set()
        reply = decode_reply(answer, Limits())
        if reply.status != Status.OK:
            raise RequestRefusedError("here", operation, reply.value)
        return reply

    def close(self):
        return


class Place(MeetingPlace):
    """Where everybody is in this process."""

    server: Served

    def connect(self, cancelled=lambda: False):
        return self.server


@pytest.fixture
def place(tmp_path):
    found = Place("ipc:///nowhere", "run1", 3)
    served = Served(tmp_path)
    object.__setattr__(found, "server", served)
    yield found
    served.handler.close()


def together(place, *functions, ranks=(0, 1, 2), timeout=20.0, may_end=()):
    """Run a function of each worker's process group in a thread of its own; what each gave."""
    given = {}

    def run(rank, function):
        group = MeetingGroup(Meetings(place, rank=rank, timeout=timeout), size=3)
        try:
            given[rank] = function(group)
        except SystemExit:
            given[rank] = None if rank in may_end else RuntimeError(f"worker {rank} has ended")
        except Exception as error:
            given[rank] = error

    threads = [threading.Thread(target=run, args=pair) for pair in zip(ranks, functions, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in given.values():
        if isinstance(error, Exception):
            raise error
    return [given[rank] for rank in ranks]


def opts(**values):
    return SimpleNamespace(**{"rootRank": 0, "reduceOp": dist.ReduceOp.SUM} | values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool])
def test_collectives_when_three_workers_meet_then_they_give_what_torch_says(place, dtype, monkeypatch):
    monkeypatch.setattr("lightning_recsys.strategies.common.workers.process_group.CHUNK_BYTES", 48)  # in several parts
    values = (torch.arange(33).view(3, 11) % 5).to(dtype)

    def all_of_them(group):
        rank = group.rank()
        own = {name: values[rank].clone() for name in ("sum", "max", "root")}
        group.allreduce([own["sum"]], opts()).wait()
        group.allreduce([own["max"]], opts(reduceOp=dist.ReduceOp.MAX)).wait()
        group.broadcast([own["root"]], opts(rootRank=2)).wait()
        gathered = [torch.empty_like(values[0]) for _ in range(3)]
        group.allgather([gathered], [values[rank]]).wait()
        at_one = [torch.empty_like(values[0]) for _ in range(3)] if rank == 1 else None
        group.gather([at_one] if at_one else [], [values[rank]], opts(rootRank=1)).wait()
        mine = torch.empty_like(values[0])
        group.scatter([mine], [list(values)] if rank == 0 else [], opts()).wait()
        group.barrier().wait()
        return own, torch.stack(gathered), mine, None if at_one is None else torch.stack(at_one)

    for rank, (own, gathered, mine, at_one) in enumerate(together(place, *[all_of_them] * 3)):
        assert torch.equal(own["sum"], values.any(0) if dtype is torch.bool else values.sum(0).to(dtype))
        assert torch.equal(own["max"], values.amax(0))
        assert torch.equal(own["root"], values[2])
        assert torch.equal(gathered, values)
        assert torch.equal(mine, values[rank])
        assert (at_one is None) == (rank != 1)
        assert at_one is None or torch.equal(at_one, values)


def test_worker_when_it_dies_then_the_others_have_its_place_and_a_mean_is_theirs(place):
    assert not place.lose(1)  # nobody has come yet: the run could not begin
    gone = threading.Event()

    def survivor(group):
        group.barrier()
        assert group.size() == 3
        gone.wait()
        value = torch.tensor([float(group.rank())])  # ranks 0 and 2
        group.allreduce([value], opts(reduceOp=dist.ReduceOp.AVG))
        return value.item(), group.rank(), group.size(), group.members

    def victim(group):
        group.barrier()
        assert place.lose(1)
        place.server.restart()  # the server dies as well, and knows of the death afterwards
        gone.set()
        with pytest.raises(RequestRefusedError, match="taken for dead"):
            group.barrier()

    assert together(place, survivor, victim, survivor) == [(1.0, 0, 2, (0, 2)), None, (1.0, 1, 2, (0, 2))]


def test_gathering_when_a_worker_dies_within_it_then_all_hear_of_it_and_the_next_barrier_goes_on_without(place):
    def survivor(group):
        group.barrier()
        with pytest.raises(WorkerLostError, match="worker 2 died while all workers were at 'allgather of 1'"):
            group.allgather([[torch.zeros(1) for _ in range(3)]], [torch.zeros(1)])
        group.barrier()
        with pytest.raises(ValueError, match="room for 3 values, and 2 workers live"):
            group.allgather([[torch.zeros(1) for _ in range(3)]], [torch.zeros(1)])
        gathered = [torch.zeros(1) for _ in range(2)]
        group.allgather([gathered], [torch.tensor([1.0 + group.rank()])])
        return torch.cat(gathered).tolist()

    def victim(group):
        group.barrier()
        place.lose(2)

    assert together(place, survivor, survivor, victim) == [[1.0, 2.0], [1.0, 2.0], None]


def test_what_belongs_together_when_a_worker_dies_within_it_then_all_of_it_is_of_those_who_live(
    place, monkeypatch, caplog
):
    """A sum and the number of its summands, which the dead worker would have had in one of them only."""
    local = threading.local()
    own = SimpleNamespace(is_initialized=lambda: True, ProcessGroup=dist.ProcessGroup, group=local)
    monkeypatch.setattr("lightning_recsys.strategies.common.workers.living.dist", own)

    def mean(group):
        total, count, size = torch.tensor([10.0 ** group.members[group.rank()]]), torch.tensor([1.0]), group.size()
        group.allreduce([total], opts())
        if group.members[group.rank()] == 2:
            place.lose(2)
            raise SystemExit
        group.barrier()  # as torchmetrics meets before it gathers, with room for those whom it has counted before
        group.allgather([[torch.zeros(1) for _ in range(size)]], [total])
        group.allreduce([count], opts())
        return (total / count).item()

    def worker(group):
        local.WORLD = group
        return among_the_living(lambda: among_the_living(lambda: mean(group)))

    with caplog.at_level("WARNING"):
        assert together(place, worker, worker, worker, may_end=(2,)) == [5.5, 5.5, None]
    assert [x for x in caplog.messages if "Worker 2 died while all workers were at 'barrier'" in x]


def test_reduction_in_pieces_when_a_worker_dies_between_two_then_all_of_them_are_of_those_who_live(place, monkeypatch):
    monkeypatch.setattr("lightning_recsys.strategies.common.workers.process_group.CHUNK_BYTES", 16)

    def survivor(group):
        total = torch.ones(7)
        group.allreduce([total], opts())
        return total.tolist(), group.members

    def victim(group):
        meet, pieces = group._meetings.meet, []

        def first(*args, **options):
            if pieces:
                place.lose(2)
                raise SystemExit
            pieces.append(meet(*args, **options))
            return pieces[0]

        monkeypatch.setattr(group._meetings, "meet", first)
        return survivor(group)

    given = together(place, survivor, survivor, victim, may_end=(2,))
    assert given == [([2.0] * 7, (0, 1)), ([2.0] * 7, (0, 1)), None]


@pytest.mark.parametrize("pieces_before", [0, 1])
def test_broadcast_when_its_root_dies_before_its_end_then_all_others_hear_of_the_death(
    place, monkeypatch, pieces_before
):
    monkeypatch.setattr("lightning_recsys.strategies.common.workers.process_group.CHUNK_BYTES", 16)

    def survivor(group):
        group.barrier()
        with pytest.raises(WorkerLostError, match="worker 1 died while all workers were at 'broadcast of 7 from 1'"):
            group.broadcast([torch.zeros(7)], opts(rootRank=1))
        group.barrier()
        return group.members

    def root(group):
        group.barrier()
        meet, pieces = group._meetings.meet, []

        def some(*args, **options):
            if len(pieces) == pieces_before:
                place.lose(1)
                raise SystemExit
            pieces.append(meet(*args, **options))
            return pieces[-1]

        monkeypatch.setattr(group._meetings, "meet", some)
        group.broadcast([torch.ones(7)], opts(rootRank=1))

    assert together(place, survivor, root, survivor, may_end=(1,)) == [(0, 2), None, (0, 2)]


@pytest.mark.parametrize("pieces_before", [0, 1])
def test_broadcast_when_the_first_worker_dies_before_its_end_then_the_next_one_brings_all_of_its_own(
    place, monkeypatch, pieces_before
):
    monkeypatch.setattr("lightning_recsys.strategies.common.workers.process_group.CHUNK_BYTES", 16)

    def survivor(group):
        group.barrier()
        return broadcast(group)

    def broadcast(group):
        value = torch.full((7,), float(group._meetings.rank))
        group.broadcast([value], opts(rootRank=0))
        return value.tolist(), group.members

    def first(group):
        group.barrier()
        meet, pieces = group._meetings.meet, []

        def some(*args, **options):
            if len(pieces) == pieces_before:
                place.lose(0)
                raise SystemExit
            pieces.append(meet(*args, **options))
            return pieces[-1]

        monkeypatch.setattr(group._meetings, "meet", some)
        return broadcast(group)

    given = together(place, first, survivor, survivor, may_end=(0,))
    assert given == [None, ([1.0] * 7, (1, 2)), ([1.0] * 7, (1, 2))]


@pytest.mark.parametrize("learns", ["by looking", "by meeting"])
def test_first_worker_when_dead_then_the_next_one_takes_its_place_once_and_no_other_does(place, monkeypatch, learns):
    monkeypatch.setattr("lightning_recsys.strategies.common.workers.process_group.LOOK_SECONDS", 0.0)
    dead, taken = threading.Event(), []

    def worker(group):
        group._take_first_place = lambda: taken.append(group._meetings.rank)
        group.barrier()
        group.look_who_lives()
        if group._meetings.rank == 0:
            place.lose(0)
            dead.set()
            return
        dead.wait(20)
        for _ in range(2):
            if learns == "by looking":
                group.look_who_lives()
            else:
                group.barrier()

    together(place, worker, worker, worker)
    assert taken == [1]


def test_broadcast_in_pieces_when_another_than_its_root_dies_between_two_then_the_others_have_all_of_it(
    place, monkeypatch
):
    monkeypatch.setattr("lightning_recsys.strategies.common.workers.process_group.CHUNK_BYTES", 16)

    def survivor(group):
        value = torch.full((7,), float(group.rank()))
        group.broadcast([value], opts(rootRank=1))
        return value.tolist(), group.members

    def victim(group):
        meet, pieces = group._meetings.meet, []

        def first(*args, **options):
            if pieces:
                place.lose(0)
                raise SystemExit
            pieces.append(meet(*args, **options))
            return pieces[0]

        monkeypatch.setattr(group._meetings, "meet", first)
        return survivor(group)

    given = together(place, victim, survivor, survivor, may_end=(0,))
    assert given == [None, ([1.0] * 7, (1, 2)), ([1.0] * 7, (1, 2))]


def test_meeting_when_its_values_cannot_be_combined_then_everybody_hears_of_it(place):
    def worker(group):
        group.allreduce([torch.ones(2)], opts())
        with pytest.raises(RequestRefusedError, match="complex"):
            group.allreduce([torch.ones(1, dtype=torch.complex64)], opts(reduceOp=dist.ReduceOp.MAX))

    assert together(place, worker, worker, worker) == [None] * 3


def test_meeting_when_its_end_cannot_be_kept_then_nobody_hears_of_it(place, monkeypatch):
    def come(rank):
        arrays = [torch.full((8,), rank, dtype=torch.uint8)]
        return place.server.request("meet", arguments=a_meeting(rank), arrays=arrays).arrays

    def full(*_):
        raise OSError("no space left on the device")

    come(0), come(1)
    with monkeypatch.context() as patch:
        patch.setattr(KeptBytes, "write", full)
        for rank in (2, 0):
            with pytest.raises(RequestRefusedError, match="no space left"):
                come(rank)
    assert come(1)[1].tolist() == [0] * 8 + [1] * 8 + [2] * 8


def test_lease_when_it_cannot_be_kept_then_it_is_not_taken_and_the_next_who_asks_has_it(place, monkeypatch):
    def take(rank, latest=0, number=1):
        arguments = {"rank": rank, "number": number, "shard": 20, "lease": 8, "latest": latest}
        return place.server.request("take_share", arguments={"run": "run1", "size": 3, **arguments}).arrays[0].tolist()

    def full(*_):
        raise OSError("no space left on the device")

    def refused(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(KeptBytes, "write", full)
            with pytest.raises(RequestRefusedError, match="no space left"):
                take(*arguments, **options)

    refused(0)  # the first of all
    assert take(0) == [1, 1, 0, 0, 8]
    refused(0, latest=1)
    assert take(1) == [1, 2, 1, 0, 8]
    assert take(0, latest=1) == [1, 3, 0, 8, 16]
    refused(2, number=2)  # the first of the next pass
    assert take(2) == [1, 4, 2, 0, 8]
    place.server.restart()
    assert take(2, latest=4) == [1, 5, 2, 8, 16]


def test_workers_when_each_waits_for_something_else_then_it_is_said_instead_of_waiting_for_ever(place):
    def first(group):
        with pytest.raises(TimeoutError, match="worker 0 waited for the others at 'barrier'"):
            group.barrier()

    def second(group):
        place.server.has_come.wait()
        with pytest.raises(RequestRefusedError, match="each would wait for the other"):
            group.allreduce([torch.zeros(2)], opts())

    assert together(place, first, second, ranks=(0, 1), timeout=0.2) == [None, None]


def test_barriers_when_workers_have_drifted_apart_then_one_is_not_taken_for_another(place):
    def finished(group):
        with pytest.raises(TimeoutError, match="waited for the others at 'all workers have finished'"):
            group.wait_for("all workers have finished")

    def behind(group):
        place.server.has_come.wait()
        with pytest.raises(RequestRefusedError, match="'all workers have finished all'") as refused:
            group.barrier()
        (hint,) = refused.value.__notes__
        assert "trainer.should_stop, max_steps, min_steps" in hint

    assert together(place, finished, behind, ranks=(0, 1), timeout=0.2) == [None, None]


def test_leases_when_the_server_is_killed_between_them_then_each_batch_is_dealt_once(place):
    dealers = [iter(ShareDealer(place, rank=rank)(20)) for rank in range(3)]
    seen = []
    for dealer in dealers:
        lease = next(dealer)
        seen += [(lease.owner, number) for number in range(lease.first, lease.last)]
        place.server.restart()

    def rest(dealer):
        return [(lease.owner, number) for lease in dealer for number in range(lease.first, lease.last)]

    threads = [threading.Thread(target=lambda dealer=dealer: seen.extend(rest(dealer))) for dealer in dealers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(owner, number) for owner in range(3) for number in range(20)]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("server", ["lives", "dies"])
def test_leases_when_their_worker_dies_then_others_have_them_and_it_is_counted_over_the_passes(place, server, caplog):
    for rank in range(3):
        place.server.request("meet", arguments=a_meeting(rank), arrays=[torch.empty(0, dtype=torch.uint8)])
    first, gone, other = (ShareDealer(place, rank=rank, tells=lambda own=rank: own == 0) for rank in range(3))
    next(iter(gone(20)))  # its first eight batches
    assert place.lose(1)
    if server == "dies":  # before anybody asks again
        place.server.restart()
    own, others = iter(first(20)), iter(other(20))
    seen = []
    while sum(x.last - x.first for x in seen) < 60:  # in turn: neither waits for the other before all is leased
        seen.append(next(own if len(seen) % 2 else others))
    batches = {(x.owner, number) for x in seen for number in range(x.first, x.last)}
    assert batches == {(owner, number) for owner in range(3) for number in range(20)}
    rest = threading.Thread(target=list, args=(others,))  # each waits until the other has handed out what it has
    rest.start()
    with caplog.at_level("WARNING"):
        assert list(own) == []
    rest.join()
    assert first.dealt_again == 8
    assert caplog.messages == ["8 batches were leased again after a worker's death; some of them were trained twice."]


class NoMemory(ModelAveraging):
    """Fails as it folds in what the trainers have sent."""

    def fold(self, replica, answer):
        raise MemoryError("no room for the sum")


class Alone(Rounds):
    """Of the only trainer."""

    def _exchange(self, *, leaving):
        return torch.zeros(1), 0


@pytest.mark.timeout(30)
def test_leases_when_a_round_fails_while_their_worker_waits_then_its_error_ends_the_wait(place):
    first, other = (ShareDealer(place, rank=rank) for rank in (0, 1))
    hook = ForegroundHook(Alone(NoMemory(), torch.zeros(1)), schedule=RoundSchedule(gap=5))
    first.while_waiting = hook.standing_in
    next(iter(other(20)))  # which it never finishes, so there may be work for others to come
    with pytest.raises(MemoryError, match="no room for the sum"):
        list(first(20))


def a_meeting(rank):
    meeting = {"rank": rank, "number": 1, "kind": "barrier all", "may_miss": True, "combine": "all"}
    return {"run": "run1", "size": 3} | meeting


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        ("meet", {"run": "../up"}, "letters and digits"),
        ("meet", {"size": 0}, "size be 1 to"),
        ("meet", {"combine": "all float"}, "no way to combine"),
        ("meet", {"combine": "sum nothing"}, "no way to combine"),
        ("meet", {"rank": 3}, "no member"),
        ("meet", {"kind": "x" * 300}, "at most 200"),
        ("take_share", {"rank": 7}, "rank must be from 0 to 2"),
        ("lose", {"rank": "1"}, "rank must be int"),
        ("leave_state", {"rank": 3}, "rank must be from 0 to 2"),
        ("leave_state", {"number": 1.0}, "number must be int"),
        ("look", {"more": 1}, "takes the arguments"),
    ],
)
def test_request_when_it_is_odd_then_it_is_refused_and_the_next_is_served(place, operation, arguments, message):
    usual = {
        "meet": a_meeting(0),
        "take_share": {"rank": 0, "number": 1, "shard": 4, "lease": 2, "latest": 0},
        "lose": {"rank": 1},
        "leave_state": {"rank": 0, "meeting": 1, "number": 1},
        "look": {},
    }[operation]
    brought = [torch.empty(0, dtype=torch.uint8)] if operation == "meet" else []
    common = {"run": "run1", "size": 3}
    with pytest.raises(RequestRefusedError, match=message):
        place.server.request(operation, arguments={**common, **usual, **arguments}, arrays=brought)
    place.server.request(operation, arguments={**common, **usual}, arrays=brought)


def test_place_when_another_process_joins_then_all_meet_with_it_whatever_is_killed_between(place):
    """The server is started anew behind each request; it forgets who waits, and nothing else."""
    waiting = WaitingPlace(place, rank=0)
    others = [Meetings(place, rank=rank, timeout=20.0) for rank in range(3)]
    dealers = [iter(ShareDealer(place, rank=rank)(20)) for rank in range(3)]

    def meet(*meetings):
        threads = [threading.Thread(target=x.meet, args=("barrier", torch.tensor([x.rank]).byte())) for x in meetings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ask(operation, **arguments):
        return place.server.request(operation, arguments={"run": "run1", "size": 3, **arguments})

    with pytest.raises(RequestRefusedError, match="worker 0 lives: nobody can take its place"):
        waiting.wait_for_state()
    meet(*others)
    leases = [next(dealer) for dealer in dealers]
    with pytest.raises(RequestRefusedError, match="worker 1 lives: nobody can take its place"):
        ask("join", rank=1, meeting=1, number=1)
    assert place.lose(0)
    place.server.restart()
    assert others[1].look() == (1, ())
    assert ask("wait_to_join", rank=0).value == []
    assert others[1].look() == (1, (0,))
    assert waiting.join((1, 1)) is None  # nobody has left anything for it
    others[1].leave_state(1)
    assert ask("wait_to_join", rank=0).value == [1, 1]
    place.server.restart()
    assert waiting.join((1, 1)) is None  # forgotten
    others[2].leave_state(1)
    place.lose(2)  # which has left it: whoever is the first now may not know that it is
    assert waiting.join((1, 1)) is None
    others[1].leave_state(1)
    joined = waiting.join((1, 1))
    place.server.restart()
    assert joined == waiting.join((1, 1)) == Joined(meeting=1, members=(1, 2, 0), number=1)  # the answer was lost
    assert others[1].look() == (1, ())
    new = Meetings(place, rank=0, timeout=20.0, joined=joined)
    share = iter(ShareDealer(place, rank=0, passes=joined.number - 1)(20))
    lease = next(share)
    assert (lease.owner, lease.first) == (0, leases[0].last)  # its share goes on
    place.server.restart()
    meet(new, others[1])
    assert new.members == others[1].members == (1, 0)  # worker 2 has died as well
    with pytest.raises(RequestRefusedError, match="worker 0 lives: nobody can take its place"):
        ask("wait_to_join", rank=0)


@pytest.mark.parametrize("may_miss", [True, False])
def test_first_meeting_when_another_process_has_joined_before_then_all_take_the_same_worker_for_the_first(
    place, may_miss
):
    """It is behind the others, who count on the dead worker of its rank until they meet."""
    groups = [MeetingGroup(Meetings(place, rank=rank, timeout=20.0), size=3) for rank in range(3)]
    dealers = [iter(ShareDealer(place, rank=rank)(20)) for rank in range(3)]

    def exchanged(group):
        value, sums = torch.full((7,), float(group._meetings.rank)), torch.ones(1)
        gathered = [torch.zeros(1) for _ in range(group.size())]
        group.broadcast([value], opts(rootRank=0))
        group.allreduce([sums], opts())
        group.allgather([gathered], [value[:1] + group._meetings.rank])
        return value.tolist(), sums.item(), torch.cat(gathered).tolist(), group.members

    def all_do(function):
        with ThreadPoolExecutor(3) as pool:
            return [*pool.map(function, groups, timeout=60)]

    all_do(MeetingGroup.barrier)
    for dealer in dealers:
        next(dealer)
    place.lose(0)
    waiting = WaitingPlace(place, rank=0)
    groups[1]._meetings.leave_state(1)
    joined = waiting.join((1, 1))
    groups[0] = MeetingGroup(Meetings(place, rank=0, timeout=20.0, joined=joined), size=3)
    together = exchanged if may_miss else lambda group: group.among_the_living(lambda: exchanged(group))
    assert all_do(together) == [([1.0] * 7, 3.0, [2.0, 3.0, 1.0], (1, 2, 0))] * 3


def test_place_when_the_pass_is_over_or_another_meeting_was_then_nobody_joins_yet(place):
    waiting, first = WaitingPlace(place, rank=1), Meetings(place, rank=0, timeout=20.0)
    size = {"run": "run1", "size": 3}
    for rank in (1, 2, 0):
        brought = [torch.zeros(1, dtype=torch.uint8)]
        place.server.request("meet", arguments=a_meeting(rank), arrays=brought)
    first._number = 1
    assert waiting.join((1, 1)) is None  # no pass has begun
    leases = [iter(ShareDealer(place, rank=rank)(4)) for rank in (0, 2)]
    for dealer in leases:
        next(dealer)
    place.lose(1)
    first.leave_state(1)
    taken = [next(dealer, None) for dealer in leases[:1]]
    assert taken[0].owner == 1
    assert waiting.join((1, 1)) is None  # nothing is left for it in this pass
    assert place.lost() == {1}
    place.lose(2)
    arguments = {**size, "rank": 0, "number": 2, "kind": "barrier all", "may_miss": True, "combine": "all"}
    place.server.request("meet", arguments=arguments, arrays=[torch.zeros(1, dtype=torch.uint8)])
    assert waiting.join((1, 1)) is None  # what was left is from before the last meeting
    assert place.server.request("wait_to_join", arguments={**size, "rank": 1}).value == []


def test_place_when_the_run_is_over_then_who_waits_is_told_and_who_comes_later_as_well(place):
    with pytest.raises(RequestRefusedError, match="worker 1 lives"):
        WaitingPlace(place, rank=1).wait_for_state()
    for rank in range(3):
        brought = [torch.zeros(1, dtype=torch.uint8)]
        place.server.request("meet", arguments=a_meeting(rank), arrays=brought)
    place.lose(1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(WaitingPlace(place, rank=1).wait_for_state)
        while not place.server.request("look", arguments={"run": "run1", "size": 3}).value[1:]:
            pass
        place.end_run()
        with pytest.raises(RunOverError, match="before another process had taken the place of worker 1"):
            waiting.result(20.0)
    place.server.restart()
    place.lose(2)
    with pytest.raises(RunOverError):
        WaitingPlace(place, rank=2).wait_for_state()


def test_place_when_all_workers_have_died_then_their_successors_are_refused_once_all_of_them_wait(place):
    for rank in range(3):
        brought = [torch.zeros(1, dtype=torch.uint8)]
        place.server.request("meet", arguments=a_meeting(rank), arrays=brought)
    for rank in range(3):
        place.lose(rank)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(WaitingPlace(place, rank=rank).wait_for_state) for rank in (0, 2)]
        while place.server.request("look", arguments={"run": "run1", "size": 3}).value != [-1, 0, 2]:
            pass
        assert not any(x.done() for x in waiting)
        waiting.append(pool.submit(WaitingPlace(place, rank=1).wait_for_state))
        for each in waiting:
            with pytest.raises(RequestRefusedError, match="all workers of this run have died: go on from its last"):
                each.result(20.0)


def test_place_when_the_next_pass_begins_without_a_meeting_then_nobody_joins_it_with_the_state_of_the_one_before(
    place, monkeypatch
):
    """A run that neither validates nor saves does so; epochs would be shuffled otherwise by who joins."""
    waiting, meetings = WaitingPlace(place, rank=1), Meetings(place, rank=0, timeout=20.0)
    for rank in range(3):
        brought = [torch.zeros(1, dtype=torch.uint8)]
        place.server.request("meet", arguments=a_meeting(rank), arrays=brought)
    meetings._number = 1
    dealer = ShareDealer(place, rank=0)
    first_pass = iter(dealer(2))
    next(first_pass)
    place.lose(1)
    place.lose(2)
    meetings.leave_state(dealer.number)
    assert waiting.wait_for_state() == (1, 1)
    for _ in first_pass:  # with the shares of the dead
        pass
    assert waiting.join((1, 1)) is None  # nothing is left of it
    second_pass = iter(dealer(2))
    next(second_pass)
    assert dealer.number == 2
    assert waiting.join((1, 1)) is None
    assert meetings.look() == (0, (1,))  # it needs another one
    meetings.leave_state(1)  # of a first worker that is behind
    assert meetings.look() == (0, (1,))
    meetings.leave_state(dealer.number)
    assert waiting.wait_for_state() == (1, 2)

    def full(*_):
        raise OSError("no space left on the device")

    written = KeptBytes.write
    with monkeypatch.context() as patch:  # room for the leases, and none for the members
        patch.setattr(
            KeptBytes,
            "write",
            lambda self, *parts: written(self, *parts) if len(parts) == 1 and b"lease_size" in parts[0] else full(),
        )
        with pytest.raises(RequestRefusedError, match="no space left"):
            waiting.join((1, 2))
    assert place.lost() == {1, 2}
    meetings.leave_state(dealer.number)
    assert waiting.join((1, 2)) == Joined(meeting=1, members=(0, 2, 1), number=2)
