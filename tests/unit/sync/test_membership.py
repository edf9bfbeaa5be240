"""Meetings of workers that may die: everybody hears the same, nobody waits for the dead, and no batch is left."""

import random

import pytest

from lightning_recsys.sync.leases import IN_FLIGHT, ShardLeases
from lightning_recsys.sync.membership import Membership, Met


def over(membership):
    met = membership.met()
    if met is not None:
        membership.end(met)
    return met


def test_meeting_when_everybody_has_come_then_it_is_over_for_all():
    membership = Membership(2)
    membership.come(0, 1, "barrier", may_miss=True)
    assert membership.met() is None
    membership.come(0, 1, "barrier", may_miss=True)  # asks again
    membership.come(1, 1, "barrier", may_miss=True)
    assert over(membership) == membership.last == Met(1, (0, 1), (0, 1))
    membership.come(0, 2, "broadcast", may_miss=True)
    membership.come(1, 1, "barrier", may_miss=True)  # has not heard of its end
    assert membership.met() is None


def test_worker_when_it_dies_after_it_came_then_what_it_brought_counts_and_it_is_gone_after_the_next_meeting():
    """Whoever divides a sum by the number of members divides by that of its summands."""
    membership = Membership(3)
    membership.come(2, 1, "allreduce", may_miss=True)
    assert membership.lose(2)
    assert not membership.lose(2)
    membership.come(0, 1, "allreduce", may_miss=True)
    membership.come(1, 1, "allreduce", may_miss=True)
    assert over(membership) == Met(1, (0, 1, 2), (0, 1, 2))
    for rank in (0, 1):
        membership.come(rank, 2, "barrier", may_miss=True)
    assert over(membership) == Met(2, (0, 1), (0, 1))


def test_meeting_when_it_cannot_miss_anybody_then_it_fails_for_all_and_the_next_one_can():
    membership = Membership(3)
    membership.lose(1)
    for rank in (0, 2):
        membership.come(rank, 1, "allgather", may_miss=False)
    assert over(membership) == Met(1, (), (0, 1, 2), missing=1)
    for rank in (0, 2):
        membership.come(rank, 2, "barrier", may_miss=True)
    assert over(membership) == Met(2, (0, 2), (0, 2))
    for rank in (0, 2):
        membership.come(rank, 3, "allgather", may_miss=False)
    assert over(membership) == Met(3, (0, 2), (0, 2))


def test_worker_when_it_is_elsewhere_then_both_places_are_named():
    membership = Membership(2)
    membership.come(0, 1, "barrier", may_miss=True)
    with pytest.raises(ValueError, match="worker 1 comes to meeting 1 for 'broadcast', and worker 0 for 'barrier'"):
        membership.come(1, 1, "broadcast", may_miss=True)
    with pytest.raises(ValueError, match="comes to meeting 3, and the others are at 1"):
        membership.come(1, 3, "barrier", may_miss=True)
    membership.lose(1)
    with pytest.raises(ValueError, match="taken for dead"):
        membership.come(1, 1, "barrier", may_miss=True)
    with pytest.raises(ValueError, match="at least 1 worker"):
        Membership(0)


def test_place_when_another_process_joins_then_it_comes_to_the_meeting_under_way_and_is_behind_all_others():
    membership = Membership(3)
    for rank in range(3):
        membership.come(rank, 1, "barrier", may_miss=True)
    over(membership)
    membership.come(0, 2, "barrier", may_miss=True)
    membership.lose(0)  # after it came
    assert (membership.first, membership.members) == (1, (0, 1, 2))
    membership.join(0)
    assert (membership.first, membership.members, membership.expected) == (1, (0, 1, 2), (1, 2, 0))
    for rank in (1, 2):
        membership.come(rank, 2, "barrier", may_miss=True)
    assert membership.met() is None  # what the dead one had brought is not the new one's
    membership.come(0, 2, "barrier", may_miss=True)
    assert over(membership) == Met(2, (1, 2, 0), (1, 2, 0))
    membership.lose(1)
    assert membership.first == 2


def test_place_when_another_process_joins_ahead_of_a_meeting_that_cannot_miss_anybody_then_that_fails_for_all():
    membership = Membership(3)
    for rank in range(3):
        membership.come(rank, 1, "barrier", may_miss=True)
    over(membership)
    membership.lose(0)
    membership.join(0)
    for rank in range(3):
        membership.come(rank, 2, "allgather", may_miss=False)
    assert over(membership) == Met(2, (), (1, 2, 0), missing=0)
    for rank in range(3):
        membership.come(rank, 3, "allgather", may_miss=False)
    assert over(membership) == Met(3, (1, 2, 0), (1, 2, 0))


