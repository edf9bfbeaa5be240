"""Data as a few numbers, which processes that must have the same compare instead; and when they compare."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_recsys.embeddings import SparseFeatures

Prints = tuple[dict[str, int], dict[str, int]]
"""The fingerprints of parts that every process must have, and of features, of which each may have others; by name."""


class SameInputs:
    """Compares what the processes of a group get: the first batch of each loop and epoch, and its lookups.

    Args:
        group: The processes, all of which compare the same.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._compared: tuple[Any, ...] | None = None  # the loop, epoch and loader whose first batch was compared last,
        self._hooks: list[RemovableHandle] = []  # and, until its second one, what compares the first one's lookups

    def compare(self, batch: Any, place: tuple[Any, ...], collections: Sequence[nn.Module]) -> None:
        """Compare a batch, and what these collections will look up for it, where it is the first of its place.

        Raises:
            ValueError: processes have different ones.
        """
        self.close()
        if place == self._compared:
            return
        self._compared = place
        if names := self.differences(fingerprints("batch", batch)):
            raise ValueError(
                "strategy=des needs the same batch on all processes of a group, but their loaders gave different ones:"
                f" {', '.join(names)}. Do not share out batches by rank: trainer.distributed_sampler_kwargs says how"
                " many processes get batches of their own. Shuffle, and draw negative samples, with a seed that is the"
                " same on all ranks."
            )
        own = WeakSet(collections)  # modules are equal where they are the same; copies outlive the run

        def compare(collection: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if collection in own:
                self._compare_lookup(args, kwargs)

        # Copies of the collections keep the hook, which leaves their lookups alone. A copy of a function is the
        # function, and one of a bound method would have a group of its own.
        self._hooks = [x.register_forward_pre_hook(compare, with_kwargs=True) for x in collections]

    def compare_anew(self) -> None:
        """Compare the next batch, whatever it is the first of."""
        self._compared = None

    def close(self) -> None:
        """Compare no more lookups."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _compare_lookup(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if names := self.differences(fingerprints("lookup", [*args, *kwargs.values()])):
            raise ValueError(
                "strategy=des needs the processes of a group to look up the same ids, but a step gave them different"
                f" ones: {', '.join(names)}. Draw negative samples, and all else that a step draws, from torch's global"
                " generator, which is the same on all of them, or from one with a seed that is."
            )

    def differences(self, own: Prints) -> list[str]:
        """The names of what the processes have different, of which this one's prints are given."""
        prints: list[Prints] = [({}, {})] * self._group.size()
        dist.all_gather_object(prints, own, group=self._group)
        return differences(prints)


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
    """The fingerprints of a batch's parts: tensors, arrays, numbers, strings, in dataclasses, mappings and sequences.

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
    """The fingerprints of each feature's ids, bags and weights, whatever other features lie beside it."""
    if not sparse.keys:
        return
    bounds, lengths = sparse.feature_bounds(), sparse.bag_lengths().view(len(sparse.keys), -1)
    for i, key in enumerate(sparse.keys):
        own = slice(bounds[i], bounds[i + 1])
        weights = [] if sparse.weights is None else [sparse.weights[own]]
        yield key, fingerprint([sparse.values[own], lengths[i], *weights])
