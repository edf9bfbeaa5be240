"""What DES asks of a model, and what it does beside training."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from prepared_folder import write_folder
from pytorch_lightning.utilities.compile import from_compiled
from thread_group import on_threads
from torch import nn
from torchmetrics import SumMetric

from lightning_recsys.data import Batch, PreparedDataModule, SyntheticDataModule
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.models import DeepFM, LogisticRegression
from lightning_recsys.models.layers import FirstOrder
from lightning_recsys.optim import RowAdagrad, RowSGD
from lightning_recsys.placement import place_fields
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.strategies import DESStrategy
from lightning_recsys.strategies.des.cut_model import CutModel, NewRows, feature_names, field_costs, partitionable
from lightning_recsys.strategies.des.fingerprints import SameInputs, differences, fingerprints
from lightning_recsys.strategies.des.strategy import _metrics_over
from lightning_recsys.tasks import CTRTask

FIELDS = {"user": 10, "movie": 20}


def collection(*features: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(name, 5, 4, (name,)) for name in features])


class Own(nn.Module):
    """A model of somebody who has not heard of DES."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


class Attentive(DeepFM):
    """Does something with the embeddings that DeepFM does not."""

    def forward(self, dense, sparse):
        return super().forward(dense, sparse) + self.embeddings(sparse).amax((1, 2))


class Wider(DeepFM):
    """Says how it is cut."""

    def partition(self, fields, group):
        super().partition(fields, group)

    def forward(self, dense, sparse):
        return super().forward(dense, sparse)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = collection("a", "b"), collection("b", "a")

    def partition(self, fields, group):
        """Which positions?"""


# --- Who is cut, and who refused -------------------------------------------------------------------------------------


def test_model_when_its_layers_say_how_they_are_cut_then_the_outermost_are_found():
    task = CTRTask(DeepFM(2, FIELDS, hidden=(4,)))
    assert list(partitionable(task)) == ["model"]
    assert list(partitionable(Own(part=Wider(2, FIELDS, hidden=(4,)), rest=nn.Linear(2, 2)))) == ["part"]
    assert list(partitionable(Own(linear=FirstOrder(2, FIELDS), other=LogisticRegression(2, FIELDS)))) == [
        "linear",
        "other",
    ]
    assert partitionable(nn.Linear(2, 2)) == {}
    assert feature_names(task.model) == ("user", "movie")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Own(below=Own(tables=collection("a"), head=nn.Linear(4, 1))),
            r"the collection 'below.tables' cannot be cut by field: below does not say .* a method partition\(fields",
        ),
        (Own(tables=collection("a")), "the model itself does not say what becomes of its rows"),
        (
            Own(deep=Attentive(2, FIELDS, hidden=(4,))),
            r"Attentive \('deep'\) has a forward of its own, but the partition",
        ),
        (Own(users=nn.Embedding(9, 2), bags=nn.EmbeddingBag(9, 2)), r"\['bags', 'users'\] cannot be cut by field"),
        (Own(part=Mixed()), r"Mixed \('part'\) has collections of different features"),
    ],
    ids=["nested", "direct", "forward", "plain", "mixed"],
)
def test_model_when_it_does_not_say_how_it_is_cut_then_refused_by_name(model, message):
    with pytest.raises(TypeError, match=message) as error:
        partitionable(model)
    assert "ddp, het, shadowsync" in str(error.value) or "different features" in str(error.value)


def test_model_when_compiled_then_refused_but_not_for_layers_without_tables():
    with pytest.raises(TypeError, match=r"'part' is compiled, and .* modules without either"):
        partitionable(Own(part=torch.compile(DeepFM(2, FIELDS, hidden=(4,)), backend="eager")))
    model = DeepFM(2, FIELDS, hidden=(4,))
    model.deep.compile(backend="eager")
    with pytest.raises(TypeError, match=r"'part\.deep' is compiled"):
        partitionable(Own(part=model))
    task = from_compiled(torch.compile(CTRTask(DeepFM(2, FIELDS, hidden=(4,))), backend="eager"))
    with pytest.raises(TypeError, match="the model itself is compiled"):
        partitionable(task)
    model = DeepFM(2, FIELDS, hidden=(4,))
    model.deep.rest = torch.compile(model.deep.rest, backend="eager")
    assert list(partitionable(Own(part=model))) == ["part"]


