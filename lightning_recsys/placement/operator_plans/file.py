"""Plans as YAML that a person can read, change and pin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import TRAINER, Operator, OperatorGraph, server_index, server_name

_HEAD = """\
# Which device of a group computes which operator. Move names between the lists as you like: operators with weights have
# to be on group servers, lookups on trainers. Operators that no list has are placed anew: delete those that need not
# stay where they are.
"""
_MEASURED = "measured"


def write_plan(
    path: Path, plan: OperatorPlan, graph: OperatorGraph, measured: Mapping[str, float] | None = None
) -> None:
    """Write a plan as lists of operators, with what each does and weighs as comments.

    Args:
        path: Path of the file; its folder must be there.
        plan: Which device computes each operator.
        graph: The operators, with what they take and send.
        measured: What the run has measured of its machines, by arguments of
            :class:`~lightning_recsys.placement.machines.GroupMachines`; kept for whoever compares plans.
    """
    lines = [_HEAD]
    for device in (TRAINER, *map(server_name, range(plan.num_servers))):
        names = plan.on(device)
        lines.append(f"{device}:" if names else f"{device}: []")
        width = max(map(len, map(_scalar, names)), default=0)
        lines += [f"  - {_scalar(name):<{width}}  # {_comment(graph.by_name[name])}" for name in names]
    if measured:
        lines += ["# Measured when the run began; not read again.", f"{_MEASURED}:"]
        lines += [f"  {name}: {value:.9f}" for name, value in measured.items()]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def read_plan(path: Path) -> dict[str, str]:
    """The device of each operator that a file names, for ``pinned`` of :func:`place_operators`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a mapping of devices to lists of operators, or has one of them twice.
    """
    devices: dict[str, str] = {}
    for device, names in _content(path).items():
        if device == _MEASURED:
            continue
        try:
            server_index(str(device))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path}: {device} must have a list of operators' names, got {names!r}.")
        for name in names:
            if name in devices:
                raise ValueError(f"{path}: operator {name!r} is listed twice. Keep one.")
            devices[name] = str(device)
    return devices


def read_measured(path: Path) -> dict[str, float]:
    """The measurements of the run that wrote a plan; none where the file does not tell.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no plan, or it tells something else than numbers.
    """
    measured = _content(path).get(_MEASURED, {})
    if not isinstance(measured, Mapping) or not all(isinstance(x, int | float) for x in measured.values()):
        raise ValueError(f"{path}: {_MEASURED} must have numbers by name, got {measured!r:.200}.")
    return {str(name): float(value) for name, value in measured.items()}


def _content(path: Path) -> Mapping[Any, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no plan {path} (operator_placement.plan). Leave it out to have operators placed."
        )
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, Mapping) or len(content) < len(node.value):  # YAML keeps the last of equal keys
        raise ValueError(f"{path} must be a mapping with a list of operators for each device, each device once.")
    return content


def _scalar(name: str) -> str:
    """Quoted where YAML would read something else than the name, a number, say."""
    return name if yaml.safe_load(f"[{name}]") == [name] else f"'{name}'"


def _comment(operator: Operator) -> str:
    weights = f", {operator.weight_bytes:,} bytes of weights" if operator.weight_bytes else ""
    return f"{operator.kind}{weights}"
