"""The ground that all metrics of this package stand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import rank_zero_warn


class BinaryMetric(Metric):
    """A metric of predictions against 0/1 labels, whose states are sums over examples.

    The states keep their dtype (float64 or int64) when the module that holds them is cast to half precision:
    ``Trainer(precision="bf16-true")`` casts everything it finds, and a bfloat16 sum stops growing at 256.

    Args:
        from_logits: ``preds`` are logits and not probabilities.
        kwargs: See :class:`torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update: bool = False

    def __init__(self, *, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.from_logits = from_logits
        self._warned = False

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Plot a value, or the values of several steps; by default :meth:`compute`'s.

        Args:
            val: What :meth:`compute` or ``forward`` returned, once or several times.
            ax: A matplotlib axis to draw on.

        Returns:
            Figure and axis.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        return self._plot(val, ax)

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(message, UserWarning)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        # torchmetrics guards against Module.half() and the like, but not against Module.to(dtype).
        def move(state: Tensor) -> Tensor:
            moved = fn(state)
            return moved if moved.dtype == state.dtype else state.to(moved.device)

        return super()._apply(move, exclude_state)
