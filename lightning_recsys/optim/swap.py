"""SWAP, samples weighted according to period: accumulators forget a share of themselves once a period.

For rows the discount is lazy: a row catches up on the periods that it has missed when it is next updated, so a period's
end costs nothing. For dense parameters it is a hook before the optimizer's step.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: U distinct rows of an update, R rows of a table, D embedding dim.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.optim.row_optimizers import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowWiseAdagrad

PERIOD = "period"  # the state that says in which period a row was last updated, float32 [R]: exact up to 2^24


@dataclass(frozen=True)
class RowSWAP(RowOptimizer):
    r"""A row rule whose accumulator is discounted once every ``period`` updates of the table.

    .. math::
        \lambda_t = \lambda_0 \text{ if } t \bmod T = 0 \text{ else } 1, \qquad
        v \leftarrow \max(\lambda_t v, v_0) + g^2

    Within a period all samples count alike; each period's end makes the older ones count less. ``t`` counts the updates
    of the whole table, by all workers, and not those of a row. A row that was last updated in a later period than the
    present one, as after a resume with a longer ``period``, counts as one of the present: it keeps its accumulator, and
    is discounted from the next period's end on. (Where workers update without a lock, one that is late by a period's
    end may so have a row discounted twice.) Adagrad's and rowwise Adagrad's sum does not fall below
    its start value :math:`v_0`. Adam discounts its second moment. FTRL discounts :math:`n` and rescales :math:`z` so
    that the weights stay as they are; at a learning rate of 0 it changes nothing, and the discount waits.

    Args:
        inner: The rule: ``RowAdagrad``, ``RowWiseAdagrad``, ``RowAdam`` or ``RowFTRL``.
        period: ``T``, updates of the table from one discount to the next, at least 1.
        discount: :math:`\lambda_0`, the share that stays, in ``(0, 1]``.

    Raises:
        ValueError: ``period`` or ``discount`` is out of range.
        TypeError: ``inner`` has no accumulator to discount, or is wrapped already.

    Reference: Liu and Zhao, Asynchronous SGD for Extreme-Scale Recommender Systems, Algorithm 2 (Adagrad-SWAP).
    Differs from the paper: the floor, without which rows of few samples would come to steps of any size; Adam and FTRL,
    which the paper names as possible.
    """

    lr: float = field(init=False, default=1.0)
    weight_decay: float = field(init=False, default=0.0)
    decay_all_rows: bool = field(init=False, default=False)
    inner: RowOptimizer = field(kw_only=True)
    period: int = field(kw_only=True)
    discount: float = field(kw_only=True)

    def __post_init__(self) -> None:
        if type(self.inner) not in (RowAdagrad, RowWiseAdagrad, RowAdam, RowFTRL):  # a subclass may have other state
            raise TypeError(
                f"RowSWAP discounts what a rule accumulates, and {type(self.inner).__name__} is none of RowAdagrad,"
                " RowWiseAdagrad, RowAdam, RowFTRL."
            )
        check_period(self.period, self.discount)
        for name in ("lr", "weight_decay", "decay_all_rows"):
            object.__setattr__(self, name, getattr(self.inner, name))
        super().__post_init__()

    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:  # noqa: D102 - inherited
        return {**self.inner.initial_state(rows), PERIOD: torch.zeros_like(rows[:, 0])}

    def update_(  # noqa: D102 - inherited
        self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None:
        own = {name: values for name, values in state.items() if name != PERIOD}
        if _stands_still(self.inner, lr):
            return
        current = step // self.period
        factors_U = self.discount ** (current - state[PERIOD]).clamp_(min=0)
        state[PERIOD].fill_(current)
        discount_state_(self.inner, own, factors_U, lr=lr)
        self.inner.update_(rows_UD, grads_UD, own, lr=lr, step=step)


def discount_state_(rule: RowOptimizer, state: dict[str, Tensor], factors_U: Tensor, *, lr: float) -> None:
    """Discount the state of rows in place, each by its own factor; their weights stay as they are.

    Args:
        rule: One that :class:`RowSWAP` takes.
        state: The rows' state, ``[U]`` or ``[U, D]``, as the rule names it.
        factors_U: What stays of each row's accumulator, in ``(0, 1]``.
        lr: The step size at which FTRL's weights are to stay, above 0.
    """
    match rule:
        case RowAdagrad(initial_accumulator=start):
            state["sum"].mul_(_like(factors_U, state["sum"])).clamp_(min=start)
        case RowAdam():
            state["exp_avg_sq"].mul_(_like(factors_U, state["exp_avg_sq"]))
        case RowFTRL(beta=beta, l1=l1, l2=l2):
            accumulator, linear = state["accumulator"], state["linear"]
            before = (accumulator.sqrt() + beta) / lr + l2
            accumulator.mul_(_like(factors_U, accumulator))
            after = (accumulator.sqrt() + beta) / lr + l2
            inside = linear.clamp(-l1, l1)  # z - sgn(z) l1 is scaled; within the band the weight is 0 and stays it
            ratio = torch.where(before > 0, after / before, torch.ones_like(before))
            linear.sub_(inside).mul_(ratio).add_(inside)


def catch_up(
    optimizer: RowSWAP, touched: NDArray[np.int64], state: dict[str, Tensor], *, lr: float, step: int
) -> dict[str, Tensor]:
    """Discount touched rows of whole tables for the periods that they missed; returns the state of the inner rule.

    Args:
        optimizer: The rule.
        touched: Row indices, int64 ``[U]``, no duplicates.
        state: The whole table's state.
        lr: As in :func:`discount_state_`.
        step: Updates that the table has seen, the coming one included.
    """
    own = {name: values for name, values in state.items() if name != PERIOD}
    if _stands_still(optimizer.inner, lr):
        return own
    periods, current = state[PERIOD].numpy(), float(step // optimizer.period)
    elsewhere = np.empty_like(touched)
    count = _elsewhere(touched, periods, np.float32(current), elsewhere)
    if count:
        moved = torch.from_numpy(elsewhere[:count])
        factors = optimizer.discount ** (current - state[PERIOD][moved]).clamp_(min=0)
        rows = {name: values[moved] for name, values in own.items()}
        discount_state_(optimizer.inner, rows, factors, lr=lr)
        for name, values in rows.items():
            own[name][moved] = values
        state[PERIOD][moved] = current
    return own


@compile_loop
def _elsewhere(touched, periods, current, elsewhere):  # noqa: ANN001, ANN202
    """The touched rows whose last update was in another period; mostly none, and one pass finds that out."""
    count = 0
    for row in touched:
        if periods[row] != current:
            elsewhere[count] = row
            count += 1
    return count


def swap(
    params: Iterable[Any], inner: Callable[[Iterable[Any]], Optimizer], *, period: int, discount: float
) -> Optimizer:
    r"""An optimizer of dense parameters whose accumulators are discounted before every ``period``-th step.

    The eager form of :class:`RowSWAP`, as a hook before the step. What comes back is ``inner``'s own optimizer, for
    Lightning, schedulers and checkpoints; it counts its own steps, which its state holds.

    Args:
        params: Parameters or parameter groups.
        inner: Makes ``torch.optim.Adagrad``, ``Adam`` or ``AdamW`` of them.
        period: ``T``, steps from one discount to the next, at least 1.
        discount: :math:`\lambda_0`, the share that stays, in ``(0, 1]``.

    Raises:
        ValueError: ``period`` or ``discount`` is out of range.
        TypeError: the optimizer has no accumulator to discount, or divides by another one (``amsgrad``).

    Reference: Liu and Zhao, Asynchronous SGD for Extreme-Scale Recommender Systems, Algorithm 2.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = swap([weight], torch.optim.Adagrad, period=2, discount=0.5)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(1)
    ...     _ = optimizer.step()
    >>> optimizer.state[weight]["sum"]  # 1 after the first step, 1 / 2 + 1 after the second
    tensor([1.5000])
    """
    check_period(period, discount)
    optimizer = inner(params)
    if type(optimizer) not in _ACCUMULATORS:
        raise TypeError(
            f"swap discounts what an optimizer accumulates, and {type(optimizer).__name__} is none of"
            f" {sorted(known.__name__ for known in _ACCUMULATORS)}."
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise TypeError(
            f"swap discounts exp_avg_sq, and {type(optimizer).__name__}(amsgrad=True) divides by its largest value so"
            " far, which would forget nothing. Leave amsgrad out."
        )
    optimizer.register_step_pre_hook(_Discount(period, discount))
    return optimizer


@dataclass(frozen=True)
class _Discount:
    """The hook; an object of a module, so that the optimizer can be copied and pickled."""

    period: int
    discount: float

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = _ACCUMULATORS[type(optimizer)]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state and parameter.grad is not None and (int(state["step"]) + 1) % self.period == 0:
                    state[name].mul_(self.discount).clamp_(min=group.get("initial_accumulator_value", 0.0))


_ACCUMULATORS: dict[type[Optimizer], str] = {
    torch.optim.Adagrad: "sum",
    torch.optim.Adam: "exp_avg_sq",
    torch.optim.AdamW: "exp_avg_sq",
}


def _stands_still(rule: RowOptimizer, lr: float) -> bool:
    """Whether an update changes nothing: FTRL's weights have no value at a learning rate of 0."""
    return isinstance(rule, RowFTRL) and lr == 0


def check_period(period: int, discount: float) -> None:
    """Refuse a period below 1 and a discount outside ``(0, 1]``.

    Raises:
        ValueError: names the number.
    """
    if period < 1 or period != int(period):
        raise ValueError(f"SWAP's period must be a whole number of updates, at least 1, got {period}.")
    if not 0 < discount <= 1:
        raise ValueError(f"SWAP's discount must be in (0, 1], got {discount}. 1 forgets nothing.")


def _like(factors_U: Tensor, values: Tensor) -> Tensor:
    return factors_U if values.dim() == 1 else factors_U.unsqueeze(1)