def test_plain_embeddings_when_named_then_stay_whole():
    model = Own(users=nn.Embedding(9, 2), linear=FirstOrder(2, FIELDS))
    assert list(partitionable(model, whole=["users"])) == ["linear"]
    with pytest.raises(ValueError, match=r"strategy.whole=\['movies'\] names no plain embedding module.* \['users'\]"):
        partitionable(model, whole=["movies"])


def test_costs_when_tables_are_shared_then_their_fields_are_one():
    tables = [EmbeddingBagConfig("people", 10, 4, ("user", "friend")), EmbeddingBagConfig("movie", 5, 4, ("movie",))]
    weights = [EmbeddingBagConfig(name, 10, 1, (name,)) for name in ("user", "friend", "movie")]
    part = Own(
        rows=EmbeddingBagCollection(tables, optimizer=RowAdagrad(0.1)),
        weights=EmbeddingBagCollection(weights, optimizer=RowSGD(0.1)),
    )
    people, movie = field_costs({"": part}, {"friend": 3.0})
    # Adagrad has as much state as there are weights.
    assert (people.fields, people.num_bytes, people.lookups) == (("user", "friend"), 4 * (10 * 8 + 20), 4 * (4 + 1))
    assert (movie.fields, movie.num_bytes, movie.lookups) == (("movie",), 4 * (5 * 8 + 10), 5.0)


def test_model_when_the_others_are_gone_then_what_they_had_is_not_a_number():
    torch.manual_seed(0)
    start = DeepFM(2, FIELDS, embedding_dim=4, hidden=(6,))

    def member(rank, group):
        model = copy.deepcopy(start)
        parts = partitionable(model)
        cut = CutModel(
            model,
            parts,
            plan=place_fields(field_costs(parts, {}), 2),
            group=group,
            replica_group=group,
            device=torch.device("cpu"),
            rows=NewRows(seed=0),
        )
        assert cut.own_features == [("user", "movie")[rank]]
        assert set(cut.cuts) == {"deep.first.weight"}
        assert all(tensor.shape[0] == FIELDS[cut.own_features[0]] for tensor in cut.stored_tensors().values())
        cut.make_whole(complete=False)
        return model.state_dict()

    for rank, state in enumerate(on_threads(2, member)):
        assert state.keys() == start.state_dict().keys()
        for name, whole in start.state_dict().items():
            other = f"embedding_bags.{list(FIELDS)[1 - rank]}." in name
            if name == "deep.first.weight":
                assert torch.equal(state[name][rank], whole[rank])
                assert state[name][1 - rank].isnan().all()
            elif other and not name.endswith("step"):
                assert state[name].isnan().all(), name
            else:
                assert torch.equal(state[name], whole), name


# --- Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"field_placement": "size"}, "strategy.field_placement must be one of mod, balanced, got 'size'"),
        ({"num_replicas": 0}, "strategy.num_replicas must be at least 1, got 0"),
        (
            {"num_replicas": 2, "dynamic_rows": DynamicRows(expire_after=9)},
            r"strategy.dynamic_rows.expire_after=9 needs strategy.num_replicas=1, got 2",
        ),
    ],
)
def test_strategy_when_an_argument_is_wrong_then_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        DESStrategy(**arguments)


def test_groups_when_processes_do_not_make_them_up_then_refused():
    trainer = pl.Trainer(strategy=DESStrategy(num_replicas=3), accelerator="cpu", devices=4, logger=False)
    with pytest.raises(ValueError, match=r"4 processes .* do not make up strategy.num_replicas=3 equal groups"):
        _ = trainer.strategy.distributed_sampler_kwargs


