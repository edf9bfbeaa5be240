"""Layers against torch's own operators, and their errors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_recsys.models.layers import (
    MLP,
    CrossLayer,
    CrossNetwork,
    CrossNetworkV2,
    DeepTower,
    DotInteraction,
    FieldwiseLinear,
    FMSecondOrder,
    LocalNormalization,
    LowRankCrossLayer,
    flatten_inputs,
)
from lightning_recsys.models.layers.linear import Linear


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_dense", [0, 3])
def test_fieldwise_linear_forward_equals_torch_linear_on_the_concatenation(num_dense):
    layer = FieldwiseLinear(num_dense, num_fields=4, embedding_dim=2, out_features=5)
    nn.init.normal_(layer.bias)
    dense, embeddings = torch.randn(6, num_dense), torch.randn(6, 4, 2)
    blocks = [layer.weight.flatten(0, 1)] + ([] if layer.dense_weight is None else [layer.dense_weight])
    expected = F.linear(torch.cat([embeddings.flatten(1), dense], 1), torch.cat(blocks).t(), layer.bias)
    torch.testing.assert_close(layer(dense, embeddings), expected)


@pytest.mark.parametrize("num_dense", [0, 3])
def test_fieldwise_linear_start_is_glorot_over_the_whole_layer(num_dense):
    layer = FieldwiseLinear(num_dense, num_fields=20, embedding_dim=16, out_features=200)
    std = (2 / (20 * 16 + num_dense + 200)) ** 0.5
    assert layer.weight.std().item() == pytest.approx(std, rel=0.02)  # 64 000 draws: 0.3 % off, one sigma
    assert layer.bias.abs().max() == 0
    assert num_dense == 0 or layer.dense_weight.std().item() == pytest.approx(std, rel=0.2)


def test_mlp_start_is_glorot_with_zero_biases():
    linear = MLP(300, [200])[0]
    assert linear.weight.std().item() == pytest.approx((2 / 500) ** 0.5, rel=0.02)
    assert linear.bias.abs().max() == 0


def test_fm_second_order_equals_the_sum_over_pairs():
    layer = FMSecondOrder(2, embedding_dim=3).double()
    dense, embeddings = torch.randn(4, 2).double(), torch.randn(4, 5, 3).double()
    vectors = torch.cat([embeddings, dense.unsqueeze(2) * layer.vectors], 1)
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i, j in itertools.combinations(range(7), 2)]
    torch.testing.assert_close(layer(dense, embeddings), torch.stack(pairs).sum(0))


def test_fm_second_order_under_autocast_stays_float32():
    layer = FMSecondOrder(2, embedding_dim=8)
    nn.init.normal_(layer.vectors)
    dense, embeddings = torch.randn(16, 2), torch.randn(16, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(dense, embeddings)
    torch.testing.assert_close(output, layer(dense, embeddings), rtol=0, atol=0)


def test_cross_network_equals_its_layers_one_by_one_and_passes_gradcheck():
    layer = CrossNetwork(4, num_layers=3).double()
    nn.init.normal_(layer.bias)
    x0 = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    x = x0
    for w, b in zip(layer.weight, layer.bias, strict=True):
        x = x0 * (x @ w).unsqueeze(1) + b + x
    torch.testing.assert_close(layer(x0), x)
    assert torch.autograd.gradcheck(layer, (x0,))


def test_cross_network_under_autocast_keeps_small_crosses():
    layer = CrossNetwork(64, num_layers=3)
    x0 = torch.randn(8, 64) * 0.01
    exact = layer(x0) - x0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x0) - x0
    # bfloat16 has 8 bits, so p is good to about 1 %. With 1 + p in bfloat16 most of p (here 0.01) would be lost.
    assert (rounded - exact).norm() < 0.03 * exact.norm()


def test_low_rank_cross_layer_equals_a_full_one_with_the_product_of_its_matrices():
    low_rank, full = LowRankCrossLayer(6, rank=2), CrossLayer(6)
    nn.init.normal_(low_rank.bias)
    full.weight.data, full.bias.data = low_rank.down @ low_rank.up, low_rank.bias.data
    x0, x = torch.randn(2, 5, 6)
    torch.testing.assert_close(low_rank(x0, x), full(x0, x))


def test_cross_network_v2_rank_decides_the_kind_of_layer():
    assert [type(layer) for layer in CrossNetworkV2(6, 2).layers] == [CrossLayer, CrossLayer]
    assert [type(layer) for layer in CrossNetworkV2(6, 2, rank=3).layers] == [LowRankCrossLayer, LowRankCrossLayer]


def test_dot_interaction_equals_the_lower_triangle_of_the_gram_matrix():
    vectors = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    layer = DotInteraction(5)
    gram = torch.einsum("bid,bjd->bij", vectors, vectors)
    expected = torch.stack([gram[:, i, j] for i in range(5) for j in range(i)], 1)
    torch.testing.assert_close(layer(vectors), expected)
    assert layer.out_features == 10
    assert torch.autograd.gradcheck(layer, (vectors,))


def test_dot_interaction_when_a_batch_is_taken_in_parts_then_its_gradient_is_autograds_own():
    torch.manual_seed(0)
    layer = DotInteraction(4)
    vectors = torch.randn(600, 4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(600, 6, dtype=torch.float64)
    (grad,) = torch.autograd.grad((layer(vectors) * weights).sum(), vectors)
    rows, columns = torch.tril_indices(4, 4, -1)
    by_pairs = (vectors[:, rows] * vectors[:, columns]).sum(2)
    (expected,) = torch.autograd.grad((by_pairs * weights).sum(), vectors)
    torch.testing.assert_close(layer(vectors), by_pairs)
    torch.testing.assert_close(grad, expected)


def test_flatten_inputs_without_numeric_features_copies_nothing():
    embeddings = torch.randn(2, 3, 4)
    assert flatten_inputs(torch.empty(2, 0), embeddings).data_ptr() == embeddings.data_ptr()
    assert flatten_inputs(torch.ones(2, 1), embeddings).shape == (2, 13)


@pytest.mark.parametrize("activation", ["relu", "gelu", "sigmoid", "silu", "tanh"])
@pytest.mark.parametrize("normalization", ["none", "batch", "local"])
def test_mlp_gradients_with_every_activation_pass_gradcheck(activation, normalization):
    # Fails where an activation overwrites what its backward pass needs.
    layer = MLP(3, [4, 2], out_features=1, activation=activation, normalization=normalization).double()
    assert torch.autograd.gradcheck(layer, (torch.randn(5, 3, dtype=torch.float64, requires_grad=True),))


def test_mlp_hidden_layers_are_linear_norm_activation_dropout():
    layer = MLP(3, [4], out_features=1, dropout=0.5, normalization="batch")
    assert [type(m) for m in layer] == [Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout, Linear]
    tower = DeepTower(2, num_fields=3, embedding_dim=4, hidden=[4], dropout=0.5, normalization="batch")
    assert [type(m) for m in tower.rest] == [nn.BatchNorm1d, nn.ReLU, nn.Dropout, Linear]


def test_dropout_acts_in_training_only():
    tower = DeepTower(0, num_fields=3, embedding_dim=4, hidden=[64], dropout=0.5)
    dense, embeddings = torch.empty(8, 0), torch.randn(8, 3, 4)
    assert not torch.equal(tower(dense, embeddings), tower(dense, embeddings))
    tower.eval()
    torch.testing.assert_close(tower(dense, embeddings), tower(dense, embeddings), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP(3, [4], activation="rely"), r"model.activation must be one of \['gelu', 'relu', .*got 'rely'"),
        (
            lambda: MLP(3, [4], normalization="layer"),
            r"model.normalization must be one of \['none', 'batch', 'local'\]",
        ),
        (lambda: LocalNormalization(0), "width of a layer must be at least 1, got 0"),
        (lambda: LocalNormalization(2, guard=0), r"LocalNormalization.guard must be in \(0, 1\], got 0"),
        (lambda: MLP(3, [4], dropout=1.0), r"model.dropout must be in \[0, 1\), got 1.0"),
        (lambda: MLP(3, [4, 0]), "width of a hidden layer must be at least 1, got 0"),
        (
            lambda: DeepTower(1, num_fields=1, embedding_dim=1, hidden=[]),
            "model.hidden must name .* at least one layer",
        ),
        (lambda: DeepTower(1, num_fields=1, embedding_dim=1, hidden=[-1]), "at least 1, got -1"),
        (lambda: CrossNetwork(3, num_layers=0), "model.num_cross_layers must be at least 1, got 0"),
        (lambda: CrossNetworkV2(3, num_layers=0), "model.num_cross_layers must be at least 1, got 0"),
        (lambda: CrossNetworkV2(3, 1, rank=0), "model.rank must be at least 1, or null for the full matrix, got 0"),
        (lambda: DotInteraction(1), "at least two vectors, got 1"),
    ],
)
def test_layers_given_a_wrong_argument_say_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_local_normalization_divides_by_the_mean_of_the_batch():
    layer = LocalNormalization(2)
    with torch.no_grad():
        layer.alpha.copy_(torch.tensor([2.0, 3.0]))
        layer.beta.copy_(torch.tensor([0.5, -1.0]))
    x = torch.tensor([[1.0, -2.0], [3.0, -6.0]])
    expected = torch.stack([2 * x[:, 0] / 2 - 0.5, 3 * x[:, 1] / -4 + 1], 1)  # equation 10
    torch.testing.assert_close(layer(x), expected)


def test_local_normalization_evaluates_by_the_running_mean_and_takes_one_example():
    layer = LocalNormalization(1, momentum=0.5)
    for value in (2.0, 4.0, 8.0):
        layer(torch.full((3, 1), value))
    layer.eval()
    running = ((2 + 4) / 2 + 8) / 2  # plain until 1 / momentum batches, then a moving average
    torch.testing.assert_close(layer.running_mean, torch.tensor([running]))
    torch.testing.assert_close(layer(torch.tensor([[11.0]])), torch.tensor([[11 / running - 1]]))


def test_local_normalization_near_a_mean_of_zero_stays_bounded_and_continuous():
    guard = 0.5
    layer = LocalNormalization(1, guard=guard).double()
    spread = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    for shift in (0.0, 1e-9, -1e-9, 0.1, -0.1):
        y = layer(spread + shift)
        assert y.isfinite().all()
        assert (y + 1).abs().max() <= (1 + abs(shift)) / guard + 1e-9  # the magnitude's mean is 1 here
    torch.testing.assert_close(layer(spread), -torch.ones_like(spread))
    border = guard  # mean = shift, mean magnitude = 1: the two branches meet
    below, above = layer(spread + border - 1e-7), layer(spread + border + 1e-7)
    torch.testing.assert_close(below, above, rtol=0, atol=1e-5)


def test_local_normalization_of_a_constant_zero_gives_finite_gradients():
    layer = LocalNormalization(3)
    x = torch.zeros(4, 3, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert layer.alpha.grad.isfinite().all()
