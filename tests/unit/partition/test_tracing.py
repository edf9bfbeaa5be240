"""Models as operators: what is one, what it costs, and what cannot be traced."""

import re
import threading

import pytest
import torch
from torch import nn
from traced_models import BATCH, MODELS, make

from lightning_recsys.partition.tracing import trace


@pytest.mark.parametrize("name", MODELS)
def test_trace_then_every_call_is_in_one_operator_and_the_model_is_unchanged(name):
    model, arguments = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    traced = trace(model, arguments)

    nodes = [node for group in traced.nodes.values() for node in group]
    assert sorted(map(str, nodes)) == sorted(str(n) for n in traced.fx_graph.nodes if n.op not in "placeholder output")
    assert list(traced.nodes) == [operator.name for operator in traced.operators.operators]
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_trace_then_weights_are_counted_once_and_lookups_stay_on_trainers(name):
    model, arguments = make(name)
    operators = trace(model, arguments).operators
    dense = sum(4 * x.numel() for x in model.parameters() if x.requires_grad)
    buffers = sum(x.numel() * x.element_size() for key, x in model.named_buffers() if "embedding_bags" not in key)
    assert sum(operator.weight_bytes for operator in operators.operators) == dense + buffers
    lookups = [x for x in operators.operators if "EmbeddingBagCollection" in x.kind]
    assert lookups
    assert all(x.trainer_only and not x.owns_parameters for x in lookups)
    assert operators.batch_size == BATCH


def test_trace_then_flops_and_bytes_are_those_of_the_formula():
    model, arguments = make("dlrm")
    graph = trace(model, arguments).operators
    # 3 -> 5 -> 4, then 6 vectors' 15 pairs and the 4 -> 6 -> 4 -> 1. The numeric features need no gradient.
    assert graph.by_name["bottom.0"].forward_flops == 2 * BATCH * 3 * 5
    assert graph.by_name["bottom.0"].backward_flops == 2 * BATCH * 3 * 5
    assert graph.by_name["top.0"].forward_flops == 2 * BATCH * 19 * 6
    assert graph.by_name["top.0"].backward_flops == 2 * 2 * BATCH * 19 * 6
    assert graph.by_name["top.0"].weight_bytes == 4 * (19 * 6 + 6)
    assert graph.by_name["top.0"].activation_bytes == 4 * BATCH * (6 + 6)
    assert graph.value_of["embeddings"].num_bytes == 4 * BATCH * 5 * 4
    assert graph.value_of["embeddings"].has_gradient
    assert not graph.value_of["dense"].has_gradient
    assert graph.results == ("squeeze",)


def test_trace_when_cross_layers_follow_each_other_then_each_counts_its_own_backward_pass():
    model, arguments = make("dcn_v2_full")
    graph = trace(model, arguments).operators
    counts = {graph.by_name[f"cross.layers.{i}"].backward_flops for i in range(3)}
    assert counts == {2 * 2 * BATCH * 23 * 23}


class Tied(nn.Module):
    """The same layer twice, with another between: neither may be elsewhere."""

    def __init__(self):
        super().__init__()
        self.shared, self.between, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.after(self.shared(self.between(self.shared(x)).relu()))


def test_trace_when_a_parameter_is_read_twice_then_all_in_between_is_one_operator():
    traced = trace(Tied(), [torch.ones(3, 4)])
    assert list(traced.nodes) == ["shared", "after"]
    assert traced.operators.by_name["shared"].kind == "Linear + relu"
    assert traced.operators.by_name["shared"].weight_bytes == 2 * 4 * 20


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(3, 1)

    def forward(self, x):
        hidden = self.one(x)
        left, right = hidden.chunk(2, 1)
        return self.two((left * right).view(x.shape[0], -1)).squeeze(1).add_(1)


def test_trace_when_shapes_and_tuples_are_handed_on_then_only_tensors_go_between_operators():
    traced = trace(Shapes(), [torch.ones(3, 4)])
    values = {value.name: value.num_bytes for value in traced.operators.values}
    assert all(values.values()), values
    assert any("chunk" in operator.kind and "getitem" in operator.kind for operator in traced.operators.operators)
    assert any("squeeze" in operator.kind and "add_" in operator.kind for operator in traced.operators.operators)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x):
        return self.scale(x) if x.sum() > 0 else x


class Mode(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.scale(x), 0.5, self.training)


class Gated(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.below, self.gate, self.above = nn.Linear(4, 4), nn.Sequential(inner), nn.Linear(4, 1)

    def forward(self, x):
        return self.above(self.gate(self.below(x)))


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Branches(), "gate.0 (Branches) cannot be traced, so its operators cannot be placed: symbolically traced"),
        (Mode(), "gate.0 (Mode) cannot be traced, so its operators cannot be placed: training and evaluation compute"),
    ],
)
def test_trace_when_a_module_decides_by_values_then_names_it_and_it_can_be_kept_whole(inner, message):
    model = Gated(inner)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        trace(model, [torch.ones(3, 4)])
    assert "whole=['gate.0']" in str(caught.value)

    traced = trace(model, [torch.ones(3, 4)], whole=["gate.0"])
    assert list(traced.nodes) == ["below", "gate.0", "above"]


@pytest.mark.parametrize(
    ("arguments", "whole", "message"),
    [
        ([torch.ones(0, 4)], [], "at least one example"),
        ([torch.ones(3, 4)], ["tower"], "no modules ['tower']"),
    ],
)
def test_trace_when_asked_for_what_is_not_there_then_says_so(arguments, whole, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trace(Tied(), arguments, whole=whole)


def test_trace_when_done_then_modules_are_called_as_before():
    original = nn.Module.__call__
    model, arguments = make("wide_deep")
    threads = [threading.Thread(target=trace, args=(model, arguments)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert nn.Module.__call__ is original
    assert isinstance(model(*arguments), torch.Tensor)
