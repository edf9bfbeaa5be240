"""The journal: who has a place, which pushes count, and how a push that was cut short is taken back."""

import os
import resource
import time
from pathlib import Path

import pytest
import torch

from lightning_recsys.parameter_server import journal as journal_module
from lightning_recsys.parameter_server.journal import LEASE_SECONDS, Journal, Undo, read_nonce
from lightning_recsys.stores.folders import locality
from lightning_recsys.stores.folders.mapped_arrays import MappedArrays

ALICE, BOB, CAROL = (bytes([letter]) * 16 for letter in b"abc")


@pytest.fixture
def arrays(tmp_path):
    shapes = {"weight": ("float32", (6, 2)), "sum": ("float32", (6,)), "counters": ("int64", (1,))}

    def fill(arrays):
        arrays["weight"].copy_(torch.arange(12).view(6, 2))
        arrays["sum"].copy_(torch.arange(6) * 100)
        arrays["counters"].fill_(7)

    return MappedArrays.create(tmp_path / "users", {"kind": "test"}, shapes, fill)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1_000_000.0
        CLOCK_BOOTTIME = "since the machine started"

        def clock_gettime(self, which):
            assert which == self.CLOCK_BOOTTIME
            return self.now

    clock = Clock()
    monkeypatch.setattr(journal_module, "time", clock)
    return clock


def spoil(arrays):
    for name in ("weight", "sum", "counters"):
        arrays[name].add_(1)


def values(arrays):
    return {name: arrays[name].tolist() for name in ("weight", "sum", "counters")}


def test_client_when_registered_then_its_place_and_count_outlive_the_process(tmp_path):
    first = Journal(tmp_path, max_clients=4)
    slots = [first.register(ALICE), first.register(BOB)]
    with first.push(slots[1], 1, None):
        pass
    first.close()
    second = Journal(tmp_path, max_clients=4)
    assert [second.slot(ALICE), second.slot(BOB), second.slot(CAROL)] == [*slots, None]
    assert [second.applied(slot) for slot in slots] == [0, 1]
    assert second.nonce == first.nonce == read_nonce(tmp_path)
    assert second.register(BOB) == slots[1]


def test_journal_when_asked_for_more_places_then_keeps_those_taken(tmp_path):
    small = Journal(tmp_path, max_clients=1)
    with small.push(small.register(ALICE), 1, None):
        pass
    small.close()
    large = Journal(tmp_path, max_clients=3)
    assert large.applied(large.register(ALICE)) == 1
    assert large.register(BOB) != large.register(CAROL)
    large.close()
    again = Journal(tmp_path, max_clients=1)
    assert again.num_clients() == 3


def register_and_push(journal, client):
    slot = journal.register(client)
    with journal.push(slot, journal.applied(slot) + 1, None):
        pass
    return slot


def test_client_when_no_place_is_free_then_is_refused_until_one_was_cut_off_for_long(tmp_path, clock):
    journal = Journal(tmp_path, max_clients=2)
    slot = register_and_push(journal, ALICE)
    clock.now += 10
    register_and_push(journal, BOB)
    with pytest.raises(RuntimeError, match=r"all 2 places for clients are taken .*--max-clients"):
        journal.register(CAROL)
    clock.now += LEASE_SECONDS - 9  # Bob was heard of meanwhile
    assert journal.num_clients() == 1
    assert journal.register(CAROL) == slot
    assert journal.applied(slot) == 0
    assert journal.slot(ALICE) is None


def test_client_when_the_wall_clock_jumps_while_the_server_is_started_again_then_keeps_its_place(tmp_path, monkeypatch):
    journal = Journal(tmp_path, max_clients=1)
    journal.refuse(journal.register(ALICE), 1)  # it has pushed
    journal.close()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 660)
    journal = Journal(tmp_path, max_clients=1)
    assert journal.num_clients() == 1
    with pytest.raises(RuntimeError, match="all 1 places for clients are taken"):
        journal.register(BOB)
    assert journal.slot(ALICE) == 0


