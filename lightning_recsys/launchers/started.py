"""How the processes of a run were started, as it is told to each of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_NO_STEP = ("bash", "interactive")  # names of SLURM jobs whose processes people start by hand


@dataclass(frozen=True)
class Launched:
    """How this process was started, where the others may go on without a worker that dies.

    Args:
        run: Name of this start of the run, letters and digits, which no other has.
        folder: Where the first worker leaves what others need that join: the folder of the launch, which is gone after
            it, or a path or URL that all machines of the run share.
        replaces: It takes the place of a worker that died: the others may train already.
    """

    run: str
    folder: Path | str
    replaces: bool


@dataclass(frozen=True)
class Started:
    """The processes of a job, equally many on each node.

    Args:
        num_nodes: Nodes (machines) of the job.
        devices: Processes on each node.
        option: The option of the command line that decided ``devices``.
        variables: The environment variables that tell both numbers, with their values, for messages.
    """

    num_nodes: int
    devices: int
    option: str
    variables: str


def started_processes() -> Started | None:
    """The processes that torchrun, or SLURM's ``srun``, has started with this one; ``None`` on a plain machine.

    torchrun comes first, since it may run within a job of SLURM. Ray and Kubeflow set the same variables.

    Raises:
        ValueError: the variables disagree, or nodes run different numbers of processes.

    >>> started_processes() is None
    True
    """
    if {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return _started("torchrun --nproc-per-node", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in _NO_STEP:
        return _started("srun --ntasks-per-node", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")
    return None


def _started(option: str, nodes: str, per_node: str, in_all: str) -> Started:
    """The values of the variables of these names."""
    told = {name: os.environ[name] for name in (nodes, per_node, in_all) if name in os.environ}
    variables = ", ".join(f"{name}={value}" for name, value in told.items())
    devices, world_size = int(told.get(per_node, 1)), int(told[in_all])
    num_nodes = int(told.get(nodes, world_size // devices))
    if num_nodes * devices != world_size:
        raise ValueError(
            f"{variables}: every node has to run as many processes as the others. Start each with the same"
            f" {option}, so that {in_all} is the number of nodes times {per_node}."
        )
    return Started(num_nodes, devices, option, variables)
