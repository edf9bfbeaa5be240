"""Which rank belongs to which trainer, and where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterLayout:
    """Ranks in rank order, ``workers_per_trainer`` of them to a trainer; all workers of a trainer are on one node.

    They share its dense replica in that node's memory, so a trainer cannot reach over two nodes.

    Args:
        num_trainers: Number of trainers, each of which has a dense replica.
        workers_per_trainer: Number of processes that share one trainer's replica.
        num_nodes: Machines; each runs as many ranks as the others, unless ``nodes`` says otherwise.
        nodes: The node of each rank, where an engine has placed them.

    Raises:
        ValueError: a number below 1, or a trainer that would lie on two nodes.

    >>> layout = ClusterLayout(num_trainers=2, workers_per_trainer=3)
    >>> layout.world_size, layout.trainer_of(4), layout.leaders
    (6, 1, (0, 3))
    """

    num_trainers: int
    workers_per_trainer: int = 1
    num_nodes: int = 1
    nodes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_trainers", "workers_per_trainer", "num_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"strategy.{name} must be at least 1, got {getattr(self, name)}.")
        if self.nodes is not None:
            check_on_one_node(self.nodes, self.workers_per_trainer, what="workers of a trainer share the memory")
        elif self.num_trainers % self.num_nodes:
            raise ValueError(
                f"strategy.num_trainers={self.num_trainers} is not a multiple of the {self.num_nodes} nodes: nodes run "
                "equally many ranks, and the workers of a trainer share the memory of one node. Take a multiple of "
                f"{self.num_nodes}, such as {-(-self.num_trainers // self.num_nodes) * self.num_nodes}."
            )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_trainers * self.workers_per_trainer

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node."""
        return self.world_size // self.num_nodes

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each trainer, which does what is done once per trainer."""
        return tuple(range(0, self.world_size, self.workers_per_trainer))

    def trainer_of(self, rank: int) -> int:
        """The trainer that a rank works for."""
        return self._checked(rank) // self.workers_per_trainer

    def worker_of(self, rank: int) -> int:
        """The rank's place among its trainer's workers; 0 leads."""
        return self._checked(rank) % self.workers_per_trainer

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"ranks are 0 to {self.world_size - 1}, got {rank}.")
        return rank


def check_on_one_node(nodes: Sequence[int], size: int, *, what: str) -> None:
    """See that ranks which belong together are on one node.

    Args:
        nodes: The node of each rank.
        size: So many ranks that follow each other belong together.
        what: What they do together on one node, for the message.

    Raises:
        ValueError: some of them are on two nodes.
    """
    for first in range(0, len(nodes), size):
        if len(together := sorted(set(nodes[first : first + size]))) > 1:
            raise ValueError(
                f"ranks {first} to {first + size - 1} are on the nodes {together}, and {what} of one node. Let each"
                f" node run a multiple of {size} ranks."
            )
