"""Whole batches in a seeded order, shared out over ranks, with a position that any number of ranks can go on from."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.hashing import key64
from lightning_recsys.sync.leases import Lease

Shuffle = Literal["rows", "batches"]

_TOGETHER = 512  # rows of small batches that are made at once: what one making costs by itself is little then


@dataclass(frozen=True)
class Steps:
    """How the rows of an epoch, from a position on, are dealt out to ranks.

    Step ``s`` covers the next ``world_size * batch_size`` rows, of which each rank takes its slice. So ``n`` ranks see
    in one step what a single rank with ``n`` times the batch size sees, every rank has the same number of batches, and
    no row is lost or seen twice. The last step is shared out evenly (sizes differ by at most one); a rest of fewer rows
    than ranks joins the step before it, whose batches are then one row larger on some ranks.

    Args:
        start: Position of the first row that is left.
        stop: Number of rows in the epoch.
        batch_size: Rows per batch and rank.
        world_size: Number of ranks.
        drop_last: Leave out what does not fill a step.

    >>> steps = Steps(0, 7, batch_size=2, world_size=2)
    >>> len(steps), [steps.slice(s, rank=r) for s in range(2) for r in range(2)]
    (2, [(0, 2), (2, 4), (4, 5), (5, 7)])
    """

    start: int
    stop: int
    batch_size: int
    world_size: int
    drop_last: bool = False

    def __len__(self) -> int:
        left = max(self.stop - self.start, 0)  # a position of an epoch with more rows may lie behind the last one
        full, rest = divmod(left, self.batch_size * self.world_size)
        if self.drop_last:
            return full
        return full + (rest >= self.world_size)

    def bounds(self, step: int) -> tuple[int, int]:
        """The rows of all ranks in a step."""
        size = self.batch_size * self.world_size
        first = self.start + step * size
        last = step == len(self) - 1 and not self.drop_last
        return first, self.stop if last else first + size

    def slice(self, step: int, *, rank: int) -> tuple[int, int]:
        """The rows of a rank in a step."""
        first, last = self.bounds(step)
        size = last - first
        return first + size * rank // self.world_size, first + size * (rank + 1) // self.world_size


@dataclass(frozen=True)
class Request:
    """Which batches of an epoch to make.

    Args:
        batch_size: Number of rows in the batch of one rank.
        drop_last: Leave out what does not fill a step of all ranks.
        rank: The rank whose batches are made.
        world_size: Number of ranks that share the rows of each step.
        seed: Seed of the order of the rows.
        epoch: Number of the epoch; each has another order, if there is any.
        start: Position in the epoch where to begin.
    """

    batch_size: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    epoch: int = 0
    start: int = 0

    def steps(self, num_rows: int) -> Steps:
        """How the rows are dealt out."""
        return Steps(self.start, num_rows, self.batch_size, self.world_size, self.drop_last)


class Dealer(Protocol):
    """Deals out the epochs of a run whose workers may be slow, or die.

    Attributes:
        in_flight: Batches that this rank was given last and may not have trained: gradients of several may make one
            update.
    """

    in_flight: int

    def __call__(self, num_batches: int) -> Iterator[Lease]:
        """This rank's leases of a new epoch, in which each rank has a share of so many batches."""
        ...

    def finish(self, lease: Lease) -> None:
        """All batches of a lease are trained."""
        ...


class BatchSource(Protocol):
    """Rows that make the batches of an epoch, in an order that hangs on the seed and the epoch."""

    def __len__(self) -> int: ...

    def batches(self, request: Request) -> Iterator[Batch]:
        """The batches of one rank, from a position of the epoch on."""
        ...

    def order(self, request: Request) -> dict[str, int | str | None]:
        """The key that the order depends on beside the seed: a position means the same rows wherever it is the same."""
        ...


