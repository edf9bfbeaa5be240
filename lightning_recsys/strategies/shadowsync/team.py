"""The workers of one trainer, and what they share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.placement import ClusterLayout
from lightning_recsys.strategies.replicas.replica import Replica, share, share_optimizer_state
from lightning_recsys.strategies.shadowsync.standstill import Standstill

STALENESS_WINDOW = 1000  # updates whose staleness is kept


class Team:
    """One worker among those of its trainer. They train one replica in shared memory, without a lock.

    All ranks of the default group make theirs together.

    Args:
        module: The model; its trained parameters move into the shared memory, with the first worker's values.
        layout: Which worker belongs to which trainer.
        rank: Rank of this worker.

    Attributes:
        replica: The replica of the trainer.
        size: Number of workers of the trainer.
        leads: Whether this is the trainer's first worker, of those that live.
        steps: int64 ``[size]``, steps that each worker has made in this run. A worker writes its own number only.
        since_round: int64 ``[size]``, steps of each worker since its last round in the foreground, each written by its
            own worker.
    """

    def __init__(self, module: nn.Module, *, layout: ClusterLayout, rank: int) -> None:
        self.size = layout.workers_per_trainer
        self._worker = layout.worker_of(rank)
        self._layout, self._rank = layout, rank
        self.leads = self._worker == 0
        self.replica = Replica((name, x) for name, x in module.named_parameters() if x.requires_grad)
        counts = torch.zeros(self.size, dtype=torch.int64)
        initial = {"replica": torch.zeros(self.replica.size), "steps": counts, "since_round": counts}
        shared = share({name: value.clone() for name, value in initial.items()}, team_size=self.size)
        self.replica.attach(shared["replica"])
        self.steps: NDArray[np.int64] = shared["steps"].numpy()
        self.since_round: NDArray[np.int64] = shared["since_round"].numpy()
        self._standstill: Standstill | None = None  # where a round needs all workers to hold still
        self._others_before: int | None = None  # steps of the others when the gradient under way was begun
        self._staleness: deque[int] = deque(maxlen=STALENESS_WINDOW)  # of this worker's last updates

    def bring_back(self) -> None:
        """Let parameters whose ``data`` was replaced be those of the replica again; see :meth:`Replica.bring_back`."""
        self.replica.bring_back(is_shared=self.size > 1)

    def elect(self, living: Sequence[int]) -> bool:
        """After a meeting of these ranks: whether this worker leads from now on, and did not before."""
        did, self.leads = self.leads, self._rank in self.leaders_among(living)
        return self.leads and not did

    def leaders_among(self, living: Sequence[int]) -> tuple[int, ...]:
        """The first worker of each trainer, of those that live."""
        first = {self._layout.trainer_of(rank): rank for rank in sorted(living, reverse=True)}
        return tuple(sorted(first.values()))

    def share_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Let all workers read and write the first one's optimizer state; all ranks call this together."""
        if self.size > 1:
            share_optimizer_state(optimizers, team_size=self.size)

    def stand_still_for_rounds(self) -> None:
        """From now on no worker updates the replica while a round is :meth:`alone`; all ranks call this together."""
        if self.size > 1:
            self._standstill = Standstill.open(team_size=self.size)

    def alone(self) -> AbstractContextManager[None]:
        """Around a round in the foreground."""
        return nullcontext() if self._standstill is None else self._standstill.alone()

    @property
    def own_steps(self) -> int:
        """Steps that this worker has made."""
        return int(self.steps[self._worker])

    @property
    def own_since_round(self) -> NDArray[np.int64]:
        """This worker's entry of ``since_round``, int64 ``[1]``, which may be written to."""
        return self.since_round[self._worker : self._worker + 1]

    def begin_batch(self) -> None:
        """A batch comes: what the others do from now on is what its gradient does not see.

        With several batches per update the first one counts.
        """
        if self._others_before is None:
            self._others_before = self._steps_of_others()

    def update(self, closure: Callable[[], Any]) -> AbstractContextManager[Callable[[], Any]]:
        """Around an optimizer's step; gives the closure that it is to call."""
        return nullcontext(closure) if self._standstill is None else self._standstill.update_after(closure)

    def count_step(self) -> None:
        """This worker has updated the replica."""
        self.steps[self._worker] += 1
        if self._others_before is not None:
            self._staleness.append(self._steps_of_others() - self._others_before)
            self._others_before = None

    def _steps_of_others(self) -> int:
        return int(self.steps.sum()) - self.own_steps

    @property
    def staleness(self) -> Tensor | None:
        """Updates of others between the beginning and the end of each of this worker's last updates; float32."""
        return torch.tensor(self._staleness, dtype=torch.float32) if self.size > 1 and self._staleness else None

    def restore(self, kept: Mapping[str, Any] | None) -> None:
        """Go on with the replica and the steps that this trainer had when :meth:`state` was kept, if it was there."""
        if kept is not None and self.leads:
            self.replica.flat.copy_(kept["replica"])
            steps = kept["since_round"].numpy()[: self.size]  # of a run with more or fewer workers, perhaps
            self.since_round[: len(steps)] = steps

    def close(self) -> None:
        """Leave the shared memory: parameters get memory of their own."""
        if self._standstill is not None:
            self._standstill.close()
            self._standstill = None
        self.replica.detach()
