"""A value that is missing or of the wrong kind is named by its place in the configuration, before anything is built."""

from __future__ import annotations

import inspect
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

# Arguments that take nothing else are checked; whoever takes more, such as a path or a class, knows best what.
PLAIN = {int, float, bool, type(None), torch.Tensor}


def check_complete(config: DictConfig) -> None:
    """Raise ``ValueError`` if a value that the files leave open (``???``) was not given on the command line either."""
    if missing := sorted(OmegaConf.missing_keys(config)):
        has, given = "have" if len(missing) > 1 else "has", " ".join(f"{key}=..." for key in missing)
        raise ValueError(f"{' and '.join(missing)} {has} no default: add {given} to the command line.")


def check_types(node: Any, path: str = "") -> None:
    """Compare the numbers and switches below ``node`` with what the classes they go to are annotated with.

    Args:
        node: Plain containers; an object with ``_target_`` is compared with that class or function.
        path: Where ``node`` lies in the configuration.

    Raises:
        TypeError: an argument annotated with numbers, ``bool`` or ``None`` alone has another value.
    """
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    allowed = _plain_arguments(node["_target_"]) if "_target_" in node else {}
    for name, value in sorted(node.items(), key=str):  # `strategy` before the trainer, which refers to it
        place = f"{path}.{name}" if path else str(name)
        if name in allowed and not _fits(value, allowed[name]):
            kinds = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed[name])
            raise TypeError(f"{place} must be {kinds}, got {value!r} ({type(value).__name__}).")
        check_types(value, place)


def _plain_arguments(target: str) -> dict[str, list[type]]:
    """Argument -> types, of those arguments that take numbers, ``bool`` or ``None`` only."""
    found = get_object(target)
    try:
        hints = _hints(found)
    except (AttributeError, NameError, TypeError):  # annotated with what is not there at run time, or not at all
        return {}
    kinds = {name: _members(hint) for name, hint in hints.items() if name != "return"}
    return {
        name: [kind for kind in members if kind is not torch.Tensor]
        for name, members in kinds.items()
        if PLAIN.issuperset(members)
    }


def _hints(found: Any) -> dict[str, Any]:
    """What arguments are annotated with, also those that a class hands on to the one it extends as ``**kwargs``."""
    if not inspect.isclass(found):
        return get_type_hints(found)
    hints: dict[str, Any] = {}
    for kind in found.__mro__:
        if (init := vars(kind).get("__init__")) is not None:
            hints = get_type_hints(init) | hints
            if not any(x.kind is x.VAR_KEYWORD for x in inspect.signature(init).parameters.values()):
                break
    return hints


def _members(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _fits(value: Any, kinds: list[type]) -> bool:
    return type(value) in kinds or (type(value) is int and float in kinds)
