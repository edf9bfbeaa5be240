"""The optimizers of torch for one parameter, as update rules of rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import torch
from torch import nn
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


def leave_out(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Take parameters that somebody else trains out of an optimizer, with the state that it may have made for them.

    State dicts of the optimizer from before, which have them, are loaded without what they have of these.

    >>> rows, dense = torch.nn.Parameter(torch.zeros(9)), torch.nn.Parameter(torch.zeros(3))
    >>> optimizer = torch.optim.Adagrad([rows, dense])
    >>> before = optimizer.state_dict()
    >>> leave_out(optimizer, [rows])
    >>> optimizer.param_groups[0]["params"] == [dense], len(optimizer.state)
    (True, 1)
    >>> optimizer.load_state_dict(before)
    """
    unwanted = set(parameters)
    places = [{i for i, x in enumerate(group["params"]) if x in unwanted} for group in optimizer.param_groups]
    if not any(places):
        return

    def without(group: Mapping[str, Any], places: Container[int]) -> dict[str, Any]:
        lists = {"params", "param_names"} & group.keys()
        return {**group, **{name: [x for i, x in enumerate(group[name]) if i not in places] for name in lists}}

    for group, here in zip(optimizer.param_groups, places, strict=True):
        kept = without(group, here)
        group["params"][:] = kept.pop("params")  # in place: LBFGS has this list as well
        group.update(kept)
    for parameter in unwanted:
        optimizer.state.pop(parameter, None)

    def load_without(optimizer: Optimizer, saved: dict[str, Any]) -> None:
        groups = list(saved["param_groups"])
        for index, (group, own, here) in enumerate(zip(groups, optimizer.param_groups, places, strict=False)):
            if len(group["params"]) > len(own["params"]):
                groups[index] = without(group, here)
        known = {number for group in groups for number in group["params"]}
        state = {number: values for number, values in saved["state"].items() if number in known}
        saved.update(param_groups=groups, state=state)

    optimizer.register_load_state_dict_pre_hook(load_without)


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