@pytest.mark.parametrize("seed", range(15))
def test_members_when_workers_come_and_die_in_any_order_then_all_living_hear_of_the_same_meetings(seed):
    """Others may take the places of those that died, where some of the rest have not heard of the last meeting yet."""
    chance = random.Random(seed)
    size = chance.randint(2, 6)
    membership = Membership(size)
    numbers, heard, alive = [0] * size, [[] for _ in range(size)], set(range(size))
    waiting, lasting = set(), set(range(size))
    for _ in range(400):
        if chance.random() < 0.02 and len(alive) > 1:
            dead = chance.choice(sorted(alive - {0}))
            membership.lose(dead)
            alive.discard(dead)
            lasting.discard(dead)
        if chance.random() < 0.02 and membership.last is not None and len(alive) < size:
            new = chance.choice(sorted(set(range(size)) - alive))
            membership.join(new)
            alive.add(new)
            waiting.discard(new)
            numbers[new], heard[new] = membership.last.number, []
        rank = chance.choice(sorted(alive))
        if rank not in waiting:
            numbers[rank] += 1
            waiting.add(rank)
        may_miss = numbers[rank] % 3 != 0
        membership.come(rank, numbers[rank], f"meeting {may_miss}", may_miss=may_miss)
        over(membership)
        if membership.last is not None and membership.last.number == numbers[rank]:
            heard[rank].append(membership.last)
            waiting.discard(rank)
    all_met = {met.number: met for met in heard[0]}
    for rank in alive:
        assert all(met == all_met.get(met.number, met) for met in heard[rank])
        last = numbers[rank] - (rank in waiting)
        assert [met.number for met in heard[rank]] == list(range(last - len(heard[rank]) + 1, last + 1))
    assert len(heard[0]) > 10
    for met in heard[0]:
        assert set(met.members) >= lasting
        assert met.members[0] == 0


def joined(leases, chance, places):
    """Now and then another process in one of some places, where there is something to train."""
    if chance.random() > 0.02 or not places:
        return set()
    new = chance.choice(sorted(places))
    if not leases.join(new):
        return set()
    assert leases.join(new)  # the answer was lost
    return {new}


@pytest.mark.parametrize("seed", range(25))
def test_leases_when_workers_are_slow_or_die_then_every_batch_is_trained_and_at_most_one_lease_twice(seed):
    """Workers fetch a batch ahead and train what they fetched before; some die, and others take their places.

    A restart forgets nothing.
    What they have trained counts once the gradients of so many batches were pushed together.
    """
    chance = random.Random(seed)
    accumulated = chance.choice((1, 1, 2, 5))
    in_flight = IN_FLIGHT + accumulated - 1
    size, shard, lease_size = chance.randint(2, 5), chance.randint(1, 60), 2 * in_flight + chance.randint(0, 5)
    leases = ShardLeases(size, shard_size=shard, lease_size=lease_size, in_flight=in_flight)
    speed = [chance.choice((1.0, 1.0, 0.05)) for _ in range(size)]
    fetched: list[list] = [[] for _ in range(size)]  # of each worker, batches that it was given and has not pushed
    current: list = [None] * size
    position, latest, before = [0] * size, [0] * size, [0] * size
    trained: list[tuple] = []
    alive, over, deaths = set(range(size)), set(), 0
    while alive - over:
        if chance.random() < 0.02 and len(alive - over) > 1 and alive - over - {0}:
            dead = chance.choice(sorted(alive - over - {0}))
            alive.discard(dead)
            deaths += 1
            leases.lose(dead)
        for new in joined(leases, chance, set(range(size)) - alive):
            alive.add(new)
            fetched[new], current[new], latest[new], before[new] = [], None, 0, 0
        leases = ShardLeases.from_plain(leases.to_plain()) if chance.random() < 0.05 else leases
        rank = chance.choice(sorted(alive - over))
        if chance.random() > speed[rank]:
            continue
        lease = current[rank]
        if lease is None or position[rank] == lease.last:
            asked = leases.take(rank, latest=latest[rank])
            if asked is None:
                if leases.is_dealt_out:
                    trained += fetched[rank]
                    over.add(rank)
                continue
            assert leases.take(rank, latest=latest[rank]) == asked  # the answer was lost
            before[rank] = latest[rank]
            current[rank], position[rank], latest[rank] = asked, asked.first, asked.number
            lease = asked
        if before[rank] and position[rank] == lease.first + in_flight:
            leases.finish(rank, before[rank])
        fetched[rank].append((lease.owner, position[rank]))
        position[rank] += 1
        if len(fetched[rank]) > accumulated:
            trained += fetched[rank][:-1]
            del fetched[rank][:-1]
    everything = {(owner, number) for owner in range(size) for number in range(shard)}
    assert set(trained) == everything
    assert len(trained) - len(everything) <= deaths * lease_size
    assert leases.dealt_again >= len(trained) - len(everything)


