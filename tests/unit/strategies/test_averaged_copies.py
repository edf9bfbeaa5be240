"""Callbacks that average weights keep a copy of the model from before its rows went to stores."""

from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from lightning_recsys.optim import RowSGD
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.mapped import MappedStores
from lightning_recsys.strategies.common.averaged_copies import (
    AveragedCopies,
    averaged_copies,
    refuse_averages_in_shared_memory,
    refuse_statistics_after_averaging,
)
from lightning_recsys.strategies.rows.tables import ServedTables, plan_placement

ROW_KEYS = {"embeddings.embedding_bags.first.weight", "embeddings.embedding_bags.second.weight"}


class Model(pl.LightningModule):
    """Tables before, between and behind dense layers: where a table has gone, what follows has another number."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(6, 4)
        self.before = nn.Linear(3, 4)
        tables = [EmbeddingBagConfig("first", 7, 4, ("a",)), EmbeddingBagConfig("second", 5, 4, ("b",))]
        self.embeddings = EmbeddingBagCollection(tables, optimizer=RowSGD(0.1))
        self.behind = nn.Linear(8, 5)


@pytest.fixture(params=[WeightAveraging, lambda: StochasticWeightAveraging(0.1)], ids=["average", "stochastic"])
def trainer(request):
    """With a copy of its model, made before its rows are elsewhere."""
    callback, model = request.param(), Model()
    trainer = SimpleNamespace(callbacks=[callback, pl.Callback()], lightning_module=model, strategy=None)
    callback.setup(trainer, model, "fit")
    return trainer


@pytest.fixture
def served(trainer, tmp_path):
    """The model's tables in stores."""
    tables = ServedTables(trainer.lightning_module, names=["plain"])
    tables.choose_rules([], given=RowSGD(0.1), check=lambda _: None)
    servers = [MappedStores(tmp_path)]
    plan = plan_placement(tables.collections, 1, method="size")

    for name, collection in tables.collections.items():
        options = {"servers": servers, "plan": plan}
        collection.bind(StoreBackend.create(name, collection.layout, collection.optimizer, **options), copy_rows=True)
    yield tables
    for server in servers:
        server.close()


def test_copy_when_the_rows_are_in_stores_then_pairs_with_the_model(trainer, served):
    model, (copy,) = trainer.lightning_module, averaged_copies(trainer)
    before = {name: parameter.clone() for name, parameter in copy.named_parameters()}
    AveragedCopies(trainer)
    pairs = list(zip(copy.named_parameters(), model.named_parameters(), strict=True))
    dense = [name for (name, average), (same, own) in pairs if name == same and average is not own]
    assert dense == ["before.weight", "before.bias", "behind.weight", "behind.bias"]
    assert all(torch.equal(copy.get_parameter(name), before[name]) for name in dense)


def test_copy_when_the_rows_are_in_stores_then_its_state_dict_leaves_them_to_whoever_saves_those(trainer, served):
    model, (copy,) = trainer.lightning_module, averaged_copies(trainer)
    copies = AveragedCopies(trainer)
    for _ in range(2):
        assert model.state_dict().keys() - copy.state_dict().keys() == ROW_KEYS
    served.release(copy_rows=True)
    copies.release()
    assert model.state_dict().keys() == copy.state_dict().keys()


def test_copy_when_the_rows_are_back_then_has_those_that_were_trained(trainer, served):
    model, (copy,) = trainer.lightning_module, averaged_copies(trainer)
    copies = AveragedCopies(trainer)
    for collection in served.collections.values():
        for table in collection.tables:
            rows = torch.full((table.num_embeddings, 4), 3.0)
            collection.embedding_bags.write(table.name, "weight", rows)
    served.release(copy_rows=True)
    copies.release()
    assert copy.plain is model.plain
    assert all((copy.state_dict()[key] == 3.0).all() for key in ("plain.weight", *ROW_KEYS))


def test_copy_when_the_model_keeps_its_rows_then_stays_as_it_is(trainer):
    (copy,) = averaged_copies(trainer)
    modules = list(copy.modules())
    AveragedCopies(trainer).release()
    assert all(module is same for module, same in zip(copy.modules(), modules, strict=True))
    assert copy.state_dict().keys() > ROW_KEYS


def test_average_when_workers_share_a_replica_then_is_refused_if_it_is_swapped_in():
    refuse_averages_in_shared_memory(SimpleNamespace(callbacks=[StochasticWeightAveraging(0.1)]), setting="x=2")
    with pytest.raises(ValueError, match=r"WeightAveraging swaps .* with x=2 .* Set strategy\.workers_per_trainer=1"):
        refuse_averages_in_shared_memory(SimpleNamespace(callbacks=[WeightAveraging()]), setting="x=2")


def test_average_when_workers_run_free_then_is_refused_with_batch_norms_if_it_is_stochastic():
    model = nn.Sequential(nn.BatchNorm1d(3))
    averages = [StochasticWeightAveraging(0.1)]
    refuse_statistics_after_averaging(SimpleNamespace(callbacks=[WeightAveraging()], lightning_module=model))
    refuse_statistics_after_averaging(SimpleNamespace(callbacks=averages, lightning_module=nn.Sequential()))
    with pytest.raises(ValueError, match=r"StochasticWeightAveraging .* statistics of batch norms"):
        refuse_statistics_after_averaging(SimpleNamespace(callbacks=averages, lightning_module=model))
