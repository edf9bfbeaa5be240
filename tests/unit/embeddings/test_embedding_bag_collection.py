"""EmbeddingBagCollection: errors, checks, state, and how it follows an optimizer."""

import copy
import pickle
import weakref

import pytest
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, LocalBackend, SparseFeatures
from lightning_recsys.optim import RowAdagrad, RowAdam, RowSGD, RowWiseAdagrad

DIM = 4


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig("users", 10, DIM, ("user", "friend"), init_std=0.1),
        EmbeddingBagConfig("genres", 5, DIM, ("genre",), pooling="mean", init_std=0.1),
    ]


def collection(**kwargs) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(tables(), **kwargs)


def ids(user: list[int], friend: list[int], genre: list[int]) -> SparseFeatures:
    return SparseFeatures(("user", "friend", "genre"), torch.tensor([*user, *friend, *genre]))


def weights(module: EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items() if key.endswith(".weight")}


@pytest.mark.parametrize("kernel", ["fbgemm", "numba", "torch"])
@pytest.mark.parametrize("kind", ["single", "bags"])
@pytest.mark.parametrize(("bad", "size"), [(-1, 10), (10, 10), (2**40, 10)])
def test_forward_when_an_id_is_out_of_range_then_named_and_nothing_changed(kernel, kind, bad, size):
    module = collection(kernel=kernel)
    before = weights(module)
    sparse = ids([1, 2], [3, bad], [0, 4])
    if kind == "bags":
        sparse = SparseFeatures(sparse.keys, sparse.values, lengths=torch.tensor([2, 0, 0, 2, 1, 1]))
    with pytest.raises(IndexError, match=rf"table 'users', feature 'friend': id {bad} is outside \[0, {size}\) \(1 of"):
        module(sparse).sum().backward()
    after = weights(module)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("kernel", ["fbgemm", "numba", "torch"])
@pytest.mark.parametrize(
    "bags",
    [
        {"lengths": torch.tensor([2, 3, 0])},
        {"lengths": torch.tensor([7, -2, 0])},
        {"lengths": torch.tensor([1, 0, 0])},
        {"offsets": torch.tensor([0, 100_000_000, 5, 5])},
        {"offsets": torch.tensor([-1, 2, 4, 5])},
        {"offsets": torch.tensor([0, 2**63 - 1, 5 - 2**63, 4])},  # whose differences overflow
    ],
)
def test_forward_when_bags_do_not_cover_the_ids_then_refused(kernel, bags):
    sparse = SparseFeatures(("user", "friend", "genre"), torch.ones(4).long(), **bags)
    with pytest.raises(ValueError, match="do not cover their 4 ids"):
        collection(kernel=kernel)(sparse)


def test_freeze_when_rows_ask_for_no_gradient_then_they_stay():
    module = collection().requires_grad_(False)
    before = weights(module)
    assert not module(ids([1], [2], [3])).requires_grad
    module.requires_grad_(True)(ids([1], [2], [3])).sum().backward()
    assert not torch.equal(weights(module)["embedding_bags.users.weight"], before["embedding_bags.users.weight"])


def test_forward_when_the_id_belongs_to_another_table_then_refused():
    with pytest.raises(IndexError, match=r"table 'genres', feature 'genre': id 7 is outside \[0, 5\)"):
        collection()(ids([1], [2], [7]))  # row 7 exists in the tensor of all tables, but not in this one


def test_check_when_switched_off_then_not_called(monkeypatch):
    module = collection(check_ids=False)
    monkeypatch.setattr(module, "_check_ids", lambda sparse: pytest.fail("checked"))
    assert module(ids([1], [2], [3])).shape == (1, 3, DIM)


def test_forward_when_features_come_in_another_order_then_found_by_name():
    module = collection()
    shuffled = SparseFeatures(("genre", "extra", "user", "friend"), torch.tensor([3, 99, 1, 2]))
    torch.testing.assert_close(module(shuffled), module(ids([1], [2], [3])))
    with pytest.raises(KeyError, match="genre"):
        module(SparseFeatures(("user", "friend"), torch.tensor([1, 2])))


