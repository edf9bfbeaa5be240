"""Updates that are applied here and owed elsewhere: a rule's step on local rows, with the step itself accumulated.

Works for rules whose state is a sum, so that updates of several workers can be added: SGD, Adagrad, RowWiseAdagrad. The
arithmetic is that of :mod:`lightning_recsys.optim.compiled`: who subtracts what one step accumulated from the same rows
gets the same bits as who takes the step. Where only one worker updates a row between two visits to its server, any rule
will do (:func:`apply_and_owe`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: U distinct rows of an update, C rows at hand, D embedding dim.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.compiled.loops import AHEAD, compile_inline, compile_rule, prefetch_row
from lightning_recsys.optim.compiled import Update, sum_of_squares, with_decay
from lightning_recsys.optim.row_optimizers import RowAdagrad, RowOptimizer, RowSGD, RowWiseAdagrad
from lightning_recsys.sync.clocks import ClockRule, advance

# Columns of a row's clocks, int32 [C, 4]: together they are in one cache line.
START = 0  # its server's clock when it was fetched
CURRENT = 1  # that, and the updates made since
UNSENT = 2  # updates that the server does not have yet
HELD = 3  # whether there is a copy at all, where a cache shares its index with others
CLOCK_COLUMNS = 4


def is_additive(optimizer: RowOptimizer) -> bool:
    """Whether a rule's steps can be added to those of other workers."""
    return type(optimizer) in (RowSGD, RowAdagrad, RowWiseAdagrad)  # a subclass may have another rule


def check_additive(optimizer: RowOptimizer) -> None:
    """Refuse a rule whose steps cannot be added to those of other workers.

    Raises:
        TypeError: names the rule and those that can.
    """
    if not is_additive(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} cannot train cached rows (strategy=het): its state is no sum"
            " of what each update adds, so updates of several workers cannot be added up. Use RowSGD, RowAdagrad or"
            " RowWiseAdagrad (optim=sgd, adagrad or rowwise_adagrad in the recipes), or algorithm=hybrid, which takes"
            " every rule, as its workers go in step."
        )


@compile_rule
def _tick(clocks, row):  # noqa: ANN001, ANN202
    """Count an update of a row; both counts stay at their end."""
    clocks[row, CURRENT] = advance(clocks[row, CURRENT], 1)
    clocks[row, UNSENT] = advance(clocks[row, UNSENT], 1)


@compile_inline
def _step(row, grads, i, scale, clocks, rows, owed):  # noqa: ANN001, ANN202
    """Take a step against a gradient; what is owed is set where the row owed nothing until now."""
    if clocks[row, UNSENT] > 1:
        for d in range(rows.shape[1]):
            change = scale * grads[i, d]
            rows[row, d] -= change
            owed[row, d] += change
    else:
        for d in range(rows.shape[1]):
            change = scale * grads[i, d]
            rows[row, d] -= change
            owed[row, d] = change


@compile_rule
def _sgd(touched, grads, clocks, rows, owed, lr):  # noqa: ANN001, ANN202
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        coming = touched[min(i + AHEAD, last)]
        prefetch_row(clocks, coming)
        prefetch_row(rows, coming)
        prefetch_row(owed, coming)
        row = touched[i]
        _tick(clocks, row)
        _step(row, grads, i, lr, clocks, rows, owed)


@compile_rule
def _adagrad(touched, grads, clocks, rows, sums, owed, owed_sums, lr, eps):  # noqa: ANN001, ANN202
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        coming = touched[min(i + AHEAD, last)]
        prefetch_row(clocks, coming)
        for array in (rows, sums, owed, owed_sums):
            prefetch_row(array, coming)
        row = touched[i]
        _tick(clocks, row)
        if clocks[row, UNSENT] == 1:
            for d in range(rows.shape[1]):
                owed[row, d] = np.float32(0)
                owed_sums[row, d] = np.float32(0)
        for d in range(rows.shape[1]):
            gradient = grads[i, d]
            square = gradient * gradient
            total = sums[row, d] + square
            change = lr * gradient / (np.sqrt(total) + eps)
            sums[row, d] = total
            owed_sums[row, d] += square
            rows[row, d] -= change
            owed[row, d] += change


@compile_rule
def _rowwise_adagrad(touched, grads, clocks, rows, sums, owed, owed_sums, lr, eps):  # noqa: ANN001, ANN202
    last = touched.shape[0] - 1
    for i in range(touched.shape[0]):
        coming = touched[min(i + AHEAD, last)]
        prefetch_row(clocks, coming)
        prefetch_row(rows, coming)
        prefetch_row(owed, coming)
        row = touched[i]
        square = sum_of_squares(grads, i) / np.float32(rows.shape[1])
        total = sums[row] + square
        sums[row] = total
        scale = lr / (np.sqrt(total) + eps)
        _tick(clocks, row)
        owed_sums[row] = owed_sums[row] + square if clocks[row, UNSENT] > 1 else square
        _step(row, grads, i, scale, clocks, rows, owed)


_LOOPS: dict[type[RowOptimizer], Update] = {RowSGD: _sgd, RowAdagrad: _adagrad, RowWiseAdagrad: _rowwise_adagrad}


