"""Rounds of a synchronisation algorithm: what it asks for is fetched, what comes is folded in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_recsys.stores.interfaces import DenseStore
from lightning_recsys.sync import SyncAlgorithm

DIVERGENCE_PERIOD = 10  # rounds; the norms cost about as much as a round through shared memory


class Rounds(ABC):
    """Runs one algorithm for one replica; whoever drives it decides when.

    Args:
        algorithm: Already started.
        replica: float32 ``[size]``; workers may be writing to it.

    Attributes:
        count: Rounds so far that moved the replica.
        exchanged_bytes: What this process sent to other trainers, and received as well. (Connections to servers count
            theirs themselves.)
        divergence: Relative L2 distance of the replica from what it was last compared with, the centre or the mean;
            ``None`` before the first comparison. (Every tenth round compares.)
    """

    def __init__(self, algorithm: SyncAlgorithm, replica: Tensor) -> None:
        self.algorithm = algorithm
        self.replica = replica
        self.count = 0
        self.exchanged_bytes = 0
        self.divergence: float | None = None

    def run(self, *, leaving: bool) -> bool:
        """One round.

        Args:
            leaving: This trainer would rather stop; others may still need it.

        Returns:
            Whether it may stop. Nothing was folded in then.
        """
        answer = self._exchange(leaving=leaving)
        if answer is None:
            return True
        if self.count % DIVERGENCE_PERIOD == 0:
            self.divergence = float((self.replica - answer).norm() / answer.norm().clamp_min(1e-12))
        self.algorithm.fold(self.replica, answer)
        self.count += 1
        return False

    @property
    def moving_seconds(self) -> float:
        """Processor time of the threads that ran rounds so far, for moving bytes instead of computing."""
        return 0.0

    @abstractmethod
    def _exchange(self, *, leaving: bool) -> Tensor | None:
        """What the algorithm asks for, or ``None`` where this trainer may leave."""


class CenterRounds(Rounds):
    """Exchanges with a centre that lies in pieces on the sync servers; nobody waits for another trainer.

    Args:
        algorithm: As in :class:`Rounds`.
        replica: As in :class:`Rounds`.
        pieces: The stores, whose sizes add up to the replica's.
    """

    def __init__(self, algorithm: SyncAlgorithm, replica: Tensor, *, pieces: Sequence[DenseStore]) -> None:
        super().__init__(algorithm, replica)
        self._pieces = pieces
        sizes = [piece.size for piece in pieces]
        self._answer = torch.empty_like(replica)
        self._parts, self._answers = torch.split(replica, sizes), torch.split(self._answer, sizes)

    def _exchange(self, *, leaving: bool) -> Tensor | None:
        if leaving:
            return None
        answers = [
            piece.begin_elastic_average(part, alpha=self.algorithm.alpha)
            for piece, part in zip(self._pieces, self._parts, strict=True)
        ]
        if len(answers) == 1:
            return answers[0]()
        for answer, part in zip(answers, self._answers, strict=True):
            part.copy_(answer())
        return self._answer

    @property
    def moving_seconds(self) -> float:
        """Processor time that moving bytes has taken."""
        return sum(piece.moving_seconds for piece in self._pieces)

    def pull_center(self) -> Tensor:
        """A copy of the centre."""
        return torch.cat([piece.pull() for piece in self._pieces])


class MeanRounds(Rounds):
    """Averages over all trainers in a process group of their own.

    Each trainer adds a vote to its vector: a trainer that wants to leave goes on taking part until all want to, so
    nobody waits for somebody who has left, and all leave after the same round.

    Args:
        algorithm: As in :class:`Rounds`.
        replica: As in :class:`Rounds`.
        group: One rank per trainer.
    """

    def __init__(self, algorithm: SyncAlgorithm, replica: Tensor, *, group: Any) -> None:
        super().__init__(algorithm, replica)
        self._group = group
        self._members = dist.get_world_size(group)
        self._message = torch.empty(replica.numel() + 1)
        # A ring sends and receives each element twice, but for this member's own share.
        self._bytes_per_round = int(2 * (self._members - 1) / self._members * self._message.nbytes)

    def _exchange(self, *, leaving: bool) -> Tensor | None:
        mean, vote = self._message[:-1], self._message[-1]
        mean.copy_(self.replica)
        vote.fill_(leaving)
        dist.all_reduce(self._message, group=self._group)
        self.exchanged_bytes += self._bytes_per_round
        return None if vote == self._members else mean.div_(self._members)
