"""The rules of :mod:`lightning_recsys.optim.row_optimizers` as compiled loops over row indices.

Each loop reads and writes a touched row and its state once, where torch would gather, update and scatter in several
passes, and asks for rows ahead of time: tables are larger than caches, and most of a loop's time would be waiting.
Single threaded and without the GIL: one thread per worker is how this package trains.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from lightning_recsys.compiled.bfloat16 import as_loop_array, noise_of, number_at, put_number
from lightning_recsys.compiled.loops import AHEAD, compile_loop, compile_rule, prefetch, prefetch_row
from lightning_recsys.optim.row_optimizers import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowSGD, RowWiseAdagrad
from lightning_recsys.optim.swap import RowSWAP, catch_up


@compile_rule
def _sgd(touched, grads, update, rows, lr):  # noqa: ANN001, ANN202
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        prefetch_row(rows, touched[min(i + AHEAD, last)])
        row = touched[i]
        noise = noise_of(rows, row, update)
        for d in range(rows.shape[1]):
            put_number(rows, row, d, number_at(rows, row, d) - lr * grads[i, d], noise)


@compile_rule
def _adagrad(touched, grads, update, rows, sums, lr, eps):  # noqa: ANN001, ANN202
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        coming = touched[min(i + AHEAD, last)]
        prefetch_row(rows, coming)
        prefetch_row(sums, coming)
        row = touched[i]
        noise = noise_of(rows, row, update)
        for d in range(rows.shape[1]):
            gradient = grads[i, d]
            total = sums[row, d] + gradient * gradient
            sums[row, d] = total
            value = number_at(rows, row, d) - lr * gradient / (np.sqrt(total) + eps)
            put_number(rows, row, d, value, noise)


@compile_loop
def sum_of_squares(grads, i):  # noqa: ANN001, ANN201
    """The sum of squares of a row of a float32 ``[U, D]``."""
    squares = np.float32(0)
    for d in range(grads.shape[1]):
        squares += grads[i, d] * grads[i, d]
    return squares


@compile_rule
def _rowwise_adagrad(touched, grads, update, rows, sums, lr, eps):  # noqa: ANN001, ANN202
    dim, last = rows.shape[1], touched.shape[0] - 1
    for i in range(touched.shape[0]):
        coming = touched[min(i + AHEAD, last)]
        prefetch_row(rows, coming)
        prefetch(sums, coming)
        row = touched[i]
        total = sums[row] + sum_of_squares(grads, i) / np.float32(dim)
        sums[row] = total
        scale = lr / (np.sqrt(total) + eps)
        noise = noise_of(rows, row, update)
        for d in range(dim):
            put_number(rows, row, d, number_at(rows, row, d) - scale * grads[i, d], noise)


@compile_loop
def _adam(touched, grads, update, rows, exp_avg, exp_avg_sq, rate, root_correction, beta1, gain1, beta2, gain2, eps):  # noqa: ANN001, ANN202
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        coming = touched[min(i + AHEAD, last)]
        prefetch_row(rows, coming)
        prefetch_row(exp_avg, coming)
        prefetch_row(exp_avg_sq, coming)
        row = touched[i]
        noise = noise_of(rows, row, update)
        for d in range(rows.shape[1]):
            gradient = grads[i, d]
            first = beta1 * exp_avg[row, d] + gain1 * gradient
            second = beta2 * exp_avg_sq[row, d] + gain2 * gradient * gradient
            exp_avg[row, d] = first
            exp_avg_sq[row, d] = second
            value = number_at(rows, row, d) - rate * first / (np.sqrt(second) / root_correction + eps)
            put_number(rows, row, d, value, noise)


@compile_loop
def _ftrl(touched, grads, update, rows, accumulator, linear, lr, beta, l1, l2):  # noqa: ANN001, ANN202
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        coming = touched[min(i + AHEAD, last)]
        prefetch_row(rows, coming)
        prefetch_row(accumulator, coming)
        prefetch_row(linear, coming)
        row = touched[i]
        noise = noise_of(rows, row, update)
        for d in range(rows.shape[1]):
            gradient = grads[i, d]
            old = accumulator[row, d]
            new = old + gradient * gradient
            root = np.sqrt(new)
            z = linear[row, d] + gradient - (root - np.sqrt(old)) / lr * number_at(rows, row, d)
            accumulator[row, d] = new
            linear[row, d] = z
            value = np.float32(0) if abs(z) <= l1 else -(z - np.copysign(l1, z)) / ((beta + root) / lr + l2)
            put_number(rows, row, d, value, noise)


@compile_rule
def _add_decay(touched, grads, rows, decay, out):  # noqa: ANN001, ANN202
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        prefetch_row(rows, touched[min(i + AHEAD, last)])
        row = touched[i]
        for d in range(rows.shape[1]):
            out[i, d] = grads[i, d] + decay * number_at(rows, row, d)


def with_decay(optimizer: RowOptimizer, touched: np.ndarray, grads: np.ndarray, rows: Tensor) -> np.ndarray:
    """The gradients of rows with their weight decay; the given ones where there is none.

    One pass ahead of the rule's own, which then finds the rows in the cache. So no rule pays for it that has none.

    Args:
        optimizer: The update rule of the rows.
        touched: Row indices, int64 ``[U]``.
        grads: Summed gradients, float32 ``[U, D]``.
        rows: The whole table, float32 or bfloat16 ``[R, D]``, on the CPU.
    """
    if not optimizer.weight_decay:
        return grads
    decayed = np.empty_like(grads)
    _add_decay(touched, grads, as_loop_array(rows), np.float32(optimizer.weight_decay), decayed)
    return decayed


Update = Callable[..., None]

COMPILED_RULES: frozenset[type[RowOptimizer]] = frozenset(
    (RowSGD, RowAdagrad, RowWiseAdagrad, RowAdam, RowFTRL, RowSWAP)
)
"""The rules that have a loop here: these classes themselves. What a subclass overrides, no loop would call."""


def apply_update(
    optimizer: RowOptimizer,
    touched: np.ndarray,
    grads: np.ndarray,
    rows: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    step: int,
) -> None:
    """Update the rows named by ``touched`` in place, with their state; all rows where the rule decays all of them.

    Args:
        optimizer: The rule, one of :data:`COMPILED_RULES`.
        touched: Row indices, int64 ``[U]``, no duplicates.
        grads: Summed gradients, float32 ``[U, D]``.
        rows: The whole table, float32 or bfloat16 ``[R, D]``, on the CPU.
        state: The whole table's state, as :meth:`RowOptimizer.initial_state` makes it.
        lr: Step size of this update.
        step: Updates that the table has seen, this one included. How bfloat16 rows are rounded follows from it.

    Raises:
        TypeError: the rule is none of :data:`COMPILED_RULES`.
    """
    if type(optimizer) not in COMPILED_RULES:
        raise TypeError(f"no compiled rule for {type(optimizer).__name__}; use kernel='torch'.")
    if optimizer.decay_all_rows:
        spread = np.zeros(tuple(rows.shape), dtype=np.float32)
        spread[touched] = grads
        touched, grads = np.arange(len(rows)), spread
    grads = with_decay(optimizer, touched, grads, rows)
    if isinstance(optimizer, RowSWAP):
        state, optimizer = catch_up(optimizer, touched, state, lr=lr, step=step), optimizer.inner
    arrays = [as_loop_array(rows), *(tensor.numpy() for tensor in state.values())]
    loop: Update
    numbers: tuple[float, ...]
    match optimizer:
        case RowSGD():
            loop, numbers = _sgd, (lr,)
        case RowWiseAdagrad():
            loop, numbers = _rowwise_adagrad, (lr, optimizer.eps)
        case RowAdagrad():
            loop, numbers = _adagrad, (lr, optimizer.eps)
        case RowAdam(beta1=beta1, beta2=beta2, eps=eps):
            # 1 - beta is formed here, in double: in float32 it would carry only four digits.
            rate, root_correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
            loop, numbers = _adam, (rate, root_correction, beta1, 1 - beta1, beta2, 1 - beta2, eps)
        case RowFTRL() if lr == 0:
            return
        case RowFTRL(beta=beta, l1=l1, l2=l2):
            loop, numbers = _ftrl, (lr, beta, l1, l2)
    loop(touched, grads, step, *arrays, *(np.float32(number) for number in numbers))