def test_client_when_the_machine_starts_again_then_has_the_whole_time_anew(tmp_path, clock, monkeypatch):
    journal = Journal(tmp_path, max_clients=1)
    journal.refuse(journal.register(ALICE), 1)
    journal.close()
    (tmp_path / "boot_id").write_text("another")
    monkeypatch.setattr(locality, "BOOT_ID", tmp_path / "boot_id")
    clock.now = 20.0
    journal = Journal(tmp_path, max_clients=1)
    clock.now += LEASE_SECONDS - 1
    with pytest.raises(RuntimeError, match="all 1 places"):
        journal.register(BOB)
    journal.close()
    clock.now += 2
    journal = Journal(tmp_path, max_clients=1)  # within the same boot times go on
    assert journal.num_clients() == 0
    assert journal.register(BOB) == 0


def test_client_when_connected_then_keeps_its_place_however_long_it_says_nothing(tmp_path, clock):
    journal = Journal(tmp_path, max_clients=2)
    slots = [register_and_push(journal, ALICE), register_and_push(journal, BOB)]
    clock.now += 100 * LEASE_SECONDS
    assert journal.num_clients(slots) == 2
    with pytest.raises(RuntimeError, match="all 2 places"):
        journal.register(CAROL, slots)
    journal.touch(slots[0])  # cut off just now
    assert journal.num_clients(slots[1:]) == 2
    with pytest.raises(RuntimeError, match="all 2 places"):
        journal.register(CAROL, slots[1:])
    clock.now += LEASE_SECONDS + 1
    assert journal.register(CAROL, slots[1:]) == slots[0]


def test_client_when_it_has_pushed_nothing_and_is_gone_then_its_place_is_free_at_once(tmp_path):
    journal = Journal(tmp_path, max_clients=1)
    slot = journal.register(ALICE)
    with pytest.raises(RuntimeError, match="all 1 places"):
        journal.register(BOB, [slot])
    assert journal.register(BOB) == slot
    assert journal.slot(ALICE) is None


def test_client_when_it_said_goodbye_then_its_place_is_free_after_a_while(tmp_path, clock):
    journal = Journal(tmp_path, max_clients=1)
    slot = register_and_push(journal, ALICE)
    journal.say_goodbye(slot)
    assert journal.slot(ALICE) is None  # late copies of its pushes find nobody
    assert journal.num_clients([slot]) == 0
    with pytest.raises(RuntimeError, match="has said goodbye"):
        journal.register(ALICE)
    with pytest.raises(RuntimeError, match="all 1 places"):
        journal.register(BOB)
    clock.now += LEASE_SECONDS + 1
    assert journal.register(BOB, [slot]) == slot


@pytest.mark.parametrize("rows", [None, torch.tensor([4, 1, 4])])
def test_push_when_it_raises_then_is_taken_back_and_does_not_count(tmp_path, arrays, rows):
    journal = Journal(tmp_path)
    slot, before = journal.register(ALICE), values(arrays)

    def apply():
        if rows is None:
            spoil(arrays)
        else:
            arrays["weight"][rows] = -1
            arrays["sum"][rows] = -1
            arrays["counters"].add_(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), journal.push(slot, 1, Undo(arrays, ("weight", "sum"), rows)):
        apply()
    assert values(arrays) == before
    assert journal.applied(slot) == 0


def killed_inside(folder, arrays, rows, *, after_mark):
    """A process that is killed while it applies push 1 of Alice, before or after the push counts."""
    pid = os.fork()
    if pid == 0:
        journal = Journal(folder)
        slot = journal.register(ALICE)
        if after_mark:
            mark = journal._mark

            def mark_and_die(*args):
                mark(*args)
                os.kill(os.getpid(), 9)

            journal._mark = mark_and_die
        with journal.push(slot, 1, Undo(arrays, ("weight", "sum"), rows)):
            spoil(arrays)
            if not after_mark:
                os.kill(os.getpid(), 9)
    assert os.waitpid(pid, 0)[1] == 9


