"""SWAP, samples weighted according to period: accumulators forget a share of themselves once a period.

For rows the discount is lazy: a row catches up on the periods that it has missed when it is next updated, so a period's
end costs nothing. For dense parameters it is a hook before the optimizer's step; servers that train the dense part make
a :class:`RowSWAP` of it. A period is a number of updates, a time, or a day of the data.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: U distinct rows of an update, R rows of a table, D embedding dim.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.optim.row_optimizers import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowWiseAdagrad

PERIOD = "period"  # the state that says in which period a row was last updated, by its number, float32 [R]
GROUP_STEP, GROUP_PERIOD = (
    "swap_step",
    "swap_period",
)  # in a group of a dense optimizer: its steps, the last one's period
SHORTEST_SECONDS = 60  # of a period of time; there are numbers for such periods until 2043
_ORIGIN = 1577836800.0  # 1 January 2020, UTC, from which periods of time are counted
# The numbers of periods of three kinds, of which no two share any, and 0 is none: a state does not say what its period
# was. Periods of updates have that of the first update behind them, so that a run can go on with other ones.
_UPDATES, _SECONDS, _DAYS = (1.0, float("inf")), (-(2.0**24), -(2.0**22)), (-(2.0**22), 0.0)


@dataclass(frozen=True, kw_only=True)
class Periods:
    """In which period an update falls; one of the three is given.

    Args:
        period: Updates in a period.
        seconds: Seconds in a period, counted from the same instant on all machines.
        day: The day of the data that this run trains on: its number, from 1, or its date. All updates fall in it.
    """

    period: int | None = None
    seconds: float | None = None
    day: int | None = None

    def at(self, step: int) -> int:
        """The number of the period of the update with this number, which is made now."""
        if self.period is not None:
            return int(step // self.period * self.period + _UPDATES[0])
        if self.seconds is not None:
            return int((time.time() - _ORIGIN) // self.seconds + _SECONDS[0])
        assert self.day is not None
        return int(self.day + _DAYS[0])

    def missed(self, last: Tensor, current: int) -> Tensor:
        """Periods that ended since those of ``last``; none since one of another kind, or 0, where none is known."""
        first, stop = _UPDATES if self.period is not None else _DAYS if self.seconds is None else _SECONDS
        missed = (current - last).clamp_(min=0).masked_fill_((last < first) | (last >= stop), 0)
        # float32 rounds numbers above 2^24, so a little less than a whole period is one: good for a million periods.
        return missed if self.period is None else (missed / self.period + 0.25).floor_()


def day_number(day: int | str | date) -> int:
    """The number of a day of the data; consecutive dates have consecutive numbers.

    Raises:
        ValueError: it is below 1 or very large (20260131 is no date), or no date such as ``2026-01-31``.

    >>> day_number("2026-02-01") - day_number(date(2026, 1, 31)), day_number(17)
    (1, 17)
    >>> day_number("2026-13-01")
    Traceback (most recent call last):
    ValueError: SWAP's day must be a whole number from 1, or a date such as 2026-01-31, got 2026-13-01.
    """
    try:
        number = date.fromisoformat(day) if isinstance(day, str) else day
    except ValueError:
        number = 0
    number = number.toordinal() if isinstance(number, date) else number
    if not 1 <= number < -_DAYS[0] or number != int(number):
        raise ValueError(f"SWAP's day must be a whole number from 1, or a date such as 2026-01-31, got {day}.")
    return number


@dataclass(frozen=True)
class RowSWAP(RowOptimizer):
    r"""A row rule whose accumulator is discounted once a period: every so many updates of the table, or by time.

    .. math::
        \lambda_t = \lambda_0 \text{ if } t \bmod T = 0 \text{ else } 1, \qquad
        v \leftarrow \max(\lambda_t v, v_0) + g^2

    Within a period all samples count alike; each period's end makes the older ones count less. ``t`` counts the updates
    of the whole table, by all workers, and not those of a row. A row that was last updated in a later period than the
    present one, as after a resume with a longer ``period``, counts as one of the present: it keeps its accumulator, and
    is discounted from the next period's end on; with a shorter one it is discounted for those that have passed since
    its own began. A row whose last period was of another kind, as where a run by days goes on from one by updates,
    counts as one of the present, too. (Where workers update without a lock, one that is late by a period's end may so
    have a row discounted twice.) Adagrad's and rowwise Adagrad's sum does not fall below its start value :math:`v_0`.
    Adam discounts its second moment. FTRL discounts :math:`n` and rescales :math:`z` so that the weights stay as they
    are; at a learning rate of 0 it changes nothing, and the discount waits.

    Args:
        inner: The rule: ``RowAdagrad``, ``RowWiseAdagrad``, ``RowAdam`` or ``RowFTRL``.
        discount: :math:`\lambda_0`, the share that stays, in ``(0, 1]``.
        period: ``T``, updates of the table from one discount to the next, at least 1.
        seconds: In place of ``period``: seconds from one discount to the next, at least 60; 86 400 for a discount at
            midnight, UTC. The clock of the process that has the rows counts.
        day: In place of ``period``, for incremental training: the day of the data that this run trains on, its number
            from 1 or its date. A run that goes on from the checkpoint of an earlier day discounts once for each day
            between the two.

    Raises:
        ValueError: a number is out of range, or there is not one of ``period``, ``seconds`` and ``day``.
        TypeError: ``inner`` has no accumulator to discount, or is wrapped already.

    Reference: Liu and Zhao, Asynchronous SGD for Extreme-Scale Recommender Systems, Algorithm 2 (Adagrad-SWAP).
    Differs from the paper: the floor, without which rows of few samples would come to steps of any size; Adam and FTRL,
    which the paper names as possible.
    """

    lr: float = field(init=False, default=1.0)
    weight_decay: float = field(init=False, default=0.0)
    decay_all_rows: bool = field(init=False, default=False)
    inner: RowOptimizer = field(kw_only=True)
    discount: float = field(kw_only=True)
    period: int | None = field(default=None, kw_only=True)
    seconds: float | None = field(default=None, kw_only=True)
    day: int | str | date | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.inner) not in (RowAdagrad, RowWiseAdagrad, RowAdam, RowFTRL):  # a subclass may have other state
            raise TypeError(
                f"RowSWAP discounts what a rule accumulates, and {type(self.inner).__name__} is none of RowAdagrad,"
                " RowWiseAdagrad, RowAdam, RowFTRL."
            )
        periods = check_periods(self.discount, period=self.period, seconds=self.seconds, day=self.day)
        object.__setattr__(self, "day", periods.day)
        for name in ("lr", "weight_decay", "decay_all_rows"):
            object.__setattr__(self, name, getattr(self.inner, name))
        super().__post_init__()

    @property
    def periods(self) -> Periods:
        """In which period an update falls."""
        return Periods(period=self.period, seconds=self.seconds, day=None if self.day is None else day_number(self.day))

    def factors(self, last: Tensor, current: int) -> Tensor:
        """What stays of accumulators that were last updated in the periods ``last``."""
        return self.discount ** self.periods.missed(last, current)

    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:  # noqa: D102 - inherited
        return {**self.inner.initial_state(rows), PERIOD: torch.zeros_like(rows[:, 0])}

    def update_(  # noqa: D102 - inherited
        self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None:
        own = {name: values for name, values in state.items() if name != PERIOD}
        if stands_still(self.inner, lr):
            return
        current = self.periods.at(step)
        factors_U = self.factors(state[PERIOD], current)
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
        optimizer: The update rule, with its periods.
        touched: Row indices, int64 ``[U]``, no duplicates.
        state: The optimizer state of the whole table, by name.
        lr: Learning rate of the coming update, as in :func:`discount_state_`.
        step: Updates that the table has seen, the coming one included.
    """
    own = {name: values for name, values in state.items() if name != PERIOD}
    if stands_still(optimizer.inner, lr):
        return own
    periods, current = state[PERIOD].numpy(), optimizer.periods.at(step)
    elsewhere = np.empty_like(touched)
    count = _elsewhere(touched, periods, np.float32(current), elsewhere)
    if count:
        moved = torch.from_numpy(elsewhere[:count])
        factors = optimizer.factors(state[PERIOD][moved], current)
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
    params: Iterable[Any],
    inner: Callable[[Iterable[Any]], Optimizer],
    *,
    discount: float,
    period: int | None = None,
    seconds: float | None = None,
    day: int | str | date | None = None,
) -> Optimizer:
    r"""An optimizer of dense parameters whose accumulators are discounted once a period.

    The eager form of :class:`RowSWAP`, as a hook before the step. What comes back is ``inner``'s own optimizer, for
    Lightning, schedulers and checkpoints; each group counts its own steps, which the optimizer's state dict holds. With
    ``strategy=async_ps``, whose servers train the dense part, they are the steps of all workers.

    Args:
        params: Parameters or parameter groups.
        inner: Makes ``torch.optim.Adagrad``, ``Adam`` or ``AdamW`` of them.
        discount: :math:`\lambda_0`, the share that stays, in ``(0, 1]``.
        period: ``T``, steps from one discount to the next, at least 1.
        seconds: In place of ``period``, as for :class:`RowSWAP`.
        day: In place of ``period``, as for :class:`RowSWAP`.

    Raises:
        ValueError: a number is out of range, or there is not one of ``period``, ``seconds`` and ``day``.
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
    periods = check_periods(discount, period=period, seconds=seconds, day=day)
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
    optimizer.register_step_pre_hook(Discount(periods, discount))
    return optimizer


@dataclass(frozen=True)
class Discount:
    """The hook of :func:`swap`; an object of a module, so that the optimizer can be copied and pickled.

    Args:
        periods: Says in which period a step falls.
        discount: The share of the accumulators that stays.
    """

    periods: Periods
    discount: float

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step that comes, and discount where a period has ended since the last one."""
        name = _ACCUMULATORS[type(optimizer)]
        for group in optimizer.param_groups:
            step, last = self.position(optimizer, group)
            current = self.periods.at(step + 1)
            group[GROUP_STEP], group[GROUP_PERIOD] = step + 1, current
            missed = int(self.periods.missed(torch.tensor([last]), current))
            for parameter in group["params"] if missed else ():
                if state := optimizer.state.get(parameter):
                    start = group.get("initial_accumulator_value", 0.0)
                    state[name].mul_(self.discount**missed).clamp_(min=start)

    def position(self, optimizer: Optimizer, group: dict[str, Any]) -> tuple[int, int]:
        """The steps of a group so far, and the period of the last one; 0 where none is known."""
        states = (optimizer.state.get(parameter) or {} for parameter in group["params"])
        step = group.get(GROUP_STEP, max((int(state["step"]) for state in states if "step" in state), default=0))
        return step, group.get(GROUP_PERIOD, 0)


