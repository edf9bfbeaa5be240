"""Categorical ids of a batch, in the layout that every lookup takes."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Shape suffixes: B batch, F features (fields), N ids of the whole batch.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.embeddings.int64_ids import are_below

T = TypeVar("T")


class _KeyedJaggedTensorLike(Protocol):
    """The methods of TorchRec's ``KeyedJaggedTensor`` that a conversion needs."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


@dataclass(frozen=True)
class SparseFeatures:
    """Bags of ids for ``F`` features of ``B`` examples, in KeyedJaggedTensor layout.

    ``values`` holds feature 0's bags for examples ``0 .. B-1``, then feature 1's, and so on. Where neither ``lengths``
    nor ``offsets`` is given, every bag holds exactly one id: the fast path of single-hot data, which builds no offsets.

    Args:
        keys: Feature names, ``F`` of them, in the order of ``values``.
        values: Ids, int64, shape ``[N]``; contiguous.
        lengths: Ids per bag, integer, shape ``[F * B]``, feature-major. An empty bag has length 0.
        offsets: Start of each bag in ``values``, int64, shape ``[F * B + 1]``; computed from ``lengths`` if absent.
        weights: Per-sample weights, float32, shape ``[N]``; they multiply the rows before pooling.

    Raises:
        TypeError: ``values`` is not int64, ``weights`` not float32, ``lengths`` or ``offsets`` not flat and integer.
        ValueError: a shape is not as above, or a key is repeated. (That lengths and offsets cover the ids is checked
            with the ids, by the collection that looks them up.)

    >>> sparse = SparseFeatures(("user", "movie"), torch.tensor([4, 5, 70, 71]))
    >>> sparse.batch_size, sparse.is_single_hot
    (2, True)
    >>> bags = SparseFeatures(("genres",), torch.tensor([3, 1, 2]), lengths=torch.tensor([2, 0, 1]))
    >>> bags.batch_size, bags.bag_offsets().tolist()
    (3, [0, 2, 2, 3])
    """

    keys: tuple[str, ...]
    values: Tensor
    lengths: Tensor | None = None
    offsets: Tensor | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(self.keys))
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"SparseFeatures.keys must not repeat a feature, got {list(self.keys)}.")
        if self.values.dtype != torch.int64 or self.values.dim() != 1:
            raise TypeError(
                f"SparseFeatures.values must be a flat int64 tensor, got {self.values.dtype} of shape "
                f"{list(self.values.shape)}. For a [B, F] matrix of ids use SparseFeatures.from_ids."
            )
        for name, tensor in (("lengths", self.lengths), ("offsets", self.offsets)):
            if tensor is not None and (tensor.dim() != 1 or tensor.is_floating_point()):
                raise TypeError(
                    f"SparseFeatures.{name} must be a flat integer tensor, got {tensor.dtype} of shape "
                    f"{list(tensor.shape)}."
                )
        num_bags, what = self._num_bags()
        if num_bags % max(len(self.keys), 1) or (not self.keys and self.values.numel()):
            raise ValueError(
                f"{what} describes {num_bags} bags, which is not a multiple of the {len(self.keys)} features."
            )
        if self.weights is not None and self.weights.shape != self.values.shape:
            raise ValueError(
                f"SparseFeatures.weights must have one weight per id, shape {list(self.values.shape)}, "
                f"got {list(self.weights.shape)}."
            )
        if self.weights is not None and (self.weights.dtype != torch.float32 or self.weights.requires_grad):
            raise TypeError(
                f"SparseFeatures.weights must be float32 and ask for no gradient (there is none for them), got "
                f"{self.weights.dtype}, requires_grad={self.weights.requires_grad}."
            )

    def _num_bags(self) -> tuple[int, str]:
        if self.offsets is not None:
            return self.offsets.numel() - 1, "SparseFeatures.offsets"
        if self.lengths is not None:
            return self.lengths.numel(), "SparseFeatures.lengths"
        return self.values.numel(), "SparseFeatures.values (one id per bag)"

    @property
    def is_single_hot(self) -> bool:
        """Whether every bag holds exactly one id, known without reading any data."""
        return self.lengths is None and self.offsets is None

    @property
    def batch_size(self) -> int:
        """``B``, the number of examples."""
        return self._num_bags()[0] // len(self.keys) if self.keys else 0

    @property
    def device(self) -> torch.device:
        """The device of ``values``."""
        return self.values.device

    def with_values(self, values: Tensor) -> SparseFeatures:
        """The same bags with other ids, int64 ``[N]``, which are not checked."""
        other = object.__new__(SparseFeatures)
        other.__dict__.update(self.__dict__, values=values)
        return other

    def bag_offsets(self) -> Tensor:
        """Offsets of all bags, int64 ``[F * B + 1]``, built where the batch does not carry them."""
        if self.offsets is not None:
            return self.offsets.long()
        if self.lengths is None:
            return torch.arange(self.values.numel() + 1, device=self.device)
        offsets = torch.zeros(self.lengths.numel() + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(self.lengths, 0, out=offsets[1:])
        return offsets

    def bag_lengths(self) -> Tensor:
        """Ids per bag, int64 ``[F * B]``."""
        if self.lengths is not None:
            return self.lengths.long()
        return self.bag_offsets().diff()

    @classmethod
    def from_ids(cls, keys: Sequence[str], ids_BF: Tensor) -> SparseFeatures:
        """One id per field from a matrix of ids, shape ``[B, F]``, any integer dtype.

        >>> SparseFeatures.from_ids(("a", "b"), torch.tensor([[1, 10], [2, 20]])).values.tolist()
        [1, 2, 10, 20]
        """
        if ids_BF.dim() != 2 or ids_BF.shape[1] != len(keys):
            raise ValueError(f"ids must have shape [B, {len(keys)}], one column per feature, got {list(ids_BF.shape)}.")
        if ids_BF.is_floating_point():
            raise TypeError(f"ids must be integers, got {ids_BF.dtype}: large ids do not survive a float.")
        return cls(tuple(keys), ids_BF.t().reshape(-1).long())

    @classmethod
    def from_kjt(cls, kjt: _KeyedJaggedTensorLike) -> SparseFeatures:
        """From TorchRec's ``KeyedJaggedTensor``, or anything with its methods. Shares the tensors, except int32 ids."""
        return cls(tuple(kjt.keys()), kjt.values().long(), lengths=kjt.lengths(), weights=kjt.weights_or_none())

    def to_kjt(self, kjt_type: type[T]) -> T:
        """To TorchRec's ``KeyedJaggedTensor``, which the caller passes in, so that TorchRec stays optional.

        Args:
            kjt_type: A class whose constructor takes ``keys, values, weights=, lengths=``.
        """
        make: Any = kjt_type
        result: T = make(keys=list(self.keys), values=self.values, weights=self.weights, lengths=self.bag_lengths())
        return result

    @classmethod
    def cat(cls, parts: Sequence[SparseFeatures]) -> SparseFeatures:
        """Join batches of the same features along the examples: parts of ``B1, B2, ...`` give ``B1 + B2 + ...``.

        Raises:
            ValueError: no part, or the parts' keys differ.

        >>> a = SparseFeatures.from_ids(("x", "y"), torch.tensor([[1, 10]]))
        >>> b = SparseFeatures.from_ids(("x", "y"), torch.tensor([[2, 20], [3, 30]]))
        >>> SparseFeatures.cat([a, b]).values.tolist()
        [1, 2, 3, 10, 20, 30]
        """
        if not parts or any(part.keys != parts[0].keys for part in parts):
            raise ValueError(f"cat needs parts with the same features, got {[list(part.keys) for part in parts]}.")
        if len(parts) == 1 or not parts[0].keys:
            return parts[0]
        lengths = weights = None
        if not all(part.is_single_hot for part in parts):
            lengths = torch.cat([part.bag_lengths().view(len(part.keys), -1) for part in parts], 1).reshape(-1)
        if any(part.weights is not None for part in parts):
            weights = _interleave([part._per_feature(part._weights_or_ones()) for part in parts])
        values = _interleave([part._per_feature(part.values) for part in parts])
        return cls(parts[0].keys, values, lengths=lengths, weights=weights)

    def select(self, keys: Sequence[str]) -> SparseFeatures:
        """The given features only, in the given order. Returns ``self`` where nothing changes.

        Raises:
            KeyError: a feature is not in the batch.
        """
        if tuple(keys) == self.keys:
            return self
        missing = [key for key in keys if key not in self.keys]
        if missing:
            raise KeyError(f"features {missing} are not in the batch, which has {list(self.keys)}.")
        index = [self.keys.index(key) for key in keys]

        def pick(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([parts[i] for i in index]) if index else parts[0][:0]

        lengths = None
        if not self.is_single_hot:
            lengths = pick(self.bag_lengths().view(len(self.keys), -1).unbind())
        weights = None if self.weights is None else pick(self._per_feature(self.weights))
        return SparseFeatures(tuple(keys), pick(self._per_feature(self.values)), lengths=lengths, weights=weights)

    def rows_from(self, starts_F: Tensor) -> Tensor:
        """Each id, counted from a number of its feature's own, int64 ``[N]``.

        Args:
            starts_F: That number, int64 ``[F]``: the first row of the feature's table where several lie in one tensor.
        """
        if not self.keys:
            return self.values  # there are none, and torch cannot tell the shape of nothing
        starts_F = starts_F.to(self.device)
        if self.is_single_hot:
            return (self.values.view(len(self.keys), -1) + starts_F.unsqueeze(1)).view(-1)
        per_feature = self.bag_lengths().view(len(self.keys), -1).sum(1)
        return self.values + starts_F.repeat_interleave(per_feature)

    def feature_bounds(self) -> list[int]:
        """The positions in ``values`` where each feature's ids start and end: ``F + 1`` of them."""
        batch_size = self.batch_size
        if self.is_single_hot:
            return [f * batch_size for f in range(len(self.keys) + 1)]
        offsets = self.bag_offsets()
        if not batch_size:
            return [0] * (len(self.keys) + 1)
        bounds: list[int] = offsets[::batch_size].tolist()
        return bounds

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SparseFeatures:
        """The same features on another device; this object itself if they are there."""
        there, tensors = torch.device(device), (self.values, self.lengths, self.offsets, self.weights)
        if all(tensor is None or tensor.device == there for tensor in tensors):
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SparseFeatures:
        """The same features in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> SparseFeatures:
        lengths, offsets, weights = (
            None if tensor is None else function(tensor) for tensor in (self.lengths, self.offsets, self.weights)
        )
        return SparseFeatures(self.keys, function(self.values), lengths, offsets, weights)

    def _per_feature(self, tensor: Tensor) -> Sequence[Tensor]:
        if self.is_single_hot:
            return tensor.reshape(len(self.keys), -1).unbind()
        sizes = [end - start for start, end in pairwise(self.feature_bounds())]
        parts: Sequence[Tensor] = tensor.split(sizes)
        return parts

    def _weights_or_ones(self) -> Tensor:
        return torch.ones(self.values.shape, device=self.device) if self.weights is None else self.weights


def find(tree: Any, kind: type[T]) -> Iterator[T]:
    """All objects of a type in nested mappings, sequences and dataclasses.

    >>> list(find({"a": [1, "x"], "b": (2.0, {"c": 3})}, int))
    [1, 3]
    """
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from find(value, kind)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from find(value, kind)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for part in fields(tree):
            yield from find(getattr(tree, part.name), kind)


def same_ids(one: SparseFeatures, other: SparseFeatures) -> bool:
    """Whether two batches look up the same rows, features in the same order."""
    if one.values is other.values and one.lengths is other.lengths and one.offsets is other.offsets:
        return True
    if one.is_single_hot != other.is_single_hot or not torch.equal(one.values, other.values):
        return False
    return one.is_single_hot or torch.equal(one.bag_offsets(), other.bag_offsets())


def _interleave(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Join per-feature pieces of several batches, feature by feature."""
    return torch.cat([piece for pieces in zip(*parts, strict=True) for piece in pieces])


# --- Checks before any memory is touched with ids ------------------------------------------------------------------


@compile_loop
def all_below(ids, bounds, limits):  # noqa: ANN001, ANN201
    """Whether the ids of each feature, taken as unsigned, are below its limit.

    Args:
        ids: int64 ``[N]``, feature by feature.
        bounds: Where each feature's ids begin and end, int64 ``[F + 1]``.
        limits: int64 ``[F]``, unsigned as well.
    """
    for f in range(limits.shape[0]):
        highest = np.uint64(0)
        for position in range(bounds[f], bounds[f + 1]):
            highest = max(highest, np.uint64(ids[position]))  # a negative id is a large one here
        if highest >= np.uint64(limits[f]):
            return False
    return True


@compile_loop
def _rise(offsets):  # noqa: ANN001, ANN202
    falls = 0
    for bag in range(1, offsets.shape[0]):
        falls += offsets[bag] < offsets[bag - 1]  # a difference could overflow
    return falls == 0


def bags_cover_ids(sparse: SparseFeatures) -> bool:
    """Whether the offsets rise from 0 to the number of ids, so that each id is in one bag.

    >>> lengths = torch.tensor([2, 0, 1])
    >>> bags_cover_ids(SparseFeatures(("a",), torch.tensor([3, 1, 2]), lengths=lengths))
    True
    >>> bags_cover_ids(SparseFeatures(("a",), torch.tensor([3, 1]), lengths=lengths))
    False
    """
    offsets = sparse.bag_offsets()
    if int(offsets[0]) != 0 or int(offsets[-1]) != sparse.values.numel():
        return False
    if sparse.device.type == "cpu":
        return bool(_rise(offsets.numpy()))
    return not bool((offsets.diff() < 0).any())


def ids_are_inside(sparse: SparseFeatures, limits_F: Tensor) -> bool:
    """Whether every id is at least 0 and below its feature's limit.

    Args:
        sparse: Bags that cover its ids.
        limits_F: Ids of each feature's table, int64 on the CPU; unsigned, as ids are (:mod:`.int64_ids`).

    In one pass of a compiled loop on the CPU, where torch's operators took a quarter of a millisecond for a batch of
    128: as long as a matrix product of the dense part.

    >>> sparse = SparseFeatures(("a", "b"), torch.tensor([4, 0, 9, 8]))
    >>> ids_are_inside(sparse, torch.tensor([5, 10])), ids_are_inside(sparse, torch.tensor([5, 9]))
    (True, False)
    """
    if not sparse.values.numel():
        return True
    if sparse.device.type == "cpu":
        bounds = np.array(sparse.feature_bounds(), dtype=np.int64)
        return bool(all_below(sparse.values.numpy(), bounds, limits_F.numpy()))
    bounds_F = torch.tensor(sparse.feature_bounds(), device=sparse.device)
    limits_N = limits_F.to(sparse.device).repeat_interleave(bounds_F.diff())
    return bool(are_below(sparse.values, limits_N).all())