@pytest.mark.parametrize("kernel", ["fbgemm", "numba", "torch"])
def test_forward_when_all_bags_or_the_batch_are_empty_then_zeros_and_no_update(kernel):
    module = collection(kernel=kernel)
    before = weights(module)
    empty = SparseFeatures(
        ("user", "friend", "genre"), torch.empty(0, dtype=torch.int64), lengths=torch.zeros(6).long()
    )
    out = module(empty)
    assert torch.equal(out, torch.zeros(2, 3, DIM))
    out.sum().backward()
    assert module(SparseFeatures(("user", "friend", "genre"), torch.empty(0, dtype=torch.int64))).shape == (0, 3, DIM)
    assert all(torch.equal(value, before[key]) for key, value in weights(module).items())


def test_forward_without_grad_then_no_graph():
    with torch.no_grad():
        assert not collection()(ids([1], [2], [3])).requires_grad


def test_bag_when_an_id_repeats_then_it_counts_twice_and_is_updated_once():
    module = collection(optimizer=RowAdagrad(lr=1.0, eps=0.0))
    sparse = SparseFeatures(("user", "friend", "genre"), torch.tensor([4, 4]), lengths=torch.tensor([2, 0, 0]))
    before = weights(module)["embedding_bags.users.weight"][4]
    out = module(sparse)
    torch.testing.assert_close(out[0, 0], 2 * before)
    out.sum().backward()
    # Both occurrences sum to g = 2; one Adagrad step from h = 0 moves by lr * 2 / sqrt(4) = 1.
    torch.testing.assert_close(weights(module)["embedding_bags.users.weight"][4], before - 1)


@pytest.mark.parametrize("optimizer", [RowSGD(), RowWiseAdagrad(), RowAdam()], ids=lambda rule: type(rule).__name__)
def test_state_dict_then_one_entry_per_table_and_a_resumed_run_is_bit_equal(optimizer):
    batches = [ids([1, 2], [3, 1], [0, 4]), ids([5, 5], [2, 9], [1, 1]), ids([1, 9], [3, 3], [2, 0])]
    through = collection(optimizer=optimizer)
    resumed = collection(optimizer=optimizer)
    for batch in batches[:2]:
        through(batch).square().sum().backward()
    saved = pickle.loads(pickle.dumps(through.state_dict()))
    assert saved["embedding_bags.users.weight"].shape == (10, DIM)
    assert saved["embedding_bags.genres.weight"].shape == (5, DIM)
    resumed.load_state_dict(saved)
    for module in (through, resumed):
        module(batches[2]).square().sum().backward()
    for key, value in through.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


def test_load_state_dict_when_entries_do_not_fit_then_each_is_named():
    module = collection()
    state = dict(module.state_dict())
    state["embedding_bags.users.weight"] = torch.zeros(11, DIM)
    del state["embedding_bags.genres.sum"]
    state["embedding_bags.other.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as error:
        module.load_state_dict(state)
    for part in (
        r"size mismatch for embedding_bags.users.weight: the checkpoint has [11, 4], the table has [10, 4]",
        'Missing key(s) in state_dict: "embedding_bags.genres.sum"',
        'Unexpected key(s) in state_dict: "embedding_bags.other.weight"',
    ):
        assert part in str(error.value)


def test_cast_when_to_bfloat16_then_refused_with_the_way_out():
    with pytest.raises(TypeError, match="precision='bf16-mixed'"):
        collection().bfloat16()
    assert collection().to("cpu").embedding_bags.rows.dtype == torch.float32


def test_parameters_then_none_asks_for_a_gradient():
    assert not any(parameter.requires_grad for parameter in collection().parameters())


def attached(lr: float = 0.1) -> tuple[EmbeddingBagCollection, torch.optim.Optimizer]:
    module = collection(optimizer=RowSGD(lr=lr))
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))], lr=0.5, fused=True)
    module.attach_to(optimizer)
    return module, optimizer


