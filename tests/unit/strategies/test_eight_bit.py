"""Fully connected layers forward in 8 bits: near float32, with its gradients, in parts and not in the model."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_recsys.partition.parts import split
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.machines import Processor
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.strategies import HierarchicalStrategy
from lightning_recsys.strategies.hierarchical.cut.eight_bit import EightBitLinear, compute_in_eight_bits, in_eight_bits


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 48), (2, 3, 48), (0, 48), (1, 48)])
def test_layer_then_outputs_are_near_float32_and_gradients_are_those_of_it(shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(48, 40, bias=bias)
    eight = EightBitLinear.of(layer)
    x, y = (torch.randn(shape).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    found, expected = eight(x), layer(y)
    assert found.shape == expected.shape
    if x.numel():
        error = float((found - expected).detach().norm() / expected.detach().norm())
        assert 1e-4 < error < 0.02  # it is computed in 8 bits, and that is near
    grad = torch.randn(expected.shape)
    own = torch.autograd.grad(found, [x, *layer.parameters()], grad)
    for one, other in zip(own, torch.autograd.grad(expected, [y, *layer.parameters()], grad), strict=True):
        torch.testing.assert_close(one, other)


def test_layer_then_its_product_is_that_of_rounded_numbers():
    layer = EightBitLinear.of(nn.Linear(5, 1, bias=False))
    layer.weight.data.copy_(torch.tensor([[127.0, 1.4, -1.6, 0.0, 3.0]]))
    x = torch.tensor([[1.27, 0.01, 0.02, 1.0, 0.0]])
    assert float(layer(x).detach()) == pytest.approx(1.27 * 127 + 0.01 - 2 * 0.02, rel=1e-6)
    assert float(layer(torch.zeros(1, 5)).detach()) == 0
    with pytest.raises(ValueError, match=r"an input of the layer .* is not finite .* strategy.fc_forward=int8"):
        layer(torch.full((1, 5), float("nan")))


@pytest.mark.parametrize("width", [140_000, 2 * 133_144 + 3])
def test_sum_when_it_needs_more_than_32_bits_then_it_is_exact(width):
    layer = EightBitLinear.of(nn.Linear(width, 2, bias=False))
    layer.weight.data[0], layer.weight.data[1] = 1.0, -1.0
    assert (
        layer(torch.ones(3, width)).tolist() == [[pytest.approx(width, rel=1e-6), pytest.approx(-width, rel=1e-6)]] * 3
    )


def test_parts_then_their_layers_change_and_the_models_do_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(16, 8)
    traced = trace(model, [x])
    (part,) = split(traced, OperatorPlan(dict.fromkeys(traced.operators.by_name, "server0"))).parts
    names = [name for name, _ in part.module.named_parameters()]
    compute_in_eight_bits(part)
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU] * 2 + [nn.Linear]
    layers = [part.module.get_submodule(f"{number}") for number in (0, 2, 4)]
    assert [type(layer) for layer in layers] == [EightBitLinear, nn.Linear, EightBitLinear]  # 4 inputs are too few
    assert [name for name, _ in part.module.named_parameters()] == names
    assert layers[0].weight is model[0].weight
    there = pickle.loads(pickle.dumps(part.module))
    (found,) = there(x)
    assert not torch.equal(found, model(x))
    torch.testing.assert_close(found, model(x), atol=0.05, rtol=0)
    assert type(copy.deepcopy(there).get_submodule("0")) is EightBitLinear


def test_planner_then_wide_layers_get_shorter_and_small_ones_longer():
    processor = Processor()
    for width, batch, is_shorter in ((1024, 512, True), (8, 4, False)):
        graph = trace(nn.Sequential(nn.Linear(width, width), nn.ReLU()), [torch.randn(batch, width)]).operators
        ours = in_eight_bits(graph, processor)
        times = [sum(processor.forward_seconds(x) for x in g.operators) for g in (ours, graph)]
        assert (times[0] < times[1]) == is_shorter
        backward = [sum(processor.backward_seconds(x) for x in g.operators) for g in (ours, graph)]
        assert backward[0] == backward[1]


def test_strategy_when_asked_for_another_form_then_names_those_there_are():
    with pytest.raises(ValueError, match=r"strategy.fc_forward must be one of float32, int8, got 'int4'"):
        HierarchicalStrategy(fc_forward="int4")
