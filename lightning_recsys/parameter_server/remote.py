"""The stores of a server on another machine, behind the same interface as mapped ones."""

# Shape suffixes: B batch, F features, D embedding dim, U distinct rows of a request.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from lightning_recsys.compression import Codec, Uncompressed
from lightning_recsys.embeddings.backend import row_shapes
from lightning_recsys.embeddings.int64_ids import in_order
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.parameter_server.client import Connection, Pending
from lightning_recsys.parameter_server.messages.exchange_wire import (
    codec_of_rows,
    cut_exchange,
    join_answers,
    pack_request,
    unpack_reply,
)
from lightning_recsys.parameter_server.messages.wire import Reply
from lightning_recsys.parameter_server.requests.checks import GENERATION
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.exchange import RowExchange, RowValues
from lightning_recsys.stores.interfaces import DenseStore, DynamicEmbeddingStore, EmbeddingStore, Rows, Stores
from lightning_recsys.stores.plain import (
    from_plain,
    optimizer_to_plain,
    optional_to_plain,
    rows_from_plain,
    rows_to_plain,
)
from lightning_recsys.stores.versions import StalenessHistogram, check_versions
from lightning_recsys.sync import StalenessNormalization

Arguments = Mapping[str, Any]
NONE: Arguments = {}
CHUNK_BYTES = 8 << 20  # of a long read or write, so that other requests get their turn
_CHUNKS_IN_FLIGHT = 4


class _Remote:
    """The base class of stores on a server: requests that name the store, and the staleness that the server tells.

    Args:
        connection: The connection to the store's server.
        name: Name of the store on its server.
        description: What the server said of it. Its generation is a part of every request: another store that has got
            this name meanwhile is not meant.
    """

    def __init__(self, connection: Connection, name: str, description: dict[str, Any]) -> None:
        self.name = name
        self._connection = connection
        self._generation = {GENERATION: description["generation"]}
        self._unread: deque[Pending] = deque()  # pushes whose answers have not been read, in the order of sending
        self._observed = StalenessHistogram()

    def _request(self, operation: str, arguments: Arguments = NONE, arrays: Sequence[Tensor] = ()) -> Reply:
        return self._connection.wait(self._begin(operation, arguments, arrays))

    def _begin(self, operation: str, arguments: Arguments = NONE, arrays: Sequence[Tensor] = ()) -> Pending:
        own = {**arguments, **self._generation}
        return self._connection.begin(operation, store=self.name, arguments=own, arrays=arrays)

    def _push(self, operation: str, arguments: Arguments = NONE, arrays: Sequence[Tensor] = ()) -> Pending:
        own = {**arguments, **self._generation}
        return self._connection.push(operation, store=self.name, arguments=own, arrays=arrays)

    def _push_gradients(self, operation: str, arguments: Arguments, arrays: Sequence[Tensor]) -> Pending:
        """Push what the answer tells the staleness of."""
        pending = self._push(operation, arguments, arrays)
        self._unread.append(pending)
        self._read_answers()
        return pending

    def _read_answers(self) -> None:
        while self._unread and (reply := self._unread[0].reply) is not None:
            self._unread.popleft()
            for counts in reply.arrays:  # none of a push that was sent twice, or refused
                self._observed.add(counts)

    @property
    def observed(self) -> StalenessHistogram:
        """How stale pushes were, as far as answers that are there have said it; nothing is asked or waited for."""
        self._read_answers()
        return self._observed

    def flush(self) -> None:
        """Wait until the server has applied every push."""
        self._connection.flush()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        return self  # a copy in this process is the same store

    def close(self) -> None:
        """Nothing of its own to let go of: the connection belongs to the :class:`RemoteStores`."""


