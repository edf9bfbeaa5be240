"""The knowledge of an engine that starts the ranks of a job, such as Ray, and that Lightning's environments lack."""

from __future__ import annotations

from abc import abstractmethod

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment

from lightning_recsys.launchers.started import Launched


class EngineEnvironment(ClusterEnvironment):
    """The environment of ranks that an engine has placed, on nodes that may run different numbers of them.

    Strategies take nodes and processes from here, whatever ``Trainer(num_nodes=..., devices=...)`` says.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """The engine has started all ranks, this one included."""
        return True

    @abstractmethod
    def node_of_ranks(self) -> tuple[int, ...]:
        """The node of each rank, in rank order; nodes are numbered from 0. The same on all ranks."""

    @property
    @abstractmethod
    def job(self) -> str:
        """The job's name, which it keeps when the engine starts its ranks again, and which no other job has."""

    def launched(self) -> Launched | None:
        """How this rank was started, where the engine replaces a rank that dies and lets the others go on."""
        return None

    @property
    def num_nodes(self) -> int:
        """Number of nodes that run ranks."""
        return len(set(self.node_of_ranks()))

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks on this rank's node."""
        return self.node_of_ranks().count(self.node_rank())
