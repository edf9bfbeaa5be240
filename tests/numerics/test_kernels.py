"""Every kernel against autograd through torch's own embedding_bag, one dense update per step."""

import copy
import dataclasses
import sys

import pytest
import torch
import torch.nn.functional as F

from lightning_recsys.embeddings import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    LocalBackend,
    SparseFeatures,
    kernels,
)
from lightning_recsys.embeddings.kernels import FbgemmModuleKernel
from lightning_recsys.embeddings.kernels.fbgemm_kernel import load_fbgemm
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowSGD, RowWiseAdagrad

# Kernels sum a row's gradients in different orders; three steps of order-1 float32 values drift by a few ulp each.
TOLERANCE = {"rtol": 1e-5, "atol": 5e-6}
KEYS, SIZES, BATCH = ("x", "y", "z"), {"shared": 40, "small": 7}, 16
OPTIMIZERS: list[RowOptimizer] = [
    RowSGD(lr=0.1),
    RowAdagrad(lr=0.1, eps=1e-6),
    RowWiseAdagrad(lr=0.1, eps=1e-6, initial_accumulator=0.1),
    RowAdam(lr=0.01),
    RowFTRL(lr=0.1, l1=0.01, l2=0.1),
]
DECAYED: list[RowOptimizer] = [dataclasses.replace(rule, weight_decay=0.3) for rule in OPTIMIZERS]
KERNELS = ["torch", "numba", "fbgemm", "fbgemm module"]
DIMS = [1, 4, 10, 16]


def serves(kernel: str, optimizer: RowOptimizer, dim: int) -> bool:
    """What each kernel promises: FBGEMM three rules on widths that are a multiple of 4, the others everything."""
    return not kernel.startswith("fbgemm") or (dim % 4 == 0 and not isinstance(optimizer, RowAdam | RowFTRL))


CASES = [
    pytest.param(optimizer, kernel, dim, id=f"{type(optimizer).__name__}-{kernel}-{dim}")
    for optimizer in OPTIMIZERS
    for kernel in KERNELS
    for dim in DIMS
    if serves(kernel, optimizer, dim)
] + [
    pytest.param(optimizer, kernel, 4, id=f"{type(optimizer).__name__}-decay-{kernel}-4")
    for optimizer in DECAYED
    for kernel in ("torch", "numba")
]


def make(optimizer: RowOptimizer, dim: int, kernel: str, pooling: str = "sum") -> EmbeddingBagCollection:
    """Two tables, the first shared by two features."""
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig("shared", SIZES["shared"], dim, ("x", "y"), pooling, init_std=0.5),
        EmbeddingBagConfig("small", SIZES["small"], dim, ("z",), init_std=0.5),
    ]
    collection = EmbeddingBagCollection(tables, optimizer=optimizer, kernel=kernel.split()[0])
    if kernel == "fbgemm module":
        assert isinstance(collection.embedding_bags, LocalBackend)
        collection.embedding_bags.kernel = FbgemmModuleKernel(collection.embedding_bags.layout, optimizer)
    return collection


def draw(kind: str, generator: torch.Generator) -> SparseFeatures:
    lengths = torch.ones(3 * BATCH, dtype=torch.int64)
    if kind != "single":
        lengths = torch.randint(0, 4, (3 * BATCH,), generator=generator)  # one bag in four is empty
    total, small = int(lengths.sum()), int(lengths[2 * BATCH :].sum())
    high = torch.tensor([SIZES["shared"]] * (total - small) + [SIZES["small"]] * small)
    values = (torch.rand(total, generator=generator) * high).long()
    weights = torch.rand(total, generator=generator) if kind == "weighted" else None
    return SparseFeatures(KEYS, values, lengths=None if kind == "single" else lengths, weights=weights)


