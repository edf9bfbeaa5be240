"""SWAP against its eager form, written out in numpy in double precision, over random access patterns."""

import copy
import itertools
import math
import threading
from functools import partial

import numpy as np
import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures, Ticket
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowSWAP, RowWiseAdagrad, swap
from lightning_recsys.optim.accumulating import check_additive
from lightning_recsys.optim.compiled import apply_update
from lightning_recsys.optim.swap import CLOCK, Periods, discount_of, discount_state_
from lightning_recsys.stores.plain import optimizer_from_plain, optimizer_to_plain

ROWS, DIM, STEPS, PERIOD, DISCOUNT, LR = 7, 3, 60, 4, 0.6, 0.1
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def another_process(monkeypatch):
    """A process's clock never goes back; each test has that of a process that has not read it."""
    begin = partial(monkeypatch.setattr, CLOCK, "latest", 0.0)
    begin()
    return begin


def accesses():
    """Which rows each step touches, and their gradients: some rows rest for many periods."""
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        touched = np.flatnonzero(random.random(ROWS) < 0.2)
        yield touched, random.normal(size=(len(touched), DIM))


class Eager:
    """Every row is discounted at each period's end, as Algorithm 2 says; then the textbook's rule."""

    def __init__(self, rows):
        self.w = rows.astype(np.float64)
        self.start()

    def run(self):
        for t, (touched, g) in enumerate(accesses(), start=1):
            if t % PERIOD == 0:
                self.forget()
            self.update(touched, g, t)
        return self.w


class EagerAdagrad(Eager):
    v0 = 0.05

    def start(self):
        self.v = np.full_like(self.w, self.v0)

    def forget(self):
        self.v = np.maximum(self.v * DISCOUNT, self.v0)

    def update(self, i, g, t):
        self.v[i] += g**2
        self.w[i] -= LR * g / (np.sqrt(self.v[i]) + 1e-8)


class EagerRowwise(EagerAdagrad):
    def start(self):
        self.v = np.full(len(self.w), self.v0)

    def update(self, i, g, t):
        self.v[i] += (g**2).mean(1)
        self.w[i] -= LR * g / (np.sqrt(self.v[i]) + 1e-8)[:, None]


class EagerAdam(Eager):
    def start(self):
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)

    def forget(self):
        self.v *= DISCOUNT

    def update(self, i, g, t):
        self.m[i] = 0.9 * self.m[i] + 0.1 * g
        self.v[i] = 0.99 * self.v[i] + 0.01 * g**2
        self.w[i] -= LR * (self.m[i] / (1 - 0.9**t)) / (np.sqrt(self.v[i] / (1 - 0.99**t)) + 1e-8)


class EagerFTRL(Eager):
    beta, l1, l2 = 1.0, 0.02, 0.1

    def curvature(self):
        return (self.beta + np.sqrt(self.n)) / LR + self.l2

    def start(self):
        self.n = np.zeros_like(self.w)
        self.z = -self.w * self.curvature() - np.sign(self.w) * self.l1

    def forget(self):
        """Solve the weight's formula for z after n has changed."""
        outside = np.abs(self.z) > self.l1
        w = np.where(outside, -(self.z - np.sign(self.z) * self.l1) / self.curvature(), 0)
        self.n *= DISCOUNT
        self.z = np.where(outside, -w * self.curvature() + np.sign(self.z) * self.l1, self.z)

    def update(self, i, g, t):
        new = self.n[i] + g**2
        self.z[i] += g - (np.sqrt(new) - np.sqrt(self.n[i])) / LR * self.w[i]
        self.n[i] = new
        shrunk = self.z[i] - np.clip(self.z[i], -self.l1, self.l1)
        self.w[i] = -shrunk / self.curvature()[i]


