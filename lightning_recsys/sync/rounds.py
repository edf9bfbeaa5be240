"""One trainer's rounds of a synchronisation algorithm: which it takes part in, what they do, when it may stop."""

from __future__ import annotations

from torch import Tensor

from lightning_recsys.sync.algorithm import SyncAlgorithm, Topology

DIVERGENCE_PERIOD = 10  # rounds; the norms cost about as much as a round through shared memory


class ReplicaRounds:
    """The rounds of one replica, without the bytes that they move.

    A round that needs all trainers carries a vote of each: a trainer that wants to stop goes on taking part until all
    want to. So nobody waits for a trainer that has left, and all leave after the same round. A round with a centre
    needs nobody else, and a trainer stops when it wants to.

    Whoever drives it asks :meth:`takes_part`, fetches what ``algorithm.topology`` names, with the number of trainers
    that want to stop, and hands both to :meth:`finish`.

    Args:
        algorithm: The algorithm, whose ``start`` was called already.
        replica: float32 ``[size]``; workers may be writing to it.
        num_trainers: Trainers whose replicas are averaged; without meaning for an algorithm with a centre.

    Attributes:
        count: Rounds so far that moved the replica.
        divergence: Relative L2 distance of the replica from what it was last compared with, the centre or the mean;
            ``None`` before the first comparison. (Every tenth round compares.)

    >>> import torch
    >>> from lightning_recsys.sync import ModelAveraging
    >>> rounds = ReplicaRounds(ModelAveraging(alpha=1.0), torch.tensor([2.0]), num_trainers=2)
    >>> rounds.takes_part(leaving=True), rounds.finish(torch.tensor([1.0]), num_leaving=1), rounds.replica
    (True, False, tensor([1.]))
    >>> rounds.finish(torch.tensor([5.0]), num_leaving=2), rounds.replica
    (True, tensor([1.]))
    """

    def __init__(self, algorithm: SyncAlgorithm, replica: Tensor, *, num_trainers: int = 1) -> None:
        self.algorithm = algorithm
        self.replica = replica
        self.num_trainers = num_trainers
        self.count = 0
        self.divergence: float | None = None

    def takes_part(self, *, leaving: bool) -> bool:
        """Whether this trainer makes one more round.

        Args:
            leaving: It would rather stop; others may still need it.
        """
        return not leaving or self.algorithm.topology is Topology.ALL_REDUCE

    def finish(self, answer: Tensor, *, num_leaving: int = 0) -> bool:
        """Fold in what came, unless all trainers want to stop.

        Args:
            answer: What ``algorithm.topology`` names, float32 ``[size]``; it may be overwritten.
            num_leaving: Trainers that want to stop, of those that took part; 0 for an algorithm with a centre.

        Returns:
            Whether this trainer may stop. Nothing was folded in then.
        """
        if num_leaving == self.num_trainers:
            return True
        if self.count % DIVERGENCE_PERIOD == 0:
            self.divergence = float((self.replica - answer).norm() / answer.norm().clamp_min(1e-12))
        self.algorithm.fold(self.replica, answer)
        self.count += 1
        return False