def reference_lookup(weights: dict[str, torch.Tensor], sparse: SparseFeatures, pooling: str) -> torch.Tensor:
    columns, bounds, offsets = [], sparse.feature_bounds(), sparse.bag_offsets()
    for f, key in enumerate(KEYS):
        table, mode = ("small", "sum") if key == "z" else ("shared", pooling)
        ids = sparse.values[bounds[f] : bounds[f + 1]]
        starts = offsets[f * BATCH : (f + 1) * BATCH] - bounds[f]
        scale = torch.ones(ids.shape) if sparse.weights is None else sparse.weights[bounds[f] : bounds[f + 1]]
        column = F.embedding_bag(ids, weights[table], starts, mode="sum", per_sample_weights=scale)
        if mode == "mean":
            column = column / sparse.bag_lengths()[f * BATCH : (f + 1) * BATCH].clamp(min=1).unsqueeze(1)
        columns.append(column)
    return torch.stack(columns, 1)


@pytest.mark.parametrize("kind", ["single", "bags", "weighted"])
@pytest.mark.parametrize(("optimizer", "kernel", "dim"), CASES)
def test_training_with_each_kernel_then_equals_autograd(optimizer, kernel, dim, kind):
    pooling = "mean" if kind == "weighted" else "sum"
    collection = make(optimizer, dim, kernel, pooling)
    weights = {name: collection.state_dict()[f"embedding_bags.{name}.weight"].clone() for name in SIZES}
    states = {name: optimizer.initial_state(weight) for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 4):
        sparse = draw(kind, generator)
        target = torch.randn(BATCH, 3, dim, generator=generator)
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        expected = reference_lookup(leaves, sparse, pooling)
        actual = collection(sparse)
        torch.testing.assert_close(actual, expected, **TOLERANCE)
        (expected * target).sum().backward()
        (actual * target).sum().backward()
        bounds = sparse.feature_bounds()
        for name, (start, end) in {"shared": (0, bounds[2]), "small": (bounds[2], bounds[3])}.items():
            touched = sparse.values[start:end].unique()
            rows, grads = weights[name][touched], leaves[name].grad[touched]
            state = {key: value[touched] for key, value in states[name].items()}
            grads = grads + optimizer.weight_decay * rows
            # The rules themselves are held against torch.optim and scalar formulas in test_row_optimizers.
            optimizer.update_(rows, grads, state, lr=optimizer.lr, step=step)
            weights[name][touched] = rows
            for key, value in state.items():
                states[name][key][touched] = value
    saved = collection.state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(saved[f"embedding_bags.{name}.weight"], weight, **TOLERANCE)
        for key, value in states[name].items():
            torch.testing.assert_close(saved[f"embedding_bags.{name}.{key}"], value, **TOLERANCE)


@pytest.mark.parametrize(
    ("optimizer", "dim", "reason"),
    [
        (RowAdam(), 64, "no fused RowAdam"),
        (RowSGD(), 70, "multiple of 4"),
        (RowSGD(weight_decay=0.1), 128, "s fused rules add no weight decay to the gradient"),
    ],
)
def test_fbgemm_when_it_cannot_serve_then_says_why_and_auto_finds_another(optimizer, dim, reason):
    with pytest.raises(ValueError, match=f"kernel='fbgemm' cannot serve these tables: it.*{reason}"):
        make(optimizer, dim, "fbgemm")
    assert make(optimizer, dim, "auto").embedding_bags.kernel.name == "numba"
    assert make(RowSGD(), 128, "auto").embedding_bags.kernel.name == "fbgemm"


@pytest.mark.parametrize("dim", [16, 128])
def test_collection_when_fbgemm_is_not_installed_then_the_compiled_loops_train_as_torch(monkeypatch, dim):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)  # as importlib finds no such package
    load_fbgemm.cache_clear()
    try:
        with pytest.raises(ValueError, match="the package fbgemm_gpu is not installed"):
            make(RowAdagrad(lr=0.1), dim, "fbgemm")
        ours, torchs = make(RowAdagrad(lr=0.1), dim, "auto"), make(RowAdagrad(lr=0.1), dim, "torch")
        assert ours.embedding_bags.kernel.name == "numba"
        generator = torch.Generator().manual_seed(5)
        for _ in range(3):
            features = draw("bags", generator)
            for collection in (ours, torchs):
                collection(features).square().sum().backward()
        for name, rows in torchs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], rows, **TOLERANCE)
    finally:
        load_fbgemm.cache_clear()  # what other tests ask


