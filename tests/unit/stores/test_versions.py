"""Versions of rows and of dense parts: staleness against hand-made schedules, and what it leaves of a gradient."""

import math

import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures, Ticket
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowSWAP, RowWiseAdagrad
from lightning_recsys.optim.swap import discount_state_
from lightning_recsys.placement import TablePart
from lightning_recsys.stores import DynamicRows, MappedStores
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.versions import CHANGE, VERSION, StalenessHistogram, count_staleness
from lightning_recsys.sync import StalenessNormalization

LAYOUT = TableLayout(
    (EmbeddingBagConfig("a", 6, 4, ("x", "y"), init_std=0.0), EmbeddingBagConfig("b", 4, 4, ("z",), init_std=0.0))
)
KEYS = ("x", "y", "z")
IDENTITY, LINEAR = StalenessNormalization("identity"), StalenessNormalization("linear")
KINDS = {"mapped": None, "dynamic": DynamicRows()}


def batch(x, y, z):
    return SparseFeatures.from_ids(KEYS, torch.tensor([[x, y, z]]))


@pytest.mark.parametrize("dynamic", KINDS.values(), ids=KINDS)
def test_rows_when_pushed_by_two_workers_in_turns_then_staleness_is_that_of_the_schedule(stores, dynamic):
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0, dynamic=dynamic, normalization=LINEAR)
    first, second = batch(0, 1, 2), batch(0, 5, 2)  # both have row 0 of a and row 2 of b
    gradient = torch.full((1, 3, 4), -1.0)
    seen_first, seen_second = (store.begin_versioned_lookup(x)() for x in (first, second))
    assert seen_first[1].tolist() == seen_second[1].tolist() == [0, 0, 0]
    store.apply_gradients(first, gradient, lr=1.0, versions=seen_first[1])
    assert store.observed.counts == {1: 3}, "nobody came between: synchronous"
    store.apply_gradients(second, gradient, lr=1.0, versions=seen_second[1])
    assert store.observed.counts == {1: 4, 2: 2}, "two rows have seen the other worker's update"
    # The first worker's came whole, of the second's a half where it was stale.
    pooled, versions = store.begin_versioned_lookup(SparseFeatures(KEYS, torch.tensor([0, 1, 1, 5, 2, 0])))()
    assert pooled[:, :, 0].tolist() == [[1.5, 1.0, 1.5], [1.0, 1.0, 0.0]]
    assert versions.tolist() == [2, 1, 1, 1, 2, 0]
    for _ in range(3):
        store.apply_gradients(first, gradient, lr=0.0)  # without versions: at the latest
    store.apply_gradients(second, gradient, lr=1.0, versions=seen_second[1])
    assert store.observed.counts == {1: 4 + 9, 2: 2 + 1, 6: 2}
    assert store.read(VERSION, 0, 10).tolist() == [6, 4, 0, 0, 0, 2, 0, 0, 6, 0]
    assert (store.observed.max(), len(store.observed)) == (6, 18)


@pytest.mark.parametrize("dynamic", KINDS.values(), ids=KINDS)
def test_row_when_it_occurs_twice_with_two_versions_then_the_older_one_counts(stores, dynamic):
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0, dynamic=dynamic, normalization=LINEAR)
    rows = torch.tensor([3])
    for _ in range(4):
        store.apply_row_gradients(rows, torch.zeros(1, 4), lr=1.0)
    twice = SparseFeatures(KEYS, torch.tensor([3, 0, 3, 1, 0, 0]))  # x and y of table a: row 3 in both
    versions = torch.tensor([4, 0, 2, 0, 0, 0])
    store.apply_gradients(twice, torch.full((2, 3, 4), -1.0), lr=1.0, versions=versions)
    assert store.observed.counts == {1: 4 + 3, 3: 1}
    assert store.read("weight", 3, 1)[0].tolist() == pytest.approx([2 / 3] * 4), "two gradients, one update"
    store.apply_row_gradients(rows, torch.full((1, 4), -1.0), lr=1.0, versions=torch.tensor([1]))
    assert store.read("weight", 3, 1)[0].tolist() == pytest.approx([2 / 3 + 1 / 5] * 4)


