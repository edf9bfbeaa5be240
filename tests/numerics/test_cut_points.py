"""Layers cut by field: parts over disjoint sets of fields, summed, are the whole, in results and in gradients.

Field f belongs to part f mod N. Each part is a layer of its own over its own fields, holding its own weights only.
"""

import pytest
import torch
from torch import Tensor, nn

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models.layers import (
    CrossLayer,
    CrossNetwork,
    FieldwiseLinear,
    FirstOrder,
    FMSecondOrder,
    LowRankCrossLayer,
)
from lightning_recsys.optim import RowSGD

B, F, D, N, H = 6, 5, 4, 3, 7
# float64, where sums in another order differ by a few units of 1e-16
EXACT = {"rtol": 1e-12, "atol": 1e-13}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 3])
def parts(request: pytest.FixtureRequest) -> list[list[int]]:
    """Which fields each part owns."""
    return [list(range(rank, F, request.param)) for rank in range(request.param)]


def randomize(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()


def columns_of(parts: list[list[int]]) -> list[Tensor]:
    """Positions of each part in ``[embeddings, numeric features]``; the numeric ones belong to the first part."""
    position = torch.arange(F * D + N)
    fields, numeric = position[: F * D].view(F, D), position[F * D :]
    return [torch.cat([fields[own].flatten(), numeric[: 0 if part else N]]) for part, own in enumerate(parts)]


def gradients(output: Tensor, of: list[Tensor]) -> list[Tensor]:
    """Of a loss that every output number enters with a slope of its own."""
    return list(torch.autograd.grad((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum(), of))


def test_first_order_parts_when_summed_are_the_whole(parts):
    fields = {f"f{f}": 3 + f for f in range(F)}
    ids = torch.stack([torch.randint(size, (B,)) for size in fields.values()], 1)
    sparse, dense = SparseFeatures.from_ids(tuple(fields), ids), torch.randn(B, N)
    whole = FirstOrder(N, fields, row_optimizer=RowSGD(1.0), kernel="torch")
    randomize(whole)
    tables = {k: v.clone() for k, v in whole.embeddings.state_dict().items()}
    layers = [
        FirstOrder(0, {f"f{f}": 3 + f for f in own}, bias=False, row_optimizer=RowSGD(1.0), kernel="torch")
        for own in parts
    ]
    for layer in layers:
        layer.embeddings.load_state_dict({key: tables[key] for key in layer.embeddings.state_dict()})
    summed = torch.stack([layer.partial(sparse) for layer in layers]).sum(0)
    output, expected = whole.combine(dense, summed), whole(dense, sparse)
    # float32: rows are trained in nothing else
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    output.square().sum().backward()
    expected.square().sum().backward()
    after = whole.embeddings.state_dict()
    for layer in layers:
        for key, rows in layer.embeddings.state_dict().items():
            torch.testing.assert_close(rows, after[key], rtol=1e-4, atol=1e-5)
            assert not key.endswith("weight") or not torch.equal(rows, tables[key]), "no gradient arrived"


def test_fm_second_order_parts_when_summed_are_the_whole(parts):
    whole = FMSecondOrder(N, embedding_dim=D).double()
    randomize(whole)
    dense = torch.randn(B, N, dtype=torch.float64)
    embeddings = torch.randn(B, F, D, dtype=torch.float64, requires_grad=True)
    sums, squares = zip(*(whole.partial(embeddings[:, own]) for own in parts), strict=True)
    output, expected = whole.combine(dense, sum(sums), sum(squares)), whole(dense, embeddings)
    torch.testing.assert_close(output, expected, **EXACT)
    of = [embeddings, *whole.parameters()]
    torch.testing.assert_close(gradients(output, of), gradients(expected, of), **EXACT)


@pytest.mark.parametrize("num_dense", [0, N])
def test_fieldwise_linear_parts_when_summed_are_the_whole(parts, num_dense):
    whole = FieldwiseLinear(num_dense, num_fields=F, embedding_dim=D, out_features=H).double()
    randomize(whole)
    layers = [FieldwiseLinear(0, num_fields=len(own), embedding_dim=D, out_features=H).double() for own in parts]
    for layer, own in zip(layers, parts, strict=True):
        layer.weight.data = whole.weight.data[own]
    dense, embeddings = torch.randn(B, num_dense).double(), torch.randn(B, F, D).double()
    summed = torch.stack([layer.partial(embeddings[:, own]) for layer, own in zip(layers, parts, strict=True)]).sum(0)
    output, expected = whole.combine(dense, summed), whole(dense, embeddings)
    torch.testing.assert_close(output, expected, **EXACT)
    (expected_gradient,) = gradients(expected, [whole.weight])
    for own, gradient in zip(parts, gradients(output, [layer.weight for layer in layers]), strict=True):
        torch.testing.assert_close(gradient, expected_gradient[own], **EXACT)


def test_cross_network_parts_when_summed_are_the_whole(parts):
    whole = CrossNetwork(F * D + N, num_layers=3).double()
    randomize(whole)
    columns = columns_of(parts)
    layers = [CrossNetwork(len(own), num_layers=3).double() for own in columns]
    for layer, own in zip(layers, columns, strict=True):
        layer.weight.data, layer.bias.data = whole.weight.data[:, own], whole.bias.data[:, own]
    x0 = torch.randn(B, F * D + N, dtype=torch.float64) * 0.3
    p, c = (
        sum(s)
        for s in zip(*(layer.partial(x0[:, own]) for layer, own in zip(layers, columns, strict=True)), strict=True)
    )
    output = [layer.combine(x0[:, own], p, c) for layer, own in zip(layers, columns, strict=True)]
    expected = whole(x0)
    for own, part in zip(columns, output, strict=True):
        torch.testing.assert_close(part, expected[:, own], **EXACT)
    order = torch.cat(columns)
    of = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    found = gradients(torch.cat(output, 1)[:, order.argsort()], of)
    weight, bias = gradients(expected, [whole.weight, whole.bias])
    wanted = [gradient[:, own] for own in columns for gradient in (weight, bias)]
    torch.testing.assert_close(found, wanted, **EXACT)


def test_cross_layer_parts_when_summed_are_the_whole(parts):
    whole = CrossLayer(F * D + N).double()
    randomize(whole)
    x0, x = torch.randn(2, B, F * D + N, dtype=torch.float64)
    columns = columns_of(parts)
    summed = sum(x[:, own] @ whole.weight[own] for own in columns)
    torch.testing.assert_close(whole.partial(x), summed, **EXACT)
    torch.testing.assert_close(whole.combine(x0, x, summed), whole(x0, x), **EXACT)


def test_low_rank_cross_layer_parts_when_summed_are_the_whole(parts):
    whole = LowRankCrossLayer(F * D + N, rank=2).double()
    randomize(whole)
    x0, x = torch.randn(2, B, F * D + N, dtype=torch.float64)
    columns = columns_of(parts)
    layers = [LowRankCrossLayer(len(own), rank=2).double() for own in columns]
    for layer, own in zip(layers, columns, strict=True):
        layer.down.data, layer.up.data, layer.bias.data = whole.down.data[own], whole.up.data[:, own], whole.bias[own]
    summed = sum(layer.partial(x[:, own]) for layer, own in zip(layers, columns, strict=True))
    expected = whole(x0, x)
    for layer, own in zip(layers, columns, strict=True):
        torch.testing.assert_close(layer.combine(x0[:, own], x[:, own], summed), expected[:, own], **EXACT)