def test_attach_then_the_update_waits_for_the_step():
    module, optimizer = attached()
    before = weights(module)["embedding_bags.users.weight"][1]
    module(ids([1], [2], [3]))[:, 0].sum().backward()
    torch.testing.assert_close(weights(module)["embedding_bags.users.weight"][1], before)
    optimizer.step()
    torch.testing.assert_close(weights(module)["embedding_bags.users.weight"][1], before - 0.1)


def test_make_whole_when_gradients_wait_for_a_step_then_they_are_dropped():
    module, optimizer = attached()
    before = weights(module)
    module.partition(range(3))
    module(ids([1], [2], [3])).sum().backward()
    module.make_whole(module.embedding_bags.read)
    optimizer.step()
    torch.testing.assert_close(weights(module), before, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_attach_when_a_scheduler_halves_then_both_rates_halve(optimizer_class):
    module = collection(optimizer=RowSGD(lr=0.1))
    dense = torch.nn.Parameter(torch.zeros(1))
    optimizer = optimizer_class([dense], lr=0.5, fused=True)
    module.attach_to(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    dense.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05]
    before = weights(module)["embedding_bags.users.weight"][1]
    module(ids([1], [2], [3]))[:, 0].sum().backward()
    optimizer.step()
    torch.testing.assert_close(weights(module)["embedding_bags.users.weight"][1], before - 0.05)


def test_attach_when_gradients_accumulate_then_one_update_of_the_joined_batch():
    micro, whole = [ids([1], [2], [3]), ids([1], [4], [0])], ids([1, 1], [2, 4], [3, 0])
    accumulated = collection(optimizer=RowAdagrad())
    joined = copy.deepcopy(accumulated)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    accumulated.attach_to(optimizer)
    for batch in micro:
        accumulated(batch).square().sum().backward()
    optimizer.step()
    joined(whole).square().sum().backward()
    for key, value in joined.state_dict().items():
        torch.testing.assert_close(accumulated.state_dict()[key], value)


def test_attach_when_the_optimizer_was_given_the_rows_then_it_has_them_no_more_and_loads_what_had_them():
    def optimizer_of(module):
        return torch.optim.Adagrad(module.named_parameters(), lr=0.5)

    module = torch.nn.ModuleDict({"rows": collection(optimizer=RowAdam()), "head": torch.nn.Linear(2, 1)})
    before, optimizer, head = optimizer_of(module), optimizer_of(module), module["head"]
    before.add_param_group({"params": [], "param_names": [], "lr": 0.1})  # for the rate of the rows
    before.state[head.bias]["sum"].fill_(7.0)
    module["rows"].attach_to(optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["head.weight", "head.bias"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0]
    optimizer.load_state_dict(before.state_dict())
    assert set(optimizer.state) == set(head.parameters())
    assert optimizer.state[head.bias]["sum"] == 7.0
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[head.bias]["sum"] == 7.0


def test_attach_when_a_second_optimizer_comes_then_it_is_followed():
    module, first = attached()
    second = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    module.attach_to(second)
    second.param_groups[1]["lr"] = 0.7
    assert module.lr == 0.7
    before = weights(module)
    module(ids([1], [2], [3])).sum().backward()
    first.step()
    assert torch.equal(weights(module)["embedding_bags.users.weight"], before["embedding_bags.users.weight"])
    second.step()
    assert not torch.equal(weights(module)["embedding_bags.users.weight"], before["embedding_bags.users.weight"])


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4), [0.5, 1, 1.5]),
        (lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), [2, 2, 1]),
    ],
)
def test_rate_when_attached_without_a_group_then_it_is_scaled_as_the_first_groups(make, rates):
    module, dense = collection(optimizer=RowSGD(2.0)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([dense], lr=0.1)
    scheduler = make(optimizer)
    module.attach_to(optimizer, own_group=False)
    assert len(optimizer.param_groups) == 1
    for rate in rates:
        assert module.lr == pytest.approx(rate)
        before = weights(module)["embedding_bags.users.weight"]
        module(ids([0], [1], [0])).sum().backward()
        assert torch.equal(weights(module)["embedding_bags.users.weight"], before)
        optimizer.step()
        torch.testing.assert_close(weights(module)["embedding_bags.users.weight"][0], before[0] - rate)
        scheduler.step(*([1.0] if rates[0] == 2 else []))


def test_attach_when_the_optimizer_is_lbfgs_then_its_one_group_is_followed_and_the_last_gradient_counts():
    module, dense = collection(optimizer=RowSGD(2.0)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.LBFGS([dense], lr=0.1, max_iter=3)
    module.attach_to(optimizer)
    before, losses = weights(module)["embedding_bags.users.weight"], []

    def closure():
        optimizer.zero_grad()
        losses.append(dense.square().sum() + module(ids([0], [1], [0]))[0, 0].sum())
        losses[-1].backward()
        return losses[-1]

    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step(closure)
    assert (len(optimizer.param_groups), module.lr, len(losses)) == (1, 1.0, 3)
    torch.testing.assert_close(weights(module)["embedding_bags.users.weight"][0], before[0] - 1)


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4), [0.5, 1, 1.5]),
        (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), [2, 1, 0.5]),
        # from a quarter of the highest rate to that in two steps, by half a cosine
        (
            lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.4, total_steps=6, pct_start=0.5, div_factor=4, cycle_momentum=False
            ),
            [0.5, 1.25, 2],
        ),
    ],
    ids=["lambda", "step", "one_cycle"],
)
def test_attach_when_a_scheduler_was_made_before_then_it_scales_both_rates(make, rates):
    module, dense = collection(optimizer=RowSGD(2.0)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([dense], lr=0.1)
    scheduler = make(optimizer)
    module.attach_to(optimizer)
    for rate in rates:
        assert module.lr == pytest.approx(rate)
        optimizer.step()
        scheduler.step()


def test_attach_when_the_optimizer_is_gone_then_updates_run_in_backward_again():
    module, optimizer = attached()
    del optimizer
    before = weights(module)["embedding_bags.users.weight"]
    module(ids([1], [2], [3])).sum().backward()
    assert not torch.equal(weights(module)["embedding_bags.users.weight"], before)
    assert module.lr == 0.1


def test_pickle_then_a_free_copy_that_trains():
    module, _optimizer = attached()
    module(ids([1], [2], [3])).sum().backward()
    copied = pickle.loads(pickle.dumps(module))
    before = weights(copied)["embedding_bags.users.weight"]
    copied(ids([1], [2], [3])).sum().backward()
    assert not torch.equal(weights(copied)["embedding_bags.users.weight"], before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EmbeddingBagCollection([]), "at least one EmbeddingBagConfig"),
        (
            lambda: EmbeddingBagCollection(
                [EmbeddingBagConfig("a", 2, 4, ("x",)), EmbeddingBagConfig("b", 2, 8, ("y",))]
            ),
            r"must share an embedding_dim, got \[4, 8\]",
        ),
        (lambda: EmbeddingBagCollection([EmbeddingBagConfig("a", 2, 4, ("x", "x"))]), r"feature names .* \['x'\]"),
        (
            lambda: collection(kernel="cuda"),
            r"kernel must be one of \['auto', 'fbgemm', 'numba', 'torch'\], got 'cuda'",
        ),
        (lambda: EmbeddingBagConfig("a", 0, 4, ("x",)), "must be at least 1, got 0 and 4"),
        (lambda: EmbeddingBagConfig("a.b", 1, 4, ("x",)), "must not be empty or hold a dot"),
        (lambda: EmbeddingBagConfig("a", 1, 4, ()), "at least one feature"),
        (lambda: EmbeddingBagConfig("a", 1, 4, ("x",), pooling="max"), "pooling must be 'sum' or 'mean', got 'max'"),
    ],
)
def test_wrong_tables_then_a_sentence_says_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class TracedBackend(LocalBackend):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[tuple[str, list[int]]] = []

    def lookup(self, sparse):
        self.asked.append(("lookup", sparse.values.tolist()))
        return super().lookup(sparse)

    def lookup_frozen(self, sparse):
        self.asked.append(("frozen", sparse.values.tolist()))
        return super().lookup(sparse)[0]

    def lookup_fresh(self, sparse):
        self.asked.append(("fresh", sparse.values.tolist()))
        return super().lookup(sparse)[0]

    def prefetch(self, sparse):
        self.asked.append(("prefetch", sparse.values.tolist()))