def test_push_when_the_process_is_killed_inside_then_is_taken_back_by_the_next(tmp_path, arrays):
    before = values(arrays)
    killed_inside(tmp_path, arrays, None, after_mark=False)
    assert values(arrays) != before
    journal = Journal(tmp_path)
    assert journal.recover()
    assert values(arrays) == before
    assert journal.applied(journal.register(ALICE)) == 0
    assert not journal.recover()


def test_push_when_the_process_is_killed_inside_then_only_its_rows_are_taken_back(tmp_path, arrays):
    killed_inside(tmp_path, arrays, torch.tensor([5, 0]), after_mark=False)
    assert Journal(tmp_path).recover()
    # Other rows belong to others, who may have trained them meanwhile.
    assert arrays["sum"].tolist() == [0, 101, 201, 301, 401, 500]
    assert arrays["weight"][:, 0].tolist() == [0, 3, 5, 7, 9, 10]
    assert arrays["counters"].tolist() == [7]


def test_push_when_the_process_is_killed_after_the_mark_then_stays(tmp_path, arrays):
    killed_inside(tmp_path, arrays, None, after_mark=True)
    spoiled = values(arrays)
    journal = Journal(tmp_path)
    assert not journal.recover()
    assert values(arrays) == spoiled
    assert journal.applied(journal.register(ALICE)) == 1


def test_push_when_its_store_was_removed_then_the_next_process_starts(tmp_path, arrays):
    killed_inside(tmp_path, arrays, None, after_mark=False)
    arrays.folder.rename(tmp_path / "elsewhere")
    assert Journal(tmp_path).recover()


@pytest.mark.parametrize("data", [b"", b"x" * 64, b"x" * 100])
def test_journal_when_damaged_then_says_so(tmp_path, data):
    (tmp_path / ".journal").write_bytes(data)
    with pytest.raises(RuntimeError, match="is not a journal of this version, or damaged"):
        Journal(tmp_path)
    assert read_nonce(tmp_path) is None


@pytest.mark.parametrize("name", [".undo", ".journal", ".journal-new"])
def test_journal_when_a_link_is_in_its_place_then_does_not_follow_it(tmp_path, name):
    (tmp_path / "stores").mkdir()
    other = tmp_path / "other"
    for link in (Path.symlink_to, Path.hardlink_to):
        other.write_bytes(b"somebody else's")
        link(tmp_path / "stores" / name, other)
        with pytest.raises(PermissionError, match=f"{name} is (a link|not a file of this user alone)"):
            Journal(tmp_path / "stores").close()
        assert other.read_bytes() == b"somebody else's"
        (tmp_path / "stores" / name).unlink()
        (tmp_path / "stores" / ".journal").unlink(missing_ok=True)
    Journal(tmp_path / "stores").close()


def spoil_and_fail(journal, slot, undo):
    with journal.push(slot, 1, undo):
        spoil(undo.arrays)
        raise ZeroDivisionError


def test_push_when_the_process_has_no_descriptor_left_then_is_recorded_all_the_same(tmp_path, arrays):
    journal = Journal(tmp_path)
    slot, before = journal.register(ALICE), values(arrays)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        for size in (6, 1 << 18):  # rows: the second record is longer than what is reserved at first
            with pytest.raises(ZeroDivisionError):
                spoil_and_fail(journal, slot, Undo(arrays, ("weight", "sum"), torch.arange(size) % 6))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert values(arrays) == before
    journal.close()


def test_undo_record_when_removed_while_it_is_needed_then_says_so(tmp_path, arrays):
    killed_inside(tmp_path, arrays, None, after_mark=False)
    (tmp_path / ".undo").unlink()
    with pytest.raises(RuntimeError, match="was removed while it was needed"):
        Journal(tmp_path).recover()


def test_nonce_when_there_is_no_journal_then_is_none(tmp_path):
    assert read_nonce(tmp_path) is None
    assert read_nonce(tmp_path / "nowhere") is None
