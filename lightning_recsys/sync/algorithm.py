"""The interface between a synchronisation rule and whoever moves the bytes."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from torch import Tensor


class Topology(Enum):
    """The vector that an algorithm needs before it can fold something into a replica."""

    CENTRAL = "central"
    """The sync servers' vector, once it has moved towards this replica by ``alpha``; no other trainer takes part."""

    ALL_REDUCE = "all_reduce"
    """The mean over the replicas of all trainers; all of them take part in each round."""


class SyncAlgorithm:
    """One trainer's side of a synchronisation rule over flat float32 vectors.

    A round has two halves. The driver (a background thread, a hook in the training loop, a test) fetches what
    :attr:`topology` names; then :meth:`fold` moves the replica, in place, for workers may be training on it.

    Args:
        alpha: Elastic parameter, unitless, in ``(0, 1]``: how far one round moves the replica.

    Attributes:
        topology: Whether a round fetches the centre or the mean of all replicas.

    Raises:
        ValueError: ``alpha`` is outside ``(0, 1]``.
    """

    topology: ClassVar[Topology]

    def __init__(self, *, alpha: float = 0.5) -> None:
        if isinstance(alpha, bool) or not 0 < alpha <= 1:
            raise ValueError(f"strategy.alpha must be in (0, 1], got {alpha}. 0.5 is the usual choice.")
        self.alpha = alpha

    def start(self, initial: Tensor) -> None:
        """Begin at the parameters that all replicas share, before the first round, or where nobody knows the last one.

        Args:
            initial: float32 ``[size]``; a rule that keeps it copies it.
        """

    def fold(self, replica: Tensor, answer: Tensor) -> None:
        """Finish a round: draw the replica towards the answer by ``alpha``, where a rule says nothing else.

        Args:
            replica: float32 ``[size]``, changed in place. Workers write to it meanwhile, so it may differ from what was
                sent; add to it rather than overwrite it.
            answer: What :attr:`topology` asked for, float32 ``[size]``; the rule may overwrite it.
        """
        replica.lerp_(answer, self.alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """The state that a checkpoint must keep; empty for a rule without memory. Equal on all trainers."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a :meth:`state_dict`, after :meth:`start`.

        Raises:
            ValueError: the state is another rule's, that of other settings, or that of another model.
        """
        own = self.state_dict()
        if {name: x.shape for name, x in own.items()} != {name: x.shape for name, x in state.items()}:
            raise ValueError(
                f"{type(self).__name__} keeps {_shapes(own)}, but the checkpoint holds {_shapes(state)}: it was saved"
                " with another strategy.algorithm, other settings of it, or another model."
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])


def _shapes(state: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in state.items()) or "nothing"
