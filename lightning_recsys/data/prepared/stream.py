"""A rank's batches of an epoch, made from windows of rows."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

import numpy as np
import torch

from lightning_recsys.data.batch import Batch
from lightning_recsys.data.loader import Request
from lightning_recsys.data.prepared.order import EpochOrder, Positions
from lightning_recsys.data.prepared.rows import PreparedRows, Window
from lightning_recsys.embeddings import SparseFeatures

T = TypeVar("T")

_PACK_ROWS = 2048  # then what a hand-over between two threads of one interpreter costs, up to a millisecond, is little


@dataclass(frozen=True)
class StreamRequest(Request):
    """Which batches of an epoch to make, of which prepared rows.

    Args:
        split: Which split of the folder the rows are of.
        window: Rows to shuffle among; 0 for none.
        features: Categorical features to read; ``None`` for all.
    """

    split: str = "train"
    window: int = 0
    features: tuple[str, ...] | None = None


@dataclass(frozen=True)
class PreparedSource:
    """The rows of a split, as a :class:`~lightning_recsys.data.loader.BatchLoader` asks for them.

    Args:
        num_rows: Number of rows of the split.
        split: Which split of the folder they are.
        window: Rows to shuffle among; 0 keeps their order.
        features: Categorical features to read; ``None`` for all.
        stream: Makes the batches of a request.
    """

    num_rows: int
    split: str
    window: int
    features: tuple[str, ...] | None
    stream: Callable[[StreamRequest], Iterator[Batch]]

    def __len__(self) -> int:
        return self.num_rows

    def batches(self, request: Request) -> Iterator[Batch]:
        """The batches of a rank, from a position of an epoch on."""
        own = StreamRequest(**vars(request), split=self.split, window=self.window, features=self.features)
        return self.stream(own)

    def order(self, request: Request) -> dict[str, int | str | None]:
        """The key that the order depends on beside the seed."""
        return {"shuffle_window": self.window}


class Windows:
    """Windows of an epoch, read when they are first asked for. Several threads may ask.

    Args:
        rows: The rows of the split.
        request: Says which epoch, and how its rows are shuffled.
        keep: How many windows to hold in memory.
    """

    def __init__(self, rows: PreparedRows, request: StreamRequest, *, keep: int = 1) -> None:
        self._rows = rows
        self._order = EpochOrder(rows.group_rows, seed=request.seed, epoch=request.epoch, window=request.window)
        self._keep = keep
        self._held: OrderedDict[int, tuple[Window, Positions]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, slices: Sequence[tuple[int, int]]) -> list[Batch]:
        """A batch of the rows at the first of these positions of the epoch, and the next ones while that costs little.

        Args:
            slices: First and last position of each batch, in rising order. Those of one size within one window are
                taken together.
        """
        start, stop = slices[0]
        number = self._order.find(start)
        plan = self._order.windows[number]
        if stop > plan.stop:
            return [self._take_across(number, start, stop)]
        together = takewhile(lambda each: each[1] <= plan.stop and each[1] - each[0] == stop - start, slices)
        window, permutation = self._get(number)
        return window.take_many(np.stack([permutation[a - plan.start : b - plan.start] for a, b in together]))

    def _take_across(self, number: int, start: int, stop: int) -> Batch:
        parts = []
        while start < stop:
            plan = self._order.windows[number]
            window, permutation = self._get(number)
            end = min(stop, plan.stop)
            parts.append(window.take(permutation[start - plan.start : end - plan.start]))
            start, number = end, number + 1
        return _join(parts)

    def _get(self, number: int) -> tuple[Window, Positions]:
        with self._lock:
            if number not in self._held:
                while len(self._held) >= self._keep:
                    self._held.popitem(last=False)
                window = self._rows.window(self._order.windows[number].groups)
                self._held[number] = window, self._order.permutation(number)
            self._held.move_to_end(number)
            return self._held[number]


def read_packs(request: StreamRequest, rows: PreparedRows, windows: Windows | None = None) -> Iterator[list[Batch]]:
    """The batches of a request; small ones in packs, which are made and handed over at the cost of one.

    Args:
        request: Says which batches to make, and of which features.
        rows: The rows of the split.
        windows: The epoch's windows, where others read them too; of all features then.
    """
    if windows is None:
        windows = Windows(rows if request.features is None else rows.select(request.features), request)
    steps = request.steps(len(rows))
    step, most = 0, _batches_of_a_pack(request)
    while step < len(steps):
        coming = range(step, min(step + most, len(steps)))
        pack = windows.take([steps.slice(each, rank=request.rank) for each in coming])
        yield pack if request.features is None else [batch.select(request.features) for batch in pack]
        step += len(pack)


def stream_batches(request: StreamRequest, rows: PreparedRows, *, ahead: int) -> Generator[Batch, None, None]:
    """The batches of a request one by one, made ahead in a thread: so many, or the pack that they are in."""
    depth = max(ahead // _batches_of_a_pack(request), 1)
    with closing(prefetched(read_packs(request, rows), depth=depth)) as made:
        for pack in made:
            yield from pack


def _batches_of_a_pack(request: StreamRequest) -> int:
    return max(_PACK_ROWS // request.batch_size, 1)


def prefetched(items: Iterable[T], *, depth: int) -> Generator[T, None, None]:
    """The same items, made ahead in a thread that ends with this iterator, however that ends.

    Args:
        items: Iterated in the thread; an error there is raised here.
        depth: Number of finished items that may wait to be taken.

    >>> list(prefetched(range(3), depth=1))
    [0, 1, 2]
    """
    waiting: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(
        depth
    )  # items, or an error, and None at the end
    stopped = threading.Event()
    thread = threading.Thread(
        target=_fill, args=(items, waiting.put, stopped), name="lightning-recsys-reader", daemon=True
    )
    thread.start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        stopped.set()
        while thread.is_alive():  # it may be waiting for a place
            while not waiting.empty():
                waiting.get()
            thread.join(0.01)


def _fill(items: Iterable[T], put: Callable[[tuple[T] | BaseException | None], None], stopped: threading.Event) -> None:
    try:
        for item in items:
            put((item,))
            if stopped.is_set():
                return
        put(None)
    except BaseException as error:  # raised where the items are used
        put(error)


def _join(parts: list[Batch]) -> Batch:
    return Batch(
        torch.cat([part.dense for part in parts]),
        SparseFeatures.cat([part.sparse for part in parts]),
        torch.cat([part.labels for part in parts]),
    )
