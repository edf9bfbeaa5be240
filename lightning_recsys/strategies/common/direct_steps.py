"""Steps of an optimizer that a strategy does not hear of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


class DirectSteps:
    """Refuses steps that go past the strategy: manual optimization may call a torch optimizer itself.

    Args:
        optimizers: The run's optimizers, which are torch's.
        consequence: What such a step would do under the strategy, for the message.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, consequence: str) -> None:
        self._consequence = consequence
        self._is_ours = False  # whether a step that the strategy makes is under way
        self._hooks = [optimizer.register_step_post_hook(self._look) for optimizer in optimizers]

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Around the strategy's own steps."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_ours:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called on the optimizer itself, which {self._consequence}. In"
                " manual optimization step what self.optimizers() returns: not use_pl_optimizer=False, and no optimizer"
                " that the module has kept."
            )

    def remove(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