def apply_and_accumulate(
    optimizer: RowOptimizer,
    touched: NDArray[np.int64],
    grads: Tensor,
    rows: Tensor,
    state: dict[str, Tensor],
    owed: dict[str, Tensor],
    clocks: NDArray[np.int32],
    *,
    lr: float,
) -> None:
    r"""Update rows and state in place, and add the update to what is owed.

    .. math:: w \leftarrow w - u, \quad U \leftarrow U + u, \qquad h \leftarrow h + v, \quad S \leftarrow S + v

    where :math:`u` and :math:`v` are the rule's step for the rows and state at hand.

    Args:
        optimizer: A rule that :func:`check_additive` accepts.
        touched: Row indices, int64 ``[U]``, no duplicates.
        grads: Summed gradients, float32 ``[U, D]``, on the rows' device.
        rows: All rows, float32 ``[C, D]``.
        state: All rows' state, as :meth:`RowOptimizer.initial_state` makes it.
        owed: ``weight`` and every state: :math:`U` and :math:`S`, shaped as ``rows`` and ``state``.
        clocks: Of all rows, int32 ``[C, 4]``: both ``CURRENT`` and ``UNSENT`` count the update, up to ``MAX_CLOCK``.
            Where a row owed nothing :math:`U` and :math:`S` are not read but set.
        lr: Step size of this update.
    """
    if rows.device.type == "cpu":
        arrays = [tensor.numpy() for tensor in (rows, *state.values(), *owed.values())]
        loop = _LOOPS[type(optimizer)]
        numbers = (lr, optimizer.eps) if isinstance(optimizer, RowAdagrad) else (lr,)
        sums = with_decay(optimizer, touched, grads.numpy(), rows) if optimizer.weight_decay else grads.numpy()
        loop(touched, sums, clocks, *arrays, *(np.float32(number) for number in numbers))
        return
    where = torch.from_numpy(touched).to(rows.device)
    clean = torch.from_numpy(touched[clocks[touched, UNSENT] == 0]).to(rows.device)
    grads = optimizer.decayed(rows.index_select(0, where), grads)
    changes = _changes(optimizer, grads, {name: x.index_select(0, where) for name, x in state.items()}, lr)
    _tick_all(clocks, touched)
    for name, change in changes.items():
        owed[name].index_fill_(0, clean, 0.0).index_add_(0, where, change)
        if name == "weight":
            rows.index_add_(0, where, change, alpha=-1)
        else:
            state[name].index_add_(0, where, change)


def apply_and_owe(
    optimizer: RowOptimizer,
    touched: NDArray[np.int64],
    grads: Tensor,
    rows: Tensor,
    state: dict[str, Tensor],
    owed: dict[str, Tensor],
    clocks: NDArray[np.int32],
    *,
    lr: float,
    step: int,
) -> None:
    """Do as :func:`apply_and_accumulate` for any rule, where nobody else updates a row until its server has the update.

    What is owed is then the difference that the rule has made, whatever it does: the server comes to the same row and
    state, but for rounding.

    Args:
        optimizer: The update rule of the rows.
        touched: Row indices, int64 ``[U]``, no duplicates.
        grads: Summed gradients, float32 ``[U, D]``, on the rows' device.
        rows: All rows, float32 ``[C, D]``.
        state: The optimizer state of all rows, by name.
        owed: ``weight`` and every state, shaped as ``rows`` and ``state``.
        clocks: Clocks of all rows, int32 ``[C, 4]``.
        lr: Step size of this update.
        step: Updates that the table has seen, this one included.
    """
    where = torch.from_numpy(touched).to(rows.device)
    clean = torch.from_numpy(touched[clocks[touched, UNSENT] == 0]).to(rows.device)
    rows_UD = rows.index_select(0, where)
    states = {name: tensor.index_select(0, where) for name, tensor in state.items()}
    before = {name: tensor.clone() for name, tensor in {"weight": rows_UD, **states}.items()}
    optimizer.update_(rows_UD, optimizer.decayed(rows_UD, grads), states, lr=lr, step=step)
    for name, after in {"weight": rows_UD, **states}.items():
        change = before[name] - after if name == "weight" else after - before[name]
        owed[name].index_fill_(0, clean, 0.0).index_add_(0, where, change)
        (rows if name == "weight" else state[name]).index_copy_(0, where, after)
    _tick_all(clocks, touched)


def _tick_all(clocks: NDArray[np.int32], touched: NDArray[np.int64]) -> None:
    for column in (CURRENT, UNSENT):
        clocks[touched, column] = ClockRule.after_update(clocks[touched, column])


def _changes(optimizer: RowOptimizer, grads_UD: Tensor, state: dict[str, Tensor], lr: float) -> dict[str, Tensor]:
    """The step of each row, and what it adds to the row's state."""
    if not isinstance(optimizer, RowAdagrad):
        return {"weight": grads_UD * lr}
    squares = grads_UD.square()
    if isinstance(optimizer, RowWiseAdagrad):
        squares = squares.mean(1)
    roots = (state["sum"] + squares).sqrt_().add_(optimizer.eps)
    if isinstance(optimizer, RowWiseAdagrad):
        return {"weight": grads_UD * (lr / roots).unsqueeze(1), "sum": squares}
    return {"weight": grads_UD * lr / roots, "sum": squares}
