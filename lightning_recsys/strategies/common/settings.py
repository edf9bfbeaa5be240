"""Checks of a strategy's settings, made where the strategy is: each is refused by its place in the config."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from lightning_recsys.sync import SyncAlgorithm, make_algorithm


def require_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of those allowed for ``strategy.<name>``."""
    if value not in allowed:
        raise ValueError(f"strategy.{name} must be one of {', '.join(map(str, allowed))}, got {value!r}.")


def require_whole(name: str, value: Any, *, at_least: int = 1, optional: bool = False, hint: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number, which 2.0 is not, of at least ``at_least``.

    Args:
        name: The setting is ``strategy.<name>``.
        value: What was given for it.
        at_least: The smallest number that is allowed.
        optional: Whether ``None`` is allowed, too.
        hint: What the message of a number that is too small ends with.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"strategy.{name} must be a whole number, got {value!r}.")
    if int(value) < at_least:
        raise ValueError(f"strategy.{name} must be at least {at_least}, got {value}.{hint and ' ' + hint}")


def require_number(name: str, value: object, *, optional: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` is a number, or ``None`` where that is allowed; not which one."""
    if not (optional and value is None) and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ValueError(f"strategy.{name} must be a number, got {value!r}.")


def require_kind(
    name: str, value: object, kinds: type | tuple[type, ...], wanted: str, *, optional: bool = False
) -> None:
    """Raise ``TypeError`` unless ``value`` is of one of the kinds, or ``None`` where that is allowed.

    Args:
        name: The setting is ``strategy.<name>``.
        value: What was given for it.
        kinds: The classes that it may be an instance of.
        wanted: What it must be, in words, with an example.
        optional: Whether ``None`` is allowed, too.
    """
    if not (optional and value is None) and not isinstance(value, kinds):
        raise TypeError(f"strategy.{name} must be {wanted}, got {value!r}.")


def require_paths(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is a list, or another collection, of modules' paths; a string is none."""
    is_list = isinstance(value, Collection) and not isinstance(value, str | Mapping)
    if not is_list or not all(isinstance(path, str) for path in value):
        example = f"[{value!r}]" if isinstance(value, str) else "['model.embedding']"
        raise TypeError(f"strategy.{name} must be a list of modules' paths, such as {example}, got {value!r}.")


def refuse_meaningless(strategy: type, settings: Mapping[str, object], why: str) -> None:
    """Refuse settings that nothing reads in the mode that other settings choose.

    Args:
        strategy: The class whose constructor has the settings' defaults: these are accepted, as a config writes them
            down, and so is whatever switches something off.
        settings: What was given, by name.
        why: The mode, in words that follow "means nothing".

    Raises:
        ValueError: a setting has another value.
    """
    defaults = inspect.signature(strategy).parameters
    for name, value in settings.items():
        if value and value != defaults[name].default:
            raise ValueError(f"strategy.{name}={value} means nothing {why}. Leave strategy.{name} out.")


def chosen_algorithm(
    strategy: type, algorithm: str | SyncAlgorithm, options: Mapping[str, Any], *, interval: float | None
) -> SyncAlgorithm:
    """The algorithm that keeps replicas together, and its times, as the settings of a strategy say.

    Args:
        strategy: The class whose settings they are.
        algorithm: Name of the algorithm, or the algorithm itself.
        options: Its numbers by the names of their settings, such as ``alpha``; ``None`` is the algorithm's default.
        interval: Seconds from one round to the next.

    Raises:
        ValueError: one of them is out of range, or the algorithm does not take it.
        TypeError: one of them is of another type.
    """
    require_kind(
        "algorithm", algorithm, (str, SyncAlgorithm), "an algorithm's name or an algorithm, such as 'easgd' or BMUF()"
    )
    for name, value in options.items():
        if name == "nesterov":
            require_kind(name, value, bool, "true or false", optional=True)
        else:
            require_number(name, value, optional=True)
    require_number("interval", interval, optional=True)
    if interval is not None and not 0 <= interval < float("inf"):
        raise ValueError(f"strategy.interval must be a finite number of seconds, at least 0, got {interval}.")
    if isinstance(algorithm, str):
        return make_algorithm(algorithm, options)
    refuse_meaningless(
        strategy, options, f"where strategy.algorithm is an object: {type(algorithm).__name__} has its own"
    )
    return algorithm
