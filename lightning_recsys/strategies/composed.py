"""A strategy by its three parts: who trains the dense part, where rows live, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_recsys.strategies.common.settings import require_kind, require_one_of, require_whole
from lightning_recsys.strategies.parts import DensePart, Free, InStep, Pace
from lightning_recsys.strategies.rows.cached import CachedRows
from lightning_recsys.strategies.rows.served import ServedRows
from lightning_recsys.strategies.served import ServedStrategy

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy

DenseName = Literal["ddp", "easgd", "ma", "bmuf", "groups", "servers", "fields"]
RowsName = Literal["local", "plain", "cached", "fields"]
PaceName = Literal["in_step", "free"]

_FREE = {
    "easgd": "replicas train on their own between rounds",
    "ma": "replicas train on their own between rounds",
    "bmuf": "replicas train on their own between rounds",
    "groups": "nets train their group's replica without waiting for each other",
    "servers": "each worker pushes its gradients when it has them",
}
"""The dense parts whose workers wait for nobody, and why."""


class ComposedStrategy(ServedStrategy):
    """A dense part, rows on servers and a pace, whichever they are; the named strategies are such ones.

    Args:
        dense: Who trains the dense part.
        rows: How workers read and train the rows: ``plain``, ``cached``, or an object of a class for it. Default: as
            the paper of the dense part has them.
        pace: Whether workers' updates of a row belong together. Default: where workers are in step and rows cached.
        min_workers: Where workers run free, some may die as long as so many are left.
        max_replacements: How many of them are replaced by other processes, in all, where the dense part
            ``takes_replacements``. Default: none.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.served.ServedStrategy`.

    Raises:
        ValueError: an argument is out of range, or two parts do not go together; names both, and the reason.
        TypeError: an argument is of another type.

    >>> from lightning_recsys.strategies import CachedRows, Replicas
    >>> strategy = ComposedStrategy(dense=Replicas(num_trainers=2, algorithm="ma"), rows=CachedRows(staleness=100))
    >>> strategy.asynchronous, strategy.rows.staleness
    (True, 100)
    """

    strategy_name = "composed"

    def __init__(
        self,
        *,
        dense: DensePart,
        rows: ServedRows | Literal["plain", "cached"] | None = None,
        pace: Pace | None = None,
        min_workers: int = 1,
        max_replacements: int = 0,
        **kwargs: Any,
    ) -> None:
        require_kind("dense", dense, DensePart, "a dense part, such as Replicas(algorithm='easgd')")
        require_kind("pace", pace, Pace, "a pace: InStep() or Free()", optional=True)
        require_whole("min_workers", min_workers)
        if dense.asynchronous and dense.wraps_model:
            raise ValueError(
                f"strategy.dense={type(dense).__name__} has asynchronous=True and wraps_model=True: DDP averages"
                " gradients at each step, for which workers wait. Set wraps_model = False in its class."
            )
        if dense.asynchronous and pace is not None and not isinstance(pace, Free):
            raise ValueError(
                f"strategy.dense={type(dense).__name__} does not go with strategy.pace={pace.name}: its workers wait"
                " for nobody. Choose strategy.pace=free."
            )
        self.dense = dense
        if pace is not None:
            self.pace = pace
        super().__init__(rows=rows, **kwargs)
        are_cached = isinstance(self.rows, CachedRows)
        own = InStep() if are_cached and not self.asynchronous else Free()
        if pace is None:
            self.pace = own
        if not self.asynchronous and isinstance(self.pace, Free) is are_cached:
            reason = (
                "workers have their batches in step, and a row's copies are trained by the mean of their gradients"
                if are_cached
                else "only cached rows are trained in step"
            )
            raise ValueError(
                f"strategy.rows={type(self.rows).__name__} does not go with strategy.pace={self.pace.name} where"
                f" workers are in step: {reason}. Choose strategy.pace={own.name}."
            )
        require_whole("max_replacements", max_replacements, at_least=0, hint="0 replaces none.")
        self.min_workers, self.max_replacements = min_workers, max_replacements


def compose(
    *,
    dense: DenseName | DensePart = "ddp",
    rows: RowsName | ServedRows | None = None,
    pace: PaceName | None = None,
    **settings: Any,
) -> RecsysStrategy:
    """The strategy that has these three parts.

    Args:
        dense: Who trains the dense part. ``ddp``: all workers, their gradients averaged at each step; ``easgd``, ``ma``
            and ``bmuf``: trainers with a replica each, which rounds of that name keep together (ShadowSync);
            ``groups``: group servers (Hierarchical Training); ``servers``: the servers, to which workers push gradients
            (asynchronous SGD); ``fields``: all workers alike, with layers cut by fields (DES); or a part, such as
            ``Replicas(algorithm="ma")`` or one of one's own, with which :class:`ComposedStrategy` is made.
        rows: Where rows live. ``local``: in each process; ``plain``: on servers, read and trained there at each step;
            ``cached``: on servers, with copies of the busy ones in each worker (HET); ``fields``: each process has
            those of its own fields (DES); or an object such as ``CachedRows(staleness=10)``. Default: as the paper of
            the dense part has them.
        pace: Who waits for whom. ``in_step``: workers train one batch together, and a row's update is by the mean of
            their gradients; ``free``: each makes updates of its own. Default: that of the dense part.
        **settings: Further arguments of the strategy that has this dense part, such as ``num_trainers``.

    Returns:
        A strategy for ``Trainer(strategy=...)``.

    Raises:
        ValueError: a part is unknown, or two of them do not go together; names both, and the reason.
        TypeError: an argument is of another type, or the strategy has none of that name.

    >>> compose(dense="easgd", rows="cached", pace="free", num_trainers=2).rows.policy
    'light_lfu'
    >>> compose(dense="easgd", pace="in_step")
    Traceback (most recent call last):
    ValueError: strategy.dense=easgd does not go with strategy.pace=in_step: replicas train on their own between \
rounds. Choose strategy.pace=free.
    """
    if not isinstance(dense, DensePart):
        require_kind("dense", dense, str, "a name, or a part such as Replicas(algorithm='ma')")
        require_one_of("dense", dense, get_args(DenseName))
    if not isinstance(rows, ServedRows):
        require_kind("rows", rows, str, "a name, or rows such as CachedRows(staleness=10)", optional=True)
        require_one_of("rows", rows, (*get_args(RowsName), None))
    require_one_of("pace", pace, (*get_args(PaceName), None))
    if isinstance(dense, DensePart):
        return _of_a_part(dense, rows, pace, settings)
    if dense == "ddp":
        return _averaged(rows, pace, settings)
    _refuse_pace(dense, pace)
    if dense == "fields":
        return _cut_by_fields(rows, settings)
    if rows in ("local", "fields"):
        raise ValueError(
            f"strategy.dense={dense} does not go with strategy.rows={rows}: its workers run free, and each would train"
            " rows of its own. Choose strategy.rows=plain or cached, which are on servers for all."
        )
    given: dict[str, Any] = {} if rows is None or (rows == "plain" and dense == "servers") else {"rows": rows}
    return _MAKERS[dense]({**given, **settings})


def _of_a_part(
    dense: DensePart, rows: str | ServedRows | None, pace: str | None, settings: Mapping[str, Any]
) -> RecsysStrategy:
    if rows in ("local", "fields"):
        raise ValueError(
            f"strategy.dense={type(dense).__name__} does not go with strategy.rows={rows}: a dense part that is an"
            " object has its rows on servers. Choose strategy.rows=plain or cached."
        )
    own_pace = {None: None, "free": Free(), "in_step": InStep()}[pace]
    given: Any = rows
    return ComposedStrategy(dense=dense, rows=given, pace=own_pace, **settings)


def _averaged(rows: str | ServedRows | None, pace: str | None, settings: Mapping[str, Any]) -> RecsysStrategy:
    """The strategies whose dense part is that of DDP."""
    from lightning_recsys.strategies.ddp import ForkserverDDPStrategy, FreeRowsDDPStrategy
    from lightning_recsys.strategies.het import HETStrategy

    rows = "local" if rows is None else rows
    given: dict[str, Any] = {**({} if isinstance(rows, str) else {"rows": rows}), **settings}
    if rows == "fields":
        raise ValueError(
            "strategy.dense=ddp does not go with strategy.rows=fields: rows of a process's own fields alone need layers"
            " that are cut likewise. Choose strategy.dense=fields."
        )
    if rows == "local":
        if pace == "free":
            raise ValueError(
                "strategy.rows=local does not go with strategy.pace=free: copies in each process are kept alike by"
                " gathering all gradients at each step. Choose strategy.rows=plain."
            )
        return ForkserverDDPStrategy(**settings)
    if isinstance(rows, CachedRows) or rows == "cached":
        if pace == "free":
            raise ValueError(
                "strategy.dense=ddp does not go with strategy.rows=cached and strategy.pace=free: workers have their"
                " batches in step, and a row's copies are trained by the mean of their gradients, as in HET. Choose"
                " strategy.pace=in_step, or strategy.rows=plain."
            )
        return HETStrategy(**given)
    if pace == "free":
        return FreeRowsDDPStrategy(**given)
    if not isinstance(rows, str):
        raise ValueError(
            f"strategy.rows={type(rows).__name__} does not go with strategy.pace=in_step: only cached rows are trained"
            " in step. Choose strategy.pace=free, or CachedRows."
        )
    return HETStrategy(algorithm="hybrid", **settings)


def _cut_by_fields(rows: str | ServedRows | None, settings: Mapping[str, Any]) -> RecsysStrategy:
    from lightning_recsys.strategies.des import DESStrategy

    if rows not in (None, "fields"):
        raise ValueError(
            f"strategy.dense=fields does not go with strategy.rows={rows}: a process has the layers of its own fields,"
            " and needs the rows of these alone. Choose strategy.rows=fields."
        )
    return DESStrategy(**settings)


def _refuse_pace(dense: str, pace: str | None) -> None:
    if dense == "fields" and pace == "free":
        raise ValueError(
            "strategy.dense=fields does not go with strategy.pace=free: all processes compute one batch together."
            " Choose strategy.pace=in_step."
        )
    if dense in _FREE and pace == "in_step":
        raise ValueError(
            f"strategy.dense={dense} does not go with strategy.pace=in_step: {_FREE[dense]}. Choose strategy.pace=free."
        )


def _replicas(algorithm: str, settings: Mapping[str, Any]) -> RecsysStrategy:
    from lightning_recsys.strategies.shadowsync import ShadowSyncStrategy

    return ShadowSyncStrategy(algorithm=algorithm, **settings)


def _groups(settings: Mapping[str, Any]) -> RecsysStrategy:
    from lightning_recsys.strategies.hierarchical import HierarchicalStrategy

    return HierarchicalStrategy(**settings)


def _servers(settings: Mapping[str, Any]) -> RecsysStrategy:
    from lightning_recsys.strategies.async_ps import AsyncParameterServerStrategy

    return AsyncParameterServerStrategy(**settings)


_MAKERS: dict[str, Callable[[Mapping[str, Any]], RecsysStrategy]] = {
    "easgd": lambda settings: _replicas("easgd", settings),
    "ma": lambda settings: _replicas("ma", settings),
    "bmuf": lambda settings: _replicas("bmuf", settings),
    "groups": _groups,
    "servers": _servers,
}