class RemoteEmbeddingStore(_Remote, EmbeddingStore):
    """Rows on a server.

    A read sees every push that was made before it on the same connection.

    Args:
        connection: The connection to the store's server.
        name: Name of the store on its server.
        description: Sizes and settings of the store, as the server told them.
        codec: How rows and their gradients travel. Whole stretches (:meth:`read`, :meth:`write`) do as they are, and
            rows of bfloat16 as bfloat16.
    """

    is_remote = True

    def __init__(self, connection: Connection, name: str, description: dict[str, Any], codec: Codec) -> None:
        super().__init__(connection, name, description)
        self.layout, self.optimizer, self.normalization = rows_from_plain(description)
        self._codec, self._compressed = codec, {"compression": codec.name}
        self._codec_of_rows = codec_of_rows(self.layout, codec)
        self._asked = {"compression": self._codec_of_rows.name}
        self.weight_bytes, self.gradient_bytes = self._codec_of_rows.encoded_bytes((1,)), codec.encoded_bytes((1,))
        self._row_shapes = row_shapes(self.layout, self.optimizer)

    def lookup(self, rows_U: Tensor) -> Tensor:  # noqa: D102 - inherited
        arrays = self._request("lookup", self._asked, [_ready(rows_U)]).arrays
        return self._codec_of_rows.decode(arrays, (rows_U.numel(), self.layout.embedding_dim))

    def pooled_lookup(self, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        return self.begin_pooled_lookup(sparse)()

    def begin_pooled_lookup(self, sparse: SparseFeatures) -> Callable[[], Tensor]:  # noqa: D102 - inherited
        arguments, arrays = _sparse(sparse)
        pending = self._begin("pooled_lookup", arguments | self._asked, arrays)
        return lambda: self._codec_of_rows.decode(self._connection.wait(pending).arrays, self._pooled(sparse))

    def begin_versioned_lookup(self, sparse: SparseFeatures) -> Callable[[], tuple[Tensor, Tensor]]:  # noqa: D102
        arguments, arrays = _sparse(sparse)
        arguments |= {"versioned": True, **self._asked}
        pending = self._begin("pooled_lookup", arguments, arrays)

        def answer() -> tuple[Tensor, Tensor]:
            pooled_BFD, versions_N = self._connection.wait(pending).arrays
            return self._codec_of_rows.decode([pooled_BFD], self._pooled(sparse)), versions_N

        return answer

    def apply_gradients(  # noqa: D102 - inherited
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> None:
        check_versions(self.normalization, versions, sparse.values.numel())
        arguments, arrays = _sparse(sparse)
        arguments |= {"lr": float(lr), **_flags(versioned=versions), **self._compressed}
        arrays = [*map(_own, arrays), *_given(versions), *self._gradients(grad_BFD)]
        self._push_gradients("apply_gradients", arguments, arrays)

    def apply_row_gradients(  # noqa: D102 - inherited
        self, rows_U: Tensor, grads_UD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> None:
        check_versions(self.normalization, versions, rows_U.numel())
        arguments = {"lr": float(lr), **_flags(versioned=versions), **self._compressed}
        arrays = [_own(rows_U), *_given(versions), *self._gradients(grads_UD)]
        self._push_gradients("apply_row_gradients", arguments, arrays)

    def _pooled(self, sparse: SparseFeatures) -> tuple[int, ...]:
        return sparse.batch_size, len(sparse.keys), self.layout.embedding_dim

    def _gradients(self, gradients: Tensor) -> list[Tensor]:
        """The gradients in the form in which they travel, in memory of their own."""
        encoded = self._codec.encode(_ready(gradients))
        return [_own(x) if x.data_ptr() == gradients.data_ptr() else x for x in encoded]

    def begin_exchange(self, request: RowExchange) -> Callable[[], RowValues]:  # noqa: D102 - inherited
        request.check(self.layout.num_rows, self._row_shapes)
        *first, last = cut_exchange(request, self._row_shapes, self._connection.limits)
        done = [self._send_exchange(part)() for part in first]  # one at a time: a server keeps few such answers
        answer = self._send_exchange(last)
        return (lambda: join_answers([*done, answer()])) if done else answer

    def _send_exchange(self, request: RowExchange) -> Callable[[], RowValues]:
        arguments, arrays = pack_request(request, self.layout.num_rows, self._row_shapes, self._codec)
        pending = (self._push if request.changes_rows else self._begin)("exchange", arguments, arrays)
        shapes, codec = self._row_shapes, self._codec_of_rows
        return lambda: unpack_reply(self._connection.wait(pending).arrays, request, shapes, codec)

    def read_rows(self, name: str, rows: Rows) -> Tensor:  # noqa: D102 - inherited
        chunks: list[Tensor] = []
        pending: deque[Pending] = deque()  # few at a time
        for arguments, arrays in self._pieces(rows):
            pending.append(self._begin("read", {"array": name, **arguments}, arrays))
            if len(pending) == _CHUNKS_IN_FLIGHT:
                chunks.append(self._connection.wait(pending.popleft()).arrays[0])
        chunks += [self._connection.wait(x).arrays[0] for x in pending]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def write_rows(self, name: str, rows: Rows, values: Tensor) -> None:  # noqa: D102 - inherited
        chunks = torch.split(values, self._piece_rows)
        for (arguments, arrays), chunk in zip(self._pieces(rows), chunks, strict=True):
            self._push("write", {"array": name, **arguments}, [*map(_own, arrays), _own(chunk)])
        self.flush()

    def _pieces(self, rows: Rows) -> Iterator[tuple[Arguments, Sequence[Tensor]]]:
        """The numbers or ids that name rows in requests, a piece in each; in one, where there are none."""
        if not isinstance(rows, slice):
            yield from (({}, [_ready(piece)]) for piece in torch.split(rows, self._piece_rows))
            return
        for first in range(rows.start, max(rows.stop, rows.start + 1), self._piece_rows):
            yield {"first_row": first, "num_rows": min(self._piece_rows, rows.stop - first)}, []

    @property
    def _piece_rows(self) -> int:
        return max(1, CHUNK_BYTES // (4 * self.layout.embedding_dim))

    @property
    def step(self) -> int:  # noqa: D102 - inherited
        return int(self._request("counter").value)

    @step.setter
    def step(self, value: int) -> None:
        self._connection.wait(self._push("set_step", {"step": int(value)}))


class RemoteDynamicStore(RemoteEmbeddingStore, DynamicEmbeddingStore):
    """Dynamic rows on a server; arguments as for :class:`RemoteEmbeddingStore`."""

    def __init__(self, connection: Connection, name: str, description: dict[str, Any], codec: Codec) -> None:
        super().__init__(connection, name, description, codec)
        self.dynamic = from_plain(DynamicRows, description["dynamic"])
        self.seed = int(description["seed"])

    def live_rows(self) -> Tensor:  # noqa: D102 - inherited
        step, parts = CHUNK_BYTES // 8, []
        for first in range(0, self._size()[1], step):
            arguments = {"first_slot": first, "num_slots": step}
            parts.append(self._request("live_rows", arguments).arrays[0])
        return in_order(torch.cat(parts)) if parts else torch.empty(0, dtype=torch.int64)

    def insert(self, rows_U: Tensor) -> None:  # noqa: D102 - inherited
        self._push("insert", arrays=[_own(rows_U)])

    def clear(self) -> None:  # noqa: D102 - inherited
        self._connection.wait(self._push("clear"))

    @property
    def num_live(self) -> int:  # noqa: D102 - inherited
        return self._size()[0]

    def _size(self) -> tuple[int, int]:
        live, slots = self._request("size").value
        return int(live), int(slots)


class RemoteDenseStore(_Remote, DenseStore):
    """A vector on a server.

    Args:
        connection: The connection to the vector's server.
        name: Name of the vector on its server.
        description: Sizes and settings of the vector, as the server told them.
    """

    def __init__(self, connection: Connection, name: str, description: dict[str, Any]) -> None:
        super().__init__(connection, name, description)
        self.parts = tuple(description["parts"])
        self.size = sum(self.parts)

    def begin_versioned_pull(self) -> Callable[[], tuple[Tensor, Tensor]]:  # noqa: D102 - inherited
        pending = self._begin("pull")

        def answer() -> tuple[Tensor, Tensor]:
            values, versions = self._connection.wait(pending).arrays
            return values, versions

        return answer

    def elastic_average(self, local: Tensor, *, alpha: float) -> Tensor:  # noqa: D102 - inherited
        return self.begin_elastic_average(local, alpha=alpha)()

    def begin_elastic_average(self, local: Tensor, *, alpha: float) -> Callable[[], Tensor]:  # noqa: D102 - inherited
        pending = self._push("elastic_average", {"alpha": float(alpha)}, [_ready(local)])
        return lambda: self._connection.wait(pending).arrays[0]

    def push_gradient(  # noqa: D102 - inherited
        self,
        gradient: Tensor,
        *,
        lr: float,
        versions: Tensor | None = None,
        trained: Tensor | None = None,
        step: int | None = None,
    ) -> Callable[[], int]:
        arguments: dict[str, Any] = {"lr": float(lr), "step": step, **_flags(versioned=versions, masked=trained)}
        marks = None if trained is None else trained.to(torch.uint8)
        arrays = [_own(gradient), *_given(versions), *_given(marks)]
        pending = self._push_gradients("push_gradient", arguments, arrays)
        return lambda: int(self._connection.wait(pending).value) if step is None else step

    def read(self, name: str) -> Tensor:  # noqa: D102 - inherited
        return self._request("read_dense", {"array": name}).arrays[0]

    def write(self, name: str, values: Tensor) -> None:  # noqa: D102 - inherited
        self._connection.wait(self._push("write_dense", {"array": name}, [_own(values)]))


class RemoteStores(Stores):
    """The stores of a server.

    Args:
        connection: To the server; closed with this object.
        reason: Why files are not mapped instead, for whoever reads a log.
        rows: How embedding rows and their gradients travel.

    Attributes:
        connection: The same; its ``traffic`` counts bytes and requests.
    """

    def __init__(self, connection: Connection, *, reason: str, rows: Codec | None = None) -> None:
        self.connection = connection
        self._rows = rows or Uncompressed()
        self.endpoint = connection.endpoint
        in_codec = "" if self._rows.name == "none" else f", rows in {self._rows.name}"
        self.route = f"messages ({reason}){in_codec}"

    def create_embedding_store(  # noqa: D102 - inherited
        self,
        name: str,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        seed: int,
        dynamic: DynamicRows | None = None,
        normalization: StalenessNormalization | None = None,
    ) -> RemoteEmbeddingStore:
        arguments = {"seed": int(seed), **rows_to_plain(layout, optimizer, normalization)}
        self._create("embedding", name, arguments | {"dynamic": optional_to_plain(dynamic)})
        return self.embedding_store(name)

    def create_dense_store(  # noqa: D102 - inherited
        self,
        name: str,
        initial: Tensor,
        *,
        optimizer: RowOptimizer | None = None,
        normalization: StalenessNormalization | None = None,
        parts: Sequence[int] = (),
    ) -> RemoteDenseStore:
        rule, plain = optimizer and optimizer_to_plain(optimizer), optional_to_plain(normalization)
        arguments: dict[str, Any] = {"optimizer": rule, "normalization": plain, "parts": list(parts)}
        self._create("dense", name, arguments, _ready(initial))
        return self.dense_store(name)

    def _create(self, kind: str, name: str, arguments: dict[str, Any], *arrays: Tensor) -> None:
        push = self.connection.push(f"create_{kind}_store", store=name, arguments=arguments, arrays=arrays)
        self.connection.wait(push)

    def embedding_store(self, name: str) -> RemoteEmbeddingStore:  # noqa: D102 - inherited
        description = self._describe("embedding", name, "dynamic")
        kind = RemoteEmbeddingStore if description["kind"] == "embedding" else RemoteDynamicStore
        return kind(self.connection, name, description, self._rows)

    def dense_store(self, name: str) -> RemoteDenseStore:  # noqa: D102 - inherited
        return RemoteDenseStore(self.connection, name, self._describe("dense", name))

    def _describe(self, kind: str, name: str, *others: str) -> dict[str, Any]:
        description: dict[str, Any] = self.connection.request("describe", store=name).value
        if description["kind"] not in (kind, *others):
            raise KeyError(f"{self.endpoint}: {name!r} is a store of the kind {description['kind']}, not {kind}.")
        return description

    def remove(self, name: str) -> None:  # noqa: D102 - inherited
        self.connection.wait(self.connection.push("remove", store=name))

    def status(self) -> dict[str, Any]:  # noqa: D102 - inherited
        status: dict[str, Any] = self.connection.request("status").value
        return status

    def close(self) -> None:
        """Wait for the last pushes, then let go of the connection."""
        self.connection.close()


def _sparse(sparse: SparseFeatures) -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments and arrays that describe resolved features; their keys are the store's own."""
    arrays = [sparse.values]
    if not sparse.is_single_hot:
        arrays.append(sparse.bag_offsets())
    if sparse.weights is not None:
        arrays.append(sparse.weights)
    arguments = {"bags": not sparse.is_single_hot, "weighted": sparse.weights is not None}
    return arguments, [_ready(array) for array in arrays]


def _flags(**given: Tensor | None) -> dict[str, bool]:
    """Arguments that say which optional arrays come; none for those that do not."""
    return {name: True for name, tensor in given.items() if tensor is not None}


def _given(tensor: Tensor | None) -> list[Tensor]:
    """Own copies of what there is."""
    return [] if tensor is None else [_own(tensor)]


def _ready(tensor: Tensor) -> Tensor:
    """The array in the form in which it travels, without a copy where it is so already."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad:
        return tensor
    return tensor.detach().cpu().contiguous()


def _own(tensor: Tensor) -> Tensor:
    """A copy that nobody else writes to, for what is sent while its owner goes on, and perhaps sent again."""
    ready = _ready(tensor)
    return ready.clone() if ready.data_ptr() == tensor.data_ptr() else ready
