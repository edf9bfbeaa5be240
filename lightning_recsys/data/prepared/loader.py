"""Batches of prepared rows, with a position that any number of workers can go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import SequentialSampler

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.prepared.stream import StreamRequest


class PreparedLoader:
    """Iterates over a split in whole batches.

    All ranks walk through one order that depends on the seed and the epoch only, and share each step's rows: see
    :class:`~lightning_recsys.data.prepared.order.Steps`. So every rank has the same number of batches, no row is lost
    or seen twice, and the position of the whole training is one number: rows of the epoch that were served. That is
    what ``state_dict()`` holds, and what any number of workers, with any batch size, can go on from.

    Args:
        num_rows: Rows of the split.
        first: What the first epoch asks for.
        stream: Makes the batches of a request.

    Raises:
        ValueError: there are too few rows for every rank to get a batch.

    Iterating again starts the next epoch.
    """

    batch_sampler = None  # Lightning asks whatever has a `sampler` for this one too

    def __init__(
        self, num_rows: int, first: StreamRequest, *, stream: Callable[[StreamRequest], Iterator[Batch]]
    ) -> None:
        self._num_rows = num_rows
        self._request = first
        self._stream = stream
        self._current = self._next = (0, 0, 0)  # (epoch, rows of it that were served, batches)
        self._length = len(first.steps(num_rows))
        if not self._length:
            needed = first.batch_size * first.world_size if first.drop_last else first.world_size
            raise ValueError(
                f"{num_rows} {first.split} rows are too few for {first.world_size} ranks"
                f"{f' with data.batch_size={first.batch_size} and drop_last' if first.drop_last else ''}: at least "
                f"{needed} are needed, so that each rank gets a batch. Use fewer workers, a smaller batch or more rows."
            )

    def __len__(self) -> int:
        """Batches of the epoch, those served before it was resumed included."""
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        epoch, start, served = self._next
        request = self._ask(epoch, start)
        steps = request.steps(self._num_rows)
        self._length = served + len(steps)
        self._next = (epoch + 1, 0, 0)
        for step, batch in enumerate(self._stream(request)):
            self._current = (epoch, steps.bounds(step)[1], served + step + 1)
            yield batch
        self._length = len(self._ask(epoch + 1, 0).steps(self._num_rows))

    @property
    def sampler(self) -> PreparedLoader | SequentialSampler:
        """What Lightning calls ``set_epoch`` on, and recognises an unshuffled loader by."""
        return self if self._request.window else SequentialSampler(range(self._num_rows))

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration run through ``epoch``; from its start, unless it is the epoch being resumed."""
        if epoch != self._next[0]:
            self._go_to(epoch, 0, 0)

    def state_dict(self) -> dict[str, int | bool]:
        """The position: the same on all ranks, so that rank 0's serves for all."""
        epoch, rows, batches = self._current
        return {"epoch": epoch, "row": rows, "batch": batches, "finished": batches == self._length, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration go on behind the last row that was served.

        Raises:
            ValueError: the position is inside an epoch of other rows, or of another order, or too few rows of the epoch
                are left for so many ranks.
        """
        epoch, row, batch = state_dict["epoch"], state_dict["row"], state_dict["batch"]
        self._current = (epoch, row, batch)
        if state_dict["finished"]:
            self._go_to(epoch + 1, 0, 0)
            return
        before = {name: state_dict[name] for name in self._identity()}
        if row and before != self._identity():
            raise ValueError(
                f"the checkpoint stopped inside epoch {epoch}, after row {row} of {before}, and this loader has "
                f"{self._identity()}. Resume with the same rows, seed and shuffle_window, or from a checkpoint saved "
                "at the end of an epoch."
            )
        left = self._num_rows - row
        if not self._request.drop_last and 0 < left < self._request.world_size:
            raise ValueError(
                f"the checkpoint stopped inside epoch {epoch} with {left} rows left, too few for "
                f"{self._request.world_size} ranks. Resume with at most {left} workers."
            )
        self._go_to(epoch, row, batch)

    def _go_to(self, epoch: int, row: int, batch: int) -> None:
        self._next = (epoch, row, batch)
        self._length = batch + len(self._ask(epoch, row).steps(self._num_rows))

    def _ask(self, epoch: int, start: int) -> StreamRequest:
        return replace(self._request, epoch=epoch, start=start)

    def _identity(self) -> dict[str, int]:
        return {"num_rows": self._num_rows, "seed": self._request.seed, "shuffle_window": self._request.window}
