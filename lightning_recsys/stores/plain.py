"""Tables and rules as plain data (dicts, lists, strings, numbers), for files and for the wire, and back.

What comes back in may come from anybody: it is checked field by field, and only names known here are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_recsys.embeddings.config import EmbeddingBagConfig, RowDtype
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowSGD, RowSWAP, RowWiseAdagrad
from lightning_recsys.sync import StalenessNormalization

_RULES: dict[str, type[RowOptimizer]] = {
    rule.__name__: rule for rule in (RowSGD, RowAdagrad, RowWiseAdagrad, RowAdam, RowFTRL, RowSWAP)
}
T = TypeVar("T")


def from_plain(kind: type[T], value: object) -> T:
    """A dataclass from a dict that may come from anybody.

    Args:
        kind: The dataclass. Its fields are numbers, strings, tuples of such, or ``None``.
        value: All its fields and no others, each of the type that the class says; lists stand for tuples.

    Raises:
        ValueError: it is something else, or what the class itself refuses.
    """
    hints = get_type_hints(kind)
    if not isinstance(value, dict) or set(value) != set(hints):
        raise ValueError(f"{kind.__name__} takes a dict of {sorted(hints)}, got {value!r:.200}.")
    if wrong := [name for name, hint in hints.items() if not _fits(value[name], hint)]:
        raise ValueError(f"{wrong} of {kind.__name__} have another type, got {value!r:.200}.")
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in value.items()})


def _fits(value: object, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(x, get_args(hint)[0]) for x in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint if hint in (int, NoneType) else isinstance(value, str)


def optional_to_plain(value: Any) -> dict[str, Any] | None:
    """A dataclass of numbers and strings as a dict; ``None`` where there is none."""
    return None if value is None else dataclasses.asdict(value)


def optional_from_plain(kind: type[T], value: object) -> T | None:
    """The reverse of :func:`optional_to_plain`; errors as of :func:`from_plain`."""
    return None if value is None else from_plain(kind, value)


def optimizer_to_plain(optimizer: RowOptimizer) -> dict[str, Any]:
    """A rule by its name, with its numbers.

    Raises:
        TypeError: the rule is none of :mod:`lightning_recsys.optim`: another process could not make it again; or it
            updates rows that no batch names.

    >>> optimizer_to_plain(RowSGD(lr=0.1))
    {'rule': 'RowSGD', 'lr': 0.1}
    """
    if _RULES.get(type(optimizer).__name__) is not type(optimizer):
        raise TypeError(
            f"a store knows the rules {sorted(_RULES)}, got {type(optimizer).__name__}: other processes update its rows"
            " and could not run a rule that is not this package's, a subclass included. Use one of these, or a strategy"
            " whose workers keep rows of their own, such as ddp."
        )
    if isinstance(optimizer, RowSWAP):
        given = {"period": optimizer.period, "seconds": optimizer.seconds, "day": optimizer.day}
        periods = {name: number for name, number in given.items() if number is not None}
        inner = optimizer_to_plain(optimizer.inner)
        return {"rule": "RowSWAP", "inner": inner, **periods, "discount": optimizer.discount}
    if optimizer.decay_all_rows:
        raise TypeError(
            f"{type(optimizer).__name__}(decay_all_rows=True) updates every row at every step, but stores, caches and"
            " dynamic tables update the rows that a batch names: leave decay_all_rows out, so that weight_decay decays"
            " those, or use single, ddp or des, whose workers keep rows of their own."
        )
    numbers = {name: number for name, number in dataclasses.asdict(optimizer).items() if name != "decay_all_rows"}
    if not optimizer.weight_decay:  # stores from before there was weight decay have the same rule
        del numbers["weight_decay"]
    return {"rule": type(optimizer).__name__, **numbers}


def optimizer_from_plain(value: object) -> RowOptimizer:
    """The reverse of :func:`optimizer_to_plain`.

    Raises:
        ValueError: an unknown rule, a number that it does not take, or one that is missing.
    """
    if not isinstance(value, dict) or not isinstance(value.get("rule"), str) or value["rule"] not in _RULES:
        raise ValueError(f"an update rule must be a dict with rule in {sorted(_RULES)}, got {value!r:.200}.")
    rule = _RULES[value["rule"]]
    names = {field.name for field in dataclasses.fields(rule) if field.init and field.name != "decay_all_rows"}
    optional = {"weight_decay": 0.0} if "weight_decay" in names else {}
    numbers = optional | {name: number for name, number in value.items() if name != "rule"}
    inner: dict[str, Any] = {}
    if rule is RowSWAP:
        wrapped = numbers.pop("inner", None)
        if not isinstance(wrapped, dict) or wrapped.get("rule") in ("RowSWAP", "RowSGD"):
            raise ValueError("RowSWAP takes an update rule that has an accumulator, and no other RowSWAP.")
        inner["inner"] = optimizer_from_plain(wrapped)
        names -= {"period", "seconds", "day"} - set(numbers)  # one of them is given, which the rule checks
    if set(numbers) != names - set(inner) or any(type(number) not in (int, float) for number in numbers.values()):
        raise ValueError(f"{rule.__name__} takes the numbers {sorted(names)}, got {numbers!r:.200}.")
    return rule(**numbers, **inner)


def layout_to_plain(layout: TableLayout) -> list[dict[str, Any]]:
    """The tables, in storage order."""
    tables = [dataclasses.asdict(table) for table in layout.tables]
    for table in tables:
        if table["dtype"] is RowDtype.FLOAT32:  # stores from before there was another have the same tables
            del table["dtype"]
    return tables


def layout_from_plain(value: object) -> TableLayout:
    """The reverse of :func:`layout_to_plain`.

    Raises:
        ValueError: no table, a field that is missing, unknown or of another type, or tables that do not go together.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"a layout must be a list of at least one table, got {value!r:.200}.")
    defaults = {"dtype": "float32"}
    tables = tuple(
        from_plain(EmbeddingBagConfig, defaults | table if isinstance(table, dict) else table) for table in value
    )
    if not all(0 <= table.init_std < float("inf") for table in tables):
        raise ValueError(f"a table's init_std must be finite and at least 0, got {[x.init_std for x in tables]}.")
    features = [feature for table in tables for feature in table.feature_names]
    kinds = {(table.embedding_dim, table.dtype) for table in tables}
    if len(kinds) > 1 or len({table.name for table in tables}) < len(tables) or len(set(features)) < len(features):
        raise ValueError("the tables of a layout must share one embedding_dim and dtype, and names must not repeat.")
    return TableLayout(tables)


def rows_to_plain(
    layout: TableLayout, optimizer: RowOptimizer, normalization: StalenessNormalization | None
) -> dict[str, Any]:
    """The description of a store of rows: its tables, its rule, and the weight of stale gradients."""
    return {
        "tables": layout_to_plain(layout),
        "optimizer": optimizer_to_plain(optimizer),
        "normalization": optional_to_plain(normalization),
    }


def rows_from_plain(plain: Mapping[str, Any]) -> tuple[TableLayout, RowOptimizer, StalenessNormalization | None]:
    """The reverse of :func:`rows_to_plain`, which may have more beside it; errors as of each."""
    normalization = optional_from_plain(StalenessNormalization, plain["normalization"])
    return layout_from_plain(plain["tables"]), optimizer_from_plain(plain["optimizer"]), normalization
