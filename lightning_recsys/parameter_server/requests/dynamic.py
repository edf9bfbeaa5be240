"""Requests to embedding stores whose rows come and go: which there are, and making and forgetting them."""

# Shape suffix: U distinct rows of a request.

from __future__ import annotations

from functools import partial

import torch

from lightning_recsys.parameter_server.messages.wire import Request
from lightning_recsys.parameter_server.requests.checks import take_arguments, take_arrays, take_plain
from lightning_recsys.parameter_server.requests.operations import Operations, Push
from lightning_recsys.parameter_server.requests.stores import OpenStores


class DynamicRequests:
    """The operations that stores with dynamic rows have besides.

    Args:
        stores: The stores of the server.

    Attributes:
        operations: The operations that a client may ask for, by name.
    """

    def __init__(self, stores: OpenStores) -> None:
        self._stores = stores
        self.operations = Operations(
            reads={"size": self._size, "live_rows": self._live_rows},
            pushes={"insert": self._insert, "clear": self._clear},  # without an undo: once more changes nothing
        )

    def _size(self, request: Request) -> object:
        served = self._stores.dynamic(request)
        take_plain(request)
        return [served.store.num_live, served.store.num_slots]

    def _live_rows(self, request: Request) -> object:
        served, most = self._stores.dynamic(request), self._stores.limits.rows
        first, count = take_plain(request, first_slot=int, num_slots=int)
        if first < 0 or not 0 <= count <= most:
            raise ValueError(f"a request names at most {most} slots from 0 on, got {count} from {first}")
        return served.store.rows_in_slots(first, count)

    def _insert(self, request: Request) -> Push:
        served = self._stores.dynamic(request)
        take_arguments(request)
        (rows_U,) = take_arrays(request, ("rows", torch.int64, 1))
        self._stores.check_rows(served, rows_U)
        return Push(partial(served.store.insert, rows_U))

    def _clear(self, request: Request) -> Push:
        served = self._stores.dynamic(request)
        take_plain(request)
        return Push(served.store.clear)
