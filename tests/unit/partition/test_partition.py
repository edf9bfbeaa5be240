"""Layers cut by fields: what the parts send adds up to what the whole layer gives, forward and backward."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from thread_group import on_threads

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, LocalBackend, SparseFeatures
from lightning_recsys.models import DCN, DLRM, DCNv2, DeepFM, FactorizationMachine, LogisticRegression, WideDeep
from lightning_recsys.models.layers import (
    CrossNetwork,
    CrossNetworkV2,
    DeepTower,
    EmbeddingDropout,
    FieldGather,
    FieldwiseLinear,
    Share,
    begin,
)
from lightning_recsys.optim import RowAdagrad, RowSGD

FIELDS = {f"f{i}": 20 + i for i in range(5)}
BATCH = 7
ROWS = {"row_optimizer": RowSGD(0.1), "embedding_dim": 4}
MODELS = {
    "lr": lambda: LogisticRegression(3, FIELDS, row_optimizer=RowSGD(0.1)),
    "fm": lambda: FactorizationMachine(3, FIELDS, **ROWS),
    "wide_deep": lambda: WideDeep(3, FIELDS, hidden=(6, 4), **ROWS),
    "deepfm": lambda: DeepFM(3, FIELDS, hidden=(6, 4), **ROWS),
    "deepfm_without_numbers": lambda: DeepFM(0, FIELDS, hidden=(6, 4), **ROWS),
    "dcn": lambda: DCN(3, FIELDS, hidden=(6,), normalization="batch", **ROWS),
    "dcn_v2_parallel": lambda: DCNv2(3, FIELDS, rank=3, hidden=(6,), **ROWS),
    "dcn_v2_stacked": lambda: DCNv2(3, FIELDS, rank=3, structure="stacked", hidden=(6,), **ROWS),
    "dcn_v2_full": lambda: DCNv2(3, FIELDS, hidden=(6,), **ROWS),
    "dlrm": lambda: DLRM(3, FIELDS, bottom_hidden=(5,), top_hidden=(6,), **ROWS),
    "dlrm_concatenation": lambda: DLRM(
        3, FIELDS, interaction="concatenation", bottom_hidden=(5,), top_hidden=(6,), **ROWS
    ),
}
# Numbers of an example that the layers of a model all-reduce or gather, with F = 5 fields, D = 4, H = 6, r = 3, L = 3.
SENT = {
    "lr": {"first_order": 1},
    "fm": {"first_order": 1, "second_order": 4 + 1},
    "wide_deep": {"first_order": 1, "deep.first": 6},
    "deepfm": {"first_order": 1, "second_order": 4 + 1, "deep.first": 6},
    "dcn": {"cross": 3, "cross_output": 1, "deep.first": 6},
    "dcn_v2_parallel": {**{f"cross.layers.{i}": 3 for i in range(3)}, "cross_output": 1, "deep.first": 6},
    "dcn_v2_stacked": {**{f"cross.layers.{i}": 3 for i in range(3)}, "deep.first": 6},
    "dcn_v2_full": {"gather": 5 * 4},
    "dlrm": {"gather": 5 * 4},
}


def batch(model):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (len(FIELDS) * BATCH,), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    num_dense = getattr(model, "num_dense", 0) or (3 if "without" not in model.name else 0)
    dense, labels = torch.randn(BATCH, num_dense, generator=generator), torch.rand(BATCH, generator=generator)
    return dense, SparseFeatures(tuple(FIELDS), values, lengths=lengths), labels


def step(model):
    """Logits, and a backward pass that leaves dense gradients and updated rows."""
    dense, sparse, labels = batch(model)
    logits = model(dense, sparse)
    torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
    return logits.detach()


def make(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.name = name
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dealt", [[(0, 3), (1, 2, 4)], [(1,), (), (0, 2, 3, 4)]], ids=["2", "3"])
def test_model_when_cut_then_logits_gradients_and_rows_are_those_of_the_whole(name, dealt):
    whole = make(name)
    start = copy.deepcopy(whole)
    logits = step(whole)

    def member(rank, group):
        model = copy.deepcopy(start)
        model.partition(dealt[rank], group)
        return model, step(model)

    for rank, (model, seen) in enumerate(on_threads(len(dealt), member)):
        torch.testing.assert_close(seen, logits, rtol=1e-5, atol=1e-6)
        modules = dict(model.named_modules())
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                layer, _, own_name = key.rpartition(".")
                cut = getattr(modules[layer], "cuts", {}).get(own_name)
                expected = whole.get_parameter(key).grad
                expected = expected if cut is None else cut.take(expected)
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-7)
        rows = {key: value for key, value in model.state_dict().items() if "embedding_bags" in key}
        assert sum(key.endswith("weight") for key in rows) in (len(dealt[rank]), 2 * len(dealt[rank]))
        for key, value in rows.items():
            torch.testing.assert_close(value, whole.state_dict()[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", SENT)
def test_layers_when_cut_then_say_what_they_send(name):
    start = make(name)

    def member(rank, group):
        model = copy.deepcopy(start)
        model.partition((rank, *range(2 + rank, 5, 2)), group)
        return {path: x.sends for path, x in model.named_modules() if getattr(x, "share", None) and x.sends}

    for sends in on_threads(2, member):
        assert {path: x.floats for path, x in sends.items()} == SENT[name]
        assert [path for path, x in sends.items() if x.gradients] == [x for x in sends if x.startswith("cross.layers")]
        assert {x.operation for x in sends.values()} == ({"all-gather"} if "gather" in sends else {"all-reduce"})


def test_embedding_dropout_when_cut_then_drops_what_the_whole_drops_and_leaves_the_generator_as_that_does():
    layer, embeddings = EmbeddingDropout(0.4, 5), torch.randn(BATCH, 5, 4)
    torch.manual_seed(3)
    whole, after = layer(embeddings), torch.get_rng_state()
    assert 0.2 < (whole == 0).float().mean() < 0.6

    def member(rank, group):
        layer.partition((1, 4), group)

    on_threads(1, member)
    torch.manual_seed(3)
    assert torch.equal(layer(embeddings[:, [1, 4]]), whole[:, [1, 4]])
    assert torch.equal(torch.get_rng_state(), after)
    layer.make_whole({})
    torch.manual_seed(3)
    assert torch.equal(layer(embeddings), whole)


def test_parameter_when_it_has_hooks_then_it_is_not_cut():
    layer = FieldwiseLinear(2, num_fields=3, embedding_dim=4, out_features=5)
    layer.bias.register_hook(lambda gradient: 2 * gradient)
    layer.partition((1,), None)
    layer.make_whole({"weight": torch.zeros(3, 4, 5)})
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ValueError, match=r"FieldwiseLinear.weight has hooks .* is cut by field"):
        layer.partition((1,), None)


def test_layer_when_made_whole_then_has_the_parameters_it_is_given():
    layer = FieldwiseLinear(2, num_fields=3, embedding_dim=4, out_features=5)
    before = copy.deepcopy(layer)

    def member(rank, group):
        layer.partition((1,), group)
        with pytest.raises(RuntimeError, match="FieldwiseLinear is cut by field already"):
            layer.partition((1,), group)
        assert layer.weight.shape == (1, 4, 5)
        cut = layer.cuts["weight"]
        filled = cut.put(layer.weight.data, fill=float("nan"))
        assert filled.isnan().all((1, 2)).tolist() == [True, False, True]
        layer.make_whole({"weight": before.weight.data})

    on_threads(1, member)
    assert torch.equal(layer.weight, before.weight)
    assert (layer.share, dict(layer.cuts)) == (None, {})


def test_cross_network_when_cut_then_gives_own_columns_with_whole_gradients():
    """Not through ``project``: a model of one's own may go on with the columns."""
    torch.manual_seed(0)
    whole = CrossNetwork(6, 2, embedding_dim=2)
    torch.nn.init.normal_(whole.bias)
    inputs = torch.randn(BATCH, 6)
    weights = torch.randn(6)
    (whole(inputs) @ weights).square().sum().backward()
    columns = {0: [0, 1, 4, 5], 1: [2, 3]}

    def member(rank, group):
        layer = copy.deepcopy(whole)
        layer.zero_grad()
        layer.partition(((0, 2), (1,))[rank], group)
        own = layer(inputs[:, columns[rank]]) @ weights[columns[rank]]
        (product,) = Share(((0, 2), (1,))[rank], group).sum(own)
        product.square().sum().backward()
        return layer

    for rank, layer in enumerate(on_threads(2, member)):
        for parameter, expected in ((layer.weight, whole.weight), (layer.bias, whole.bias)):
            torch.testing.assert_close(parameter.grad, expected.grad[:, columns[rank]], rtol=1e-4, atol=1e-4)


