"""Model averaging over all trainers."""

from __future__ import annotations

from typing import ClassVar

from lightning_recsys.sync.algorithm import SyncAlgorithm, Topology


class ModelAveraging(SyncAlgorithm):
    r"""Model averaging (MA): decentralised and synchronous.

    .. math:: w_g \leftarrow \tfrac1n \textstyle\sum_i w_i, \qquad w_i \leftarrow (1-\alpha)\, w_i + \alpha\, w_g

    With ``alpha=1`` it is plain averaging; below that a replica keeps a part of what its workers learned while the
    all-reduce was under way.

    Args:
        alpha: Elastic parameter, in ``(0, 1]``.

    Communication: one all-reduce of the replica over the trainers per round.
    Reference: Zheng et al. 2020, ShadowSync, Algorithm 3.
    Differs from the paper: nothing.

    >>> import torch
    >>> replica = torch.tensor([2.0])
    >>> ModelAveraging(alpha=0.5).fold(replica, torch.tensor([1.0]))
    >>> replica
    tensor([1.5000])
    """

    topology: ClassVar[Topology] = Topology.ALL_REDUCE
