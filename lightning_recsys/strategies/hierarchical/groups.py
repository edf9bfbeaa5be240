"""Which rank and which server belong to which group."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recsys.placement.cluster_layout import check_on_one_node
from lightning_recsys.strategies.common.settings import require_whole


@dataclass(frozen=True)
class Groups:
    """Groups of trainers and group servers. Ranks are nets: those of a trainer follow each other, and so do trainers.

    Args:
        num_groups: Number of groups, each of which has a dense replica.
        trainers_per_group: Number of trainers that train one group's replica.
        nets_per_trainer: Ranks of a trainer, which is on one node.
        servers_per_group: Group servers, over which a replica is cut.
        num_nodes: Machines; each runs as many ranks as the others, unless ``nodes`` says otherwise.
        nodes: The node of each rank, where an engine has placed them.

    Raises:
        ValueError: a number is below 1, or nodes cannot have equally many trainers.

    >>> groups = Groups(num_groups=2, trainers_per_group=2, nets_per_trainer=1, servers_per_group=2)
    >>> groups.world_size, groups.group_of(3), groups.leaders, groups.servers_of(1)
    (4, 1, (0, 2), (2, 3))
    """

    num_groups: int
    trainers_per_group: int
    nets_per_trainer: int
    servers_per_group: int
    num_nodes: int = 1
    nodes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_groups", "trainers_per_group", "nets_per_trainer", "servers_per_group"):
            require_whole(name, getattr(self, name))
        num_trainers = self.num_groups * self.trainers_per_group
        if self.nodes is not None:
            check_on_one_node(self.nodes, self.nets_per_trainer, what="nets of a trainer share the memory")
        elif num_trainers % self.num_nodes:
            raise ValueError(
                f"strategy.num_groups={self.num_groups} of strategy.trainers_per_group={self.trainers_per_group} are"
                f" {num_trainers} trainers, which is no multiple of the {self.num_nodes} nodes: nodes run equally many"
                " ranks, and a trainer is on one node."
            )

    @property
    def nets_per_group(self) -> int:
        """Ranks that train one replica."""
        return self.trainers_per_group * self.nets_per_trainer

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_groups * self.nets_per_group

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node."""
        return self.world_size // self.num_nodes

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each group, which does what is done once per group."""
        return tuple(range(0, self.world_size, self.nets_per_group))

    def group_of(self, rank: int) -> int:
        """The group that a rank works for."""
        return rank // self.nets_per_group

    def ranks_of(self, group: int) -> frozenset[int] | None:
        """The ranks that work for a group; ``None`` where it is the only one."""
        if self.num_groups == 1:
            return None
        first = self.leaders[group]
        return frozenset(range(first, first + self.nets_per_group))

    def node_of(self, group: int) -> int:
        """The node of a group's first rank, where its servers run: parts are code, and go no further than a file."""
        leader = self.leaders[group]
        return leader // self.ranks_per_node if self.nodes is None else self.nodes[leader]

    def servers_of(self, group: int) -> tuple[int, ...]:
        """The numbers of a group's servers among all group servers."""
        return tuple(range(group * self.servers_per_group, (group + 1) * self.servers_per_group))
