"""Blocks through a thread pool, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ordered_map(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """``map`` in the threads of a pool, with at most ``ahead`` results waiting, so that memory stays bounded.

    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(ordered_map(pool, abs, [-1, -2, -3], ahead=2))
    [1, 2, 3]
    """
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
