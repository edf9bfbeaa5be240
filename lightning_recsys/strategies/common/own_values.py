"""The logged values of workers that run free: each its own value of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class OwnValues:
    """Stands in for Lightning's logging in the training loop, which reduces values with ``sync_dist=True``.

    Lightning reduces the value of a step over all ranks within the call, and the others are at other steps or have
    finished. Here each worker that runs free keeps its own. The value of an epoch is reduced when the epoch is over,
    where all ranks meet.

    Args:
        strategy: The strategy, which reduces the values of an epoch.
    """

    def __init__(self, strategy: RecsysStrategy) -> None:
        self._strategy = strategy
        self._warned = False  # that values are each worker's own
        self._call: str | None = None  # the call of self.log that is under way in the training loop

    def log(self, log_value: Callable[..., None], fx: str, name: str, value: Any, **options: Any) -> None:
        """Log by ``log_value``, Lightning's own, by which ``self.log`` of any hook of the training loop goes."""
        self._call = f"self.log({name!r}, ..., sync_dist=True) in {fx}"
        try:
            log_value(fx, name, value, **{**options, "sync_dist_fn": self._reduce})
        finally:
            self._call = None

    def _reduce(self, value: Tensor, **options: Any) -> Tensor:
        if self._call is None:
            return self._strategy.reduce(value, **options)
        if not self._warned and self._strategy.is_global_zero:
            log.warning(
                "%s: workers run free, so the value of a step is that of rank 0 alone. With on_epoch=True the value of"
                " an epoch is that of all workers.",
                self._call,
            )
        self._warned = True
        return value
