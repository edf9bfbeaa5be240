"""The server's side of what a worker's cache of rows says in one message (:mod:`lightning_recsys.stores.exchange`).

Nothing else in a server knows of it: the handler finds the operation by its name, as any other.
"""

from __future__ import annotations

from torch import Tensor

from lightning_recsys.compression import Codec
from lightning_recsys.parameter_server.messages.exchange_wire import codec_of_rows, pack_reply, unpack_request
from lightning_recsys.parameter_server.messages.wire import MessageError, Request
from lightning_recsys.parameter_server.requests.operations import Operations, Push
from lightning_recsys.parameter_server.requests.served import ServedEmbedding
from lightning_recsys.parameter_server.requests.stores import OpenStores
from lightning_recsys.stores.exchange import RowExchange
from lightning_recsys.stores.row_files import CLOCK


class ExchangeRequests:
    """The operations of embedding stores for caches.

    Args:
        stores: The stores of the server.

    Attributes:
        operations: What is offered here: the one operation as a read, where it changes no row, and as a push.
    """

    def __init__(self, stores: OpenStores) -> None:
        self._stores = stores
        self.operations = Operations(
            reads={"exchange": self._read}, pushes={"exchange": self._push}, again={"exchange": self._again}
        )

    def _unpack(self, request: Request) -> tuple[ServedEmbedding, RowExchange, Codec]:
        served = self._stores.embedding(request)
        exchange, codec = unpack_request(request, served.num_rows, served.store.row_shapes, self._stores.limits)
        return served, exchange, codec

    def _read(self, request: Request) -> object:
        served, exchange, codec = self._unpack(request)
        if exchange.changes_rows:
            raise MessageError("an exchange with pushes or steps needs a sequence number")
        return _answer(served, exchange, codec)

    def _push(self, request: Request) -> Push:
        served, exchange, codec = self._unpack(request)
        if not exchange.changes_rows:
            raise ValueError("an exchange without pushes and steps changes nothing and takes no sequence number")

        def apply() -> object:
            served.store.push_updates(exchange)
            return _answer(served, exchange, codec)

        return Push(apply, served.undo(exchange.push_rows, CLOCK, counts=exchange.updates_per_push))

    def _again(self, request: Request) -> object:
        return _answer(*self._unpack(request))


def _answer(served: ServedEmbedding, exchange: RowExchange, codec: Codec) -> tuple[Tensor, ...]:
    """The rows that are fetched and checked, whether the pushes are made now or were made before."""
    store = served.store
    return tuple(pack_reply(store.fetch_and_check(exchange), store.row_shapes, codec_of_rows(store.layout, codec)))