def test_sum_when_partials_are_bfloat16_then_adds_in_float32():
    def member(rank, group):
        partial = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)[rank : rank + 1]
        (total,) = Share((), group).sum(partial)
        halves = torch.full((1,), 2.0**-9, dtype=torch.bfloat16) if rank else torch.ones(1, dtype=torch.bfloat16)
        return total, Share((), group).sum(halves.float())[0]

    for total, exact in on_threads(2, member):
        assert total.dtype == torch.bfloat16
        assert exact.item() == 1 + 2.0**-9


def test_sums_when_begun_one_after_the_other_then_can_be_waited_for_in_any_order():
    def member(rank, group):
        share = Share((), group)
        first, second = share.start(torch.full((3,), 1.0 + rank)), share.start(torch.full((2,), 10.0 + rank))
        return second()[0], first()[0]

    for late, early in on_threads(2, member):
        assert (early.tolist(), late.tolist()) == ([3.0] * 3, [21.0] * 2)


def test_tower_when_begun_then_gives_what_it_gives_at_once():
    torch.manual_seed(0)
    tower = DeepTower(2, num_fields=3, embedding_dim=4, hidden=[5])
    dense, embeddings = torch.randn(BATCH, 2), torch.randn(BATCH, 3, 4)
    expected = tower(dense, embeddings)

    def member(rank, group):
        fields = ((0, 2), (1,))[rank]
        own = copy.deepcopy(tower)
        own.partition(fields, group)
        logits = begin(own, dense, embeddings[:, fields])
        (meanwhile,) = Share(fields, group).sum(torch.ones(1))
        assert meanwhile == 2
        return logits()

    for logits in (begin(tower, dense, embeddings)(), *on_threads(2, member)):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_fields_when_dealt_out_twice_then_gather_refuses():
    def member(rank, group):
        with pytest.raises(ValueError, match=r"each of 2 fields needs one process, got \[\[0\], \[0\]\]"):
            FieldGather(2, 4).partition((0,), group)

    on_threads(2, member)


