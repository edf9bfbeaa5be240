"""Algorithms by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning_recsys.sync.algorithm import SyncAlgorithm
from lightning_recsys.sync.bmuf import BMUF
from lightning_recsys.sync.easgd import EASGD
from lightning_recsys.sync.model_averaging import ModelAveraging

_ALGORITHMS: dict[str, type[SyncAlgorithm]] = {"easgd": EASGD, "ma": ModelAveraging, "bmuf": BMUF}


def register_algorithm(name: str, algorithm: type[SyncAlgorithm]) -> None:
    """Make an algorithm known as ``strategy.algorithm=<name>``.

    Args:
        name: Lower case; a name that is taken means the new class from now on.
        algorithm: The class. Its arguments may have the names of the strategy's (``alpha``, ``eta``,
            ``block_momentum``, ``nesterov``), which are handed on; any others need defaults.

    Raises:
        TypeError: ``algorithm`` is not a subclass of :class:`SyncAlgorithm`.

    >>> from lightning_recsys.sync import ModelAveraging
    >>> register_algorithm("average", ModelAveraging)
    >>> make_algorithm("average", {"alpha": 1.0}).alpha
    1.0
    """
    if not (inspect.isclass(algorithm) and issubclass(algorithm, SyncAlgorithm)):
        raise TypeError(f"{name!r}: a synchronisation algorithm is a subclass of SyncAlgorithm, got {algorithm!r}.")
    _ALGORITHMS[name] = algorithm


def algorithm_names() -> list[str]:
    """All names that are known now."""
    return sorted(_ALGORITHMS)


def make_algorithm(name: str, options: Mapping[str, Any]) -> SyncAlgorithm:
    """An algorithm by its name.

    Args:
        name: The name that the algorithm was registered by.
        options: Arguments of its constructor; ``None`` stands for the constructor's own default.

    Raises:
        ValueError: no algorithm has this name, or it does not take one of the options.
    """
    if name not in _ALGORITHMS:
        raise ValueError(f"strategy.algorithm must be one of {', '.join(algorithm_names())}, got {name!r}.")
    given = {key: value for key, value in options.items() if value is not None}
    known = inspect.signature(_ALGORITHMS[name]).parameters
    if unknown := [key for key in given if key not in known]:
        taken = ", ".join(f"strategy.{key}" for key in known if key in options)
        raise ValueError(
            f"strategy.{unknown[0]} means nothing to strategy.algorithm={name}, which takes {taken or 'no options'}."
            f" Leave strategy.{unknown[0]} out."
        )
    return _ALGORITHMS[name](**given)
