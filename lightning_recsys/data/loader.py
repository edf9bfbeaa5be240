"""Whole batches in a seeded order, shared out over ranks, with a position that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.hashing import key64


class RowSource(Protocol):
    """Rows that can be taken in any order: held in memory, or generated on the spot."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Batch:
        """The rows with these numbers (int64, shape ``[B]``), as one batch in that order."""
        ...


class BatchLoader:
    """Iterates over a :class:`RowSource` in whole batches; no row is touched one by one, and no worker process runs.

    Ranks walk through one common order together: step ``s`` covers the next ``world_size * batch_size`` rows of it, of
    which each rank takes its slice. So ``n`` ranks see in one step what a single rank with ``n`` times the batch size
    sees, every rank has the same number of batches, and no row is lost or seen twice. The last step is shared out
    evenly (sizes differ by at most one); a rest of fewer rows than ranks joins the step before it, whose batches are
    then one row larger on some ranks.

    Args:
        source: The rows.
        batch_size: Rows per batch and rank.
        shuffle: ``rows`` draws a new permutation of the rows for each epoch, from ``(seed, epoch)``; ``batches``
            permutes the steps only, which costs no memory per row and is enough for rows that are independent by
            construction; ``None`` keeps the order of the source.
        seed: Seed of the order.
        drop_last: Leave out what does not fill a step of ``world_size * batch_size`` rows.
        rank: Whose slices to yield.
        world_size: How many ranks share the rows.

    Raises:
        ValueError: the batch size is not positive, or there are too few rows for every rank to get a batch.

    Iterating again starts the next epoch. Under a Lightning ``Trainer`` the epoch follows the trainer's, and a
    checkpoint saved between two batches holds ``state_dict()``: training goes on with the very next batch.

    >>> class Counter:
    ...     def __len__(self): return 7
    ...     def take(self, rows): return rows.tolist()
    >>> [list(BatchLoader(Counter(), batch_size=2, rank=rank, world_size=2)) for rank in (0, 1)]
    [[[0, 1], [4]], [[2, 3], [5, 6]]]
    """

    batch_sampler = None  # Lightning asks whatever has a `sampler` for this one too

    def __init__(
        self,
        source: RowSource,
        *,
        batch_size: int,
        shuffle: Literal["rows", "batches"] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"data.batch_size must be at least 1, got {batch_size}.")
        self.source = source
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self._step_size = batch_size * world_size
        self._full_steps, rest = divmod(len(source), self._step_size)
        self._num_rows = len(source) - rest if drop_last else len(source)
        needed = self._step_size if drop_last else world_size
        if len(source) < needed:
            raise ValueError(
                f"{len(source)} rows are too few for {world_size} ranks"
                f"{f' with data.batch_size={batch_size} and drop_last' if drop_last else ''}: at least {needed} are "
                "needed, so that each rank gets a batch. Use fewer workers, a smaller batch or more rows."
            )
        self._num_batches = self._full_steps + (not drop_last and rest >= world_size)
        if self._num_batches == self._full_steps and self._num_rows % self._step_size:
            self._full_steps -= 1  # the last step takes the rest, too small for a step of its own
        self._current = self._next = (0, 0)  # (epoch, batches of it that were served)
        self._resumed = self._identity()

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        epoch, first_step = self._next
        if first_step:
            self._check_position(epoch, first_step)
        self._next = (epoch + 1, 0)
        order = self._order(epoch)
        for step in range(first_step, self._num_batches):
            self._current = (epoch, step + 1)
            yield self.source.take(self._rows_of(step, order))

    @property
    def sampler(self) -> BatchLoader | SequentialSampler:
        """What Lightning calls ``set_epoch`` on, and recognises an unshuffled loader by."""
        return self if self.shuffle else SequentialSampler(range(self._num_rows))

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration run through ``epoch``; from its start, unless it is the epoch being resumed."""
        if epoch != self._next[0]:
            self._next = (epoch, 0)

    def state_dict(self) -> dict[str, int]:
        """The position: the same on all ranks, so that rank 0's serves for all."""
        epoch, batch = self._current
        return {"epoch": epoch, "batch": batch, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue behind the last batch that was served.

        That iteration raises ``ValueError`` if the position is inside an epoch of other rows, another seed or another
        batch size, where it has no meaning.
        """
        self._resumed = {name: state_dict[name] for name in self._identity()}
        self._current = (state_dict["epoch"], state_dict["batch"])
        finished = state_dict["batch"] == self._resumed["num_batches"]
        self._next = (self._current[0] + 1, 0) if finished else self._current

    def _identity(self) -> dict[str, int]:
        return {
            "num_rows": self._num_rows,
            "num_batches": self._num_batches,
            "rows_per_step": self._step_size,
            "seed": self.seed,
        }

    def _check_position(self, epoch: int, batch: int) -> None:
        if self._resumed != self._identity():
            raise ValueError(
                f"the checkpoint stopped inside epoch {epoch}, after batch {batch} of a loader with {self._resumed}, "
                f"and this one has {self._identity()}. Resume with the same data, seed, batch size and number of "
                "workers, or from a checkpoint saved at the end of an epoch."
            )

    def _order(self, epoch: int) -> Tensor | None:
        if self.shuffle is None:
            return None
        generator = torch.Generator().manual_seed(int(key64(self.seed, epoch) >> 1))
        count = len(self.source) if self.shuffle == "rows" else self._full_steps
        return torch.randperm(count, generator=generator)

    def _rows_of(self, step: int, order: Tensor | None) -> Tensor:
        if order is not None and self.shuffle == "batches" and step < self._full_steps:
            step = int(order[step])
        start = step * self._step_size
        stop = start + self._step_size if step < self._full_steps else self._num_rows
        start, stop = (start + (stop - start) * (self.rank + i) // self.world_size for i in (0, 1))
        if order is not None and self.shuffle == "rows":
            return order[start:stop]
        return torch.arange(start, stop)
