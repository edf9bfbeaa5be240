"""The optimizers of torch for one parameter, as update rules of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_recsys.optim.row_optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSGD, RowWiseAdagrad
from lightning_recsys.optim.swap import RowSWAP, discount_of

UNKNOWN_SETTINGS = ("momentum", "decoupled_weight_decay", "lr_decay", "amsgrad", "maximize")


def row_rule_of(optimizer: Optimizer, group: Mapping[str, Any], *, lr: float) -> RowOptimizer | None:
    """The rule of the same name, with the numbers of a parameter group; ``None`` where there is no such rule.

    On rows that are updated at every step it gives what the optimizer does, SWAP's periods included.

    Args:
        optimizer: Plain SGD, Adagrad or Adam of torch have a rule; subclasses may do other things and have none.
        group: The parameter group.
        lr: The rule's own learning rate, for whoever does not bring the group's with each update.

    >>> parameter = torch.nn.Parameter(torch.zeros(3))
    >>> optimizer = torch.optim.SGD([parameter], lr=0.1, weight_decay=0.01)
    >>> row_rule_of(optimizer, optimizer.param_groups[0], lr=0.1)
    RowSGD(lr=0.1, weight_decay=0.01, decay_all_rows=False)
    >>> optimizer.param_groups[0]["momentum"] = 0.9
    >>> row_rule_of(optimizer, optimizer.param_groups[0], lr=0.1) is None
    True
    """
    found = _RULES.get(type(optimizer))
    if found is None or unknown_settings(group):
        return None
    rule, discount = found(group, lr), discount_of(optimizer)
    if discount is None or isinstance(rule, RowSGD):
        return rule
    return RowSWAP(inner=rule, discount=discount.discount, **asdict(discount.periods))


def unknown_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group that no rule of rows has, as far as they are used."""
    return {name: group[name] for name in UNKNOWN_SETTINGS if group.get(name)}


def nearest_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> RowOptimizer:
    """A rule to put in the place of an optimizer that rows do not have: that of its family, without its additions."""
    lr, plain = base_lr(group) or 0.01, {"weight_decay": 0.0, **group}
    if plain.get("decoupled_weight_decay") or not isinstance(plain["weight_decay"], float | int):
        plain["weight_decay"] = 0.0  # which is no L2 in the gradient
    for family, rule in _RULES.items():
        if isinstance(optimizer, family):
            return rule(plain, lr)
    if {"betas", "eps"} <= set(plain):
        return _adam(plain, lr)
    return RowWiseAdagrad(lr)


def base_lr(group: Mapping[str, Any]) -> float:
    """The learning rate that a group was given; schedulers note it, and OneCycleLR the rate that it rises to."""
    return float(group.get("max_lr", group.get("initial_lr", group.get("lr", 0.0))))


def written(rule: RowOptimizer) -> str:
    """A rule as one writes it, without what is as by default.

    >>> written(RowAdam(0.01, weight_decay=0.1))
    'RowAdam(lr=0.01, weight_decay=0.1)'
    """
    given = {x.name: getattr(rule, x.name) for x in fields(rule) if x.init}
    defaults = {x.name: x.default for x in fields(rule) if x.name != "lr" and x.default is not MISSING}
    shown = (
        f"{name}={written(value) if isinstance(value, RowOptimizer) else repr(value)}"
        for name, value in sorted(given.items(), key=lambda item: item[0] == "weight_decay")
        if defaults.get(name, MISSING) != value
    )
    return f"{type(rule).__name__}({', '.join(shown)})"


def _adam(group: Mapping[str, Any], lr: float) -> RowAdam:
    beta1, beta2 = group["betas"]
    return RowAdam(lr, beta1, beta2, group["eps"], weight_decay=group["weight_decay"])


_RULES: dict[type[Optimizer], Callable[[Mapping[str, Any], float], RowOptimizer]] = {
    torch.optim.SGD: lambda group, lr: RowSGD(lr, weight_decay=group["weight_decay"]),
    torch.optim.Adagrad: lambda group, lr: RowAdagrad(
        lr,
        eps=group["eps"],
        initial_accumulator=group["initial_accumulator_value"],
        weight_decay=group["weight_decay"],
    ),
    torch.optim.Adam: _adam,
}
