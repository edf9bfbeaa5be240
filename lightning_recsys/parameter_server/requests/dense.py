"""Requests to dense stores: read a vector, write it, average with it, push a gradient to it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_recsys.parameter_server.requests.checks import take_arguments, take_arrays, take_nothing
from lightning_recsys.parameter_server.requests.operations import Operations, Push
from lightning_recsys.parameter_server.requests.served import ServedDense
from lightning_recsys.parameter_server.requests.stores import OpenStores
from lightning_recsys.parameter_server.wire import Request
from lightning_recsys.stores.checks import check_rate


class DenseRequests:
    """What dense stores offer.

    Args:
        stores: The server's.

    Attributes:
        operations: What is offered here.
    """

    def __init__(self, stores: OpenStores) -> None:
        self._stores = stores
        self.operations = Operations(
            reads={"pull": self._pull},
            pushes={
                "assign": self._assign,
                "elastic_average": self._elastic_average,
                "push_gradient": self._push_gradient,
            },
            again={
                "elastic_average": lambda request: stores.dense(request).store.pull(),
                "push_gradient": lambda request: stores.dense(request).store.version,
            },
        )

    def _pull(self, request: Request) -> object:
        take_nothing(request)
        served = self._stores.dense(request)
        self._stores.check_reply(served.store.size)
        return served.store.pull()

    def _assign(self, request: Request) -> Push:
        take_arguments(request)
        served, values = self._store_and_vector(request)
        return Push(partial(served.store.assign, values))

    def _elastic_average(self, request: Request) -> Push:
        (alpha,) = take_arguments(request, alpha=float)
        served, local = self._store_and_vector(request)
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must be in [0, 1], got {alpha}")
        # The answer takes the place of the vector that came, which nobody reads again.
        apply = partial(served.store.elastic_average, local, alpha=alpha, out=local)
        return Push(apply, served.undo("values"))

    def _push_gradient(self, request: Request) -> Push:
        (lr,) = take_arguments(request, lr=float)
        served, gradient = self._store_and_vector(request)
        check_rate(lr)
        apply = partial(served.store.push_gradient, gradient, lr=lr)
        return Push(apply, served.undo("values", *served.store.state))

    def _store_and_vector(self, request: Request) -> tuple[ServedDense, Tensor]:
        (vector,) = take_arrays(request, ("values", torch.float32, 1))
        served = self._stores.dense(request)
        if vector.numel() != served.store.size:
            raise ValueError(f"{request.store!r} has {served.store.size} elements, got {vector.numel()}")
        return served, vector
