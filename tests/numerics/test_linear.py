"""The matrix products of the dense part against torch.addmm, on both of their paths."""

import pytest
import torch
from torch import nn

from lightning_recsys.models.layers import linear

BATCH, INPUTS, OUTPUTS = 64, 192, 128  # 1.5 M multiplications: above the threshold
# Both libraries sum 192 products of order-1 float32 numbers, in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-4}


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def path(request, monkeypatch):
    """Both libraries on any processor; counts the calls of ours, so that a path cannot be missed."""
    calls = []
    original = linear._OneDNNAffine.apply
    monkeypatch.setattr(linear, "prefers_onednn", lambda: request.param)
    monkeypatch.setattr(linear._OneDNNAffine, "apply", lambda *args: calls.append(1) or original(*args))
    yield
    assert bool(calls) == request.param


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("addend_shape", [None, (OUTPUTS,), (BATCH, OUTPUTS)], ids=["none", "bias", "matrix"])
@pytest.mark.parametrize("transposed", [True, False])
def test_affine_then_value_and_gradients_equal_addmm(path, addend_shape, transposed):
    inputs = draw(BATCH, INPUTS, seed=0)
    weight = draw(OUTPUTS, INPUTS, seed=1) if transposed else draw(INPUTS, OUTPUTS, seed=1)
    addend = None if addend_shape is None else draw(*addend_shape, seed=2)
    leaves = [leaf for leaf in (inputs, weight, addend) if leaf is not None]
    matrix = weight.t() if transposed else weight
    actual = linear.affine(inputs, matrix, addend)
    expected = torch.addmm(torch.zeros(OUTPUTS) if addend is None else addend, inputs, matrix)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    upstream = torch.randn(BATCH, OUTPUTS, generator=torch.Generator().manual_seed(3))
    for left, right in zip(
        torch.autograd.grad(actual, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(left, right, **TOLERANCE)


def test_affine_when_the_gradient_is_an_expanded_scalar_then_right(path):
    inputs, weight = draw(BATCH, INPUTS, seed=0), draw(INPUTS, OUTPUTS, seed=1)
    linear.affine(inputs, weight).sum().backward()
    torch.testing.assert_close(inputs.grad, weight.detach().sum(1).expand(BATCH, -1), **TOLERANCE)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("batch", [64, 512], ids=["wide", "tall"])
def test_affine_when_differentiated_then_the_weights_gradient_lies_as_the_weight(monkeypatch, batch, transposed):
    monkeypatch.setattr(linear, "prefers_onednn", lambda: True)
    inputs = draw(batch, INPUTS, seed=0).detach()
    weight = draw(OUTPUTS, INPUTS, seed=1) if transposed else draw(INPUTS, OUTPUTS, seed=1)
    result = linear.affine(inputs, weight.t() if transposed else weight)
    (grad,) = torch.autograd.grad(result.sum(), weight)
    assert grad.stride() == weight.stride()  # otherwise the accumulation would copy it
    expected = inputs.sum(0).expand(OUTPUTS, INPUTS)
    torch.testing.assert_close(grad, expected if transposed else expected.t(), rtol=1e-5, atol=1e-4)


def test_affine_when_small_or_mixed_precision_or_double_then_left_to_torch(monkeypatch):
    monkeypatch.setattr(linear, "prefers_onednn", lambda: True)
    monkeypatch.setattr(linear._OneDNNAffine, "apply", lambda *_: pytest.fail("not torch's product"))
    inputs, weight = draw(BATCH, INPUTS, seed=0), draw(INPUTS, OUTPUTS, seed=1)
    assert linear.affine(inputs[:4], weight).shape == (4, OUTPUTS)
    assert linear.affine(inputs.double(), weight.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert linear.affine(inputs, weight).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
def test_affine_when_compiled_then_the_graph_has_torchs_product(monkeypatch):
    """Inductor ends in an assertion at oneDNN's operator with a weight that is a view."""
    monkeypatch.setattr(linear, "prefers_onednn", lambda: True)
    targets = []

    def collect(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(linear.Linear(INPUTS, OUTPUTS), backend=collect)
    inputs = draw(BATCH, INPUTS, seed=0)
    assert linear._is_worth_onednn(inputs, compiled.weight)
    assert compiled(inputs).shape == (BATCH, OUTPUTS)
    assert any("addmm" in target for target in targets)
    assert not any("mkldnn" in target for target in targets)


def test_linear_then_a_torch_linear_in_everything_else():
    module = linear.Linear(INPUTS, OUTPUTS)
    assert isinstance(module, nn.Linear)
    assert torch.equal(module.bias, torch.zeros(OUTPUTS))
    assert float(module.weight.detach().std()) == pytest.approx((2 / (INPUTS + OUTPUTS)) ** 0.5, rel=0.05)
