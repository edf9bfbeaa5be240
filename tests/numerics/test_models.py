"""Every model against its paper's formula in scalar Python loops, forward and through one update of every parameter."""

import itertools
import math

import pytest
import torch
from sklearn.linear_model import LogisticRegression as SklearnLogisticRegression
from torch import nn

from lightning_recsys.embeddings import PoolingType, SparseFeatures
from lightning_recsys.models import DCN, DLRM, DCNv2, DeepFM, FactorizationMachine, LogisticRegression, WideDeep
from lightning_recsys.optim import RowSGD

FIELDS = {"user": 4, "item": 5, "genres": 3}
DIM = 3
DENSE = [[0.5, -1.2], [0.0, 0.3], [-0.7, 2.0], [1.1, 0.4]]
# For each example the ids of each field: single ids, several, a repeated one, none.
BAGS = [
    {"user": [3], "item": [0], "genres": [0, 2]},
    {"user": [1], "item": [4], "genres": []},
    {"user": [3], "item": [2], "genres": [1, 1, 0]},
    {"user": [0], "item": [0], "genres": [2]},
]
State = dict  # parameter name -> nested lists of floats


def sparse_features():
    values = [i for field in FIELDS for bags in BAGS for i in bags[field]]
    lengths = [len(bags[field]) for field in FIELDS for bags in BAGS]
    return SparseFeatures(tuple(FIELDS), torch.tensor(values), lengths=torch.tensor(lengths))


# --- The papers' formulas, for one example ----------------------------------------------------------------------------


def pool(state: State, prefix, bags, pooling):
    """One vector per field, from the tables under ``prefix``."""
    vectors = []
    for field in FIELDS:
        rows = [state[f"{prefix}.embedding_bags.{field}.weight"][i] for i in bags[field]]
        share = 1 / len(rows) if pooling == "mean" and rows else 1.0
        width = len(state[f"{prefix}.embedding_bags.{field}.weight"][0])
        vectors.append([sum(row[d] * share for row in rows) for d in range(width)])
    return vectors


