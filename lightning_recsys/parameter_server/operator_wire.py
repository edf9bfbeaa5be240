"""Tensors of any shape between a net and the server that computes a part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.parameter_server.wire import DTYPES, Limits

MAX_DIMS = 8


def flatten(tensors: Sequence[Tensor | None]) -> tuple[list[list[int] | None], list[Tensor]]:
    """The shapes of some tensors, and those that are there as vectors; contiguous, and on the CPU as they are.

    Raises:
        TypeError: a tensor has a dtype that does not travel.
    """
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES.values():
            raise TypeError(f"tensors of {tensor.dtype} do not travel between trainers and group servers")
    shapes = [None if tensor is None else list(tensor.shape) for tensor in tensors]
    return shapes, [tensor.detach().contiguous().view(-1) for tensor in tensors if tensor is not None]


def restore(shapes: object, arrays: Sequence[Tensor], *, limits: Limits) -> list[Tensor | None]:
    """The reverse of :func:`flatten`, for what a stranger may have sent.

    Raises:
        ValueError: shapes and arrays do not belong together.
    """
    if type(shapes) is not list or len(shapes) > limits.frames or not all(map(_is_shape, shapes)):
        raise ValueError(f"shapes must be a list of lists of sizes, got {shapes!r:.100}")
    if sum(shape is not None for shape in shapes) != len(arrays):
        raise ValueError(f"{len(arrays)} arrays came for the shapes {shapes!r:.100}")
    rest = iter(arrays)
    return [None if shape is None else _shaped(next(rest), shape) for shape in shapes]


def _is_shape(value: Any) -> bool:
    sizes_are_right = type(value) is list and all(type(size) is int and size >= 0 for size in value)
    return value is None or (sizes_are_right and len(value) <= MAX_DIMS)


def _shaped(array: Tensor, shape: list[int]) -> Tensor:
    if array.dim() != 1 or array.numel() != math.prod(shape):
        raise ValueError(f"an array of shape {list(array.shape)} came for the shape {shape}")
    return array.view(torch.Size(shape))
