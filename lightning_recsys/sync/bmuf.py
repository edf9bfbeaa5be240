"""Blockwise model-update filtering."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from lightning_recsys.sync.algorithm import SyncAlgorithm, Topology


class BMUF(SyncAlgorithm):
    r"""Blockwise model-update filtering: a step towards the mean, with momentum, instead of the mean itself.

    .. math::
        d = \tfrac1n \textstyle\sum_i w_i - w_b, \qquad D \leftarrow m D + \eta\, d, \qquad w_g \leftarrow w_g + D,
        \qquad w_i \leftarrow (1-\alpha)\, w_i + \alpha\, w_b

    where :math:`w_b` is the model that the replicas are drawn towards: first their common start, after each update of
    the global model :math:`w_g` that, or with Nesterov's look-ahead :math:`w_g + m D`. What the replicas learned in a
    round is measured against where they were drawn to: measured against :math:`w_g` the look-ahead itself would count
    as learned, and the momentum twice, which diverges. With ``eta=1`` and ``block_momentum=0`` it is
    :class:`ModelAveraging`.

    Args:
        alpha: Elastic parameter, in ``(0, 1]``.
        eta: Step size of the global model, above 0; 1 goes all the way to the mean.
        block_momentum: ``m``, in ``[0, 1)``. With ``n`` trainers ``1 - 1/n`` makes up for the shrinkage of averaging.
        nesterov: Look ahead; needs ``block_momentum``.

    Raises:
        ValueError: a parameter is out of range.

    Communication: one all-reduce of the replica over the trainers per round.
    Reference: Zheng et al. 2020, ShadowSync, Algorithm 4; Chen and Huo 2016 for momentum and Nesterov, which the
    algorithm's comment leaves open.
    Differs from the paper: nothing.

    >>> import torch
    >>> bmuf, replica = BMUF(alpha=1.0, eta=0.5), torch.tensor([4.0])
    >>> bmuf.start(torch.tensor([0.0]))
    >>> bmuf.fold(replica, torch.tensor([2.0]))  # the mean over the trainers
    >>> replica
    tensor([1.])
    """

    topology: ClassVar[Topology] = Topology.ALL_REDUCE

    def __init__(
        self, *, alpha: float = 0.5, eta: float = 1.0, block_momentum: float = 0.0, nesterov: bool = False
    ) -> None:
        super().__init__(alpha=alpha)
        if isinstance(eta, bool) or not (math.isfinite(eta) and eta > 0):
            raise ValueError(f"strategy.eta must be a finite number above 0, got {eta}. 1 is the usual choice.")
        if isinstance(block_momentum, bool) or not 0 <= block_momentum < 1:
            raise ValueError(f"strategy.block_momentum must be in [0, 1), got {block_momentum}. Use 0 for none.")
        if nesterov and not block_momentum:
            raise ValueError("strategy.nesterov=true looks ahead along strategy.block_momentum, which is 0: set it.")
        self.eta = eta
        self.block_momentum = block_momentum
        self.nesterov = nesterov
        self._global = self._momentum = torch.empty(0)  # until `start`
        self._base = self._global  # what the replicas were last drawn towards: the global model, or ahead of it

    def start(self, initial: Tensor) -> None:  # noqa: D102 - inherited
        self._global = initial.clone()
        self._momentum = initial.new_zeros(initial.shape)
        self._base = initial.clone() if self.nesterov else self._global

    def fold(self, replica: Tensor, answer: Tensor) -> None:  # noqa: D102 - inherited
        self._momentum.mul_(self.block_momentum).add_(answer.sub_(self._base), alpha=self.eta)
        self._global.add_(self._momentum)
        if self.nesterov:
            torch.add(self._global, self._momentum, alpha=self.block_momentum, out=self._base)
        replica.lerp_(self._base, self.alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """The global model and its momentum; with Nesterov's look-ahead what replicas were last drawn towards, too."""
        state = {"global": self._global, "momentum": self._momentum}
        return state | {"base": self._base} if self.nesterov else state