def test_batches_when_there_are_groups_then_are_dealt_out_to_those():
    strategy = DESStrategy(num_replicas=2)
    pl.Trainer(strategy=strategy, accelerator="cpu", devices=4, logger=False)
    seen = []
    for rank in range(4):
        strategy.cluster_environment.set_global_rank(rank)
        seen.append((strategy.distributed_sampler_kwargs, strategy.sees_own_examples))
    assert [kwargs["rank"] for kwargs, _ in seen] == [0, 0, 1, 1]
    assert {kwargs["num_replicas"] for kwargs, _ in seen} == {2}
    assert [own for _, own in seen] == [True, False, True, False]


def test_gradients_when_a_groups_batch_lacks_some_then_these_count_as_zeros():
    """A head of the model for each domain, and a batch of one domain, say. What no group uses has no gradient."""
    models = [nn.ParameterList([torch.zeros(2), torch.zeros(2), torch.zeros(3), torch.zeros(1)]) for _ in range(2)]
    losses = [lambda x: 2 * x[0].sum() + x[1].sum(), lambda x: 4 * x[2].sum() + x[1].sum()]

    def member(rank, group):
        strategy = DESStrategy(num_replicas=2)
        strategy._counterparts = group
        losses[rank](models[rank]).backward()
        strategy._average(list(models[rank]))
        return [None if x.grad is None else x.grad.tolist() for x in models[rank]]

    assert on_threads(2, member) == [[[1.0, 1.0], [1.0, 1.0], [2.0, 2.0, 2.0], None]] * 2


# --- Data ------------------------------------------------------------------------------------------------------------


def differing(*batches) -> list[str]:
    return differences([fingerprints("batch", batch) for batch in batches])


def test_batches_when_processes_read_different_fields_then_are_known_to_be_the_same():
    bags = SparseFeatures(("a", "b"), torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]))
    whole = Batch(torch.rand(2, 3), bags, torch.ones(2))
    assert differing(whole, whole.select(["b"]), whole.select(["a"]), whole.select(["b", "a"])) == []
    assert differing(whole, Batch(whole.dense + 1, bags, whole.labels)) == ["batch.dense"]
    assert differing([whole.dense], [whole.dense.reshape(3, 2)]) == ["batch[0]"]
    assert differing({"x": torch.zeros(0)}, {"x": torch.zeros(0)}) == []
    assert differing({"x": torch.zeros(1)}, {}) == ["batch['x']"]


def test_batches_when_they_have_numbers_alone_then_these_are_compared():
    none = SparseFeatures((), torch.zeros(0, dtype=torch.long))
    batch = Batch(torch.rand(2, 3), none, torch.ones(2))
    assert differing(batch, batch) == []
    assert differing(batch, Batch(batch.dense + 1, none, batch.labels)) == ["batch.dense"]


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "nested", "jagged"])
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|Sparse CSC|nested tensors)")
def test_batches_when_a_tensor_is_sparse_or_nested_then_its_numbers_count(layout):
    def batch(value):
        numbers = torch.tensor([[0.0, value], [2.0, 0.0]])
        if layout in ("nested", "jagged"):
            return torch.nested.nested_tensor(
                [numbers[0], numbers[1, :1]], layout=torch.jagged if layout == "jagged" else torch.strided
            )
        return getattr(numbers, "to_sparse" if layout == "coo" else f"to_sparse_{layout}")()

    assert differing(batch(1.0), batch(1.0)) == []
    assert differing(batch(1.0), batch(3.0)) == ["batch"]


@pytest.mark.parametrize(
    "other",
    [
        SparseFeatures(("a", "b"), torch.tensor([1, 2, 4]), lengths=torch.tensor([1, 0, 1, 1])),
        SparseFeatures(("a", "b"), torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 2, 0])),
        SparseFeatures(
            ("a", "b"), torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]), weights=torch.ones(3) / 2
        ).select(["b"]),
    ],
    ids=["ids", "bags", "weights"],
)
def test_batches_when_a_category_differs_then_it_is_named_wherever_it_is(other):
    bags = SparseFeatures(("a", "b"), torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]))
    assert differing({"query": (bags, 1)}, {"query": (other, 1)}) == ["batch['query'][0]['b']"]
    assert differing({"query": (bags, 1)}, {"query": (bags, 2)}) == ["batch['query'][1]"]
    batches = [Batch(torch.zeros(2, 0), x, torch.ones(2)) for x in (bags, other)]
    assert differing(*batches) == ["batch.sparse['b']"]
    assert differing({"rows": np.arange(3)}, {"rows": np.arange(3) + 1}) == ["batch['rows']"]


