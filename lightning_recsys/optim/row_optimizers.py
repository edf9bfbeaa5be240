"""Update rules for embedding rows: what happens to one row when its summed gradient arrives.

A rule owns no rows. Kernels and stores gather the touched rows with their state, add the weight decay to their
gradients (:meth:`RowOptimizer.decayed`), call :meth:`RowOptimizer.update_` and put them back;
:mod:`lightning_recsys.optim.compiled` holds the same rules as compiled loops.
"""

# Shape suffixes: U unique rows of a batch, D embedding dim.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowOptimizer(ABC):
    r"""Base of all row update rules: hyperparameters, and which state a row carries.

    Weight decay is L2 in the gradient, as in ``torch.optim.Adam(weight_decay=...)``: whoever applies a rule hands it
    :math:`g + \lambda w` in place of :math:`g`. It is lazy: an update decays the rows that it touches, once each,
    however often the batch names them.

    Args:
        lr: Step size; a schedule may override it at each update.
        weight_decay: Factor :math:`\lambda` of the L2 penalty in the gradient, at least 0.
        decay_all_rows: Every update decays every row, as a dense optimizer would: rows that the batch does not touch
            are updated with the gradient :math:`\lambda w`, their state too. The time of an update then grows with the
            table, so this is for small ones.

    Raises:
        ValueError: a number is out of range, or there is no weight decay that ``decay_all_rows`` could mean.
    """

    lr: float
    weight_decay: float = field(default=0.0, kw_only=True)
    decay_all_rows: bool = field(default=False, kw_only=True)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Refuse an old name of an argument; subclasses are dataclasses, each with an ``__init__`` of its own."""
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._require("lr", self.lr, positive=True)
        self._require("weight_decay", self.weight_decay)
        if self.decay_all_rows and not self.weight_decay:
            raise ValueError(f"{type(self).__name__}.decay_all_rows needs a weight_decay above 0.")

    def _require(self, name: str, value: float, *, positive: bool = False, below: float = math.inf) -> None:
        if not math.isfinite(value) or value < 0 or value >= below or (positive and value == 0):
            lower = "above" if positive else "at least"
            upper = f" and below {below:g}" if below < math.inf else ""
            raise ValueError(f"{type(self).__name__}.{name} must be a finite number {lower} 0{upper}, got {value}.")

    def decayed(self, rows_UD: Tensor, grads_UD: Tensor) -> Tensor:
        """The gradients with the weight decay of their rows: what :meth:`update_` is to be called with."""
        return grads_UD.add(rows_UD, alpha=self.weight_decay) if self.weight_decay else grads_UD

    @abstractmethod
    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:
        """State of fresh rows ``[R, D]``: name -> float32 tensor ``[R]`` (one per row) or ``[R, D]``."""

    @abstractmethod
    def update_(self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int) -> None:
        """Apply one update in place.

        Args:
            rows_UD: The touched rows, ``[U, D]``.
            grads_UD: Their gradients, summed over the batch, ``[U, D]``, with the weight decay.
            state: The touched rows' state, shapes as in :meth:`initial_state`.
            lr: Step size of this update.
            step: Updates that the table has seen, this one included; starts at 1.
        """


@dataclass(frozen=True)
class RowSGD(RowOptimizer):
    r"""Gradient descent without state.

    .. math:: w \leftarrow w - \eta\, g

    Args:
        lr: Step size :math:`\eta`.
        weight_decay: Factor :math:`\lambda` of the L2 penalty in the gradient, at least 0; see :class:`RowOptimizer`.
        decay_all_rows: Whether rows that no batch touches decay as well; see :class:`RowOptimizer`.
    """

    lr: float = 0.01

    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:  # noqa: D102 - inherited
        return {}

    def update_(  # noqa: D102 - inherited
        self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None:
        rows_UD.sub_(grads_UD, alpha=lr)


@dataclass(frozen=True)
class RowAdagrad(RowOptimizer):
    r"""Adagrad with one accumulator per weight.

    .. math:: h \leftarrow h + g^2, \qquad w \leftarrow w - \eta\, g / (\sqrt{h} + \epsilon)

    Reference: Duchi et al. 2011, "Adaptive subgradient methods"; the same rule as ``torch.optim.Adagrad``.

    Args:
        lr: Step size :math:`\eta`.
        eps: :math:`\epsilon`, at least 0; keeps the first steps of a weight finite whose gradients are tiny.
        initial_accumulator: :math:`h` of a row that no batch has touched; the larger, the smaller its first steps.
        weight_decay: Factor :math:`\lambda` of the L2 penalty in the gradient, at least 0; see :class:`RowOptimizer`.
        decay_all_rows: Whether rows that no batch touches decay as well; see :class:`RowOptimizer`.
    """

    lr: float = 0.01
    eps: float = 1e-8
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps", self.eps)
        self._require("initial_accumulator", self.initial_accumulator)

    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:  # noqa: D102 - inherited
        return {"sum": torch.full_like(rows, self.initial_accumulator)}

    def update_(  # noqa: D102 - inherited
        self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None:
        state["sum"].addcmul_(grads_UD, grads_UD)
        rows_UD.addcdiv_(grads_UD, state["sum"].sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class RowWiseAdagrad(RowAdagrad):
    r"""Adagrad with one accumulator per row: the mean of the squared gradient over the row.

    .. math:: h \leftarrow h + \tfrac1D \textstyle\sum_d g_d^2, \qquad w \leftarrow w - \eta\, g / (\sqrt{h} + \epsilon)

    Needs a ``D``-th of Adagrad's state. Reference: FBGEMM ``EXACT_ROWWISE_ADAGRAD``, as in DLRM. Its arguments are
    those of :class:`RowAdagrad`.
    """

    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:  # noqa: D102 - inherited
        return {"sum": torch.full_like(rows[:, 0], self.initial_accumulator)}

    def update_(  # noqa: D102 - inherited
        self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None:
        state["sum"].add_(grads_UD.square().mean(1))
        rows_UD.addcdiv_(grads_UD, state["sum"].sqrt().add_(self.eps).unsqueeze(1), value=-lr)


@dataclass(frozen=True)
class RowAdam(RowOptimizer):
    r"""Lazy Adam: moments move only for rows that the batch touches; the bias correction counts the table's updates.

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
        w \leftarrow w - \eta\, \frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \epsilon}

    Equals ``torch.optim.Adam`` on rows touched at every step. Reference: Kingma & Ba 2015, Algorithm 1; laziness as in
    ``torch.optim.SparseAdam``.

    Args:
        lr: Step size :math:`\eta`.
        beta1: :math:`\beta_1`, in ``[0, 1)``: what the mean of the gradients keeps in an update of the row.
        beta2: :math:`\beta_2`, in ``[0, 1)``: what the mean of the squared gradients keeps.
        eps: :math:`\epsilon`, at least 0.
        weight_decay: Factor :math:`\lambda` of the L2 penalty in the gradient, at least 0; see :class:`RowOptimizer`.
        decay_all_rows: Whether rows that no batch touches decay as well; see :class:`RowOptimizer`.
    """

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps", self.eps)
        self._require("beta1", self.beta1, below=1)
        self._require("beta2", self.beta2, below=1)

    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:  # noqa: D102 - inherited
        return {"exp_avg": torch.zeros_like(rows), "exp_avg_sq": torch.zeros_like(rows)}

    def update_(  # noqa: D102 - inherited
        self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None:
        state["exp_avg"].lerp_(grads_UD, 1 - self.beta1)
        state["exp_avg_sq"].mul_(self.beta2).addcmul_(grads_UD, grads_UD, value=1 - self.beta2)
        denominator = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - self.beta2**step)).add_(self.eps)
        rows_UD.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - self.beta1**step))


@dataclass(frozen=True)
class RowFTRL(RowOptimizer):
    r"""FTRL-Proximal: per-weight rates with L1 (exact zeros) and L2.

    .. math::
        \sigma = \frac{\sqrt{n + g^2} - \sqrt{n}}{\alpha}, \quad z \leftarrow z + g - \sigma w, \quad
        n \leftarrow n + g^2, \quad
        w \leftarrow \begin{cases} 0 & |z| \le \lambda_1 \\
        -\left(\frac{\beta + \sqrt{n}}{\alpha} + \lambda_2\right)^{-1} (z - \mathrm{sgn}(z) \lambda_1) & \text{else}
        \end{cases}

    Reference: McMahan et al. 2013, "Ad click prediction", Algorithm 1, with ``lr`` for its alpha.
    Differs from the paper: ``z`` starts at the value whose weight is the row's initial value, and not at 0, which
    would forget a random start at the first update. A learning rate of 0, as schedules pass through, changes nothing.

    Args:
        lr: Learning rate, the paper's :math:`\alpha`.
        beta: :math:`\beta`, at least 0: the larger, the smaller the first steps of a weight.
        l1: :math:`\lambda_1`, at least 0: weights whose ``z`` is no larger are exactly 0.
        l2: :math:`\lambda_2`, at least 0: draws weights towards 0.
        weight_decay: Factor :math:`\lambda` of the L2 penalty in the gradient, at least 0; see :class:`RowOptimizer`.
        decay_all_rows: Whether rows that no batch touches decay as well; see :class:`RowOptimizer`.
    """

    lr: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "l1", "l2"):
            self._require(name, getattr(self, name))

    def initial_state(self, rows: Tensor) -> dict[str, Tensor]:  # noqa: D102 - inherited
        linear = -rows * (self.beta / self.lr + self.l2) - rows.sign() * self.l1
        return {"accumulator": torch.zeros_like(rows), "linear": linear}

    def update_(  # noqa: D102 - inherited
        self, rows_UD: Tensor, grads_UD: Tensor, state: dict[str, Tensor], *, lr: float, step: int
    ) -> None:
        if lr == 0:
            return
        accumulator, linear = state["accumulator"], state["linear"]
        root = accumulator.sqrt()
        accumulator.addcmul_(grads_UD, grads_UD)
        new_root = accumulator.sqrt()
        linear.add_(grads_UD).addcmul_((new_root - root).div_(lr), rows_UD, value=-1)
        shrunk = linear - linear.clamp(-self.l1, self.l1)  # z - sgn(z) l1 outside the band, exactly 0 inside
        # Without l2 and beta, a weight whose gradients were all 0 has no curvature: 0 / 0 is kept at 0.
        curvature = new_root.add_(self.beta).div_(lr).add_(self.l2).clamp_(min=torch.finfo(rows_UD.dtype).tiny)
        torch.div(shrunk.neg_(), curvature, out=rows_UD)
