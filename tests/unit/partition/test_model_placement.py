"""Greedy refinement against the exact solver, on the models as their configurations make them."""

import pytest
import torch

from lightning_recsys import models
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models import (
    DCN,
    DLRM,
    DCNv2,
    DeepFM,
    FactorizationMachine,
    GraphSAGE,
    LogisticRegression,
    WideDeep,
)
from lightning_recsys.partition.tracing import check_traceable, trace
from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.exact import solve
from lightning_recsys.placement.loads import LoadModel
from lightning_recsys.placement.machines import GroupMachines
from lightning_recsys.placement.tagging import place_operators

FIELDS = {f"f{i}": 10 for i in range(26)}
BATCH = 64
PLACED = [LogisticRegression, FactorizationMachine, WideDeep, DeepFM, DCN, DCNv2, DLRM]


def test_models_then_each_is_compared_below_or_has_no_operators_to_place():
    ours = {x for x in vars(models).values() if isinstance(x, type) and issubclass(x, torch.nn.Module)}
    assert ours == {*PLACED, GraphSAGE}
    # It computes as many layers as the batch has hops, on rows that differ between batches: there is no graph to cut.
    with pytest.raises(ValueError, match=r"\(GraphSAGE\) cannot be traced"):
        check_traceable(GraphSAGE(0, {"node": 80}, num_classes=2, embedding_dim=4, hidden=4))


class MakesFeatures(torch.nn.Module):
    def __init__(self, *, from_ids: bool) -> None:
        super().__init__()
        self.inner, self.from_ids = WideDeep(0, {"a": 10}), from_ids

    def forward(self, dense, ids):
        make = SparseFeatures.from_ids if self.from_ids else SparseFeatures
        return self.inner(dense, make(("a",), ids))


@pytest.mark.parametrize("from_ids", [False, True])
def test_model_when_it_makes_its_own_sparse_features_then_is_told_to_take_them(from_ids):
    with pytest.raises(
        ValueError, match=r"makes SparseFeatures, .* in the training step, and call the model with them"
    ):
        check_traceable(MakesFeatures(from_ids=from_ids))


@pytest.mark.parametrize("model_class", PLACED)
def test_greedy_then_its_bottleneck_is_within_ten_per_cent_of_the_best(model_class):
    sample = torch.randn(BATCH, 13), SparseFeatures(tuple(FIELDS), torch.randint(0, 10, (26 * BATCH,)))
    graph = trace(model_class(13, FIELDS), sample).operators
    for bandwidth, shared in ((1.25e7, None), (1.25e8, None), (1.25e9, 2.0)):
        for num_servers in (2, 4):
            group = GroupMachines(num_servers, num_trainers=num_servers, link=Network(bandwidth), shared_cores=shared)
            model = LoadModel(graph, group)
            greedy, exact = (
                max(model.busy_seconds(model.loads(devices)).values())
                for devices in (place_operators(graph, group).devices, solve(graph, group).devices)
            )
            assert greedy <= 1.1 * exact
