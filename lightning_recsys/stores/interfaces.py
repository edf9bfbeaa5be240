"""The interfaces of stores, whether they are mapped into this process or lie behind a server."""

# Shape suffixes: B batch, F features, D embedding dim, U distinct rows of a request, R rows of a store.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.exchange import RowExchange, RowValues
from lightning_recsys.stores.versions import VERSION, StalenessHistogram
from lightning_recsys.sync import StalenessNormalization

VALUES = "values"  # of a dense vector, among what can be read and written

Rows: TypeAlias = "slice | Tensor"
"""Rows of a store: a stretch, with its first row and the one behind its last, or their numbers, int64 ``[U]``."""


class EmbeddingStore(ABC):
    """Rows of one width with their optimizer state. Every process reads and writes them without a lock (Hogwild).

    A row is named by its place in the store: ``layout.table_starts[table] + id``.

    Attributes:
        layout: The tables, behind each other. A part of a table that is cut by rows is a table here; ids count from
            its own first row.
        optimizer: The update rule.
        normalization: What stale gradients count; ``None`` where rows have no versions.
        weight_bytes: Size of an element of a row where it travels: 4 of float32.
        gradient_bytes: The same of its gradients and updates.
        is_remote: Whether rows come in messages, and not from this machine's memory.
    """

    layout: TableLayout
    optimizer: RowOptimizer
    normalization: StalenessNormalization | None
    weight_bytes: int = 4
    gradient_bytes: int = 4
    is_remote: bool = False

    @property
    @abstractmethod
    def observed(self) -> StalenessHistogram:
        """The staleness of the rows in the updates of this object, as far as it has heard of it."""

    @abstractmethod
    def lookup(self, rows_U: Tensor) -> Tensor:
        """Copies of rows: int64 ``[U]`` -> float32 ``[U, D]``."""

    @abstractmethod
    def pooled_lookup(self, sparse: SparseFeatures) -> Tensor:
        """Sum each bag's (weighted) rows where they live: float32 ``[B, F, D]``.

        Args:
            sparse: Resolved features (:meth:`EmbeddingBagCollection.resolve`): those of ``layout``, in its order.
        """

    def begin_pooled_lookup(self, sparse: SparseFeatures) -> Callable[[], Tensor]:
        """Ask for :meth:`pooled_lookup` and return what waits for the answer, so that several stores work at once.

        A mapped store has the answer at once; a remote store sends here and receives there.
        """
        pooled_BFD = self.pooled_lookup(sparse)
        return lambda: pooled_BFD

    @abstractmethod
    def begin_versioned_lookup(self, sparse: SparseFeatures) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin like :meth:`begin_pooled_lookup`, with the version of each id's row: int64 ``[N]``.

        A version may be older than the row that comes with it, never newer.

        Raises:
            ValueError: the rows have no versions.
        """

    @abstractmethod
    def apply_gradients(
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> Tensor | None:
        """Train the rows of ``sparse`` with the gradient ``[B, F, D]`` of what :meth:`pooled_lookup` returned.

        A remote store may return before the server has applied it; :meth:`flush` waits for that.

        Args:
            sparse: As for the lookup.
            grad_BFD: The gradient.
            lr: Step size of this update.
            versions: As the lookup returned them, of each id; where rows have versions. The store multiplies each row's
                gradient by what its staleness leaves of it. Without them it is fresh.

        Returns:
            Of versioned rows how often each staleness occurred, int64 ``[K, 2]``, where that is known at once.

        Raises:
            ValueError: versions for rows that have none, or not one for each id.
        """

    @abstractmethod
    def apply_row_gradients(
        self, rows_U: Tensor, grads_UD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> Tensor | None:
        """Train distinct rows with their summed gradients ``[U, D]``; asynchronous as :meth:`apply_gradients`."""

    @abstractmethod
    def begin_exchange(self, request: RowExchange) -> Callable[[], RowValues]:
        """Push updates, fetch rows and check clocks in one message; returns what waits for the answer.

        A mapped store has done it when this returns. A remote store has sent it: the answer may be awaited much later,
        and other requests made meanwhile; they are done after this one. The pushes of one request are applied once,
        however often it must be sent. The tensors of ``request`` stay as they are until the answer is there.

        Raises:
            ValueError: the request does not fit the store (:meth:`RowExchange.check`); nothing was changed.
            IndexError: a row is not in the store; nothing was changed.
        """

    def read(self, name: str, first_row: int, num_rows: int) -> Tensor:
        """Read like :meth:`read_rows`, for a stretch of rows."""
        return self.read_rows(name, slice(first_row, first_row + num_rows))

    def write(self, name: str, first_row: int, values: Tensor) -> None:
        """The reverse of :meth:`read`; returns when it is done."""
        self.write_rows(name, slice(first_row, first_row + len(values)), values)

    @abstractmethod
    def read_rows(self, name: str, rows: Rows) -> Tensor:
        """The weights and state of some rows, by name: a copy, ``[U, ...]``. It does not count as a use of them.

        ``weight``, a state, ``version``, ``change``, or ``digest``: int64, another one once a row has changed.
        """

    @abstractmethod
    def write_rows(self, name: str, rows: Rows, values: Tensor) -> None:
        """The reverse of :meth:`read_rows`, but for digests; returns when it is done."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Updates that the store has seen."""

    @step.setter
    @abstractmethod
    def step(self, value: int) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """Return when every update that this object was given is in the store."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory and connections; the rows stay."""


