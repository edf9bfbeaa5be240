"""The cache's rows: what it trains, what it owes, and that the two add up."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.optim.compiled import apply_update
from lightning_recsys.row_cache import RowCache
from lightning_recsys.sync.clocks import MAX_CLOCK

RULES = [RowSGD(), RowAdagrad(initial_accumulator=0.1), RowWiseAdagrad()]
RULES += [replace(rule, weight_decay=0.3) for rule in RULES]
NUM_KEYS = 400
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")),
]


class Server:
    """All rows, with what a server does to them."""

    def __init__(self, rule, dim, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(NUM_KEYS, dim, generator=self.generator)
        self.values = {"weight": rows, **rule.initial_state(rows)}
        self.clock = np.zeros(NUM_KEYS, dtype=np.int32)

    def fill(self, cache, plan):
        keys = plan.keys_U[plan.new_U]
        values = {name: tensor[keys] for name, tensor in self.values.items()}
        cache.install(plan.slots_U[plan.new_U], values, self.clock[keys])

    def apply(self, updates):
        for name, tensor in self.values.items():
            tensor[updates.keys] += updates.values[name].cpu() * (-1 if name == "weight" else 1)
        self.clock[updates.keys] = np.maximum(self.clock[updates.keys], updates.current)


def some_keys(generator, size=60):
    return generator.integers(0, NUM_KEYS, size)


@pytest.mark.parametrize("dim", [1, 7, 16, 128])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_one_step_when_its_update_reaches_the_server_then_it_has_the_bits_of_the_stores_own_update(rule, dim):
    generator, server, direct = np.random.default_rng(0), Server(rule, dim), Server(rule, dim)
    cache = RowCache(50, dim, rule)
    for step in range(1, 21):
        plan = cache.plan(some_keys(generator))
        server.fill(cache, plan)
        grads = torch.randn(plan.slots_U.size, dim, generator=server.generator)
        rate = 0.1 / step
        cache.update(plan.slots_U, grads, lr=rate)
        state = {name: x for name, x in direct.values.items() if name != "weight"}
        apply_update(rule, plan.keys_U, grads.numpy(), direct.values["weight"], state, lr=rate, step=step)
        assert torch.equal(cache.rows[plan.slots_U], direct.values["weight"][plan.keys_U])
        for name, tensor in cache.row_state.items():
            assert torch.equal(tensor[plan.slots_U], direct.values[name][plan.keys_U])
        server.apply(cache.take(plan.slots_U))
        cache.index.evict(spare_from=plan.number + 1)
        for name, tensor in server.values.items():
            assert torch.equal(tensor, direct.values[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["lru", "lfu", "light_lfu"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_many_steps_when_rows_are_evicted_and_flushed_then_the_server_has_every_update(rule, policy, device):
    generator, server, direct = np.random.default_rng(1), Server(rule, 8), Server(rule, 8)
    cache, dropped = RowCache(100, 8, rule, policy=policy, device=device), 0
    for step in range(1, 41):
        plan = cache.plan(some_keys(generator))
        server.fill(cache, plan)
        grads = torch.randn(plan.slots_U.size, 8, generator=server.generator)
        cache.update(plan.slots_U, grads.to(device), lr=0.05 * step)
        state = {name: x[plan.keys_U] for name, x in direct.values.items() if name != "weight"}
        rows = direct.values["weight"][plan.keys_U]
        rule.update_(rows, grads + rule.weight_decay * rows, state, lr=0.05 * step, step=step)
        for name, tensor in {"weight": rows, **state}.items():
            direct.values[name][plan.keys_U] = tensor
        torch.testing.assert_close(cache.rows[plan.slots_U].cpu(), rows, rtol=1e-5, atol=1e-5)  # float32 sums
        direct.clock[plan.keys_U] += 1
        slots = cache.index.evict(spare_from=plan.number + 1)
        updates, number = cache.take(slots), len(slots)
        dropped += number
        assert len(cache.index) <= 100
        server.apply(updates)
    assert dropped > 500
    server.apply(cache.take(cache.dirty_slots()))
    assert cache.dirty_slots().size == 0
    assert (server.clock == direct.clock).all()  # one worker: both clocks count its updates
    for name, tensor in server.values.items():
        torch.testing.assert_close(tensor, direct.values[name], rtol=1e-5, atol=1e-5)


def test_clocks_when_a_row_is_fetched_updated_and_taken_then_they_follow_the_paper():
    cache = RowCache(10, 2, RowSGD())
    plan = cache.plan(np.array([7, 3, 7]))
    cache.install(plan.slots_U, {"weight": torch.zeros(2, 2)}, np.array([5, 9], dtype=np.int32))
    for _ in range(3):
        cache.update(plan.slots_U[:1], torch.ones(1, 2), lr=1.0)
    assert cache.start[plan.slots_U].tolist() == [5, 9]
    assert cache.current[plan.slots_U].tolist() == [8, 9]
    assert cache.dirty_slots().tolist() == plan.slots_U[:1].tolist()
    updates = cache.take(plan.slots_U)
    assert (updates.keys.tolist(), updates.current.tolist(), updates.unsent.tolist()) == ([7], [8], [3])
    assert updates.values["weight"].tolist() == [[3.0, 3.0]]
    assert cache.rows[plan.slots_U].tolist() == [[-3.0, -3.0], [0.0, 0.0]]  # the rows stay
    assert cache.start[plan.slots_U].tolist() == [5, 9]
    cache.update(plan.slots_U, torch.ones(2, 2), lr=1.0)
    updates = cache.take(plan.slots_U)
    assert (updates.unsent.tolist(), updates.values["weight"].tolist()) == ([1, 1], [[1.0, 1.0], [1.0, 1.0]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_install_when_a_row_was_updated_since_it_was_asked_for_then_the_update_is_made_again(rule, device):
    server, cache = Server(rule, 3), RowCache(10, 3, rule, device=device)
    plan = cache.plan(np.array([4, 6]))
    server.fill(cache, plan)
    cache.update(plan.slots_U[:1], torch.ones(1, 3, device=device), lr=0.5)
    other = {name: tensor[[4, 6]] + 2 for name, tensor in server.values.items()}  # trained by somebody else
    cache.install(plan.slots_U, other, np.array([20, 30], dtype=np.int32))
    assert (cache.start[plan.slots_U].tolist(), cache.current[plan.slots_U].tolist()) == ([20, 30], [21, 30])
    owed = cache.take(plan.slots_U)
    assert owed.keys.tolist() == [4]
    for name, tensor in {"weight": cache.rows, **cache.row_state}.items():
        expected = other[name].clone()
        expected[:1] += owed.values[name].cpu() * (-1 if name == "weight" else 1)
        torch.testing.assert_close(tensor[plan.slots_U].cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bags", [False, True])
def test_gradients_when_summed_by_row_then_they_are_those_of_autograd(bags, weighted, device):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (3 * 5,), generator=generator) if bags else torch.ones(15, dtype=torch.int64)
    keys = torch.randint(0, 12, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(keys.numel(), generator=generator) if weighted else None
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    grad_BFD = torch.randn(5, 3, 4, generator=generator)
    cache = RowCache(100, 4, RowSGD(), device=device)
    plan = cache.plan(keys.numpy())
    on_device = [None if x is None else x.to(device) for x in (offsets if bags else None, weights)]
    sums = cache.sum_gradients(plan, *on_device, grad_BFD.to(device))
    rows = torch.zeros(12, 4, requires_grad=True)
    pooled = torch.nn.functional.embedding_bag(keys, rows, offsets[:-1], mode="sum", per_sample_weights=weights)
    pooled.backward(grad_BFD.transpose(0, 1).reshape(15, 4))
    torch.testing.assert_close(sums.cpu(), rows.grad[plan.keys_U])


@pytest.mark.parametrize("kernel", ["fbgemm", "numba", "torch"])
def test_lookup_when_slots_are_the_ids_of_one_table_then_a_kernel_serves_them(kernel):
    generator, server = np.random.default_rng(2), Server(RowSGD(), 8)
    cache = RowCache(30, 8, RowSGD())
    for _ in range(5):  # slots grow, are freed and come back
        keys = some_keys(generator)
        plan = cache.plan(keys)
        server.fill(cache, plan)
        table = EmbeddingBagConfig("slots", cache.rows.shape[0], 8, ("a", "b"))
        slots = SparseFeatures(("a", "b"), torch.from_numpy(plan.slots_N))
        kernel_of_slots = choose_kernel(kernel, TableLayout((table,)), RowSGD(), torch.device("cpu"))
        expected = server.values["weight"][keys].view(2, 30, 8).transpose(0, 1)
        assert torch.equal(kernel_of_slots.lookup(cache.rows, slots), expected)
        cache.index.evict(spare_from=plan.number + 1)


def test_rows_of_the_next_batch_when_it_is_planned_ahead_then_they_are_spared():
    cache = RowCache(2, 1, RowSGD())
    plan = cache.plan(np.array([1, 2, 3]))
    cache.install(plan.slots_U, {"weight": torch.zeros(3, 1)}, np.zeros(3, dtype=np.int32))
    ahead = cache.plan(np.array([3, 4, 5]))
    cache.update(plan.slots_U, torch.ones(3, 1), lr=1.0)
    slots = cache.index.evict(spare_from=ahead.number)
    updates, dropped = cache.take(slots), len(slots)
    assert (updates.keys.tolist(), dropped, len(cache.index)) == ([1, 2], 2, 3)
    cache.install(ahead.slots_U[ahead.new_U], {"weight": torch.ones(2, 1)}, np.ones(2, dtype=np.int32))
    assert cache.rows[ahead.slots_U].tolist() == [[-1.0], [1.0], [1.0]]


def test_copies_when_outdated_at_the_last_clock_then_it_stays_the_last():
    cache = RowCache(2, 1, RowSGD(1.0))
    slots = cache.plan(np.array([4, 6])).slots_U
    cache.install(slots, {"weight": torch.zeros(2, 1)}, np.array([MAX_CLOCK, 3], dtype=np.int32))
    cache.outdate(slots)
    assert cache.current[slots].tolist() == [MAX_CLOCK, 4]


def test_clear_when_rows_are_dirty_then_nothing_is_owed_any_more():
    cache = RowCache(5, 1, RowSGD())
    plan = cache.plan(np.array([1, 2]))
    cache.install(plan.slots_U, {"weight": torch.zeros(2, 1)}, np.zeros(2, dtype=np.int32))
    cache.update(plan.slots_U, torch.ones(2, 1), lr=1.0)
    cache.clear()
    assert (len(cache.index), cache.dirty_slots().size) == (0, 0)
    assert cache.plan(np.array([1])).new_U.all()


@pytest.mark.parametrize("rule", [RowAdam(), RowFTRL()], ids=lambda rule: type(rule).__name__)
def test_rule_when_its_updates_cannot_be_added_then_refused_by_name(rule):
    with pytest.raises(
        TypeError, match=rf"{type(rule).__name__} cannot train cached rows.*RowSGD, RowAdagrad or RowWise"
    ):
        RowCache(5, 4, rule)
