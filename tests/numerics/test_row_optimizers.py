"""Row update rules against torch.optim where it has them, and against scalar formulas in double precision."""

import math

import numpy as np
import pytest
import torch

from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowSGD, RowWiseAdagrad
from lightning_recsys.optim.compiled import apply_update

# float32 against float32 (or double): a handful of roundings a step on values of order 0.1.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
STEPS, ROWS, DIM = 6, 5, 3


def run(optimizer: RowOptimizer, rows: torch.Tensor, grads: list[torch.Tensor], *, compiled: bool) -> torch.Tensor:
    rows = rows.clone()
    state = optimizer.initial_state(rows)
    for step, grad in enumerate(grads, start=1):
        if compiled:
            touched = np.arange(ROWS)
            apply_update(optimizer, touched, grad.numpy(), rows, state, lr=optimizer.lr, step=step)
        else:
            optimizer.update_(rows, optimizer.decayed(rows, grad), state, lr=optimizer.lr, step=step)
    return rows


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, DIM, generator=generator) * 0.1
    return rows, [torch.randn(ROWS, DIM, generator=generator) for _ in range(STEPS)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [
        (RowSGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            RowAdagrad(lr=0.1, eps=1e-3, initial_accumulator=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=0.5),
        ),
        (
            RowAdam(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3),
        ),
        (RowSGD(lr=0.1, weight_decay=0.7), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.7)),
        (
            RowAdagrad(lr=0.1, eps=1e-3, weight_decay=0.7),
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, weight_decay=0.7),
        ),
        (
            RowAdam(lr=0.1, eps=1e-3, weight_decay=0.7),
            lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-3, weight_decay=0.7),
        ),
    ],
    ids=["sgd", "adagrad", "adam", "sgd_decay", "adagrad_decay", "adam_decay"],
)
def test_rule_when_all_rows_are_touched_then_equals_torch_optim(problem, optimizer, reference, compiled):
    rows, grads = problem
    parameter = torch.nn.Parameter(rows.clone())
    torch_optimizer = reference([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        torch_optimizer.step()
    torch.testing.assert_close(run(optimizer, rows, grads, compiled=compiled), parameter.data, **TOLERANCE)


def scalar_rowwise_adagrad(rows, grads, *, rate, eps, start, decay):
    rows, sums = rows.tolist(), [start] * len(rows)
    for grad in grads:
        for r, g in enumerate(grad.tolist()):
            g = [x + decay * w for x, w in zip(g, rows[r], strict=True)]
            sums[r] += sum(x * x for x in g) / len(g)
            rows[r] = [w - rate * x / (math.sqrt(sums[r]) + eps) for w, x in zip(rows[r], g, strict=True)]
    return torch.tensor(rows)


def scalar_ftrl(rows, grads, *, alpha, beta, l1, l2, decay):
    """McMahan et al. 2013, Algorithm 1, from the z that the initial weight implies."""
    rows = rows.tolist()
    z = [[-w * (beta / alpha + l2) - math.copysign(l1, w) for w in row] for row in rows]
    n = [[0.0] * DIM for _ in rows]
    for grad in grads:
        for r, row in enumerate(grad.tolist()):
            for d, g in enumerate(row):
                g += decay * rows[r][d]
                sigma = (math.sqrt(n[r][d] + g * g) - math.sqrt(n[r][d])) / alpha
                z[r][d] += g - sigma * rows[r][d]
                n[r][d] += g * g
                inside = abs(z[r][d]) <= l1
                curvature = (beta + math.sqrt(n[r][d])) / alpha + l2
                rows[r][d] = 0.0 if inside else -(z[r][d] - math.copysign(l1, z[r][d])) / curvature
    return torch.tensor(rows)


@pytest.mark.parametrize("decay", [0.0, 0.7])
@pytest.mark.parametrize("compiled", [False, True])
def test_rowwise_adagrad_then_equals_the_scalar_formula(problem, compiled, decay):
    rows, grads = problem
    optimizer = RowWiseAdagrad(lr=0.1, eps=1e-3, initial_accumulator=0.5, weight_decay=decay)
    expected = scalar_rowwise_adagrad(rows, grads, rate=0.1, eps=1e-3, start=0.5, decay=decay)
    torch.testing.assert_close(run(optimizer, rows, grads, compiled=compiled), expected, **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("l1", "l2", "decay"), [(0.0, 0.0, 0.0), (0.0, 0.5, 0.0), (1.5, 0.1, 0.0), (0.5, 0.1, 0.7)])
def test_ftrl_then_equals_the_scalar_formula(problem, compiled, l1, l2, decay):
    rows, grads = problem
    result = run(RowFTRL(lr=0.1, beta=0.7, l1=l1, l2=l2, weight_decay=decay), rows, grads, compiled=compiled)
    expected = scalar_ftrl(rows, grads, alpha=0.1, beta=0.7, l1=l1, l2=l2, decay=decay)
    torch.testing.assert_close(result, expected, **TOLERANCE)
    if l1:
        assert (result == 0).any()
        assert (result != 0).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_ftrl_when_the_first_gradient_is_zero_then_rows_stay_as_drawn(problem, compiled):
    rows, _ = problem
    result = run(RowFTRL(lr=0.1, l1=0.3, l2=0.2), rows, [torch.zeros(ROWS, DIM)], compiled=compiled)
    torch.testing.assert_close(result, rows, **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rule", [RowSGD, RowAdagrad, RowWiseAdagrad, RowAdam, RowFTRL])
def test_rule_when_a_schedule_reaches_zero_then_rows_stay(problem, rule, compiled):
    rows, grads = problem
    optimizer, moved = rule(), rows.clone()
    state = optimizer.initial_state(moved)
    if compiled:
        apply_update(optimizer, np.arange(ROWS), grads[0].numpy(), moved, state, lr=0.0, step=1)
    else:
        optimizer.update_(moved, grads[0], state, lr=0.0, step=1)
    assert torch.equal(moved, rows)


@pytest.mark.parametrize("rule", [RowSGD, RowAdagrad, RowWiseAdagrad, RowAdam, RowFTRL])
def test_weight_decay_when_a_batch_touches_some_rows_then_the_others_stay_and_gradients_are_not_written_to(
    problem, rule
):
    rows, grads = problem
    optimizer, moved, touched = rule(weight_decay=0.5), rows.clone(), np.array([3, 1])
    state = optimizer.initial_state(moved)
    given = grads[0][:2].numpy().copy()
    given.setflags(write=False)  # as what came over a wire is
    apply_update(optimizer, touched, given, moved, state, lr=optimizer.lr, step=1)
    assert torch.equal(moved[[0, 2, 4]], rows[[0, 2, 4]])
    assert not torch.isclose(moved[[1, 3]], rows[[1, 3]]).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowAdam(weight_decay=-0.1), "RowAdam.weight_decay must be a finite number at least 0, got -0.1"),
        (lambda: RowAdam(decay_all_rows=True), "RowAdam.decay_all_rows needs a weight_decay above 0"),
        (lambda: RowSGD(lr=0.0), r"RowSGD.lr must be a finite number above 0, got 0.0"),
        (lambda: RowAdagrad(eps=-1.0), "RowAdagrad.eps must be a finite number at least 0"),
        (lambda: RowWiseAdagrad(initial_accumulator=math.nan), "RowWiseAdagrad.initial_accumulator"),
        (lambda: RowAdam(beta1=1.0), r"RowAdam.beta1 must be a finite number at least 0 and below 1, got 1.0"),
        (lambda: RowFTRL(l1=-0.1), "RowFTRL.l1"),
    ],
)
def test_wrong_hyperparameter_then_it_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_compiled_update_when_the_rule_is_a_subclass_then_refused(problem):
    class AdamL2(RowAdam):
        pass

    with pytest.raises(TypeError, match="no compiled rule for AdamL2"):
        run(AdamL2(), *problem, compiled=True)