class DynamicEmbeddingStore(EmbeddingStore):
    """Rows that exist from their first update on (:class:`DynamicRows`): the three operations on a hash table.

    *Lookup* (:meth:`lookup`, :meth:`pooled_lookup`, :meth:`read`) gives a row that does not exist as what it would be
    made as. *Insert* makes rows, *update* (gradients, exchanges, :meth:`write`) makes those that it needs. Reference:
    DES, section 5, where a lookup of a new id inserts it; here its first update does, which trains to the same rows.

    Attributes:
        dynamic: The rules by which rows are made and forgotten.
        seed: Seed of the first values of rows.
    """

    dynamic: DynamicRows
    seed: int

    @abstractmethod
    def insert(self, rows_U: Tensor) -> None:
        """Make rows, int64 ``[U]``, where they do not exist, however rarely they were seen."""

    @abstractmethod
    def live_rows(self) -> Tensor:
        """The rows that exist, int64, rising."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows, and all counts of ids without one."""

    @property
    @abstractmethod
    def num_live(self) -> int:
        """Rows that take room: those that exist, and expired ones whose room is not free yet."""


class DenseStore(ABC):
    """One flat float32 vector of one or more parts, each with a version, such as the centre of elastic averaging.

    Attributes:
        size: Number of elements.
        parts: Number of elements of each part.
    """

    size: int
    parts: tuple[int, ...]

    @property
    @abstractmethod
    def observed(self) -> StalenessHistogram:
        """The staleness of the parts in the updates of this object, as far as it has heard of it."""

    def pull(self) -> Tensor:
        """A copy, float32 ``[size]``."""
        return self.read(VALUES)

    @abstractmethod
    def begin_versioned_pull(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Ask for a copy and for the version of each part, int64 ``[P]``; returns what waits for both.

        A version may be older than the part that comes with it, never newer.
        """

    def assign(self, values: Tensor) -> None:
        """Overwrite all elements."""
        self.write(VALUES, values)

    @abstractmethod
    def elastic_average(self, local: Tensor, *, alpha: float) -> Tensor:
        r"""Move the store's vector towards a replica and return where it went.

        .. math:: \tilde w \leftarrow (1-\alpha)\,\tilde w + \alpha\, w

        The caller then moves the replica towards the returned vector. Where memory is shared, that is the store's
        vector itself: read it before the next call, and know that others move it meanwhile.
        Reference: ShadowSync, Algorithm 2.
        """

    def begin_elastic_average(self, local: Tensor, *, alpha: float) -> Callable[[], Tensor]:
        """Ask for :meth:`elastic_average` and return what waits for the answer, so that several servers work at once.

        ``local`` must stay where it is until then.
        """
        center = self.elastic_average(local, alpha=alpha)
        return lambda: center

    @abstractmethod
    def push_gradient(
        self,
        gradient: Tensor,
        *,
        lr: float,
        versions: Tensor | None = None,
        trained: Tensor | None = None,
        step: int | None = None,
    ) -> Callable[[], int]:
        """One update of each part by the store's own rule, which counts the part's updates as its steps.

        A push has a number among those of all workers to all stores that are trained together. It says in which period
        of :class:`~lightning_recsys.optim.RowSWAP` the update falls. One of these stores counts, and each push goes to
        it first. A remote store may return before the server has applied it; :meth:`flush` waits for that.

        Args:
            gradient: float32 ``[size]``.
            lr: Step size of this update.
            versions: That the gradient was computed at, int64 ``[P]``. Each part's gradient is multiplied by what its
                staleness leaves of it. Without them it is fresh.
            trained: Which parts have a gradient, bool ``[P]``; the others stay as they are, with their versions.
                Default: all of them.
            step: The number of the push, from the store that counts; ``None`` where this is that store, which counts
                it whatever is trained.

        Returns:
            Waits for the number of the push, and returns it: ``step``, where that was given. A push that had to be sent
            twice, as where a server was killed, may be told the number of a later one; it was counted once.
        """

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """A copy of ``values``, a state by its name, ``version``, ``change`` (if any) or ``step`` (int64 ``[1]``).

        The step is the number of pushes that this store has counted. For checkpoints.
        """

    @abstractmethod
    def write(self, name: str, values: Tensor) -> None:
        """The reverse of :meth:`read`; returns when it is done."""

    @abstractmethod
    def flush(self) -> None:
        """Return when every update that this object was given is in the store."""

    @property
    def version(self) -> int:
        """Updates applied so far (averages and gradients), to the part that has seen most of them."""
        return int(self.read(VERSION).max())

    @abstractmethod
    def close(self) -> None:
        """Let go of memory and connections; the vector stays."""


class Stores(ABC):
    """The stores of one server, by name. :func:`connect` makes it from an endpoint.

    Attributes:
        endpoint: Where it was found, ``shm:///folder`` or ``tcp://host:port``.
        route: How rows and vectors are read and written, and why so; for a log.
    """

    endpoint: str
    route: str

    @abstractmethod
    def create_embedding_store(
        self,
        name: str,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        seed: int,
        dynamic: DynamicRows | None = None,
        normalization: StalenessNormalization | None = None,
    ) -> EmbeddingStore:
        """Make a store whose rows are drawn as each table's ``init_std`` says; state starts as the rule says.

        Args:
            name: Name under which the store is asked for, one of a kind on its server.
            layout: Names and sizes of its tables.
            optimizer: The update rule.
            seed: Seed of the rows' first values.
            dynamic: Make rows when they are first trained instead of all at once: a :class:`DynamicEmbeddingStore`.
            normalization: Give every row a version, and let stale gradients count as this says. Default: no versions,
                which cost nothing then.

        Raises:
            ValueError: a store of that name is there, with other tables or another rule.
        """

    @abstractmethod
    def create_dense_store(
        self,
        name: str,
        initial: Tensor,
        *,
        optimizer: RowOptimizer | None = None,
        normalization: StalenessNormalization | None = None,
        parts: Sequence[int] = (),
    ) -> DenseStore:
        """Make a vector.

        Args:
            name: Name under which the vector is asked for, one of a kind on its server.
            initial: The values that the vector begins with, float32 ``[size]``.
            optimizer: Update rule that applies pushed gradients; by default none can be pushed.
            normalization: What stale gradients count; by default as much as others.
            parts: Number of elements of each part, which has a version of its own; by default it is one part.

        Raises:
            ValueError: a store of that name is there and is another, or the parts do not make up the vector.
        """

    @abstractmethod
    def embedding_store(self, name: str) -> EmbeddingStore:
        """Open a store. Raises ``KeyError`` that names what is there."""

    @abstractmethod
    def dense_store(self, name: str) -> DenseStore:
        """Open a vector. Raises ``KeyError`` that names what is there."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a store and its files."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Rows, bytes, requests, refused requests, clients, uptime in seconds; plain numbers and strings."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all that was opened here."""