def linear(x, weight, bias):
    """``weight`` is [outputs][inputs], as in torch.nn.Linear."""
    return [b + sum(w * v for w, v in zip(row, x, strict=True)) for row, b in zip(weight, bias, strict=True)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def relu(x):
    return [max(v, 0.0) for v in x]


def perceptron(state: State, prefix, x, *, last_is_linear):
    numbers = sorted(int(k.split(".")[-2]) for k in state if k.startswith(prefix + ".") and k.endswith(".weight"))
    for i in numbers:
        x = linear(x, state[f"{prefix}.{i}.weight"], state[f"{prefix}.{i}.bias"])
        if not (last_is_linear and i == numbers[-1]):
            x = relu(x)
    return x


def tower(state: State, inputs):
    """The deep network on all inputs, embeddings first; its first layer's weights lie as [field][dim][output]."""
    rows = [row for block in state["deep.first.weight"] for row in block] + state.get("deep.first.dense_weight", [])
    weight = [list(column) for column in zip(*rows, strict=True)]
    hidden = relu(linear(inputs, weight, state["deep.first.bias"]))
    return perceptron(state, "deep.rest", hidden, last_is_linear=True)[0]


def first_order(state: State, dense, bags, pooling):
    fields = sum(vector[0] for vector in pool(state, "first_order.embeddings", bags, pooling))
    bias = state.get("first_order.bias", [0.0])[0]
    return bias + fields + dot(dense, state.get("first_order.dense_weight", []))


def second_order(state: State, dense, bags, pooling):
    vectors = pool(state, "embeddings", bags, pooling)
    vectors += [[x * v for v in vector] for x, vector in zip(dense, state.get("second_order.vectors", []), strict=True)]
    return sum(dot(a, b) for a, b in itertools.combinations(vectors, 2))


def inputs_of(state: State, dense, bags, pooling):
    return [v for vector in pool(state, "embeddings", bags, pooling) for v in vector] + dense


def lr(state, dense, bags, pooling):
    return first_order(state, dense, bags, pooling)


def fm(state, dense, bags, pooling):
    return first_order(state, dense, bags, pooling) + second_order(state, dense, bags, pooling)


def wide_deep(state, dense, bags, pooling):
    return first_order(state, dense, bags, pooling) + tower(state, inputs_of(state, dense, bags, pooling))


def deepfm(state, dense, bags, pooling):
    return fm(state, dense, bags, pooling) + tower(state, inputs_of(state, dense, bags, pooling))


def dcn(state, dense, bags, pooling):
    x0 = x = inputs_of(state, dense, bags, pooling)
    for w, b in zip(state["cross.weight"], state["cross.bias"], strict=True):
        s = dot(x, w)
        x = [x0[k] * s + b[k] + x[k] for k in range(len(x))]
    return dot(x, state["cross_output.weight"][0]) + tower(state, x0)


def dcn_v2(state, dense, bags, pooling):
    x0 = x = inputs_of(state, dense, bags, pooling)
    size = range(len(x0))
    for layer in itertools.takewhile(lambda n: f"cross.layers.{n}.bias" in state, itertools.count()):
        prefix = f"cross.layers.{layer}"
        if f"{prefix}.weight" in state:
            weight = state[f"{prefix}.weight"]
        else:
            down, up = state[f"{prefix}.down"], state[f"{prefix}.up"]
            weight = [[sum(down[i][r] * up[r][k] for r in range(len(up))) for k in size] for i in size]
        bias = state[f"{prefix}.bias"]
        x = [x0[k] * (sum(x[i] * weight[i][k] for i in size) + bias[k]) + x[k] for k in size]
    if "cross_output.weight" in state:
        return dot(x, state["cross_output.weight"][0]) + tower(state, x0)
    return tower(state, x)


def dlrm(state, dense, bags, pooling):
    vectors = pool(state, "embeddings", bags, pooling)
    bottom = perceptron(state, "bottom", dense, last_is_linear=False) if dense else []
    vectors = [bottom] * bool(dense) + vectors
    pairs = [dot(vectors[i], vectors[j]) for i in range(len(vectors)) for j in range(i)]
    return perceptron(state, "top", bottom + pairs, last_is_linear=True)[0]


def dlrm_concatenation(state, dense, bags, pooling):
    bottom = perceptron(state, "bottom", dense, last_is_linear=False) if dense else []
    vectors = itertools.chain(*pool(state, "embeddings", bags, pooling))
    return perceptron(state, "top", [*bottom, *vectors], last_is_linear=True)[0]


MODELS = {
    "lr": (LogisticRegression, {}, lr),
    "fm": (FactorizationMachine, {"embedding_dim": DIM}, fm),
    "wide_deep": (WideDeep, {"embedding_dim": DIM, "hidden": [5, 4]}, wide_deep),
    "deepfm": (DeepFM, {"embedding_dim": DIM, "hidden": [5, 4]}, deepfm),
    "deepfm_one_layer": (DeepFM, {"embedding_dim": DIM, "hidden": [5]}, deepfm),
    "dcn": (DCN, {"embedding_dim": DIM, "hidden": [5, 4], "num_cross_layers": 3}, dcn),
    "dcn_v2": (DCNv2, {"embedding_dim": DIM, "hidden": [5, 4], "num_cross_layers": 2}, dcn_v2),
    "dcn_v2_low_rank": (DCNv2, {"embedding_dim": DIM, "hidden": [5], "num_cross_layers": 2, "rank": 2}, dcn_v2),
    "dcn_v2_stacked": (
        DCNv2,
        {"embedding_dim": DIM, "hidden": [5], "num_cross_layers": 2, "structure": "stacked"},
        dcn_v2,
    ),
    "dlrm": (DLRM, {"embedding_dim": DIM, "bottom_hidden": [6, 4], "top_hidden": [5, 4]}, dlrm),
    "dlrm_concatenation": (
        DLRM,
        {"embedding_dim": DIM, "bottom_hidden": [4], "top_hidden": [5], "interaction": "concatenation"},
        dlrm_concatenation,
    ),
    "dlrm_shallow": (DLRM, {"embedding_dim": DIM, "bottom_hidden": [], "top_hidden": []}, dlrm),
}


def build(name, num_dense, pooling="sum"):
    """The model with no parameter at a special value, so that no term of a formula can hide."""
    model_class, arguments, _ = MODELS[name]
    model = model_class(
        num_dense,
        FIELDS,
        row_optimizer=RowSGD(lr=1.0),
        kernel="torch",
        pooling=PoolingType(pooling),
        **arguments,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


def state_of(model: nn.Module) -> State:
    return {name: value.double().tolist() for name, value in model.state_dict().items()}


def expected_logits(name, state, num_dense, pooling="sum"):
    formula = MODELS[name][2]
    return [formula(state, dense[:num_dense], bags, pooling) for dense, bags in zip(DENSE, BAGS, strict=True)]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logits_on_single_and_multi_hot_fields_equal_the_papers_formula(name, num_dense, pooling):
    model = build(name, num_dense, pooling)
    logits = model(torch.tensor(DENSE)[:, :num_dense], sparse_features())
    expected = expected_logits(name, state_of(model), num_dense, pooling)
    assert logits.shape == (len(BAGS),)
    # float32 against float64 on a few dozen terms of order 1
    torch.testing.assert_close(logits.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def central_difference(name, state, num_dense, weights, key, index, step=1e-5):
    """Slope of the weighted sum of logits along one number of ``state``."""
    values = []
    for sign in (1, -1):
        *outer, last = index
        row = state[key]
        for i in outer:
            row = row[i]
        kept, row[last] = row[last], row[last] + sign * step
        values.append(dot(weights, expected_logits(name, state, num_dense)))
        row[last] = kept
    return (values[0] - values[1]) / (2 * step)


@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_all_parameters_and_rows_equal_differences_of_the_formula(name, num_dense):
    model = build(name, num_dense)
    before = state_of(model)
    weights = [0.7, -1.0, 0.4, 1.3]
    torch.dot(model(torch.tensor(DENSE)[:, :num_dense], sparse_features()), torch.tensor(weights)).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
    # Rows are trained in the backward pass: with SGD at rate 1 the step is the gradient.
    gradients |= {
        key: torch.tensor(before[key]) - value
        for key, value in model.state_dict().items()
        if ".embedding_bags." in key and key.endswith(".weight")
    }
    assert len(gradients) >= len(FIELDS) + 1
    for key, gradient in gradients.items():
        flat = gradient.abs().flatten().argmax()  # the largest: a wrong sign or factor shows
        index = [int(i) for i in torch.unravel_index(flat, gradient.shape)]
        slope = central_difference(name, before, num_dense, weights, key, index)
        assert gradient[tuple(index)].item() == pytest.approx(slope, rel=1e-3, abs=1e-4), (key, index)
        assert slope != 0, f"{key} does not influence the logits"


def test_logistic_regression_when_trained_to_the_optimum_predicts_as_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(high, (400,), generator=generator) for high in (3, 4)], 1)
    dense = torch.randn(400, 2, generator=generator)
    score = torch.tensor([-1.0, 0.5, 1.0])[ids[:, 0]] + 0.8 * dense[:, 0] - 0.5 * dense[:, 1]
    labels = (torch.rand(400, generator=generator) < score.sigmoid()).float()
    sparse = SparseFeatures.from_ids(("a", "b"), ids)
    model = LogisticRegression(2, {"a": 3, "b": 4}, row_optimizer=RowSGD(lr=2.0), kernel="torch")
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels).backward()
        optimizer.step()
    one_hot = torch.cat([nn.functional.one_hot(ids[:, 0], 3), nn.functional.one_hot(ids[:, 1], 4), dense], 1).numpy()
    reference = SklearnLogisticRegression(C=math.inf, tol=1e-8, max_iter=1000).fit(one_hot, labels.numpy())
    expected = torch.from_numpy(reference.predict_proba(one_hot)[:, 1]).float()
    # Both stop near the same unique optimum of the probabilities (weights are not unique with one-hot columns).
    torch.testing.assert_close(model(dense, sparse).sigmoid().detach(), expected, rtol=0, atol=1e-3)
