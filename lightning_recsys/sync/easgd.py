"""Elastic averaging with a centre on the sync servers."""

from __future__ import annotations

from typing import ClassVar

from lightning_recsys.sync.algorithm import SyncAlgorithm, Topology


class EASGD(SyncAlgorithm):
    r"""Elastic averaging, sequential and asymmetric: centralised and asynchronous.

    .. math::
        \tilde w \leftarrow (1-\alpha)\,\tilde w + \alpha\, w, \qquad w \leftarrow (1-\alpha)\, w + \alpha\, \tilde w

    The second line reads the centre :math:`\tilde w` that the first one wrote. (Zhang et al.'s elastic averaging is
    symmetric: both sides move by the same difference.)

    Args:
        alpha: Elastic parameter of both lines, in ``(0, 1]``.

    Communication: a round sends the replica to the sync servers and gets the centre back; nobody waits for another
    trainer.
    Reference: Zheng et al. 2020, ShadowSync, Algorithm 2.
    Differs from the paper: nothing.

    >>> import torch
    >>> center, replica = torch.tensor([0.0]), torch.tensor([2.0])
    >>> center.lerp_(replica, 0.5)  # the sync server's half
    tensor([1.])
    >>> EASGD(alpha=0.5).fold(replica, center)
    >>> replica
    tensor([1.5000])
    """

    topology: ClassVar[Topology] = Topology.CENTRAL