RULES = {
    "adagrad": (RowAdagrad(lr=LR, initial_accumulator=0.05), EagerAdagrad),
    "rowwise_adagrad": (RowWiseAdagrad(lr=LR, initial_accumulator=0.05), EagerRowwise),
    "adam": (RowAdam(lr=LR, beta2=0.99), EagerAdam),
    "ftrl": (RowFTRL(lr=LR, beta=1.0, l1=0.02, l2=0.1), EagerFTRL),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_rows_when_touched_now_and_then_then_equal_the_eager_form(name, compiled):
    inner, eager = RULES[name]
    rule = RowSWAP(inner=inner, period=PERIOD, discount=DISCOUNT)
    rows = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)) * 0.1
    expected = eager(rows.numpy()).run()
    state = rule.initial_state(rows)
    for step, (touched, g) in enumerate(accesses(), start=1):
        grads = torch.from_numpy(g).float()
        if compiled:
            apply_update(rule, touched, grads.numpy(), rows, state, lr=LR, step=step)
            continue
        where = torch.from_numpy(touched)
        own_rows, own = rows[where], {key: value[where] for key, value in state.items()}
        rule.update_(own_rows, grads, own, lr=LR, step=step)
        rows[where] = own_rows
        for key, value in own.items():
            state[key][where] = value
    torch.testing.assert_close(rows, torch.from_numpy(expected).float(), **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
def test_weight_decay_when_of_the_inner_rule_then_it_is_added_to_the_gradient_once(compiled):
    plain = RowAdagrad(lr=LR)
    rule = RowSWAP(inner=RowAdagrad(lr=LR, weight_decay=0.5), period=1000, discount=0.5)  # no period ends
    rows, grads = torch.randn(ROWS, DIM), torch.randn(ROWS, DIM)
    expected, state = rows.clone(), rule.initial_state(rows)
    plain.update_(expected, grads + 0.5 * rows, plain.initial_state(rows), lr=LR, step=1)
    if compiled:
        apply_update(rule, np.arange(ROWS), grads.numpy(), rows, state, lr=LR, step=1)
    else:
        rule.update_(rows, rule.decayed(rows, grads), state, lr=LR, step=1)
    torch.testing.assert_close(rows, expected, **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_rows_when_each_day_is_a_run_of_its_own_then_are_discounted_once_for_each_day_between(name, compiled):
    """A row's first day discounts nothing; then it rests, while state travels from run to run."""
    inner = RULES[name][0]
    rows, eager_rows = torch.full((1, DIM), 0.1), torch.full((1, DIM), 0.1)
    state, eager = RowSWAP(inner=inner, day=1, discount=DISCOUNT).initial_state(rows), inner.initial_state(eager_rows)
    last = 738_000  # as dates are numbered
    for step, day in enumerate((738_000, 738_001, 738_001, 738_007), start=1):
        rule = optimizer_from_plain(optimizer_to_plain(RowSWAP(inner=inner, day=day, discount=DISCOUNT)))
        update_one(rule, compiled, state, rows, step=step)
        for _ in range(day - last):
            discount_state_(inner, eager, torch.tensor([DISCOUNT]), lr=LR)
        update_one(inner, compiled, eager, eager_rows, step=step)
        last = day
    torch.testing.assert_close(rows, eager_rows, **TOLERANCE)
    for key, value in eager.items():
        torch.testing.assert_close(state[key], value, **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_and_dense_parameters_when_periods_are_hours_then_are_discounted_by_the_clock(compiled, monkeypatch):
    now = [1_800_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    rule = RowSWAP(inner=RowAdagrad(lr=LR), seconds=3600, discount=DISCOUNT)
    assert optimizer_from_plain(optimizer_to_plain(rule)) == rule
    rows = torch.zeros(1, DIM)
    state = rule.initial_state(rows)
    weight = torch.nn.Parameter(torch.zeros(DIM))
    optimizer = swap([weight], partial(torch.optim.Adagrad, lr=LR), seconds=3600, discount=DISCOUNT)
    expected = 0.0
    for step, hours in enumerate((0, 1, 0, 3), start=1):
        now[0] += 3600 * hours
        update_one(rule, compiled, state, rows, step=step)
        weight.grad = torch.full((DIM,), 0.5)
        optimizer.step()
        expected = expected * DISCOUNT**hours + 0.25
        torch.testing.assert_close(state["sum"], torch.full((1, DIM), expected))
        torch.testing.assert_close(optimizer.state[weight]["sum"], torch.full((DIM,), expected))


def test_dense_parameters_when_each_day_is_a_run_of_its_own_then_are_discounted_once_for_each_day_between():
    weight, saved, expected = torch.nn.Parameter(torch.zeros(1)), None, 0.0
    for day, missed in (("2026-01-30", 0), ("2026-01-31", 1), ("2026-02-03", 3)):
        optimizer = swap([weight], partial(torch.optim.Adagrad, lr=LR), day=day, discount=DISCOUNT)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for _ in range(2):
            weight.grad = torch.ones(1)
            optimizer.step()
        expected = expected * DISCOUNT**missed + 2
        saved = copy.deepcopy(optimizer.state_dict())
        assert optimizer.state[weight]["sum"].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        ({}, "one of period .*, got none"),
        ({"period": 2, "day": 3}, "one of period .*, got period=2, day=3"),
        ({"seconds": 5}, "seconds must be a finite number, at least 60"),
        ({"day": 0}, "day must be a whole number from 1, or a date"),
        ({"day": 20260131}, "or a date such as 2026-01-31, got 20260131"),
        ({"day": "31.1.2026"}, "day must be a whole number from 1, or a date such as 2026-01-31, got 31.1.2026"),
    ],
)
def test_periods_when_they_are_none_then_refused_by_name(periods, message):
    with pytest.raises(ValueError, match=message):
        RowSWAP(inner=RowAdagrad(), discount=0.5, **periods)
    with pytest.raises(ValueError, match=message):
        swap([torch.nn.Parameter(torch.ones(1))], torch.optim.Adagrad, discount=0.5, **periods)


def update_one(rule, compiled, state, rows, *, lr=LR, step):
    """An update of a single row by either form."""
    if compiled:
        apply_update(rule, np.array([0]), np.full((1, DIM), 0.5, dtype=np.float32), rows, state, lr=lr, step=step)
    else:
        rule.update_(rows, torch.full((1, DIM), 0.5), state, lr=lr, step=step)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_row_when_the_period_became_longer_then_it_counts_as_of_the_present_one(name, compiled):
    rule = RowSWAP(inner=RULES[name][0], period=10, discount=DISCOUNT)
    rows = torch.full((1, DIM), 0.1)
    state = rule.initial_state(rows)
    update_one(rule, compiled, state, rows, step=19)
    expected_rows, expected = rows.clone(), {key: value.clone() for key, value in state.items()}
    state["period"].fill_(19)  # where one of 2 updates began
    for step in (19, 20, 29, 30):  # discounts at 20 and 30
        update_one(rule, compiled, state, rows, step=step)
        update_one(rule, compiled, expected, expected_rows, step=step)
        assert state["period"].tolist() == [step // 10 * 10 + 1]
    torch.testing.assert_close(rows, expected_rows, rtol=0, atol=0)
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=0)


def test_row_when_the_period_became_shorter_then_is_discounted_once_for_each_since_its_own_began():
    """Not for all that a run with the shorter one would have had: its accumulator would be gone."""
    rows = torch.zeros(1, DIM)
    rule = RowSWAP(inner=RowAdagrad(lr=LR), period=100, discount=DISCOUNT)
    state = rule.initial_state(rows)
    update_one(rule, True, state, rows, step=210)
    shorter = RowSWAP(inner=RowAdagrad(lr=LR), period=30, discount=DISCOUNT)
    update_one(shorter, True, state, rows, step=280)
    torch.testing.assert_close(state["sum"], torch.full((1, DIM), 0.25 * DISCOUNT**2 + 0.25))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("late", "later"), [(19, 20), (6001 * 200_000 - 1, 6001 * 200_000)])
def test_row_when_a_worker_is_late_by_a_periods_end_then_it_is_discounted_once(compiled, late, later):
    """The late worker's update does not bring the earlier period back, also where float32 has no such number."""
    rule = RowSWAP(inner=RowAdagrad(lr=LR), period=10 if later == 20 else 6001, discount=0.5)
    rows = torch.zeros(1, DIM)
    state = rule.initial_state(rows)
    for step in (late - 1, later, late, later + 1):
        update_one(rule, compiled, state, rows, step=step)
    torch.testing.assert_close(state["sum"], torch.full((1, DIM), 0.25 * 0.5 + 3 * 0.25))


@pytest.mark.parametrize(("earlier", "later", "missed"), [(7200, 3600, 3), (3600, 7200, 1), (86_400, 120, 102)])
def test_state_when_a_run_goes_on_with_other_seconds_then_it_misses_the_periods_that_have_passed(
    earlier, later, missed, monkeypatch
):
    now = [1_800_000_000 // 86_400 * 86_400.0]  # midnight, where periods of whole hours end
    monkeypatch.setattr("time.time", lambda: now[0])
    weight, discount = torch.nn.Parameter(torch.zeros(DIM)), 0.99
    rows = torch.zeros(1, DIM)
    old, new = (RowSWAP(inner=RowAdagrad(lr=LR), seconds=x, discount=discount) for x in (earlier, later))
    state = old.initial_state(rows)
    saved = None
    for step, (rule, hours) in enumerate(((old, 0), (new, 3.4)), start=1):
        now[0] += 3600 * hours
        update_one(rule, True, state, rows, step=step)
        optimizer = swap([weight], partial(torch.optim.Adagrad, lr=LR), seconds=rule.seconds, discount=discount)
        if saved is not None:
            optimizer.load_state_dict(saved)
        weight.grad = torch.full((DIM,), 0.5)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
    expected = 0.25 * discount**missed + 0.25
    torch.testing.assert_close(state["sum"], torch.full((1, DIM), expected))
    torch.testing.assert_close(optimizer.state[weight]["sum"], torch.full((DIM,), expected))


@pytest.mark.parametrize("seconds", [60, 60.1, 61, 90.5, 3600, 86_400])
def test_periods_of_time_then_each_end_is_missed_once(seconds, monkeypatch):
    now, periods = [0.0], Periods(seconds=seconds)
    monkeypatch.setattr("time.time", lambda: now[0])
    first = int(60_000_000 / seconds)  # nearly two years
    numbers = []
    for count in range(1000):
        now[0] = 1_735_689_600 + (first + count + 0.5) * seconds  # the middle of a period
        numbers.append(periods.at(0))
    assert torch.tensor(numbers, dtype=torch.float32).tolist() == numbers
    missed = [int(periods.missed(torch.tensor([x]), y)) for x, y in itertools.pairwise(numbers)]
    assert missed == [1] * 999


def test_row_when_a_worker_has_read_the_clock_before_the_hour_ended_then_it_is_discounted_once(
    monkeypatch, another_process
):
    # The first update reads the clock twice, as its row has no period yet. The third one, of another process, read it
    # in the first hour, and once more behind its end.
    hours = iter([0, 0, 1, 0, 1, 1])
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0 + 3600 * next(hours))
    rule = RowSWAP(inner=RowAdagrad(lr=LR), seconds=3600, discount=0.5)
    rows = torch.zeros(1, DIM)
    state = rule.initial_state(rows)
    for step in range(1, 5):
        if step == 3:
            another_process()
        update_one(rule, True, state, rows, step=step)
    torch.testing.assert_close(state["sum"], torch.full((1, DIM), 0.25 * 0.5 + 3 * 0.25))


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_and_dense_parameters_when_the_clock_is_set_back_then_each_hour_is_discounted_once(compiled, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0 + now[0])
    rule = RowSWAP(inner=RowAdagrad(lr=LR), seconds=3600, discount=0.5)
    rows, weight = torch.zeros(1, DIM), torch.nn.Parameter(torch.zeros(DIM))
    state, expected = rule.initial_state(rows), 0.0
    optimizer = swap([weight], partial(torch.optim.Adagrad, lr=LR), seconds=3600, discount=0.5)
    for step, (minute, ends) in enumerate([(50, 0), (61, 1), (59, 0), (-500, 0), (62, 0), (121, 1)], start=1):
        now[0] = 60.0 * minute
        update_one(rule, compiled, state, rows, step=step)
        weight.grad = torch.full((DIM,), 0.5)
        optimizer.step()
        expected = expected * 0.5**ends + 0.25
        torch.testing.assert_close(state["sum"], torch.full((1, DIM), expected))
        torch.testing.assert_close(optimizer.state[weight]["sum"], torch.full((DIM,), expected))


def test_row_when_the_clock_is_set_back_before_another_process_reads_it_then_it_is_discounted_once(
    monkeypatch, another_process
):
    now = [0.0]
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0 + now[0])
    rule = RowSWAP(inner=RowAdagrad(lr=LR), seconds=3600, discount=0.5)
    rows = torch.zeros(1, DIM)
    state = rule.initial_state(rows)
    for step, minute in enumerate([50, 61, 59, 62], start=1):
        now[0] = 60.0 * minute
        if minute == 59:
            another_process()
        update_one(rule, True, state, rows, step=step)
    torch.testing.assert_close(state["sum"], torch.full((1, DIM), 0.25 * 0.5 + 3 * 0.25))


