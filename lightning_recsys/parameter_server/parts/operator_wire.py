"""Tensors between a net and the server that computes a part of it: of any shape, compressed, some left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.compression import Codec, Receiver, Sender, describe, specs


def pack(sender: Sender, tensors: Sequence[Tensor | None]) -> tuple[list[Any], list[Tensor]]:
    """The descriptions of tensors, ``None`` for one that is left out, and the arrays that travel, all of them vectors.

    Raises:
        TypeError: a tensor has a dtype that does not travel.
        ValueError: a value cannot be expressed in the sender's codec.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    try:
        described = iter(describe(present))
    except ValueError as error:
        raise TypeError(f"{error} A part of a model takes and gives tensors of these.") from None
    arrays = [array.reshape(-1) for array in sender.encode(present)]
    return [None if tensor is None else next(described) for tensor in tensors], arrays


def unpack(receiver: Receiver, described: object, arrays: Sequence[Tensor]) -> list[Tensor | None]:
    """The reverse of :func:`pack`, for what a stranger may have sent.

    Raises:
        ValueError: description and arrays do not belong together.
    """
    if type(described) is not list:
        raise ValueError(f"tensors must be described by a list, got {described!r:.100}")
    expected = specs([one for one in described if one is not None])
    places = [place for dtype, shape in expected for place in _layout(receiver.codec, dtype, shape)]
    if len(places) != len(arrays):
        raise ValueError(f"{len(arrays)} arrays came for {described!r:.100}, which has {len(places)}")
    shaped = [_shaped(array, shape) for array, (_, shape) in zip(arrays, places, strict=True)]
    found = iter(receiver.decode(shaped, expected))
    return [None if one is None else next(found) for one in described]


def _layout(codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]) -> Sequence[tuple[torch.dtype, Sequence[int]]]:
    return codec.layout(shape) if dtype == torch.float32 else [(dtype, shape)]


def _shaped(array: Tensor, shape: Sequence[int]) -> Tensor:
    if array.dim() != 1 or array.numel() != math.prod(shape):
        raise ValueError(f"an array of shape {list(array.shape)} came for the shape {list(shape)}")
    return array.view(torch.Size(shape))