def test_dynamic_row_when_it_was_forgotten_and_made_anew_then_an_old_push_counts_as_fresh(stores):
    dynamic = DynamicRows(expire_after=2)
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0, dynamic=dynamic, normalization=LINEAR)
    row, other = torch.tensor([3]), torch.tensor([4])
    for _ in range(5):
        store.apply_row_gradients(row, torch.zeros(1, 4), lr=1.0)
    for _ in range(4):
        store.apply_row_gradients(other, torch.zeros(1, 4), lr=1.0)
    assert store.live_rows().tolist() == [4]
    store.apply_row_gradients(row, torch.full((1, 4), -1.0), lr=1.0, versions=torch.tensor([5]))
    assert store.observed.counts == {1: 10}
    assert store.read("weight", 3, 1)[0].tolist() == [1.0] * 4
    assert store.read(VERSION, 3, 1).tolist() == [1]


@pytest.mark.parametrize(
    "rule", [RowSGD(0.1), RowAdagrad(0.1), RowWiseAdagrad(0.1), RowAdam(0.1)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("dynamic", KINDS.values(), ids=KINDS)
def test_versioned_rows_when_nothing_is_stale_then_train_as_others_do(stores, rule, dynamic):
    plain = stores.create_embedding_store("plain", LAYOUT, rule, seed=3, dynamic=dynamic)
    tagged = stores.create_embedding_store("tagged", LAYOUT, rule, seed=3, dynamic=dynamic, normalization=LINEAR)
    for _ in range(4):
        sparse = SparseFeatures(KEYS, torch.cat([torch.randint(6, (10,)), torch.randint(4, (5,))]))
        gradient = torch.randn(5, 3, 4)
        pooled, versions = tagged.begin_versioned_lookup(sparse)()
        assert torch.equal(pooled, plain.pooled_lookup(sparse))
        plain.apply_gradients(sparse, gradient, lr=0.1)
        tagged.apply_gradients(sparse, gradient, lr=0.1, versions=versions)
    for name in ("weight", *rule.initial_state(torch.zeros(1, 4))):
        assert torch.equal(plain.read(name, 0, 10), tagged.read(name, 0, 10))
    assert set(tagged.observed.counts) == {1}


def test_stale_gradient_when_adagrad_sees_it_then_it_is_smaller_in_the_sum_as_well(stores):
    """Equation 8: rho multiplies the gradient, and not the learning rate."""
    store = stores.create_embedding_store("t", LAYOUT, RowAdagrad(0.1, eps=0.0), seed=0, normalization=LINEAR)
    row = torch.tensor([0])
    store.apply_row_gradients(row, torch.full((1, 4), 3.0), lr=1.0)
    store.apply_row_gradients(row, torch.full((1, 4), 8.0), lr=1.0, versions=torch.tensor([0]))
    assert store.read("sum", 0, 1)[0].tolist() == [9.0 + 16.0] * 4
    assert store.read("weight", 0, 1)[0].tolist() == pytest.approx([-1.0 - 4 / 5] * 4)


@pytest.mark.parametrize("dynamic", KINDS.values(), ids=KINDS)
def test_weight_change_when_used_then_is_the_root_mean_square_of_the_rows_last_update(stores, dynamic):
    rule = StalenessNormalization("linear", sensitivity=2.0)
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0, dynamic=dynamic, normalization=rule)
    row, last = torch.tensor([7]), torch.tensor([[1.0, -1.0, 3.0, 5.0]])
    store.apply_row_gradients(row, last, lr=0.5)
    change = 0.5 * 3.0  # root of (1 + 1 + 9 + 25) / 4
    assert store.read(CHANGE, 7, 1).tolist() == [change]
    before = store.read("weight", 7, 1)
    store.apply_row_gradients(row, torch.ones(1, 4), lr=1.0, versions=torch.tensor([-8]))
    staleness, weight = 10, 1 / (1 + math.exp(-2.0 * change))
    moved = before - store.read("weight", 7, 1)
    assert moved[0].tolist() == pytest.approx([1 / (staleness * weight)] * 4)
    assert store.read(CHANGE, 7, 1).tolist() == pytest.approx([moved[0, 0].item()])


PARTED = [RowSGD(1.0), RowAdagrad(1.0), RowAdam(1.0)]


@pytest.mark.parametrize("rule", PARTED, ids=lambda x: type(x).__name__)
def test_dense_parts_when_pushed_apart_then_each_has_its_version_and_its_steps(stores, rule):
    initial = torch.randn(7)
    store = stores.create_dense_store("v", initial, optimizer=rule, normalization=IDENTITY, parts=(3, 4))
    rows = [initial[:3].clone().unsqueeze(0), initial[3:].clone().unsqueeze(0)]
    states, steps = [rule.initial_state(row) for row in rows], [0, 0]
    for trained in ([True, True], [True, False], [True, True], [False, True], [True, True]):
        gradient = torch.randn(7)
        store.push_gradient(gradient, lr=0.1, trained=torch.tensor(trained))
        for part, piece in enumerate((gradient[:3], gradient[3:])):
            if trained[part]:
                steps[part] += 1
                options = {"lr": 0.1, "step": steps[part]}
                rule.update_(rows[part], piece.unsqueeze(0), states[part], **options)
    values, versions = store.begin_versioned_pull()()
    torch.testing.assert_close(values, torch.cat(rows, 1)[0])
    assert versions.tolist() == steps == [4, 4]
    assert store.observed.counts == {1: 8}


ACCUMULATOR = {"RowAdagrad": "sum", "RowAdam": "exp_avg_sq", "RowFTRL": "accumulator"}


@pytest.mark.parametrize("inner", [RowAdagrad(1.0), RowAdam(1.0), RowFTRL(1.0)], ids=lambda x: type(x).__name__)
def test_dense_parts_when_discounted_by_the_step_of_all_workers_then_equal_the_eager_form(stores, inner):
    """Parts rest for whole periods; another store counts the pushes, of which some go to that one alone."""
    swap = RowSWAP(inner=inner, period=3, discount=0.5)
    initial, random = torch.randn(7) / 10, torch.Generator().manual_seed(3)
    store = stores.create_dense_store("v", initial, optimizer=swap, normalization=IDENTITY, parts=(3, 4))
    rows = [initial[:3].clone().unsqueeze(0), initial[3:].clone().unsqueeze(0)]
    states, steps, step = [inner.initial_state(row) for row in rows], [0, 0], 0
    for push in range(1, 31):
        before, step = step, step + {11: 7, 20: 15}.get(push, 1)
        for state in states:  # at the end of each period, whoever is trained
            for _ in range(step // 3 - before // 3):
                discount_state_(inner, state, torch.tensor([0.5]), lr=0.1)
        trained = [push % 7 > 4 or push == 30, torch.rand(1, generator=random).item() < 0.3 or push == 30]
        gradient = torch.randn(7, generator=random)
        assert store.push_gradient(gradient, lr=0.1, trained=torch.tensor(trained), step=step)() == step
        for part, piece in enumerate((gradient[:3], gradient[3:])):
            if trained[part]:
                steps[part] += 1
                inner.update_(rows[part], piece.unsqueeze(0), states[part], lr=0.1, step=steps[part])
    torch.testing.assert_close(store.pull(), torch.cat(rows, 1)[0])
    name = ACCUMULATOR[type(inner).__name__]
    torch.testing.assert_close(store.read(name), torch.cat([state[name] for state in states], 1)[0])
    assert store.read(VERSION).tolist() == steps
    assert store.read("period").tolist() == [step // 3 * 3 + 1] * 2
    assert store.read("step").tolist() == [0], "it counts those whose number it is not told"


def test_dense_parts_when_pushed_by_two_workers_in_turns_then_staleness_is_that_of_the_schedule(stores):
    options = {"optimizer": RowSGD(1.0), "normalization": LINEAR, "parts": (2, 1)}
    store = stores.create_dense_store("v", torch.zeros(3), **options)
    gradient = torch.full((3,), -6.0)
    _, first = store.begin_versioned_pull()()
    _, second = store.begin_versioned_pull()()
    store.push_gradient(gradient, lr=1.0, versions=first)
    store.push_gradient(gradient, lr=1.0, versions=second, trained=torch.tensor([True, False]))
    assert store.pull().tolist() == [9.0, 9.0, 6.0]
    store.push_gradient(gradient, lr=1.0, versions=second)
    assert store.pull().tolist() == [11.0, 11.0, 9.0], "3 updates of the first part since, 2 of the second"
    assert store.observed.counts == {1: 2, 2: 2, 3: 1}
    again = stores.create_dense_store("v", torch.zeros(3), **options)
    assert again.read(VERSION).tolist() == [3, 2]
    again.write(VERSION, torch.tensor([7, 8]))
    assert store.version == 8


def test_dense_change_when_used_then_is_each_parts_own(stores):
    rule = StalenessNormalization("linear", sensitivity=1.0)
    store = stores.create_dense_store("v", torch.zeros(4), optimizer=RowSGD(1.0), normalization=rule, parts=(1, 3))
    store.push_gradient(torch.tensor([2.0, 1.0, 2.0, 2.0]), lr=1.0)
    assert store.read(CHANGE).tolist() == pytest.approx([2.0, math.sqrt(3)])
    before = store.pull()
    store.push_gradient(torch.ones(4), lr=1.0, versions=torch.tensor([-3, -3]))
    factors = [1 / (5 / (1 + math.exp(-x))) for x in (2.0, math.sqrt(3), math.sqrt(3), math.sqrt(3))]
    assert (before - store.pull()).tolist() == pytest.approx(factors)


PLANS = {
    "one": [("a", 6, 0, 1, 0), ("b", 4, 0, 1, 0)],
    "by tables": [("a", 6, 0, 1, 0), ("b", 4, 0, 1, 1)],
    "by rows": [("a", 3, 0, 2, 0), ("a", 3, 1, 2, 1), ("b", 2, 0, 2, 1), ("b", 2, 1, 2, 0)],
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ticket_when_the_collection_is_cut_over_stores_then_each_row_has_its_own_version(tmp_path, plan):
    backend = make_backend(tmp_path, plan)
    bags = SparseFeatures(KEYS, torch.tensor([0, 5, 3, 1, 2, 2]), lengths=torch.tensor([2, 1, 0, 1, 1, 1]))
    gradient = torch.full((2, 3, 4), -1.0)
    assert backend.is_versioned
    _, stale = backend.lookup(bags)
    _, fresh = backend.lookup(bags)
    backend.apply_gradients([fresh], gradient, lr=1.0)
    backend.apply_gradients([stale], gradient, lr=1.0)
    # a: rows 0, 5, 3 and 1; b: row 2, twice in the batch
    assert backend.observed.counts == {1: 5, 2: 5}
    _, ticket = backend.lookup(SparseFeatures(KEYS, torch.tensor([0, 4, 5, 3, 2, 1])))
    assert ticket.versions.tolist() == [2, 0, 2, 2, 2, 0]
    _, other = backend.lookup(SparseFeatures(KEYS, torch.tensor([0, 4, 5, 3, 2, 1])))
    joined = Ticket.joined([ticket, other])
    backend.apply_gradients([ticket, other], torch.zeros(4, 3, 4), lr=1.0)
    assert joined.versions.tolist() == [2, 0, 2, 0, 2, 2, 2, 2, 2, 0, 2, 0]
    assert backend.observed.counts == {1: 11, 2: 5}
    assert backend.read("a", "weight")[:, 0].tolist() == [1.5, 1.5, 0, 1.5, 0, 1.5]
    assert backend.read("b", "weight")[2, 0].item() == 3.0


def make_backend(tmp_path, plan):
    servers = []
    for index in range(1 + max(server for *_, server in plan)):
        (tmp_path / str(index)).mkdir()
        servers.append(MappedStores(tmp_path / str(index)))
    held = []
    for index, server in enumerate(servers):
        parts = [
            TablePart("t", table, rows, stripe=stripe, num_stripes=stripes, server=at)
            for table, rows, stripe, stripes, at in plan
            if at == index
        ]
        tables = {x.name: x for x in LAYOUT.tables}
        layout = TableLayout(
            tuple(
                EmbeddingBagConfig(part.table, part.num_rows, 4, tables[part.table].feature_names, init_std=0.0)
                for part in parts
            )
        )
        store = server.create_embedding_store("t", layout, RowSGD(1.0), seed=0, normalization=LINEAR)
        held.append((store, parts))
    return StoreBackend(LAYOUT, RowSGD(1.0), stores=held)


def test_store_without_versions_when_versions_come_then_refused_and_it_has_no_arrays_for_them(stores, tmp_path):
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0)
    for act in (
        lambda: store.begin_versioned_lookup(batch(0, 0, 0)),
        lambda: store.apply_gradients(batch(0, 0, 0), torch.ones(1, 3, 4), lr=1.0, versions=torch.zeros(3)),
    ):
        with pytest.raises(ValueError, match=r"normalization=\.\.\."):
            act()
    assert not [path.name for path in (tmp_path / "t").iterdir() if path.name in (VERSION, CHANGE)]
    assert len(store.observed) == 0
    with pytest.raises(ValueError, match=r"normalization=None, asked .* normalization=StalenessNormalization"):
        stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0, normalization=IDENTITY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"versions": torch.zeros(2)}, r"versions must be torch.int64 of shape \[2\]"),
        (
            {"versions": torch.zeros(3, dtype=torch.int64)},
            r"2 parts: versions must be .* got torch.int64 of shape \[3\]",
        ),
        ({"trained": torch.ones(1, dtype=torch.bool)}, r"trained must be torch.bool of shape \[2\]"),
    ],
)
def test_dense_push_when_it_does_not_fit_the_parts_then_refused_and_nothing_changes(stores, options, message):
    store = stores.create_dense_store("v", torch.zeros(3), optimizer=RowSGD(1.0), parts=(1, 2))
    with pytest.raises(ValueError, match=message):
        store.push_gradient(torch.ones(3), lr=1.0, **options)
    assert (store.pull().tolist(), store.version) == ([0, 0, 0], 0)


@pytest.mark.parametrize("parts", [(1, 1), (3, 1), (3, 0)])
def test_parts_when_they_do_not_make_up_the_vector_then_refused(stores, parts):
    with pytest.raises(ValueError, match="the parts of a vector of 3 elements"):
        stores.create_dense_store("v", torch.zeros(3), parts=parts)


def test_histogram_when_filled_then_tells_mean_quantiles_and_the_largest():
    values = torch.randint(1, 50, (1000,))
    histogram, half = StalenessHistogram(), StalenessHistogram()
    assert (histogram.mean(), histogram.quantile(0.99), histogram.max(), len(histogram)) == (0, 0, 0, 0)
    half.add(count_staleness(values[:500]))
    histogram.add(count_staleness(values[500:]))
    histogram.update(half)
    assert histogram.mean() == pytest.approx(values.float().mean().item())
    assert histogram.quantile(0.99) == values.float().quantile(0.99, interpolation="higher").item()
    assert histogram.max() == values.max().item()
    assert sum(histogram.counts.values()) == len(histogram) == 1000
