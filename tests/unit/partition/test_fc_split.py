"""Fully connected layers in pieces compute and learn what the whole ones do."""

import copy
import re

import pytest
import torch
from torch import nn
from traced_models import make, step

from lightning_recsys.models.layers import FieldwiseLinear
from lightning_recsys.partition.fc_split import LayerSplit, num_inputs, num_outputs, split_layers
from lightning_recsys.partition.parts import split
from lightning_recsys.partition.split_choice import choose_splits
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.machines import GroupMachines, Processor
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import TRAINER, server_name
from lightning_recsys.placement.tagging import place_operators

BATCH = 16


def perceptron(*, bias=True, activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 11, bias=bias), activation(), nn.Linear(11, 3, bias=bias), nn.Tanh(), nn.Linear(3, 1)
    )


SPLITS = {
    "vertical": [LayerSplit("0", "output", 3)],
    "horizontal": [LayerSplit("2", "input", 4)],
    "vertical_twice": [LayerSplit("0", "output", 2), LayerSplit("2", "output", 3)],
    "co_partitioned": [LayerSplit("0", "output", 3), LayerSplit("2", "input", 3)],
    "other_bounds": [LayerSplit("0", "output", 3), LayerSplit("2", "input", 2)],
}


def keyed_grads(model):
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_split_then_outputs_and_gradients_are_those_of_the_whole(splits, bias):
    whole, x = perceptron(bias=bias), torch.randn(BATCH, 5, requires_grad=True)
    pieces = split_layers(whole, splits)
    expected = whole(x)
    expected.square().sum().backward()
    grad_x, x.grad = x.grad, None
    output = pieces.model(x)
    torch.testing.assert_close(output, expected)
    grads = keyed_grads(whole)
    whole.zero_grad()  # the layers that are not split are the same ones
    output.square().sum().backward()
    torch.testing.assert_close(x.grad, grad_x)
    assert pieces.whole_state(keyed_grads(pieces.model)).keys() == grads.keys()
    torch.testing.assert_close(pieces.whole_state(keyed_grads(pieces.model)), grads)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adam])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_split_when_trained_for_20_steps_then_weights_are_those_of_the_whole(splits, optimizer):
    whole = perceptron(activation=nn.GELU)
    pieces = split_layers(copy.deepcopy(whole), splits)
    inputs = torch.randn(20, BATCH, 5)
    for model in (whole, pieces.model):
        steps = optimizer(model.parameters(), lr=0.05)
        for x in inputs:
            steps.zero_grad()
            model(x).sub(x.sum(1, keepdim=True)).square().mean().backward()
            steps.step()
    torch.testing.assert_close(
        pieces.whole_state(pieces.model.state_dict()), dict(whole.state_dict()), rtol=1e-4, atol=1e-5
    )


def test_state_when_cut_and_put_together_then_is_the_same():
    whole = perceptron()
    pieces = split_layers(whole, SPLITS["co_partitioned"])
    state = {name: torch.randn_like(x) for name, x in whole.state_dict().items()}
    cut = pieces.piece_state(state)
    pieces.model.load_state_dict(cut)
    assert cut["0.pieces.1.weight"].shape == (4, 5)
    assert cut["2.pieces.0.bias"].shape == (3,)
    assert "2.pieces.1.bias" not in cut
    torch.testing.assert_close(pieces.whole_state(cut), state)


def test_trace_when_layers_are_co_partitioned_then_nothing_is_gathered_between_them():
    pieces = split_layers(perceptron(), SPLITS["co_partitioned"])
    traced = trace(pieces.model, [torch.randn(BATCH, 5)])
    operators = traced.operators
    assert [operators.by_name[f"2.pieces.{i}"].inputs for i in range(3)] == [("_1_1",), ("_1_2",), ("_1_3",)]
    assert all(f"0.pieces.{i}" in traced.nodes for i in range(3))
    assert not any("_side_by_side" in x.kind or "_columns" in x.kind for x in operators.operators)
    # What crosses, with a pair of pieces on each server, is the input and the last layer's partial sums.
    devices = {x.name: TRAINER for x in operators.operators if not x.owns_parameters}
    devices |= {f"{layer}.pieces.{i}": server_name(i) for layer in "02" for i in range(3)} | {"4": "server0"}
    devices |= {x.name: server_name(i) for i, x in enumerate(x for x in operators.operators if x.kind == "ReLU")}
    parts = split(traced, OperatorPlan(devices, 3))
    assert [len(parts.on(f"server{i}")) for i in range(3)] == [2, 1, 1]
    x = torch.randn(BATCH, 5)
    torch.testing.assert_close(parts(x), perceptron()(x))


