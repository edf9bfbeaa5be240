"""Whether ids are inside their tables, and bags cover them, before any memory is touched with them."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.embeddings.int64_ids import are_below
from lightning_recsys.embeddings.sparse_features import SparseFeatures


@compile_loop
def _all_below(ids, bounds, limits):  # noqa: ANN001, ANN202
    for f in range(limits.shape[0]):
        highest = np.uint64(0)
        for position in range(bounds[f], bounds[f + 1]):
            highest = max(highest, np.uint64(ids[position]))  # a negative id is a large one here
        if highest >= np.uint64(limits[f]):
            return False
    return True


@compile_loop
def _rise(offsets):  # noqa: ANN001, ANN202
    lowest = offsets[0] * 0
    for bag in range(1, offsets.shape[0]):
        lowest = min(lowest, offsets[bag] - offsets[bag - 1])
    return lowest >= 0


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
        return bool(_all_below(sparse.values.numpy(), bounds, limits_F.numpy()))
    bounds_F = torch.tensor(sparse.feature_bounds(), device=sparse.device)
    limits_N = limits_F.to(sparse.device).repeat_interleave(bounds_F.diff())
    return bool(are_below(sparse.values, limits_N).all())