def test_leases_when_all_are_equally_fast_then_each_trains_its_own_share_in_order():
    leases = ShardLeases(2, shard_size=16, lease_size=8)
    latest = [0, 0]
    seen = []
    for rank in (0, 1, 0, 1):
        lease = leases.take(rank, latest=latest[rank])
        latest[rank] = lease.number
        seen.append((rank, lease.owner, lease.first, lease.last))
    assert seen == [(0, 0, 0, 8), (1, 1, 0, 8), (0, 0, 8, 16), (1, 1, 8, 16)]
    assert leases.take(0, latest=latest[0]) is None
    assert not leases.is_dealt_out  # worker 1 may still die with its second lease
    assert leases.take(1, latest=latest[1]) is None
    assert leases.is_dealt_out


def test_leases_when_a_dead_worker_has_asked_before_it_died_then_it_gets_nothing_and_the_others_come_to_the_end():
    leases, latest, taken = ShardLeases(2, shard_size=16, lease_size=8), 0, []
    leases.take(1)
    leases.lose(1)
    assert leases.take(1, latest=1) is None  # the server comes to it late
    while (lease := leases.take(0, latest=latest)) is not None:
        latest = lease.number
        taken.append((lease.owner, lease.first, lease.last))
    assert taken == [(0, 0, 8), (0, 8, 16), (1, 0, 8), (1, 8, 16)]
    assert leases.is_dealt_out


def test_leases_when_arguments_are_out_of_range_then_they_are_named():
    with pytest.raises(ValueError, match="lease_size=0"):
        ShardLeases(2, shard_size=4, lease_size=0)


def test_leases_when_a_worker_pauses_then_the_others_have_its_share_but_for_the_batch_by_which_it_comes_to_the_end():
    leases, taken, latest = ShardLeases(2, shard_size=20, lease_size=8), [], 0
    assert leases.take(1, pauses=True) is None
    while (lease := leases.take(0, latest=latest)) is not None:
        latest = lease.number
        taken += [(lease.owner, x) for x in range(lease.first, lease.last)]
    assert sorted(taken) == [(0, x) for x in range(20)] + [(1, x) for x in range(1, 20)]
    assert not leases.is_dealt_out
    last = leases.take(1, pauses=True)
    assert (last.owner, last.first, last.last) == (1, 0, 1)
    assert leases.take(1, latest=last.number, pauses=True) is None
    assert leases.is_dealt_out


def test_leases_when_all_who_live_pause_and_the_others_have_died_then_say_so_instead_of_waiting_for_ever():
    leases = ShardLeases(3, shard_size=20, lease_size=8)
    assert leases.take(1, pauses=True) is None
    assert leases.take(2, pauses=True) is None  # worker 0 may come
    leases.take(0)
    leases.lose(0)
    leases = ShardLeases.from_plain(leases.to_plain())
    with pytest.raises(
        ValueError, match=r"60 batches .* workers \[0\] have died, and the others, \[1, 2\], .* drained"
    ):
        leases.take(1, pauses=True)
    assert leases.take(2).owner == 2  # whose group has come back
    assert leases.take(1, pauses=True) is None


def test_leases_when_all_pause_and_nobody_has_died_then_wait_for_one_to_come_back():
    leases = ShardLeases(2, shard_size=20, lease_size=8)
    assert leases.take(0, pauses=True) is None
    assert leases.take(1, pauses=True) is None


def test_leases_when_a_worker_pauses_in_mid_epoch_then_it_gets_nothing_until_it_goes_on():
    leases = ShardLeases(2, shard_size=20, lease_size=8)
    first = leases.take(1)
    assert leases.take(1, latest=first.number, pauses=True) is None
    assert leases.take(1, latest=first.number).first == 8


def test_leases_when_a_pass_ends_early_then_nobody_gets_more_of_it_whoever_dies():
    leases = ShardLeases(2, shard_size=16, lease_size=8)
    latest = leases.take(0).number
    leases.take(1)
    leases.end()
    leases = ShardLeases.from_plain(leases.to_plain())
    assert leases.is_dealt_out
    assert leases.take(0, latest=latest) is None
    leases.lose(1)
    assert leases.take(0, latest=latest) is None
    assert (leases.is_dealt_out, leases.dealt_again) == (True, 0)


def test_leases_when_a_pass_ends_before_a_worker_has_begun_it_then_it_gets_its_first_batch_and_the_others_wait():
    leases = ShardLeases(3, shard_size=16, lease_size=8)
    latest = [leases.take(0).number, leases.take(1).number]
    leases.end()
    assert leases.take(0, latest=latest[0]) is None
    assert not leases.is_dealt_out
    lease = leases.take(2)
    assert (lease.owner, lease.first, lease.last) == (2, 0, 1)
    assert leases.take(2, latest=lease.number) is None
    assert leases.is_dealt_out
