"""How many processes a strategy has that trains on CPUs and says itself how many it needs."""

from __future__ import annotations

import os

import torch
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy


def take_ranks(strategy: DDPStrategy, wanted: int) -> None:
    """Have so many processes on each node, where neither ``trainer.devices`` nor ``torchrun`` says how many.

    Args:
        strategy: The strategy, before its ranks are set.
        wanted: Number of processes of a node.

    Raises:
        ValueError: the accelerator is no CPU.
    """
    devices = strategy.parallel_devices or []
    if any(device.type != "cpu" for device in devices):
        raise ValueError(f"{type(strategy).__name__} trains in memory, on CPUs: set trainer.accelerator=cpu.")
    if len(devices) == 1:  # also what Lightning makes of devices="auto" on a CPU
        strategy.parallel_devices = [torch.device("cpu")] * (_started(strategy) or wanted)


def check_ranks(strategy: DDPStrategy, needed: int, *, settings: str, what: str) -> None:
    """Refuse another number of processes than the settings of the strategy need.

    Args:
        strategy: The strategy, after :func:`take_ranks`.
        needed: Number of processes that each node needs.
        settings: The settings that need them, in words for the message.
        what: What the settings give numbers of, for the message.

    Raises:
        ValueError: a node has more or fewer processes than the settings need.
    """
    started = _started(strategy)
    have = started or strategy.num_processes
    if have != needed:
        source = f"torchrun --nproc-per-node={have}" if started else f"trainer.devices={have}"
        raise ValueError(
            f"{settings} needs {needed} processes on each of {strategy.num_nodes} nodes, but there is {source}. Set it"
            f" to {needed}, or change the number of {what} or of nodes (trainer.num_nodes)."
        )


def _started(strategy: DDPStrategy) -> int | None:
    """Processes of this node that ``torchrun`` has started."""
    by_torchrun = isinstance(strategy.cluster_environment, TorchElasticEnvironment)
    return int(os.environ["LOCAL_WORLD_SIZE"]) if by_torchrun else None
