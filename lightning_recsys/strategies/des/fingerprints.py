"""Data as a few numbers: processes that must have the same compare these instead."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_recsys.embeddings import SparseFeatures

Prints = tuple[dict[str, int], dict[str, int]]
"""Of what every process must have, and of features, of which each may have others; by name."""


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """One number for some tensors: their bytes and shapes."""
    value = 0
    for tensor in (part for whole in tensors for part in _dense_parts(whole)):
        flat = tensor.detach().reshape(-1).contiguous().cpu()
        value = zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", value)
        value = zlib.crc32(repr(tuple(tensor.shape)).encode(), value)
    return value


def _dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor, or those that a sparse or nested one is made of."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.strided:
        return [tensor]
    shape = torch.tensor(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        return [shape, tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [shape, tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [shape, tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # of another library, which says itself what it needs


def fingerprints(name: str, thing: Any) -> Prints:
    """Of each part of a batch: tensors, arrays, numbers and strings, in dataclasses, mappings and sequences.

    Args:
        name: What the whole is called; parts are called ``name.field`` and ``name['key']``.
        thing: The batch. Objects of other kinds count by their tensors where torch's ``pytree`` finds some, and are
            passed over otherwise.
    """
    parts: dict[str, int] = {}
    features: dict[str, int] = {}
    for path, part in _walk(name, thing):
        if isinstance(part, SparseFeatures):
            features |= {f"{path}[{key!r}]": number for key, number in _of_features(part)}
        elif isinstance(part, Tensor):
            parts[path] = fingerprint([part])
        else:
            parts[path] = zlib.crc32(repr(part).encode())
    return parts, features


def differences(prints: Sequence[Prints]) -> list[str]:
    """The names of what is not the same in all of them; a feature only counts where two of them have it."""
    found: dict[str, set[int | None]] = {}
    for name in {name for parts, _ in prints for name in parts}:
        found[name] = {parts.get(name) for parts, _ in prints}
    for _, features in prints:
        for name, number in features.items():
            found.setdefault(name, set()).add(number)
    return sorted(name for name, numbers in found.items() if len(numbers) > 1)


def _walk(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, np.ndarray):
        thing = torch.from_numpy(thing) if thing.dtype.kind in "biuf" else thing.tolist()
    if isinstance(thing, Tensor | SparseFeatures | str | bytes | int | float | None):
        yield name, thing
        return
    inside: Iterable[tuple[str, Any]]
    if isinstance(thing, Mapping):
        inside = [(f"[{key!r}]", value) for key, value in thing.items()]
    elif dataclasses.is_dataclass(thing):
        inside = [(f".{field.name}", getattr(thing, field.name)) for field in dataclasses.fields(thing)]
    elif isinstance(thing, list | tuple):
        inside = [(f"[{i}]", value) for i, value in enumerate(thing)]
    else:
        inside = [(f"[{i}]", leaf) for i, leaf in enumerate(tree_leaves(thing)) if leaf is not thing]
    for place, value in inside:
        yield from _walk(name + place, value)


def _of_features(sparse: SparseFeatures) -> Iterator[tuple[str, int]]:
    """Of each feature's ids, bags and weights, whatever other features lie beside it."""
    bounds, lengths = sparse.feature_bounds(), sparse.bag_lengths().view(len(sparse.keys), -1)
    for i, key in enumerate(sparse.keys):
        own = slice(bounds[i], bounds[i + 1])
        weights = [] if sparse.weights is None else [sparse.weights[own]]
        yield key, fingerprint([sparse.values[own], lengths[i], *weights])
