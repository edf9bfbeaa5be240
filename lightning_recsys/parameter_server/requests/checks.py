"""Checks of what a request brought: exactly the arguments and arrays that were asked for, within their ranges."""

# Shape suffixes: F features, N ids of the batch.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.parameter_server.messages.wire import Request

GENERATION = "generation"  # an argument of whatever concerns a store that is open: which one of that name


def take_generation(request: Request) -> int | None:
    """The generation of the store that is meant; ``None`` for whichever there is.

    Raises:
        ValueError: the generation is no integer.
    """
    generation = request.arguments.get(GENERATION)
    if generation is not None and type(generation) is not int:
        raise ValueError(f"{GENERATION} must be int, got {generation!r:.100}")
    return generation


def take_arguments(
    request: Request, defaults: Mapping[str, object] | None = None, **types: type | tuple[type, ...]
) -> tuple[Any, ...]:
    """The arguments in the order asked for; exactly those (and a generation), of exactly these types.

    Args:
        request: The request that brought the arguments.
        defaults: Values of those that may be missing.
        types: Allowed types of each argument, by its name.

    Raises:
        ValueError: one is missing, of another type, or not asked for.
    """
    given = {name: value for name, value in request.arguments.items() if name != GENERATION}
    given = {**(defaults or {}), **given}
    if given.keys() != types.keys():
        raise ValueError(f"{request.operation} takes the arguments {sorted(types)}, got {sorted(given)!s:.200}")
    for name, kind in types.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(given[name]) not in allowed:
            raise ValueError(f"{name} must be {' or '.join(x.__name__ for x in allowed)}, got {given[name]!r:.100}")
    return tuple(given[name] for name in types)


def take_arrays(request: Request, *expected: tuple[str, torch.dtype, int]) -> list[Tensor]:
    """The arrays; exactly as many, each with its dtype and number of dimensions.

    Raises:
        ValueError: one is missing, another, or one too many.
    """
    arrays = list(request.arrays)
    found = [take_array(arrays, *one) for one in expected]
    if arrays:
        raise ValueError(f"{request.operation} takes {len(expected)} arrays, got {len(request.arrays)}")
    return found


def take_array(arrays: list[Tensor], name: str, dtype: torch.dtype, dims: int) -> Tensor:
    """The first array of the list, taken out of it."""
    if not arrays:
        raise ValueError(f"an array is missing: {name}")
    array = arrays.pop(0)
    if array.dtype != dtype or array.dim() != dims:
        got = f"{array.dtype} of shape {list(array.shape)}"
        raise ValueError(f"{name} must be {dtype} with {dims} dimensions, got {got}")
    return array


def take_plain(
    request: Request, defaults: Mapping[str, object] | None = None, **types: type | tuple[type, ...]
) -> tuple[Any, ...]:
    """Do as :func:`take_arguments`, of a request that brings no arrays."""
    take_arrays(request)
    return take_arguments(request, defaults, **types)