def discount_of(optimizer: Optimizer) -> Discount | None:
    """The hook of :func:`swap`, where the optimizer has it."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, Discount)), None)


_ACCUMULATORS: dict[type[Optimizer], str] = {
    torch.optim.Adagrad: "sum",
    torch.optim.Adam: "exp_avg_sq",
    torch.optim.AdamW: "exp_avg_sq",
}


def stands_still(rule: RowOptimizer, lr: float) -> bool:
    """Whether an update changes nothing: FTRL's weights have no value at a learning rate of 0."""
    return isinstance(rule, RowFTRL) and lr == 0


def check_periods(
    discount: float, *, period: int | None, seconds: float | None, day: int | str | date | None
) -> Periods:
    """Refuse numbers that are out of range; the periods otherwise.

    Raises:
        ValueError: names the number, or there is not one of ``period``, ``seconds`` and ``day``.
    """
    given = {name: x for name, x in {"period": period, "seconds": seconds, "day": day}.items() if x is not None}
    if len(given) != 1:
        got = ", ".join(f"{name}={value}" for name, value in given.items()) or "none"
        raise ValueError(f"SWAP takes one of period (updates), seconds and day (of the data), got {got}.")
    if period is not None and (period < 1 or period != int(period)):
        raise ValueError(f"SWAP's period must be a whole number of updates, at least 1, got {period}.")
    if seconds is not None and not SHORTEST_SECONDS <= seconds < float("inf"):
        raise ValueError(f"SWAP's seconds must be a finite number, at least {SHORTEST_SECONDS}, got {seconds}.")
    if not 0 < discount <= 1:
        raise ValueError(f"SWAP's discount must be in (0, 1], got {discount}. 1 forgets nothing.")
    return Periods(period=period, seconds=seconds, day=None if day is None else day_number(day))


def _like(factors_U: Tensor, values: Tensor) -> Tensor:
    return factors_U if values.dim() == 1 else factors_U.unsqueeze(1)
