"""SWAP, samples weighted according to period: accumulators forget a share of themselves once a period.

For rows the discount is lazy: a row catches up on the periods that it has missed when it is next updated, so a period's
end costs nothing. For dense parameters it is a hook before the optimizer's step; servers that train the dense part make
a :class:`RowSWAP` of it. A period is a number of updates, a time, or a day of the data.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: U distinct rows of an update, R rows of a table, D embedding dim.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from lightning_recsys.compiled.atomics import atomic_add, compare_and_swap
from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.optim.row_optimizers import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowWiseAdagrad

PERIOD = "period"  # the state that says in which period a row was last updated, by its number, float32 [R]
GROUP_STEP, GROUP_PERIOD = (
    "swap_step",
    "swap_period",
)  # in a group of a dense optimizer: its steps, the last one's period
SHORTEST_SECONDS = 60  # of a period of time: each begins in a minute of its own
_ORIGIN = 1735689600.0  # 1 January 2025, UTC, from which minutes are counted; there are numbers for them until 2040
# The numbers of periods of three kinds, of which no two share any, and 0 is none: a state does not say what its period
# was. Periods of updates have that of the first update behind them, and periods of time twice the minute in which they
# begin (float32 has even numbers alone there), so that a run can go on with longer or shorter ones. Numbers from -2^24
# to -2^22 stand in earlier checkpoints, and count as of another kind.
_UPDATES, _SECONDS, _DAYS = (1.0, float("inf")), (-(2.0**25), -(2.0**24)), (-(2.0**22), 0.0)


class WallClock:
    """The machine's clock, but for one thing: where that is set back, this one stands still until it is there again.

    Attributes:
        latest: The latest time that was read, in seconds since 1970, UTC.
    """

    def __init__(self) -> None:
        self.latest = 0.0

    def read(self) -> float:
        """Seconds since 1970, UTC, and never fewer than before."""
        self.latest = max(self.latest, time.time())
        return self.latest


CLOCK = WallClock()
"""The clock by which periods of time begin, one for all tables and optimizers of a process: no period goes back."""


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
            return self._number(self._present())
        assert self.day is not None
        return int(self.day + _DAYS[0])

    def missed(self, last: Tensor, current: int) -> Tensor:
        """Periods that ended since those of ``last``; none since one of another kind, or 0, where none is known."""
        first, stop = _UPDATES if self.period is not None else _DAYS if self.seconds is None else _SECONDS
        if self.seconds is not None:
            missed = self._count(torch.tensor(float(current))) - self._count(last)
        else:
            missed = current - last
        missed = missed.clamp_(min=0).masked_fill_((last < first) | (last >= stop), 0)
        # float32 rounds numbers above 2^24, so a little less than a whole period is one: good for a million periods.
        return missed if self.period is None else (missed / self.period + 0.25).floor_()

    def _present(self) -> float:
        """Periods of time that have ended by now."""
        assert self.seconds is not None
        return (CLOCK.read() - _ORIGIN) // self.seconds

    def _number(self, count: float) -> int:
        """The number of the period of time that follows so many others."""
        assert self.seconds is not None
        return int(_SECONDS[0] + 2 * (count * self.seconds // 60))

    def _count(self, numbers: Tensor) -> Tensor:
        """Periods of time before the first one that begins in these minutes or later, float32."""
        assert self.seconds is not None
        minutes = (numbers.double() - _SECONDS[0]) / 2
        # A period begins in the minute, and perhaps not at its start: the quotient is less than one period below a
        # whole number, but for rounding.
        return (minutes * 60 / self.seconds - 1e-6).ceil_().float()

    def is_ahead(self, last: Tensor, current: int) -> Tensor:
        """Whether updates of this run have begun later periods already than that of an update which comes late.

        Later numbers that no update of this run can have written are those of an earlier run, whose periods had another
        length or were of another kind, or whose clock was wrong: these are not ahead.

        Args:
            last: Numbers of the periods of the latest updates, of any dtype.
            current: Number of the late update's period.
        """
        ahead = last > current
        if not bool(ahead.any()):  # nearly always
            return ahead
        if self.day is not None:
            return torch.zeros_like(ahead)  # all updates of a run are of one day
        if self.seconds is not None:
            # The clock is read again: whoever wrote the number has read it before. Another process may have seen the
            # next period begin, and then the clock set back, while this one has not read it in between.
            present = self._present()
            begun = (last <= self._number(present)) | (last == self._number(present + 1))
            return ahead & (last >= _SECONDS[0]) & (last < _SECONDS[1]) & begun
        # An update with number n leaves at most n + 1. So an earlier run's number is above that of the present period
        # only where the present period has a length that does not divide it.
        assert self.period is not None
        begun = ((last.double() - 1) / self.period).round() * self.period + 1
        return ahead & (last >= _UPDATES[0]) & (begun.float() == last)

    def claim(self, touched: NDArray[np.int64], numbers: Tensor, current: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Bring what an update touches to its period, and tell which of it the caller is now the one to discount.

        The invariant: a period's number never goes back within a run, and each step forward is made by one caller,
        which discounts for the periods that lie between. So the number is written first, by compare and swap, and the
        discount comes afterwards, when others may be training the same already. A process that is killed between the
        two leaves what it claimed without this discount, and nobody makes it up.

        Args:
            touched: Places of what the update touches, int64 ``[U]``, no duplicates.
            numbers: Numbers of all periods, float32 ``[R]``, perhaps mapped by other processes too; written to.
            current: Number of the update's period.

        Yields:
            Places, int64, and the periods that ended since theirs, float32, at least 1; a place comes twice where
            another worker has brought it to an earlier period meanwhile.
        """
        array, left = numbers.numpy(), touched
        while True:
            places, last = np.empty_like(left), np.empty(len(left), dtype=np.float32)
            count = _elsewhere(left, array, np.float32(current), places, last)
            if not count:
                return
            behind = ~self.is_ahead(torch.from_numpy(last[:count]), current).numpy()
            places, last = places[:count][behind], last[:count][behind]
            won = np.empty(len(places), dtype=np.bool_)
            _claim(places, last, array, np.float32(current), won)
            missed = self.missed(torch.from_numpy(last[won]), current)
            if bool((moved := missed >= 1).any()):
                yield torch.from_numpy(places[won])[moved], missed[moved]
            left = places[~won]


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
    counts as one of the present, too. Where workers update a row without a lock, one of them discounts it at each
    period's end; a worker that is late leaves the row in the later period in which it finds it. Adagrad's and rowwise
    Adagrad's sum does not fall below its start value :math:`v_0`. Adam discounts its second moment. FTRL discounts
    :math:`n` and rescales :math:`z` so that the weights stay as they are; at a learning rate of 0 it changes
    nothing, and the discount waits.

    Args:
        inner: The rule: ``RowAdagrad``, ``RowWiseAdagrad``, ``RowAdam`` or ``RowFTRL``.
        discount: :math:`\lambda_0`, the share that stays, in ``(0, 1]``.
        period: ``T``, updates of the table from one discount to the next, at least 1.
        seconds: In place of ``period``: seconds from one discount to the next, at least 60; 86 400 for a discount at
            midnight, UTC. The clock of the process that has the rows counts; where it is set back, the present period
            goes on until the clock is there again.
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
        """The factors that discount accumulators which were last updated in the periods ``last``."""
        return self.discount ** self.periods.missed(last, current)

    def claim(self, touched: NDArray[np.int64], periods: Tensor, *, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Bring rows to the period of an update, and tell which the caller is to discount: :meth:`Periods.claim`.

        Behind a server the journal puts back period and accumulator together, so a kill between the two loses nothing.

        Args:
            touched: Numbers of the rows that the update touches, int64 ``[U]``, no duplicates.
            periods: Periods of all rows, float32 ``[R]``, perhaps mapped by other processes too; written to.
            step: Number of the update.

        Yields:
            Rows whose state the caller has to discount, int64, and what stays of it, float32; twice where another
            worker has brought a row to an earlier period meanwhile.
        """
        for rows, missed in self.periods.claim(touched, periods, self.periods.at(step)):
            yield rows, self.discount**missed

    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:  # noqa: D102 - inherited
        return {**self.inner.initial_state(rows), PERIOD: torch.zeros_like(rows[:, 0])}

    def update_(  # noqa: D102 - inherited
        self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None:
        own = {name: values for name, values in state.items() if name != PERIOD}
        if stands_still(self.inner, lr):
            return
        current, last_U = self.periods.at(step), state[PERIOD]
        factors_U = self.factors(last_U, current)
        last_U.masked_fill_(~self.periods.is_ahead(last_U, current), current)
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
    for moved, factors in optimizer.claim(touched, state[PERIOD], step=step):
        rows = {name: values[moved] for name, values in own.items()}
        discount_state_(optimizer.inner, rows, factors, lr=lr)
        for name, values in rows.items():
            own[name][moved] = values
    return own


@compile_loop
def _elsewhere(touched, periods, current, elsewhere, last):  # noqa: ANN001, ANN202
    """The touched rows of other periods, and these; mostly none, and one pass finds that out."""
    count = 0
    for row in touched:
        period = periods[row]
        if period != current:
            elsewhere[count], last[count] = row, period
            count += 1
    return count


@compile_loop
def _claim(rows, last, periods, current, won):  # noqa: ANN001, ANN202
    """Bring each row from its last period to the present one, and tell where nobody else has changed it meanwhile."""
    for i in range(rows.shape[0]):
        won[i] = compare_and_swap(periods, rows[i], last[i], current) == last[i]


@compile_loop
def _next(steps, position):  # noqa: ANN001, ANN202
    """Count a step, and tell its number, which no other worker has."""
    return atomic_add(steps, position, 1) + 1


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
    ``strategy=async_ps``, whose servers train the dense part, they are the steps of all workers, and with several
    workers in a trainer of ``strategy=shadowsync`` those of the trainer's workers together.

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

    A process that trains alone counts in the parameter groups. Workers that share the accumulators share the counts as
    well: the number of a step is unique among them, and who brings a group to a later period is the one to discount it.

    Args:
        periods: Says in which period a step falls.
        discount: The share of the accumulators that stays.
        counts: What workers share: for each parameter group its steps, int64, and the number of the last one's period,
            float32, by the names that a group has for them. Empty where nothing is shared.
    """

    periods: Periods
    discount: float
    counts: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step that comes, and discount where a period has ended since the last one."""
        for index, group in enumerate(optimizer.param_groups):
            shares = index < len(self.counts.get(GROUP_STEP, ()))  # a group that was added since is each worker's own
            for missed in self._count_together(index) if shares else self._count_alone(optimizer, group):
                self._forget(optimizer, group, self.discount**missed)

    def _count_alone(self, optimizer: Optimizer, group: dict[str, Any]) -> Iterator[int]:
        """Count a step of a group, and tell the periods that ended since the last one, if there are any."""
        step, last = self.position(optimizer, group)
        current = self.periods.at(step + 1)
        group[GROUP_STEP] = step + 1
        if last != current and not bool(self.periods.is_ahead(before := torch.tensor([last]), current)):
            group[GROUP_PERIOD] = current
            if missed := int(self.periods.missed(before, current)):
                yield missed

    def _count_together(self, index: int) -> Iterator[int]:
        """Count a step that no other worker has counted, and tell the periods that this worker is to discount for."""
        current = self.periods.at(_next(self.counts[GROUP_STEP].numpy(), index))
        for _, missed in self.periods.claim(np.array([index]), self.counts[GROUP_PERIOD], current):
            yield int(missed)

    @staticmethod
    def _forget(optimizer: Optimizer, group: dict[str, Any], factor: float) -> None:
        name, start = _ACCUMULATORS[type(optimizer)], group.get("initial_accumulator_value", 0.0)
        for parameter in group["params"]:
            if state := optimizer.state.get(parameter):
                state[name].mul_(factor).clamp_(min=start)

    def share(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Begin to count in tensors, which the caller replaces by those that all workers map; returns the dict of them.

        The groups have the counts again in state dicts. A state dict that is loaded brings state and counts of its own.

        Args:
            optimizer: The one whose hook this is.
        """
        if not self.counts:
            optimizer.register_state_dict_pre_hook(self._tell)
            optimizer.register_load_state_dict_post_hook(lambda _: self.counts.clear())
        self._tell(optimizer)
        found = [self.position(optimizer, group) for group in optimizer.param_groups]
        self.counts[GROUP_STEP] = torch.tensor([step for step, _ in found])
        self.counts[GROUP_PERIOD] = torch.tensor([float(period) for _, period in found])
        return self.counts

    def _tell(self, optimizer: Optimizer) -> None:
        """Write the counts that are shared into the groups."""
        pairs = zip(*(self.counts[x].tolist() for x in (GROUP_STEP, GROUP_PERIOD)), strict=True) if self.counts else ()
        for group, (step, period) in zip(optimizer.param_groups, pairs, strict=False):
            group[GROUP_STEP], group[GROUP_PERIOD] = step, int(period)

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
