"""Per-row clocks: their bounds on numbers, and Lemma 1 over random interleavings of workers."""

import numpy as np
import pytest

from lightning_recsys.sync import ClockRule
from lightning_recsys.sync.clocks import MAX_CLOCK, hear, is_too_far

NUM_WORKERS, NUM_ROWS = 3, 2

are_too_far = np.vectorize(is_too_far, otypes=[bool])
hear_each = np.vectorize(hear, otypes=[np.int32])


class Rule(ClockRule):
    """The rule over arrays of clocks."""

    def needs_push(self, start, current):
        """Copies too far ahead of what they started from: push them and fetch them again."""
        return are_too_far(current, start, self.bound)

    def is_stale(self, current, server):
        """Copies too far behind their server."""
        return are_too_far(server, current, self.bound)

    def after_push(self, server, sent):
        """The server's clocks once pushes have been applied."""
        return hear_each(server, sent, self.by_sum)


def clocks(*numbers):
    return np.array(numbers, dtype=np.int32)


@pytest.mark.parametrize(("staleness", "expected"), [(0, [0, 1, 1, 1]), (1, [0, 0, 1, 1]), (10, [0, 0, 0, 1])])
def test_bounds_when_the_lag_passes_the_staleness_then_a_row_is_called(staleness, expected):
    clock_rule = Rule(staleness=staleness)
    behind, ahead = clocks(5, 5, 5, 5), clocks(5, 6, 15, 16)
    assert clock_rule.needs_push(behind, ahead).tolist() == [bool(x) for x in expected]
    assert clock_rule.is_stale(behind, ahead).tolist() == [bool(x) for x in expected]
    assert not clock_rule.needs_push(ahead, behind).any()
    assert not clock_rule.is_stale(ahead, behind).any()


def test_bounds_when_staleness_is_none_then_no_row_is_ever_called():
    clock_rule, largest = Rule(staleness=None), clocks(2**31 - 1)
    assert not clock_rule.needs_push(clocks(0), largest).any()
    assert not clock_rule.is_stale(clocks(0), largest).any()


def test_bounds_when_clock_and_staleness_near_the_largest_number_then_nothing_wraps():
    clock_rule, large = Rule(staleness=2**31 - 1), clocks(2**31 - 2)
    assert not clock_rule.needs_push(clocks(0), large).any()
    assert Rule(staleness=0).is_stale(large - 1, large).all()
    assert not Rule(staleness=2**40).is_stale(clocks(0), large).any()


@pytest.mark.parametrize("staleness", [0, 5, 2**40])
def test_bounds_when_a_clock_is_at_its_end_then_the_copy_counts_as_too_far_off(staleness):
    clock_rule, end = Rule(staleness, clock="sum"), clocks(MAX_CLOCK)
    assert clock_rule.needs_push(end, end).all()
    assert clock_rule.is_stale(end - 1, end).all()
    assert clock_rule.after_push(end - 1, clocks(1)) == clock_rule.after_push(end, end) == end


def test_push_when_clocks_are_max_or_sum_then_the_server_has_the_larger_one_or_counts_all():
    server, current, unsent = clocks(7, 7), clocks(5, 9), clocks(2, 3)
    largest, total = Rule(1, clock="max"), Rule(1, clock="sum")
    assert largest.after_push(server, largest.sent(current, unsent)).tolist() == [7, 9]
    assert total.after_push(server, total.sent(current, unsent)).tolist() == [9, 10]
    assert largest.after_push(server, current).dtype == total.after_push(server, unsent).dtype == np.int32


def test_copies_when_updated_then_their_clocks_go_on_to_the_end():
    after = ClockRule.after_update(clocks(0, 7, MAX_CLOCK - 1, MAX_CLOCK))
    assert after.tolist() == [1, 8, MAX_CLOCK, MAX_CLOCK]
    assert after.dtype == np.int32


def test_rule_when_an_argument_is_wrong_then_refused():
    with pytest.raises(ValueError, match=r"strategy\.staleness must be at least 0, or null for no bound, got -1"):
        ClockRule(staleness=-1)
    with pytest.raises(ValueError, match=r"strategy\.clock must be one of \['max', 'sum'\], got 'mean'"):
        ClockRule(staleness=1, clock="mean")