def test_lookups_when_a_collection_is_copied_in_between_then_those_of_the_copy_are_its_own(monkeypatch):
    strategy, own, compared = DESStrategy(), collection("a"), []
    trainer = SimpleNamespace(state=SimpleNamespace(stage="train"), current_epoch=0)
    strategy._lightning_module = SimpleNamespace(
        trainer=trainer, _apply_batch_transfer_handler=lambda batch, **_: batch
    )
    strategy._cut = SimpleNamespace(collections={"embeddings": own})
    strategy._inputs = SameInputs(None)
    monkeypatch.setattr(strategy._inputs, "differences", lambda prints: compared.append(prints) or [])
    strategy.batch_to_device(1, torch.device("cpu"))
    twin, features = copy.deepcopy(own), SparseFeatures.from_ids(("a",), torch.tensor([[1]]))
    own(features)
    assert len(compared) == 2  # the batch and the lookup
    twin(features)
    assert len(compared) == 2


def same(selected: Batch, batch: Batch, names: tuple[str, ...]) -> None:
    assert selected.sparse.keys == names
    assert torch.equal(selected.dense, batch.dense)
    assert torch.equal(selected.labels, batch.labels)
    expected = batch.sparse.select(names)
    assert torch.equal(selected.sparse.values, expected.values)
    assert torch.equal(selected.sparse.bag_lengths(), expected.bag_lengths())


def test_synthetic_data_when_fields_are_selected_then_batches_have_those_only():
    data = SyntheticDataModule(train_rows=50, batch_size=20, cardinalities=(9, 8, 7), multi_hot={"c1": 2}, num_dense=1)
    whole = list(data.train_dataloader())
    data.select_fields(["c1", "c2"])
    for selected, batch in zip(data.train_dataloader(), whole, strict=True):
        same(selected, batch, ("c1", "c2"))
    data.select_fields(None)
    assert next(iter(data.train_dataloader())).sparse.keys == ("c0", "c1", "c2")
    for wrong in ([], ["c3"]):
        with pytest.raises(ValueError, match=r"has the fields \['c0', 'c1', 'c2'\]: select one or more of them"):
            data.select_fields(wrong)


@pytest.mark.parametrize("reader", ["local", "shared"])
def test_prepared_rows_when_fields_are_selected_then_only_their_columns_are_read(tmp_path, reader):
    data = PreparedDataModule(root=write_folder(tmp_path, train=[30, 17], bags=True), batch_size=8, reader=reader)
    data.setup("fit")
    whole = list(data.train_dataloader())
    for names in (("small",), ("row", "tags")):
        data.select_fields(names)
        batches = list(data.train_dataloader())
        for selected, batch in zip(batches, whole, strict=True):
            same(selected, batch, names)
            assert names == ("small",) or torch.equal(selected.sparse.weights, batch.sparse.select(names).weights)
    assert data._rows["train"].select(["small"])._columns == ["label", "number", "negative", "small"]
    data.teardown("fit")


# --- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_when_counted_over_groups_then_whoever_has_them_and_not_those_with_a_group_of_their_own():
    def gather(value, group):
        seen.append(group)
        return [value]

    def sync(metric):
        with metric.sync_context(dist_sync_fn=gather, distributed_available=lambda: True):
            pass

    seen = []
    with _metrics_over("counterparts"):
        sync(SumMetric())
        sync(SumMetric(process_group="own"))
    sync(SumMetric())
    assert seen == ["counterparts", "own", None]
