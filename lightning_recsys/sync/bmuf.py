"""Blockwise model-update filtering."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from lightning_recsys.sync.algorithm import Exchange, SyncAlgorithm


class BMUF(SyncAlgorithm):
    r"""Blockwise model-update filtering: a step towards the mean, with momentum, instead of the mean itself.

    .. math::
        d = \tfrac1n \textstyle\sum_i w_i - w_g, \qquad D \leftarrow m D + \eta\, d, \qquad w_g \leftarrow w_g + D,
        \qquad w_i \leftarrow (1-\alpha)\, w_i + \alpha\, w_g

    With Nesterov's look-ahead the replicas move towards :math:`w_g + m D`. With ``eta=1`` and ``block_momentum=0`` it
    is :class:`ModelAveraging`.

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

    exchange: ClassVar[Exchange] = Exchange.MEAN

    def __init__(
        self, *, alpha: float = 0.5, eta: float = 1.0, block_momentum: float = 0.0, nesterov: bool = False
    ) -> None:
        super().__init__(alpha=alpha)
        if not (math.isfinite(eta) and eta > 0):
            raise ValueError(f"strategy.eta must be a finite number above 0, got {eta}. 1 is the usual choice.")
        if not 0 <= block_momentum < 1:
            raise ValueError(f"strategy.block_momentum must be in [0, 1), got {block_momentum}. Use 0 for none.")
        if nesterov and not block_momentum:
            raise ValueError("strategy.nesterov=true looks ahead along strategy.block_momentum, which is 0: set it.")
        self.eta = eta
        self.block_momentum = block_momentum
        self.nesterov = nesterov
        self._global: Tensor | None = None
        self._momentum: Tensor | None = None

    def start(self, initial: Tensor) -> None:  # noqa: D102 - inherited
        self._global = initial.clone()
        self._momentum = initial.new_zeros(initial.shape)

    def fold(self, replica: Tensor, answer: Tensor) -> None:  # noqa: D102 - inherited
        assert self._global is not None
        assert self._momentum is not None
        self._momentum.mul_(self.block_momentum).add_(answer.sub_(self._global), alpha=self.eta)
        self._global.add_(self._momentum)
        target = self._global
        if self.nesterov:
            target = answer.copy_(self._global).add_(self._momentum, alpha=self.block_momentum)
        replica.lerp_(target, self.alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """The global model and its momentum."""
        assert self._global is not None
        assert self._momentum is not None
        return {"global": self._global, "momentum": self._momentum}
