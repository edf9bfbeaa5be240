"""How many processes a strategy has: as somebody started them, as the trainer was told, as its settings need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pytorch_lightning.utilities import rank_zero_only

from lightning_recsys.launchers import EngineEnvironment, Started, started_processes

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy


def placed_ranks(strategy: RecsysStrategy) -> tuple[int, ...] | None:
    """The node of each rank, where an engine has placed them; ``None`` where all nodes run equally many."""
    environment = strategy.cluster_environment
    return environment.node_of_ranks() if isinstance(environment, EngineEnvironment) else None


def count_ranks(strategy: RecsysStrategy) -> int:
    """Ranks of all nodes, once a ``Trainer`` has the strategy."""
    placed = placed_ranks(strategy)
    return strategy.num_nodes * strategy.num_processes if placed is None else len(placed)


def started_ranks(strategy: RecsysStrategy) -> int:
    """Ranks of all nodes, as an engine, torchrun or SLURM has started them; else as ``trainer.devices`` says."""
    if placed_ranks(strategy) is not None or (started := _started(strategy)) is None:
        return count_ranks(strategy)
    return started.num_nodes * started.devices


def take_placed(strategy: RecsysStrategy) -> None:
    """Have the nodes and processes that an engine has placed; on CPUs, whatever ``trainer.devices`` says.

    Raises:
        ValueError: the engine replaces single workers, and this strategy cannot go on without one.
    """
    environment = strategy.cluster_environment
    if isinstance(environment, EngineEnvironment):
        if strategy.launched is None and (launched := environment.launched()) is not None:
            check_replaced_by_engine(strategy)
            strategy.launched = launched
        strategy.num_nodes = environment.num_nodes
        if all(device.type == "cpu" for device in strategy.parallel_devices or []):
            strategy.parallel_devices = [torch.device("cpu")] * environment.num_local_ranks


def step_back(strategy: RecsysStrategy) -> None:
    """Be not the first worker, whatever the rank, in the place of one that died: another one is, which lives."""
    launched = strategy.launched
    if launched is not None and launched.replaces and not strategy.is_global_zero:
        rank_zero_only.rank = max(strategy.global_rank, 1)  # type: ignore[attr-defined]  # Lightning sets it so


def take_ranks(strategy: RecsysStrategy, wanted: int) -> None:
    """Have so many processes on each node, where neither ``trainer.devices`` nor torchrun or SLURM says how many.

    Args:
        strategy: The strategy, before its ranks are set.
        wanted: Number of processes of a node.

    Raises:
        ValueError: the accelerator is no CPU.
    """
    devices = strategy.parallel_devices or []
    if any(device.type != "cpu" for device in devices):
        raise ValueError(f"{type(strategy).__name__} trains in memory, on CPUs: set trainer.accelerator=cpu.")
    if len(devices) == 1 and placed_ranks(strategy) is None:  # also what Lightning makes of devices="auto" on a CPU
        started = _started(strategy)
        strategy.parallel_devices = [torch.device("cpu")] * (started.devices if started else wanted)


def check_ranks(strategy: RecsysStrategy, needed: int, *, settings: str, what: str) -> None:
    """Refuse another number of processes than the settings of the strategy need.

    Args:
        strategy: The strategy, after :func:`take_ranks`.
        needed: Number of processes that each node needs; where an engine has placed them, in all.
        settings: The settings that need them, in words for the message.
        what: What the settings give numbers of, for the message.

    Raises:
        ValueError: a node has more or fewer processes than the settings need.
    """
    if (placed := placed_ranks(strategy)) is not None:
        if len(placed) != needed:
            raise ValueError(
                f"{settings} needs {needed} processes, and {len(placed)} were started. Start as many (num_workers of"
                f" Ray's ScalingConfig), or change the number of {what}."
            )
        return
    started = _started(strategy)
    have = started.devices if started else strategy.num_processes
    if have != needed:
        source = f"{started.option if started else 'trainer.devices'}={have}"
        raise ValueError(
            f"{settings} needs {needed} processes on each of {strategy.num_nodes} nodes, but there is {source}. Set it"
            f" to {needed}, or change the number of {what} or of nodes (trainer.num_nodes)."
        )


def check_started(strategy: RecsysStrategy) -> None:
    """Refuse processes other than the trainer was told of.

    Args:
        strategy: The strategy, in one of the processes of the run.

    Raises:
        ValueError: somebody has started more or fewer, or spread them otherwise over the nodes.
    """
    if placed_ranks(strategy) is not None:
        return
    nodes, devices, started = strategy.num_nodes, strategy.num_processes, _started(strategy)
    if strategy.world_size != nodes * devices or (started is not None and started.devices != devices):
        told = started.variables if started else f"{strategy.world_size} processes were started"
        raise ValueError(
            f"trainer.num_nodes={nodes} and trainer.devices={devices}, but {told}. Set both to what the processes'"
            " launcher was told; the recipes take auto for it."
        )


def _started(strategy: RecsysStrategy) -> Started | None:
    """The processes that torchrun or SLURM has started, where this run's are those."""
    environment = strategy.cluster_environment
    assert environment is not None
    by_others = environment.creates_processes_externally and not strategy.launches
    return started_processes() if by_others else None


def check_replaced_by_engine(strategy: RecsysStrategy) -> None:
    """Refuse a strategy whose workers cannot be replaced one by one, by the engine that has started them.

    Raises:
        ValueError: workers wait for each other at each batch, share memory, or have servers of their own beside them.
    """
    name, asked = type(strategy).__name__, f"strategy.max_replacements={strategy.max_replacements}"
    if not (strategy.asynchronous and strategy.dense.takes_replacements):
        why = "can have no other process in the place of a worker that died, as its settings are"
    elif any(spec.ranks is not None for spec in strategy.server_specs()):
        why = "has servers that hold the code of the run, beside workers, and they end with these"
    elif strategy.servers is None:
        why = "needs servers that outlive workers: give it some (strategy.servers; servers=RayServers(...) of fit)"
    else:
        return
    raise ValueError(f"{asked}: {name} {why}. Without max_replacements all workers start again when one dies.")


def check_lost_workers(strategy: RecsysStrategy) -> None:
    """Refuse to keep more workers than there are, and to replace those that no other process can replace.

    Raises:
        ValueError: ``min_workers`` is above the number of workers; ``max_replacements`` does not go with the dense
            part.
    """
    if strategy.max_replacements and not strategy.dense.takes_replacements:
        raise ValueError(
            f"strategy.max_replacements={strategy.max_replacements}: {type(strategy.dense).__name__} can have no other"
            " process in the place of a worker that died, as its settings are (workers that share memory, with"
            " strategy.workers_per_trainer above 1, cannot). The others go on without it: leave max_replacements out."
        )
    if strategy.min_workers > (workers := count_ranks(strategy)):
        raise ValueError(
            f"strategy.min_workers={strategy.min_workers}, and the run has {workers} workers (trainer.devices times"
            f" trainer.num_nodes). Choose at most {workers}, by which none may die."
        )
