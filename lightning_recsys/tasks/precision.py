"""The time of a model's dense part in float32 and in bfloat16, on this processor and on real examples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures
from lightning_recsys.tasks.base import Task

ROUNDS = 3  # at least, of each precision, behind one that does not count
WORTH = 1.2  # times as fast: below it, rounding is not worth what it gains


@dataclass(frozen=True)
class PrecisionTimes:
    """The times of one forward and backward pass of the dense part.

    Args:
        float32: In seconds, in float32.
        bfloat16: In seconds, under autocast to bfloat16.

    >>> PrecisionTimes(float32=0.030, bfloat16=0.012).gain
    2.5
    >>> PrecisionTimes(0.030, 0.012).precision, PrecisionTimes(0.030, 0.029).precision
    ('bf16-mixed', '32-true')
    """

    float32: float
    bfloat16: float

    @property
    def gain(self) -> float:
        """How many times as fast bfloat16 is."""
        return self.float32 / self.bfloat16

    @property
    def precision(self) -> str:
        """The trainer's ``precision``: ``bf16-mixed`` where it is at least 1.2 times as fast, else ``32-true``."""
        return "bf16-mixed" if self.gain >= WORTH else "32-true"


def time_precisions(task: Task, batch: Any, *, seconds: float = 0.5) -> PrecisionTimes:
    """Time the dense part of a task's model on a batch in both precisions, in turns; nothing of the model changes.

    Vectors of the right shape stand in for looked-up rows: no table is read, so they may be anywhere. Gradients are
    made and dropped, and buffers (such as batch norm's averages) and the random generator have their old values after.

    Args:
        task: The task, on the CPU; it needs no trainer.
        batch: Examples as its loader gives them. Times are those of the threads that torch has now.
        seconds: For how long to go on, beyond three rounds.

    Returns:
        The medians.
    """
    generator = torch.Generator().manual_seed(0)
    taken: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    deadline = time.perf_counter() + seconds
    with _untouched(task), _stand_ins(task, generator):
        while len(taken["float32"]) <= ROUNDS or time.perf_counter() < deadline:
            for name, rounds in taken.items():
                began = time.perf_counter()
                _forward_and_backward(task, batch, bfloat16=name == "bfloat16")
                rounds.append(time.perf_counter() - began)
    return PrecisionTimes(**{name: statistics.median(rounds[1:]) for name, rounds in taken.items()})


def _forward_and_backward(task: Task, batch: Any, *, bfloat16: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16) if bfloat16 else nullcontext(), torch.enable_grad():
        output: Tensor = task(batch)
    wanted = [parameter for parameter in task.parameters() if parameter.requires_grad]
    if wanted:
        torch.autograd.grad(output.sum(), wanted, allow_unused=True)


@contextmanager
def _untouched(task: Task) -> Iterator[None]:
    """Training mode, as in a step; modes, buffers and the random generator are as before afterwards."""
    modes = {module: module.training for module in task.modules()}  # parents first
    collections = [module for module in task.modules() if isinstance(module, EmbeddingBagCollection)]
    rows = {id(buffer) for collection in collections for buffer in collection.buffers()}  # which nobody looks up
    buffers = [(buffer, buffer.clone()) for buffer in task.buffers() if id(buffer) not in rows]
    with torch.random.fork_rng(devices=[]):
        try:
            task.train()
            yield
        finally:
            for module, mode in modes.items():
                module.train(mode)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def _stand_ins(task: Task, generator: torch.Generator) -> Iterator[None]:
    """Lookups that give random vectors, which want gradients as rows do."""

    def stand_in(collection: EmbeddingBagCollection) -> Any:
        width = len(collection.feature_names), collection.embedding_dim

        def look_up(sparse: SparseFeatures) -> Tensor:
            if sparse.batch_size not in made:
                made[sparse.batch_size] = torch.randn(sparse.batch_size, *width, generator=generator)
            return made[sparse.batch_size].detach().requires_grad_(collection.trainable)

        made: dict[int, Tensor] = {}
        return look_up

    with ExitStack() as stack:
        for module in task.modules():
            if isinstance(module, EmbeddingBagCollection):
                stack.enter_context(patch.object(module, "forward", stand_in(module)))
        yield