class RowSource(Protocol):
    """Rows that can be taken in any order: held in memory, or generated on the spot."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Batch:
        """The rows with these numbers (int64, shape ``[B]``), as one batch in that order."""
        ...


@runtime_checkable
class ManyRowSource(RowSource, Protocol):
    """A :class:`RowSource` for which several small batches take little more time than one."""

    def take_many(self, rows_KB: Tensor) -> list[Batch]:
        """The batches of ``K`` times as many rows, each as :meth:`take` makes it, bit for bit."""
        ...


@dataclass(frozen=True)
class ShuffledRows:
    """A :class:`RowSource` as a :class:`BatchSource`: rows are taken as they are asked for.

    Args:
        rows: The rows to take from, by their numbers.
        shuffle: ``rows`` draws a new permutation of the rows for each epoch; ``batches`` permutes the steps only, which
            costs no memory per row and is enough for rows that are independent by construction; ``None`` keeps the
            order of the rows.
        features: The categorical features that batches have; ``None`` for all.
    """

    rows: RowSource
    shuffle: Shuffle | None = None
    features: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, request: Request) -> Iterator[Batch]:
        """See the protocol."""
        steps = request.steps(len(self))
        size = request.batch_size * request.world_size
        generator = torch.Generator().manual_seed(int(key64(request.seed, request.epoch) >> 1))
        if self.shuffle == "rows":
            order = torch.randperm(len(self), generator=generator)
        elif self.shuffle == "batches":
            whole = replace(request, start=0).steps(len(self))
            last = whole.bounds(len(whole) - 1)
            order = torch.randperm(len(whole) - (last[1] - last[0] != size), generator=generator)  # it stays the last

        def rows_of(step: int) -> Tensor:
            start, stop = steps.slice(step, rank=request.rank)
            if self.shuffle == "rows":
                return order[start:stop]
            number = steps.bounds(step)[0] // size
            moved = int(order[number]) - number if self.shuffle and number < len(order) else 0
            return torch.arange(start, stop) + moved * size

        for batch in self._taken(map(rows_of, range(len(steps)))):
            yield batch if self.features is None else batch.select(self.features)

    def _taken(self, coming: Iterator[Tensor]) -> Iterator[Batch]:
        """A batch of each of these rows; small ones are made together where the source can do so."""
        if not isinstance(self.rows, ManyRowSource):
            yield from map(self.rows.take, coming)
            return
        for size, alike in groupby(coming, len):
            while rows := list(islice(alike, max(1, _TOGETHER // size))):
                yield from [self.rows.take(rows[0])] if len(rows) == 1 else self.rows.take_many(torch.stack(rows))

    def order(self, request: Request) -> dict[str, int | str | None]:
        """See the protocol."""
        steps = {"rows_per_step": request.batch_size * request.world_size} if self.shuffle == "batches" else {}
        return {"shuffle": self.shuffle, **steps}


class BatchLoader:
    """Iterates over rows in whole batches; no row is touched one by one.

    All ranks walk through one order that hangs on the seed and the epoch, and share each step's rows: see
    :class:`Steps`. The position of the whole training is one number: rows of the epoch that were served. That is what
    ``state_dict()`` holds, and what any number of ranks, with any batch size, can go on from (where steps are shuffled,
    as many ranks with the same batch size only).

    Args:
        source: The rows, or an object that makes whole batches of them.
        batch_size: Number of rows in the batch of one rank.
        shuffle: How a :class:`RowSource` is shuffled; see :class:`ShuffledRows`. A :class:`BatchSource` has an order of
            its own, and this says whether it is another one in each epoch.
        seed: Seed of the order of the rows.
        drop_last: Leave out what does not fill a step of ``world_size * batch_size`` rows.
        rank: The rank whose slice of each step is yielded.
        world_size: Number of ranks that share the rows of each step.

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
        source: RowSource | BatchSource,
        *,
        batch_size: int,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"data.batch_size must be at least 1, got {batch_size}.")
        self._source: BatchSource = source if hasattr(source, "batches") else ShuffledRows(source, shuffle)  # type: ignore[assignment]
        self._shuffled = shuffle is not None
        self._request = Request(batch_size, drop_last, rank, world_size, seed)
        self._length = len(self._steps(0, 0))
        if not self._length:
            needed = batch_size * world_size if drop_last else world_size
            raise ValueError(
                f"{len(source)} rows are too few for {world_size} ranks"
                f"{f' with data.batch_size={batch_size} and drop_last' if drop_last else ''}: at least {needed} are "
                "needed, so that each rank gets a batch. Use fewer workers, a smaller batch or more rows."
            )
        self._current = self._next = (0, 0, 0)  # (epoch, rows of it that were served, batches)
        self._finished = False  # whether those are all of the epoch
        self._resumed = self._identity()
        self._dealer: Dealer | None = None

    def __len__(self) -> int:
        """Batches of the epoch, those served before it was resumed included.

        Raises:
            TypeError: they are dealt out as the epoch goes on.
        """
        if self._dealer is not None:
            raise TypeError("how many batches of the epoch this rank gets is not known before")
        return self._length

    @property
    def share_length(self) -> int:
        """Batches of this rank's own share of the epoch, also where they are dealt out."""
        return self._length

    @property
    def num_shares(self) -> int:
        """The number of ranks that share the rows."""
        return self._request.world_size

    @property
    def is_within_epoch(self) -> bool:
        """Whether the next iteration goes on in the midst of an epoch."""
        return self._next[1] > 0

    def deal(self, dealer: Dealer, *, rank: int, num_shares: int) -> None:
        """From the next iteration on, serve what is leased to this rank instead of its own share.

        Args:
            dealer: Leases parts of shares.
            rank: Of this one among those that a run began with; it may have fewer by now.
            num_shares: How many those were, and how many shares there are from now on.

        The position is then that of this rank's own share, until the epoch is over for it, and it is one batch behind:
        whoever asks for batches without knowing their number asks for one more than it has trained.
        """
        self._dealer = dealer
        self._request = replace(self._request, rank=rank, world_size=num_shares)
        self._length = len(self._steps(0, 0))

    def __iter__(self) -> Iterator[Batch]:
        epoch, start, served = self._next
        if start:
            self._check_position(epoch, start)
        steps = self._steps(epoch, start)
        self._length = served + len(steps)
        self._next = (epoch + 1, 0, 0)
        if self._dealer is not None:
            yield from self._dealt(self._dealer, epoch, start, steps)
            return
        for step, batch in enumerate(self._source.batches(replace(self._request, epoch=epoch, start=start))):
            self._current = (epoch, steps.bounds(step)[1], served + step + 1)
            self._finished = step == len(steps) - 1
            yield batch
        self._length = len(self._steps(epoch + 1, 0))

    def _dealt(self, dealer: Dealer, epoch: int, start: int, steps: Steps) -> Iterator[Batch]:
        """The batches of the leases of an epoch. Those that follow each other in a share are made by one iterator."""
        share: Generator[Batch, None, None] | Iterator[Batch] = iter(())
        place: tuple[int, int] | None = None  # the share that it makes batches of, and which comes next
        served, behind = 0, (epoch, start, 0)
        self._current, self._finished = behind, False
        before: Lease | None = None  # the lease whose last batches may not be trained
        for lease in dealer(len(steps)):
            if place != (lease.owner, lease.first):
                _close(share)
                begin = steps.bounds(lease.first)[0] if lease.first else start
                share = self._source.batches(replace(self._request, epoch=epoch, start=begin, rank=lease.owner))
            for number in range(lease.first, lease.last):
                if before is not None and number == lease.first + dealer.in_flight:  # those under way are trained
                    dealer.finish(before)
                    before = None
                batch = next(share)
                served += 1
                self._current = behind
                row = steps.bounds(number)[1] if lease.owner == self._request.rank else behind[1]
                behind = (epoch, row, served)
                yield batch
            place, before = (lease.owner, lease.last), lease
        _close(share)
        self._current, self._finished = (epoch, len(self._source), served), True

    @property
    def sampler(self) -> BatchLoader | SequentialSampler:
        """The object that Lightning calls ``set_epoch`` on, and by which it recognises an unshuffled loader."""
        return self if self._shuffled else SequentialSampler(range(len(self._source)))

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration run through ``epoch``; from its start, unless it is the epoch being resumed."""
        if epoch != self._next[0]:
            self._go_to(epoch, 0, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on all ranks, so that rank 0's serves for all."""
        epoch, row, batch = self._current
        return {"epoch": epoch, "row": row, "batch": batch, "finished": self._finished, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue behind the last row that was served.

        That iteration raises ``ValueError`` if the position is inside an epoch of other rows or of another order, where
        it has no meaning, or if too few rows of the epoch are left for so many ranks.
        """
        if "row" not in state_dict:
            raise ValueError("the position of the data in this checkpoint was written by an earlier version.")
        epoch, row, batch = state_dict["epoch"], state_dict["row"], state_dict["batch"]
        self._resumed = {name: state_dict.get(name) for name in self._identity()}
        self._current, self._finished = (epoch, row, batch), state_dict["finished"]
        if self._finished:
            self._go_to(epoch + 1, 0, 0)
        else:
            self._go_to(epoch, row, batch)

    def _go_to(self, epoch: int, row: int, batch: int) -> None:
        self._next = (epoch, row, batch)
        self._length = batch + len(self._steps(epoch, row))

    def _steps(self, epoch: int, start: int) -> Steps:
        return replace(self._request, epoch=epoch, start=start).steps(len(self._source))

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": len(self._source), "seed": self._request.seed, **self._source.order(self._request)}

    def _check_position(self, epoch: int, row: int) -> None:
        left, ranks = len(self._source) - row, self._request.world_size
        if self._resumed != self._identity():
            same = "the same rows, seed and order"
            size = self._resumed.get("rows_per_step")
            if isinstance(size, int) and self._resumed == self._identity() | {"rows_per_step": size}:
                same = f"workers and data.batch_size whose product is {size}"
                if not size % ranks:
                    same = f"data.batch_size={size // ranks}"
            raise ValueError(
                f"the checkpoint stopped inside epoch {epoch}, after row {row} of {self._resumed}, and this loader has "
                f"{self._identity()}. Resume with {same}, or from a checkpoint saved at the end of an epoch."
            )
        if not self._request.drop_last and 0 < left < ranks:
            raise ValueError(
                f"the checkpoint stopped inside epoch {epoch} with {left} rows left, too few for {ranks} ranks. Resume "
                f"with at most {left} workers."
            )


def _close(batches: Iterator[Batch]) -> None:
    """End an iterator that is not asked for more: it may have a thread or a connection."""
    with suppress(AttributeError):  # a plain iterator
        batches.close()  # type: ignore[attr-defined]
