"""The weight of a gradient when other updates came between the parameters that it was computed at and its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, overload

import torch
from torch import Tensor

StalenessRule = Literal["identity", "linear", "power", "relative", "literal"]

STALENESS_RULES: tuple[StalenessRule, ...] = get_args(StalenessRule)


@dataclass(frozen=True)
class StalenessNormalization:
    r"""The factor :math:`\rho` that a stale gradient is multiplied with before its optimizer sees it.

    The staleness :math:`\tau` of a gradient is the parameter's version after its update minus the version that the
    worker pulled, so synchronous training has :math:`\tau = 1`. Where ``sensitivity`` is given, it is weighted by how
    much the parameter moved at its last update, and then it is normalised to the cluster that the learning rate was
    tuned for:

    .. math::
        \tau' = \frac{\delta'}{\delta}\, \tau \cdot \mathrm{sigmoid}(\lambda\, |\Delta w|), \qquad
        g \leftarrow \rho(\tau')\, g

    ============  ===========================================================================================
    ``identity``  :math:`\rho = 1`: plain asynchronous training
    ``linear``    :math:`\rho = 1 / \tau'`
    ``power``     :math:`\rho = \tau'^{-k}` (eq. 4)
    ``relative``  :math:`\rho = 1` up to :math:`\mu'`, then :math:`(\tau' / \mu')^{-k}`
    ``literal``   :math:`\rho = 1` up to :math:`\mu'`, then :math:`\tau'^{-k}` (eq. 7 with k = 2)
    ============  ===========================================================================================

    The default is ``relative``, which is continuous: the literal rule falls from 1 to :math:`\mu'^{-k}` between two
    stalenesses next to each other (to a millionth at :math:`\mu' = 1000`), so that half of a cluster's gradients
    would count and the other half would be thrown away.

    Args:
        rule: Name of one of the rules in the table.
        power: :math:`k`, above 0; the paper uses 2. ``identity`` and ``linear`` have no use for it.
        target: :math:`\mu'`, at least 1: the mean staleness of the cluster that the learning rate was tuned for, which
            is about its number of workers. The paper uses 1 000 throughout, so smaller clusters train as without.
        scale: :math:`\delta' / \delta`, above 0: the standard deviation of the staleness in that cluster over the one
            in this cluster. 1 leaves :math:`\tau` as it is counted.
        sensitivity: :math:`\lambda` of the weight-change transform, at least 0, for :math:`|\Delta w|` as the root mean
            square of the last update. The transform lies between 1/2, for a parameter that no longer moves, and 1.
            ``None`` leaves it out.

    Raises:
        ValueError: an argument is out of range.

    Reference: Liu & Zhao 2021, "Asynchronous stochastic gradient descent for extreme-scale recommender systems",
    equations 3 to 8; ``linear`` is Zhang et al. 2016, "Staleness-aware async-SGD".
    Differs from the paper: ``relative``; :math:`\rho` never exceeds 1, though transform and scale can take
    :math:`\tau'` below 1; :math:`|\Delta w|` is one number per parameter or row.

    >>> StalenessNormalization(target=1000).factor(2000)
    0.25
    >>> StalenessNormalization("linear").factor(torch.tensor([1, 2, 4]))
    tensor([1.0000, 0.5000, 0.2500])
    """

    rule: StalenessRule = "relative"
    power: float = 2.0
    target: float = 1000.0
    scale: float = 1.0
    sensitivity: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in STALENESS_RULES:
            raise ValueError(f"staleness rule must be one of {', '.join(STALENESS_RULES)}, got {self.rule!r:.100}.")
        if not (_is_finite(self.power) and self.power > 0):
            raise ValueError(f"staleness power must be a finite number above 0, got {self.power}. The paper uses 2.")
        if not (_is_finite(self.target) and self.target >= 1):
            raise ValueError(
                f"staleness target must be a finite number of at least 1, which is synchronous, got {self.target}."
            )
        if not (_is_finite(self.scale) and self.scale > 0):
            raise ValueError(f"staleness scale must be a finite number above 0, got {self.scale}. 1 changes nothing.")
        if self.sensitivity is not None and not (_is_finite(self.sensitivity) and self.sensitivity >= 0):
            raise ValueError(
                f"staleness sensitivity must be None or a finite number of at least 0, got {self.sensitivity}."
            )

    @property
    def uses_changes(self) -> bool:
        """Whether :meth:`factor` needs to know how much parameters moved at their last update."""
        return self.sensitivity is not None and self.rule != "identity"

    @overload
    def factor(self, staleness: float, change: float | None = None) -> float: ...

    @overload
    def factor(self, staleness: Tensor, change: Tensor | None = None) -> Tensor: ...

    def factor(self, staleness: float | Tensor, change: float | Tensor | None = None) -> float | Tensor:
        r"""The factors :math:`\rho` of gradients, in ``(0, 1]``.

        Args:
            staleness: :math:`\tau` of each, in updates; any shape, any dtype. What is below 1 counts as 1.
            change: :math:`|\Delta w|` of each parameter or row, in the same shape; where :attr:`uses_changes`.

        Returns:
            A number for a number, else a float32 tensor in the shape of ``staleness``.

        Raises:
            ValueError: the rule uses changes and there are none.
        """
        if not isinstance(staleness, Tensor):
            moved = None if change is None else torch.tensor(float(change), dtype=torch.float64)
            return float(self._factor(torch.tensor(float(staleness), dtype=torch.float64), moved))
        return self._factor(staleness.to(torch.float32), change if isinstance(change, Tensor) else None)

    def _factor(self, staleness: Tensor, change: Tensor | None) -> Tensor:
        scaled = staleness * self.scale
        if self.sensitivity is not None and self.uses_changes:
            if change is None:
                raise ValueError(f"sensitivity={self.sensitivity} needs the last changes of what is updated.")
            scaled = scaled * torch.sigmoid(self.sensitivity * change.to(scaled.dtype))
        scaled = scaled.clamp(min=1)  # so that no rule exceeds 1
        match self.rule:
            case "identity":
                return torch.ones_like(scaled)
            case "linear":
                return scaled.reciprocal()
            case "power":
                return scaled.pow(-self.power)
            case "relative":
                return (scaled / self.target).clamp(min=1).pow(-self.power)
            case "literal":
                return torch.where(scaled > self.target, scaled.pow(-self.power), 1.0)


def _is_finite(value: float) -> bool:
    """Whether it is a finite number, which ``True`` is not meant for."""
    return not isinstance(value, bool) and math.isfinite(value)