def test_trace_when_bounds_differ_or_others_read_what_is_gathered_then_it_stays():
    traced = trace(split_layers(perceptron(), SPLITS["other_bounds"]).model, [torch.randn(BATCH, 5)])
    assert any("_side_by_side" in x.kind for x in traced.operators.operators)

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.act, self.two = nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6)

        def forward(self, x):
            hidden = self.act(self.one(x))
            return self.two(hidden) + hidden

    whole, x = Skips(), torch.randn(BATCH, 5)
    pieces = split_layers(whole, [LayerSplit("one", "output", 2), LayerSplit("two", "input", 2)])
    traced = trace(pieces.model, [x])
    assert any("_side_by_side" in operator.kind for operator in traced.operators.operators)
    devices = {o.name: "server0" if o.owns_parameters else TRAINER for o in traced.operators.operators}
    torch.testing.assert_close(split(traced, OperatorPlan(devices))(x), whole(x))


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("wide_deep", [LayerSplit("deep.first", "output", 2), LayerSplit("deep.rest.1", "input", 2)]),
        ("dcn_v2_stacked", [LayerSplit("deep.first", "output", 3)]),
        (
            "dlrm",
            [LayerSplit("top.0", "output", 2), LayerSplit("top.2", "input", 2), LayerSplit("bottom.0", "input", 3)],
        ),
    ],
)
def test_split_when_part_of_a_model_then_parts_on_servers_compute_and_learn_the_same(name, splits):
    whole, arguments = make(name)
    pieces = split_layers(copy.deepcopy(whole), splits)
    traced = trace(pieces.model, arguments)
    plan = place_operators(traced.operators, GroupMachines(3, link=Network(1e9)))
    parts = split(traced, plan)
    held = [key for part in parts.parts for key in part.module.state_dict() if ".pieces." in key]
    assert sorted(held) == sorted(pieces.pieces)  # each in one part

    torch.testing.assert_close(step(whole, arguments, forward=parts), step(whole, arguments))
    torch.testing.assert_close(pieces.whole_state(keyed_grads(pieces.model)), keyed_grads(whole))


def test_fieldwise_layer_when_split_by_output_then_each_piece_has_some_of_them():
    whole = FieldwiseLinear(3, num_fields=2, embedding_dim=4, out_features=5)
    assert (num_inputs(whole), num_outputs(whole)) == (11, 5)
    holder = nn.Module()
    holder.layer = whole
    pieces = split_layers(holder, [LayerSplit("layer", "output", 2)]).model.layer
    dense, embeddings = torch.randn(BATCH, 3), torch.randn(BATCH, 2, 4)
    torch.testing.assert_close(pieces(dense, embeddings), whole(dense, embeddings))
    assert [piece.weight.shape[2] for piece in pieces.pieces] == [3, 2]
    assert pieces.share is None
    with pytest.raises(AttributeError, match="weight"):
        _ = pieces.weight


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.norm = nn.LayerNorm(4)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([LayerSplit("three", "output", 2)], "no layer 'three'"),
        ([LayerSplit("norm", "output", 2)], "norm (LayerNorm) cannot be split by output"),
        ([LayerSplit("one", "output", 2)], "one shares parameters with another module (['one.weight'"),
    ],
)
def test_split_when_a_layer_cannot_be_then_says_why(splits, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        split_layers(Shared(), splits)


@pytest.mark.parametrize(
    ("make_splits", "message"),
    [
        (lambda: [LayerSplit("0", "output", 1)], "at least 2 pieces"),
        (lambda: [LayerSplit("0", "rows", 2)], "by output or by input"),
        (lambda: [LayerSplit("0", "output", 2)] * 2, "can be split once"),
        (lambda: [LayerSplit("4", "output", 2)], "4 has 1 outputs, too few for 2 pieces"),
        (lambda: [LayerSplit("2", "input", 12)], "2 has 11 inputs, too few for 12 pieces"),
    ],
)
def test_split_when_asked_for_the_impossible_then_says_what_is(make_splits, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        split_layers(perceptron(), make_splits())


# --- Chosen by cost ---------------------------------------------------------------------------------------------------

SLOW = Processor(flops=1e6, memory_bandwidth=1e15, call_seconds=0.0)


def group(**changes):
    return GroupMachines(**{"num_servers": 2, "processor": SLOW, "link": Network(1e9), **changes})


def test_choice_when_what_is_between_two_layers_is_wide_then_both_are_split_together():
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    splits = choose_splits(model, [torch.randn(BATCH, 4)], group(link=Network(1e6)))
    assert splits == [LayerSplit("0", "output", 2), LayerSplit("2", "input", 2)]


def test_choice_when_the_link_is_slow_then_nothing_is_split():
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))
    assert choose_splits(model, [torch.randn(BATCH, 64)], group(link=Network(1e2))) == []
    assert choose_splits(model, [torch.randn(BATCH, 64)], group(num_servers=1)) == []


def test_choice_when_a_layer_is_too_large_for_each_server_then_it_is_split():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    machines = group(server_memory=40_000, link=Network(1e3))
    (first, *_) = choose_splits(model, [torch.randn(BATCH, 64)], machines)
    assert first.path == "0"
    graph = trace(split_layers(model, [first]).model, [torch.randn(BATCH, 64)]).operators
    place_operators(graph, machines)
