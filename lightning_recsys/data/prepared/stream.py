"""A rank's batches of an epoch, made from windows of rows."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.prepared.order import EpochOrder, Positions, Steps
from lightning_recsys.data.prepared.rows import PreparedRows, Window
from lightning_recsys.embeddings import SparseFeatures

T = TypeVar("T")


@dataclass(frozen=True)
class StreamRequest:
    """Which batches to make.

    Args:
        split: Of the rows.
        seed: Seed of the order.
        epoch: Number of the epoch.
        window: Rows to shuffle among; 0 for none.
        start: Position in the epoch where to begin.
        batch_size: Rows per batch and rank.
        drop_last: Leave out what does not fill a step of all ranks.
        rank: Whose batches.
        world_size: How many ranks share the rows.
        features: Categorical features to read; ``None`` for all.
    """

    split: str
    seed: int
    epoch: int
    window: int
    start: int
    batch_size: int
    drop_last: bool
    rank: int
    world_size: int
    features: tuple[str, ...] | None = None

    def steps(self, num_rows: int) -> Steps:
        """How the rows are dealt out."""
        return Steps(self.start, num_rows, self.batch_size, self.world_size, self.drop_last)


class Windows:
    """Windows of an epoch, read when they are first asked for. Several threads may ask.

    Args:
        rows: The rows of the split.
        order: The order of the epoch.
        keep: How many windows to hold in memory.
    """

    def __init__(self, rows: PreparedRows, order: EpochOrder, *, keep: int = 1) -> None:
        self._rows = rows
        self._order = order
        self._keep = keep
        self._held: OrderedDict[int, tuple[Window, Positions]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, start: int, stop: int) -> Batch:
        """The rows at these positions of the epoch."""
        parts = []
        number = self._order.find(start)
        while start < stop:
            plan = self._order.windows[number]
            window, permutation = self._get(number)
            end = min(stop, plan.stop)
            parts.append(window.take(permutation[start - plan.start : end - plan.start]))
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else _join(parts)

    def _get(self, number: int) -> tuple[Window, Positions]:
        with self._lock:
            if number not in self._held:
                while len(self._held) >= self._keep:
                    self._held.popitem(last=False)
                window = self._rows.window(self._order.windows[number].groups)
                self._held[number] = window, self._order.permutation(number)
            self._held.move_to_end(number)
            return self._held[number]


def read_batches(request: StreamRequest, rows: PreparedRows, windows: Windows | None = None) -> Iterator[Batch]:
    """The batches of a request.

    Args:
        request: Which.
        rows: The rows of the split.
        windows: The epoch's windows, where others read them too; of all features then.
    """
    if windows is None:
        order = EpochOrder(rows.group_rows, seed=request.seed, epoch=request.epoch, window=request.window)
        windows = Windows(rows if request.features is None else rows.select(request.features), order)
    steps = request.steps(len(rows))
    for step in range(len(steps)):
        batch = windows.take(*steps.slice(step, rank=request.rank))
        yield batch if request.features is None else batch.select(request.features)


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T | None = None
    error: BaseException | None = None
    last: bool = False


def prefetched(items: Iterable[T], *, depth: int) -> Generator[T, None, None]:
    """The same items, made ahead in a thread that ends with this iterator, however that ends.

    Args:
        items: Iterated in the thread; an error there is raised here.
        depth: How many items may wait.

    >>> list(prefetched(range(3), depth=1))
    [0, 1, 2]
    """
    waiting: queue.Queue[_Item[T]] = queue.Queue(depth)
    stopped = threading.Event()
    thread = threading.Thread(
        target=_fill, args=(items, waiting.put, stopped), name="lightning-recsys-reader", daemon=True
    )
    thread.start()
    try:
        while not (item := waiting.get()).last:
            if item.error is not None:
                raise item.error
            yield item.value  # type: ignore[misc]
    finally:
        stopped.set()
        while thread.is_alive():  # it may be waiting for a place
            while not waiting.empty():
                waiting.get()
            thread.join(0.01)


def _fill(items: Iterable[T], put: Callable[[_Item[T]], None], stopped: threading.Event) -> None:
    try:
        for item in items:
            put(_Item(item))
            if stopped.is_set():
                return
        put(_Item(last=True))
    except BaseException as error:  # raised where the items are used
        put(_Item(error=error))


def _join(parts: list[Batch]) -> Batch:
    return Batch(
        torch.cat([part.dense for part in parts]),
        SparseFeatures.cat([part.sparse for part in parts]),
        torch.cat([part.labels for part in parts]),
    )