def test_full_cross_matrices_when_cut_then_refused():
    with pytest.raises(TypeError, match=r"full matrices cannot be cut by field: set model\.rank"):
        CrossNetworkV2(6, 2).partition((0,), None)


# --- Collections -----------------------------------------------------------------------------------------------------


def tables():
    return [
        EmbeddingBagConfig("shared", 9, 4, ("a", "b"), init_std=0.5),
        EmbeddingBagConfig("c", 5, 4, ("c",), init_std=0.5),
    ]


def test_collection_when_cut_then_has_the_rows_of_its_own_tables_only_until_it_is_whole_again():
    collection = EmbeddingBagCollection(tables(), optimizer=RowAdagrad(0.1))
    sparse = SparseFeatures(("a", "b", "c"), torch.tensor([1, 2, 3, 4, 0, 1]))
    collection(sparse).sum().backward()
    before = {name: value.clone() for name, value in collection.state_dict().items()}
    looked_up = collection(sparse).detach()
    collection.partition((2,))
    assert collection.feature_names == ("c",)
    assert collection.embedding_bags.rows.shape == (5, 4)
    assert torch.equal(collection(sparse), looked_up[:, 2:])
    with pytest.raises(RuntimeError, match="cut already"):
        collection.partition((0,))
    collection.make_whole(lambda table, name: before[f"embedding_bags.{table}.{name}"])
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(collection(sparse), looked_up)


def test_collection_when_cut_to_nothing_then_gives_no_columns_and_counts_updates():
    collection = EmbeddingBagCollection(tables())
    collection.partition(())
    for _ in range(3):
        pooled = collection(SparseFeatures(("other",), torch.tensor([5, 6])))
        assert pooled.shape == (2, 0, 4)
        pooled.sum().backward()
    assert collection.embedding_bags.step == 3


def test_collection_when_features_of_a_table_are_parted_then_refused():
    with pytest.raises(ValueError, match=r"\['a', 'b'\] share table 'shared': keep them together"):
        EmbeddingBagCollection(tables()).partition((0, 2))


def test_rows_when_made_for_some_tables_then_do_not_depend_on_the_others():
    """The random numbers of the run stay where they are."""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    made = []
    for fields in ((0, 1, 2), (2,)):
        collection = EmbeddingBagCollection(tables(), device="meta")
        collection.partition(fields)
        assert isinstance(collection.embedding_bags, LocalBackend)
        assert collection.embedding_bags.is_meta
        collection.embedding_bags.make_rows(seed=7, device=torch.device("cpu"))
        made.append(collection.embedding_bags.read("c", "weight"))
    assert torch.equal(*made)
    assert 0.2 < made[0].std() < 1
    assert torch.equal(torch.get_rng_state(), state)


# --- The docs ---------------------------------------------------------------------------------------------------------


def test_model_when_written_as_in_the_docs_then_is_cut_as_the_whole_is():
    page = Path(__file__).parents[3] / "docs" / "cut_by_fields.md"
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if "class " in code:
            exec(code, names)
    whole = names["WideAndDeep"](3, FIELDS)
    whole.name = "docs"
    layer = names["WeightedFields"](3)
    torch.nn.init.normal_(layer.weight)
    embeddings = torch.randn(BATCH, 3, 16)
    start = copy.deepcopy(whole)

    def member(rank, group):
        model, own = copy.deepcopy(start), copy.deepcopy(layer)
        model.partition(((0, 3), (1, 2, 4))[rank], group)
        own.partition(((0, 2), (1,))[rank], group)
        return step(model), own(embeddings[:, [[0, 2], [1]][rank]])

    for logits, summed in on_threads(2, member):
        torch.testing.assert_close(logits, step(copy.deepcopy(start)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(summed, layer(embeddings), rtol=1e-5, atol=1e-5)