def test_backend_when_a_batch_is_announced_or_frozen_then_it_is_told_so_with_resolved_features():
    table = EmbeddingBagConfig("t", 9, 2, ("x",))
    collection = EmbeddingBagCollection([table])
    collection.bind(backend := TracedBackend(collection.layout, collection.optimizer, kernel="torch"))
    two = SparseFeatures(("other", "x"), torch.tensor([0, 0, 3, 4]))
    collection.prefetch(two)
    collection(two)
    with torch.no_grad():
        collection(two)
    collection.requires_grad_(False)
    collection(two)
    collection.prefetch(two)
    collection.eval()(two)
    with torch.no_grad():
        collection(two)
    kinds = [kind for kind, _ in backend.asked]
    assert kinds == ["prefetch", "lookup", "frozen", "frozen", "frozen", "fresh"], "and frozen rows are not announced"
    assert all(values == [3, 4] for _, values in backend.asked)
    with pytest.raises(IndexError, match=r"id 9 is outside \[0, 9\)"):
        collection.requires_grad_().prefetch(SparseFeatures(("x",), torch.tensor([9])))


def test_gradients_when_bound_with_a_scale_then_the_backend_gets_so_much_of_them_until_unbound():
    table = EmbeddingBagConfig("t", 9, 2, ("x",), init_std=0.0)
    collection = EmbeddingBagCollection([table], optimizer=RowSGD(1.0))
    sparse = SparseFeatures(("x",), torch.tensor([3]))
    backend = LocalBackend(collection.layout, collection.optimizer, kernel="torch")
    collection.bind(backend, gradient_scale=0.25)
    collection(sparse).sum().backward()
    assert collection(sparse).tolist() == [[[-0.25, -0.25]]]
    collection.unbind()
    collection(sparse).sum().backward()
    assert collection(sparse).tolist() == [[[-1.25, -1.25]]]


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, LightningOptimizer], ids=["own", "lightning"])
def test_zero_grad_when_gradients_wait_for_a_step_then_they_are_dropped_and_later_ones_are_not(wrap):
    """In manual optimization ``self.optimizers()`` gives Lightning's wrapper."""
    dense = torch.nn.Parameter(torch.zeros(1))
    tables = [
        EmbeddingBagCollection([EmbeddingBagConfig(name, 5, 2, ("x",), init_std=0.0)], optimizer=RowSGD(1.0))
        for name in "ab"
    ]
    optimizer = torch.optim.SGD([dense], lr=1.0)
    for table in tables:
        table.attach_to(optimizer)
    ids = SparseFeatures(("x",), torch.tensor([1, 3]))

    def backward():
        sum(table(ids).sum() for table in tables).backward()
        dense.grad = torch.ones(1)

    given = wrap(optimizer)
    backward()
    given.zero_grad()
    assert dense.grad is None
    backward()
    optimizer.step()
    given.zero_grad(set_to_none=False)
    assert dense.grad.item() == 0.0
    assert dense.item() == -1.0
    for table in tables:
        (rows,) = (value for key, value in table.state_dict().items() if key.endswith("weight"))
        assert rows.tolist() == [[0, 0], [-1, -1], [0, 0], [-1, -1], [0, 0]]


def test_zero_grad_when_a_collection_follows_another_optimizer_then_the_first_one_drops_nothing():
    table = EmbeddingBagCollection([EmbeddingBagConfig("a", 5, 2, ("x",), init_std=0.0)], optimizer=RowSGD(1.0))
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    table.attach_to(first)
    table.attach_to(second)
    table(SparseFeatures(("x",), torch.tensor([1]))).sum().backward()
    first.zero_grad()
    second.step()
    assert table.state_dict()["embedding_bags.a.weight"][1].tolist() == [-1.0, -1.0]
    copied = copy.deepcopy(first)
    copied.zero_grad()
    weak = weakref.ref(first)
    del first
    assert weak() is None, "an optimizer that nobody has must not live on until the garbage collector runs"