def test_auto_when_rows_are_narrow_then_takes_the_compiled_loops_and_fbgemm_where_they_are_wide():
    chosen = {dim: make(RowWiseAdagrad(), dim, "auto").embedding_bags.kernel.name for dim in (1, 16, 64, 128)}
    assert chosen == {1: "numba", 16: "numba", 64: "numba", 128: "fbgemm"}


@pytest.mark.parametrize("kernel", ["torch", "numba"])
@pytest.mark.parametrize(
    ("optimizer", "make_reference"),
    [
        (RowSGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3)),
        (RowAdagrad(0.1, eps=1e-6), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, weight_decay=0.3)),
        (RowAdam(0.01), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_weight_decay_when_all_rows_decay_then_equals_torchs_optimizer_on_dense_gradients(
    optimizer, make_reference, kernel
):
    collection = make(dataclasses.replace(optimizer, weight_decay=0.3, decay_all_rows=True), 4, kernel)
    leaves = {name: collection.state_dict()[f"embedding_bags.{name}.weight"].clone() for name in SIZES}
    reference = make_reference([leaf.requires_grad_() for leaf in leaves.values()])
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        sparse = draw("bags", generator)
        target = torch.randn(BATCH, 3, 4, generator=generator)
        reference.zero_grad()
        (reference_lookup(leaves, sparse, "sum") * target).sum().backward()
        (collection(sparse) * target).sum().backward()
        reference.step()
    for name, leaf in leaves.items():
        actual = collection.state_dict()[f"embedding_bags.{name}.weight"]
        torch.testing.assert_close(actual, leaf.detach(), **TOLERANCE)


def own_rule(rule: RowOptimizer) -> RowOptimizer:
    """A subclass whose update decays a row by a tenth and leaves the rest to its base class."""

    def update_(self, rows_UD: torch.Tensor, grads_UD: torch.Tensor, state, **options) -> None:
        rows_UD.mul_(0.9)
        type(rule).update_(self, rows_UD, grads_UD, state, **options)

    own = type("Own" + type(rule).__name__, (type(rule),), {"update_": update_})
    return own(**dataclasses.asdict(rule))


@pytest.mark.parametrize("dim", [4, 10, 128])  # for auto: loops, loops, FBGEMM where it has the rule
@pytest.mark.parametrize(
    "optimizer", [*OPTIMIZERS, DECAYED[0]], ids=lambda x: type(x).__name__ + "-decay" * bool(x.weight_decay)
)
def test_subclass_of_a_rule_when_it_overrides_the_update_then_that_trains_the_rows(optimizer, dim, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(kernels.log, "info", lambda message, *values: lines.append(message % values))
    rule = own_rule(optimizer)
    collection = make(rule, dim, "auto")
    kernel = collection.embedding_bags.kernel
    rows, state = collection.embedding_bags.rows.detach().clone(), collection.embedding_bags.row_state
    state = {name: tensor.detach().clone() for name, tensor in state.items()}
    ids = torch.tensor([[3, 5, 6]])
    collection(SparseFeatures.from_ids(KEYS, ids)).sum().backward()
    touched = torch.tensor([3, 5, SIZES["shared"] + 6])  # each once, with a gradient of ones
    expected, part = rows[touched] * 0.9, {name: tensor[touched] for name, tensor in state.items()}
    options = {"lr": optimizer.lr, "step": 1}
    optimizer.update_(expected, torch.ones(3, dim) + optimizer.weight_decay * rows[touched], part, **options)
    torch.testing.assert_close(collection.embedding_bags.rows[touched], expected, **TOLERANCE)
    assert kernel.name == "torch"
    make(rule, dim, "auto").embedding_bags.kernel  # noqa: B018 - to choose it once more
    assert [line.split()[0] for line in lines] == [type(rule).__name__]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "numba",
            "kernel='numba' cannot .*: it has no compiled OwnRowSGD, only RowAdagrad, .*, RowWiseAdagrad",
        ),
        ("fbgemm", "kernel='fbgemm' cannot .*: it has no fused OwnRowSGD"),
    ],
)
def test_subclass_of_a_rule_when_a_kernel_without_it_is_asked_for_then_refused(kernel, message):
    with pytest.raises(ValueError, match=message):
        make(own_rule(RowSGD()), 4, kernel)(draw("single", torch.Generator()))


