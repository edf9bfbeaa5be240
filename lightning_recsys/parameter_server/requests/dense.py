"""Requests to dense stores: read a vector, write it, average with it, push a gradient to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.parameter_server.messages.wire import Request
from lightning_recsys.parameter_server.requests.checks import take_arguments, take_array, take_arrays, take_plain
from lightning_recsys.parameter_server.requests.operations import Answer, Operations, Push
from lightning_recsys.parameter_server.requests.stores import OpenStores
from lightning_recsys.stores.checks import check_rate
from lightning_recsys.stores.dense_store import STEP
from lightning_recsys.stores.interfaces import VALUES

MAX_STEP = 1 << 62  # leaves room to count on


class DenseRequests:
    """The operations of dense stores.

    Args:
        stores: The stores of the server.

    Attributes:
        operations: The operations that a client may ask for, by name.
    """

    def __init__(self, stores: OpenStores) -> None:
        self._stores = stores
        self.operations = Operations(
            reads={"pull": self._pull, "read_dense": self._read},
            pushes={
                "write_dense": self._write,
                "elastic_average": self._elastic_average,
                "push_gradient": self._push_gradient,
            },
            again={
                "elastic_average": lambda request: stores.dense(request).store.pull(),
                "push_gradient": lambda request: int(stores.dense(request).store.read(STEP)),
            },
        )

    def _pull(self, request: Request) -> object:
        take_plain(request)
        served = self._stores.dense(request)
        self._stores.check_reply(served.store.size + 2 * len(served.store.parts))
        return served.store.begin_versioned_pull()()

    def _read(self, request: Request) -> object:
        (name,) = take_plain(request, array=str)
        served = self._stores.dense(request)
        self._stores.check_reply(served.store.size)
        return served.store.read(name)

    def _write(self, request: Request) -> Push:
        (name,) = take_arguments(request, array=str)
        if len(request.arrays) != 1:
            raise ValueError("write_dense takes one array of values")
        # No undo: the same values, written a second time, leave what the first time left.
        return Push(partial(self._stores.dense(request).store.write, name, request.arrays[0]))

    def _elastic_average(self, request: Request) -> Push:
        (alpha,) = take_arguments(request, alpha=float)
        (local,) = take_arrays(request, ("replica", torch.float32, 1))
        served = self._stores.dense(request)
        if local.numel() != served.store.size:
            raise ValueError(f"{request.store!r} has {served.store.size} elements, got {local.numel()}")
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must be in [0, 1], got {alpha}")

        def apply() -> Tensor:
            # The answer takes the place of the vector that came: the store's own moves on while a reply is sent.
            return local.copy_(served.store.elastic_average(local, alpha=alpha))

        return Push(apply, served.undo(VALUES))

    def _push_gradient(self, request: Request) -> Push:
        optional = {"versioned": False, "masked": False, "step": None}
        kinds: dict[str, Any] = {"lr": float, "versioned": bool, "masked": bool, "step": (int, type(None))}
        lr, versioned, masked, step = take_arguments(request, optional, **kinds)
        arrays = list(request.arrays)
        gradient = take_array(arrays, "gradient", torch.float32, 1)
        versions = take_array(arrays, "versions", torch.int64, 1) if versioned else None
        trained = take_array(arrays, "trained", torch.uint8, 1).bool() if masked else None
        if arrays:
            raise ValueError(f"push_gradient takes gradient, versions and trained, got {len(request.arrays)} arrays")
        store = (served := self._stores.dense(request)).store
        store.check_gradient(gradient, versions, trained)
        check_rate(lr)
        if step is not None and not 0 <= step < MAX_STEP:
            raise ValueError(f"step must be from 0 to {MAX_STEP - 1}, got {step}")

        def apply() -> Answer:
            number, counts = store.train(gradient, lr=lr, versions=versions, trained=trained, step=step)
            return Answer(number, [counts])

        return Push(apply, served.undo(*store.written))