class Caches:
    """Workers that read, train and drop copies of rows, in any order; values are replaced by lists of updates seen.

    A step of a worker is two events, the read and the write, and other workers' events may lie between them.
    """

    def __init__(self, staleness, clock):
        self.rule, self.staleness = Rule(staleness, clock=clock), staleness
        per_copy, per_row = (NUM_WORKERS, NUM_ROWS), (NUM_ROWS,)
        self.server = np.zeros(per_row, dtype=np.int32)
        self.applied = np.zeros((*per_row, NUM_WORKERS), dtype=np.int64)  # of whom the server has how many updates
        self.made = np.zeros((*per_row, NUM_WORKERS), dtype=np.int64)
        self.present, self.in_step = np.zeros(per_copy, dtype=bool), np.zeros(per_copy, dtype=bool)
        self.begun, self.current, self.unsent = (np.zeros(per_copy, dtype=np.int32) for _ in range(3))
        self.seen = np.zeros((*per_copy, NUM_WORKERS), dtype=np.int64)

    def push(self, worker, rows):
        unsent = self.unsent[worker, rows]
        before = self.server.copy()
        sent = self.rule.sent(self.current[worker, rows], unsent)
        self.server[rows] = self.rule.after_push(self.server[rows], sent)
        assert (self.server >= before).all()
        assert (self.server[rows] >= self.current[worker, rows]).all()  # or others would not learn of the push
        self.applied[rows, worker] += unsent
        self.unsent[worker, rows] = 0

    def fetch(self, worker, rows):
        self.present[worker, rows] = True
        self.begun[worker, rows] = self.current[worker, rows] = self.server[rows]
        self.seen[worker, rows] = self.applied[rows]

    def go_on(self, kind, worker, rows):
        if kind == "flush" or kind == "evict":
            self.evict_or_flush(worker, rows, keep=kind == "flush")
        elif self.in_step[worker].any():
            self.write(worker)
        else:
            self.read(worker, rows)
        self.lemma_1_holds()
        self.every_worker_sees_its_own_updates_and_none_is_lost()

    def read(self, worker, rows):
        hits = rows[self.present[worker, rows]]
        ahead = self.rule.needs_push(self.begun[worker, hits], self.current[worker, hits])
        behind = self.rule.is_stale(self.current[worker, hits], self.server[hits])
        invalid = hits[ahead | behind]
        assert self.staleness is not None or not invalid.size
        self.push(worker, invalid[self.unsent[worker, invalid] > 0])
        self.fetch(worker, np.setdiff1d(rows, np.setdiff1d(hits, invalid)))
        self.in_step[worker, rows] = True
        if self.staleness is not None:
            assert (abs(self.current[worker, rows] - self.server[rows]) <= self.staleness).all()
            if self.rule.clock == "sum":
                not_seen = (self.applied[rows] - self.seen[worker, rows]).clip(0).sum(1)
                assert (not_seen <= 2 * self.staleness).all()

    def write(self, worker):
        rows = self.in_step[worker]
        self.current[worker, rows] += 1
        self.unsent[worker, rows] += 1
        self.seen[worker, rows, worker] += 1
        self.made[rows, worker] += 1
        self.in_step[worker] = False

    def evict_or_flush(self, worker, rows, *, keep):
        rows = rows[self.present[worker, rows] & ~self.in_step[worker, rows]]
        self.push(worker, rows[self.unsent[worker, rows] > 0])
        self.present[worker, rows] &= keep

    def lemma_1_holds(self):
        if self.staleness is None:
            return
        behind = self.rule.is_stale(self.current, np.broadcast_to(self.server, self.current.shape))
        readable = self.present & ~behind & ~self.rule.needs_push(self.begun, self.current)
        lowest = np.where(readable, self.current, np.iinfo(np.int32).max).min(0)
        highest = np.where(readable, self.current, 0).max(0)
        assert (highest - lowest <= 2 * self.staleness)[readable.sum(0) > 1].all()
        assert (self.begun <= self.server)[self.present].all()
        assert (self.current - self.begun <= self.staleness + 1)[self.present].all()  # + 1: written, not read again yet

    def every_worker_sees_its_own_updates_and_none_is_lost(self):
        for worker in range(NUM_WORKERS):
            present = self.present[worker]
            assert (self.seen[worker, present, worker] == self.made[present, worker]).all()
            assert (self.applied[:, worker] + self.unsent[worker] == self.made[:, worker]).all()
        if self.rule.clock == "sum":
            assert (self.server == self.applied.sum(1)).all()
        else:
            assert (self.server <= self.applied.sum(1)).all()


@pytest.mark.parametrize("clock", ["max", "sum"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4, None])
def test_lemma_1_when_workers_interleave_at_random_then_it_holds(staleness, clock):
    """Short runs first: where one fails, its events are few. Steps are more frequent than what ends a copy."""
    generator = np.random.default_rng(0)
    rows_of = [np.flatnonzero(batch >> np.arange(NUM_ROWS) & 1) for batch in range(1, 2**NUM_ROWS)]
    for num_events in [12] * 30 + [100] * 8:
        caches, events = Caches(staleness, clock), []
        kinds = generator.choice(["step", "flush", "evict"], num_events, p=[0.8, 0.1, 0.1])
        workers, batches = (generator.integers(0, n, num_events) for n in (NUM_WORKERS, len(rows_of)))
        for kind, worker, batch in zip(kinds, workers, batches, strict=True):
            events.append((str(kind), int(worker), rows_of[batch].tolist()))
            try:
                caches.go_on(kind, worker, rows_of[batch])
            except AssertionError as error:
                error.add_note(f"after {events}")
                raise