@pytest.mark.parametrize("optimizer", [RowAdagrad(), RowWiseAdagrad()], ids=["adagrad", "rowwise"])
@pytest.mark.parametrize("target", ["torch", "numba", "fbgemm"])
def test_state_dict_when_moved_between_kernels_then_training_goes_on_alike(optimizer, target):
    generator = torch.Generator().manual_seed(3)
    source = make(optimizer, 8, "numba")
    source(draw("bags", generator)).square().sum().backward()
    moved = make(optimizer, 8, target)
    moved.load_state_dict(copy.deepcopy(source.state_dict()))
    sparse = draw("bags", generator)
    for collection in (source, moved):
        collection(sparse).square().sum().backward()
    for key, value in source.state_dict().items():
        torch.testing.assert_close(moved.state_dict()[key], value, **TOLERANCE)


@pytest.mark.parametrize("dim", [3, 40])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_compiled_loops_when_rows_are_asked_for_ahead_then_equal_torch(optimizer, dim):
    # More rows than a loop asks for ahead, a row longer than a cache line, and ids that come again far apart.
    tables = [EmbeddingBagConfig("many", 5000, dim, ("a", "b")), EmbeddingBagConfig("few", 3, dim, ("c",))]
    generator = torch.Generator().manual_seed(5)
    ids = (torch.rand(300, 3, generator=generator) * torch.tensor([5000, 200, 3])).long()
    sparse, target = SparseFeatures.from_ids(("a", "b", "c"), ids), torch.randn(300, 3, dim, generator=generator)
    saved = []
    for kernel in ("numba", "torch"):
        torch.manual_seed(6)
        collection = EmbeddingBagCollection(tables, optimizer=optimizer, kernel=kernel)
        for _ in range(3):
            (collection(sparse) * target).sum().backward()
        saved.append(collection.state_dict())
    for key, value in saved[0].items():
        # The 300 gradients of one row of "few" are summed in two orders: 1e-7 of a sum of magnitude 100.
        torch.testing.assert_close(value, saved[1][key], rtol=1e-4, atol=5e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_training_on_a_gpu_then_equals_the_cpu(kernel):
    generator = torch.Generator().manual_seed(4)
    cpu, gpu = make(RowWiseAdagrad(), 16, "torch"), make(RowWiseAdagrad(), 16, kernel).cuda()
    for _ in range(3):
        sparse = draw("weighted", generator)
        cpu(sparse).square().sum().backward()
        gpu(sparse.to("cuda")).square().sum().backward()
    for key, value in cpu.state_dict().items():
        torch.testing.assert_close(gpu.state_dict()[key].cpu(), value, **TOLERANCE)


@pytest.mark.parametrize("kind", ["single", "bags", "weighted"])
@pytest.mark.parametrize("num_rows", [2 * 128, 2 * 128 + 1, 100_000])
def test_numba_when_rows_are_too_many_to_have_places_of_their_own_then_they_train_bit_for_bit_as_few(num_rows, kind):
    # 16 to 48 ids of a feature: 32 to 128 places where they are hashed, so 257 rows are too many in any case.
    def train(size: int) -> torch.Tensor:
        tables = [EmbeddingBagConfig(key, size, 4, (key,), init_std=0.0) for key in KEYS]
        collection = EmbeddingBagCollection(tables, optimizer=RowAdagrad(lr=0.1), kernel="numba")
        generator = torch.Generator().manual_seed(3)
        for _ in range(4):
            sparse = draw(kind, generator)
            (collection(sparse) * torch.randn(BATCH, 3, 4, generator=generator)).sum().backward()
        weights = [collection.state_dict()[f"embedding_bags.{key}.weight"] for key in KEYS]
        assert not any(weight[40:].any() for weight in weights)
        return torch.stack([weight[:40] for weight in weights])

    assert torch.equal(train(num_rows), train(40))
