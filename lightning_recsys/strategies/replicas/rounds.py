"""The bytes of a trainer's rounds: what the algorithm asks for is fetched from sync servers, or from the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_recsys.parameter_server.remote import RemoteDenseStore
from lightning_recsys.placement import chunk_evenly
from lightning_recsys.stores.interfaces import DenseStore, Stores
from lightning_recsys.sync import ReplicaRounds, SyncAlgorithm

CENTER = "center"  # in checkpoints,
CENTER_STORE = "sync-center"  # and on sync servers, where no path of a module can be the same
SYNC = "sync"  # the kind of these servers


class Rounds(ReplicaRounds, ABC):
    """Rounds that move bytes; whoever drives it decides when.

    Attributes:
        exchanged_bytes: What this process sent to other trainers, and received as well. (Connections to servers count
            theirs themselves.)
        over_sockets: Whether vectors travel, which takes processor time of threads and servers beside a round's own.
    """

    exchanged_bytes = 0
    over_sockets = True

    def run(self, *, leaving: bool) -> bool:
        """One round.

        Args:
            leaving: This trainer would rather stop; others may still need it.

        Returns:
            Whether it may stop. Nothing was folded in then.
        """
        if not self.takes_part(leaving=leaving):
            return True
        answer, num_leaving = self._exchange(leaving=leaving)
        return self.finish(answer, num_leaving=num_leaving)

    def set_leaders(self, ranks: tuple[int, ...]) -> None:
        """Before rounds begin, or go on after a pause: these workers make those of the trainers that live."""

    def close(self) -> None:
        """Let go of what the rounds have of their own; once the other trainers are ready to do so, too."""
        return

    @abstractmethod
    def _exchange(self, *, leaving: bool) -> tuple[Tensor, int]:
        """The tensor that the algorithm asks for, and how many trainers want to stop; ``leaving``: this one's vote."""


class CenterRounds(Rounds):
    """Exchanges with a centre that lies in pieces on the sync servers; nobody waits for another trainer.

    Args:
        algorithm: The algorithm, already started; see :class:`~lightning_recsys.sync.ReplicaRounds`.
        replica: The vector that rounds move, while workers may be writing to it.
        pieces: The stores, whose sizes add up to the replica's.
    """

    def __init__(self, algorithm: SyncAlgorithm, replica: Tensor, *, pieces: Sequence[DenseStore]) -> None:
        super().__init__(algorithm, replica)
        self._pieces = pieces
        self.over_sockets = any(isinstance(piece, RemoteDenseStore) for piece in pieces)
        sizes = [piece.size for piece in pieces]
        self._answer = torch.empty_like(replica)
        self._parts, self._answers = torch.split(replica, sizes), torch.split(self._answer, sizes)

    def _exchange(self, *, leaving: bool) -> tuple[Tensor, int]:
        # All pieces are asked before the first answer is waited for: the servers work at the same time.
        answers = [
            piece.begin_elastic_average(part, alpha=self.algorithm.alpha)
            for piece, part in zip(self._pieces, self._parts, strict=True)
        ]
        if len(answers) == 1:
            return answers[0](), 0
        for answer, part in zip(answers, self._answers, strict=True):
            part.copy_(answer())
        return self._answer, 0

    def pull_center(self) -> Tensor:
        """A copy of the centre."""
        return torch.cat([piece.pull() for piece in self._pieces])


class MeanRounds(Rounds):
    """Averages over all trainers in a process group of their own; each adds its vote to its vector.

    Args:
        algorithm: The algorithm, already started; see :class:`~lightning_recsys.sync.ReplicaRounds`.
        replica: The vector that rounds move, while workers may be writing to it.
        group: Process group with one rank per trainer; ``None`` where there is none yet.
    """

    def __init__(self, algorithm: SyncAlgorithm, replica: Tensor, *, group: Any | None) -> None:
        super().__init__(algorithm, replica)
        self._group: Any | None = None
        self._message = torch.empty(replica.numel() + 1)
        if group is not None:
            self.enter(group)

    def enter(self, group: Any) -> None:
        """Average in this group from the next round on."""
        self._group, self.num_trainers = group, group.size()
        # A ring sends and receives each element twice, but for this member's own share.
        self._bytes_per_round = int(2 * (self.num_trainers - 1) / self.num_trainers * self._message.nbytes)

    def _exchange(self, *, leaving: bool) -> tuple[Tensor, int]:
        # The vector is copied first: workers go on writing to the replica while its sum travels round the ring.
        mean, vote = self._message[:-1], self._message[-1]
        mean.copy_(self.replica)
        vote.fill_(leaving)
        assert self._group is not None
        self._group.allreduce([self._message]).wait()
        self.exchanged_bytes += self._bytes_per_round
        return mean.div_(self.num_trainers), int(vote)

    def close(self) -> None:
        """Take the process group apart."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def make_center(servers: Sequence[Stores], initial: Tensor, name: str = CENTER_STORE) -> None:
    """Make a centre, in the place of one that is there: of a run before, or of a worker that died within this.

    Args:
        servers: The sync servers, each of which has an equal part.
        initial: The whole centre, as it is at first.
        name: The stores'; each centre has its own.
    """
    for server, (start, stop) in _chunks(servers, initial.numel()):
        with suppress(KeyError):
            server.remove(name)
        server.create_dense_store(name, initial[start:stop].clone())


def find_center(servers: Sequence[Stores], size: int, name: str = CENTER_STORE) -> list[DenseStore]:
    """The pieces of a centre of so many elements, which is there."""
    return [server.dense_store(name) for server, _ in _chunks(servers, size)]


def _chunks(servers: Sequence[Stores], size: int) -> list[tuple[Stores, tuple[int, int]]]:
    return list(zip(servers, chunk_evenly(size, len(servers)), strict=False))