@pytest.mark.parametrize(("seconds", "minute"), [(60, 59), (3600, 24 * 60)], ids=["shorter periods", "a wrong clock"])
def test_row_when_an_earlier_run_has_left_a_later_period_then_it_counts_as_of_the_present_one(
    seconds, minute, monkeypatch, another_process
):
    now = [60.0 * minute]
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0 + now[0])
    rows = torch.zeros(1, DIM)
    earlier, rule = (RowSWAP(inner=RowAdagrad(lr=LR), seconds=x, discount=0.5) for x in (seconds, 3600))
    state = rule.initial_state(rows)
    update_one(earlier, True, state, rows, step=1)
    another_process()
    for step, later in enumerate([59.5, 61], start=2):
        now[0] = 60.0 * later
        update_one(rule, True, state, rows, step=step)
    torch.testing.assert_close(state["sum"], torch.full((1, DIM), 0.5 * 0.5 + 0.25))


def test_dense_parameters_when_two_workers_share_their_state_then_periods_are_of_the_steps_of_both():
    """Another process may go on alone from the state of either, and a group that is added belongs to one worker."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    groups = lambda: [{"params": [weight]} for weight in weights[:2]]  # noqa: E731
    make = partial(swap, inner=partial(torch.optim.Adagrad, lr=LR), period=PERIOD, discount=DISCOUNT)
    one, other = make(groups()), make(groups())
    for weight in weights[:2]:
        other.state[weight] = one.state[weight]
    discount_of(other).share(other).update(discount_of(one).share(one))
    one.add_param_group({"params": [weights[2]]})
    expected = own = 0.0
    for step in range(1, 4 * PERIOD + 2):
        optimizer = one if step % 3 else other
        for weight in weights if optimizer is one else weights[:2]:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        expected = expected * (DISCOUNT if step % PERIOD == 0 else 1.0) + 1.0
        if optimizer is one:
            own_step = step - step // 3
            own = own * (DISCOUNT if own_step % PERIOD == 0 else 1.0) + 1.0
        sums = [one.state[weight]["sum"][0].item() for weight in weights]
        assert sums == pytest.approx([expected, expected, own])
        assert [group["swap_step"] for group in other.state_dict()["param_groups"]] == [step] * 2
    alone = make(groups())
    alone.load_state_dict(other.state_dict())
    for _ in range(PERIOD):
        step += 1
        for weight in weights[:2]:
            weight.grad = torch.ones_like(weight)
        alone.step()
        expected = expected * (DISCOUNT if step % PERIOD == 0 else 1.0) + 1.0
    assert [alone.state[weight]["sum"][0].item() for weight in weights[:2]] == pytest.approx([expected] * 2)


def test_periods_when_many_workers_end_them_at_once_then_each_end_is_one_workers():
    """Each update claims all rows, in an order that differs from that of the steps; claims lose nothing."""
    rule = RowSWAP(inner=RowAdagrad(lr=LR), period=1, discount=0.5)
    periods, num_rows, steps, workers = torch.ones(64), 64, 4000, 4
    halvings, counter = torch.zeros(workers, num_rows), itertools.count(1)
    start = threading.Barrier(workers)

    def work(worker: int) -> None:
        start.wait()
        for _ in range(steps // workers):
            for rows, factors in rule.claim(np.arange(num_rows), periods, step=next(counter)):
                halvings[worker, rows] -= factors.log2()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert periods.tolist() == [steps + 1] * num_rows
    assert halvings.sum(0).tolist() == [steps] * num_rows
    assert (halvings.sum(1) > 0).sum() > 1, "several workers have ended periods"


def test_row_when_the_table_has_had_more_updates_than_float32_counts_then_every_period_still_ends():
    rows, expected = torch.zeros(1, DIM), 0.0
    rule = RowSWAP(inner=RowAdagrad(lr=LR), period=6001, discount=DISCOUNT)
    state = rule.initial_state(rows)
    for number in range(200_000, 200_020):
        update_one(rule, True, state, rows, step=6001 * number + number % 7)
        expected = DISCOUNT * expected + 0.25
    torch.testing.assert_close(state["sum"], torch.full((1, DIM), expected))


@pytest.mark.parametrize(("periods", "expected"), [({"period": 2}, 4.25 * DISCOUNT + 0.5), ({"day": 17}, 4.75)])
def test_rows_when_the_checkpoint_is_of_the_rule_without_swap_then_count_as_of_the_present_period(periods, expected):
    """A model that was trained for weeks begins to forget: nothing of what was before has missed a period."""
    table = EmbeddingBagConfig("t", ROWS, DIM, ("a",))
    before = EmbeddingBagCollection([table], optimizer=RowAdagrad(lr=LR)).state_dict()
    before["embedding_bags.t.sum"].fill_(4.0)
    before["embedding_bags.t.step"].fill_(1000)
    rule = RowSWAP(inner=RowAdagrad(lr=LR), discount=DISCOUNT, **periods)
    after = EmbeddingBagCollection([table], optimizer=rule)
    after.load_state_dict(before)
    backend, grad_BFD = after.embedding_bags, torch.full((1, 1, DIM), 0.5)
    for _ in range(3):  # with periods of 2 updates the second of them begins one
        backend.apply_gradients([Ticket(SparseFeatures(("a",), torch.zeros(1, dtype=torch.int64)))], grad_BFD, lr=LR)
    assert backend.step == 1003
    torch.testing.assert_close(backend.read("t", "sum")[0], torch.full((DIM,), expected))
    del before["embedding_bags.t.sum"]
    with pytest.raises(RuntimeError, match=r"Missing key.*t\.sum"):
        after.load_state_dict(before)


KINDS = ({"period": 2}, {"seconds": 3600}, {"day": "2026-01-31"})


@pytest.mark.parametrize(("earlier", "later"), [*itertools.permutations(KINDS, 2)], ids=str)
def test_state_when_its_period_was_of_another_kind_then_it_counts_as_of_the_present_one(earlier, later):
    """A run by days goes on from one by updates: the numbers of their periods say nothing of each other."""
    adagrad, weight, saved = partial(torch.optim.Adagrad, lr=LR), torch.nn.Parameter(torch.zeros(DIM)), None
    rows, state = torch.zeros(1, DIM), None
    for periods, steps in ((earlier, (1, 2, 3)), (later, (4, 5))):  # in both of which the period of 2 is the same
        rule = RowSWAP(inner=RowAdagrad(lr=LR), **periods, discount=DISCOUNT)
        optimizer = swap([weight], adagrad, **periods, discount=DISCOUNT)
        if saved is not None:
            optimizer.load_state_dict(saved)
        state = state or rule.initial_state(rows)
        for step in steps:
            before = [state["sum"].clone(), optimizer.state[weight]["sum"].clone()]
            weight.grad = torch.full((DIM,), 0.5)
            optimizer.step()
            update_one(rule, True, state, rows, step=step)
            if periods is later:
                torch.testing.assert_close([state["sum"], optimizer.state[weight]["sum"]], [x + 0.25 for x in before])
        saved = copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("compiled", [False, True])
def test_ftrl_when_the_learning_rate_is_zero_at_a_periods_end_then_the_discount_waits(compiled):
    rule = RowSWAP(inner=RULES["ftrl"][0], period=PERIOD, discount=DISCOUNT)
    rows = torch.full((1, DIM), 0.1)
    state = rule.initial_state(rows)
    update_one(rule, compiled, state, rows, step=1)
    before = {key: value.clone() for key, value in state.items()}
    update_one(rule, compiled, state, rows, lr=0.0, step=PERIOD)
    assert all(torch.equal(state[key], value) for key, value in before.items())
    update_one(rule, compiled, state, rows, step=PERIOD + 1)
    torch.testing.assert_close(state["accumulator"], before["accumulator"] * DISCOUNT + 0.25)
    assert state["period"].tolist() == [PERIOD + 1]


def test_discount_then_makes_a_difference():
    """The comparison above would pass with a discount that does nothing, if that of the eager form did nothing too."""
    rows = np.ones((ROWS, DIM))
    forgetful = EagerAdagrad(rows).run()
    EagerAdagrad.forget, kept = lambda self: None, EagerAdagrad.forget
    try:
        assert not np.allclose(forgetful, EagerAdagrad(rows).run(), rtol=1e-2)
    finally:
        EagerAdagrad.forget = kept


@pytest.mark.parametrize("name", RULES)
def test_rule_when_it_travels_as_plain_data_then_comes_back_equal(name):
    rule = RowSWAP(inner=RULES[name][0], period=PERIOD, discount=DISCOUNT)
    assert optimizer_from_plain(optimizer_to_plain(rule)) == rule


@pytest.mark.parametrize(
    "change",
    [
        {"inner": {"rule": "RowSGD", "lr": 0.1}},
        {"inner": "RowAdagrad"},
        {"period": 0},
        {"period": 2.5},
        {"discount": 2.0},
        {"discount": "half"},
        {"more": 1},
    ],
)
def test_plain_data_when_it_is_no_swap_then_refused(change):
    plain = optimizer_to_plain(RowSWAP(inner=RowAdagrad(), period=2, discount=0.5)) | change
    with pytest.raises(ValueError, match=r"RowSWAP|SWAP|update rule"):
        optimizer_from_plain(plain)


def test_plain_data_when_a_swap_holds_itself_many_times_then_refused():
    plain = optimizer_to_plain(RowSWAP(inner=RowAdagrad(), period=2, discount=0.5))
    deep = plain
    for _ in range(2000):
        deep = plain | {"inner": deep}
    with pytest.raises(ValueError, match="RowSWAP"):
        optimizer_from_plain(deep)


def test_rule_without_an_accumulator_then_refused_by_name():
    with pytest.raises(TypeError, match="RowSGD is none of RowAdagrad"):
        RowSWAP(inner=RowSGD(), period=2, discount=0.5)
    with pytest.raises(TypeError, match="RowSWAP"):
        check_additive(RowSWAP(inner=RowAdagrad(), period=2, discount=0.5))
    with pytest.raises(TypeError, match="SGD is none of"):
        swap([torch.nn.Parameter(torch.ones(1))], partial(torch.optim.SGD, lr=0.1), period=2, discount=0.5)
    with pytest.raises(TypeError, match=r"Adam\(amsgrad=True\) divides by its largest value"):
        swap([torch.nn.Parameter(torch.ones(1))], partial(torch.optim.Adam, amsgrad=True), period=2, discount=0.5)


@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_dense_adagrad_when_resumed_at_any_step_then_equals_the_closed_form(at):
    start, gradients = 0.1, [math.sin(t) for t in range(1, 10)]
    make = partial(torch.optim.Adagrad, lr=LR, initial_accumulator_value=start, eps=0.0)
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = swap([weight], make, period=PERIOD, discount=DISCOUNT)
    w, v = 1.0, start
    for t, gradient in enumerate(gradients, start=1):
        if t == at:  # another process goes on
            saved = copy.deepcopy(optimizer.state_dict())
            weight = torch.nn.Parameter(weight.detach().clone())
            optimizer = swap([weight], make, period=PERIOD, discount=DISCOUNT)
            optimizer.load_state_dict(saved)
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        v = (max(v * DISCOUNT, start) if t % PERIOD == 0 else v) + gradient**2
        w -= LR * gradient / math.sqrt(v)
        assert weight.item() == pytest.approx(w, rel=1e-9)
