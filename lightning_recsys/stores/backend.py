"""A collection's rows in stores, on one server or cut over several by tables and by rows."""

# Shape suffixes: B batch, F features of the collection, S features of one server, D embedding dim.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures, TableBackend, Ticket
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.embeddings.sparse_features import same_ids
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.placement import PlacementPlan, TableCost, TablePart, rows_in_stripe
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.dynamic.tables import IDS, DynamicTables, keep_keys
from lightning_recsys.stores.interfaces import DynamicEmbeddingStore, EmbeddingStore, Stores
from lightning_recsys.stores.row_files import row_bytes
from lightning_recsys.stores.stripes import keep_stripes, stripe_rows
from lightning_recsys.stores.tables import StoredTables
from lightning_recsys.stores.versions import StalenessHistogram
from lightning_recsys.sync import StalenessNormalization

_Found = tuple[Tensor, Tensor | None]
"""Pooled rows, float32 ``[B, F, D]``, and the versions of the batch's rows, int64 ``[N]``, where they have some."""

_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class _Striped:
    """A batch whose ids have been divided by the number of their tables' stripes.

    Args:
        sparse: The batch.
        stripes: The stripe of each id, int32 ``[N]``.
        rows: Its row there, int64 ``[N]``.
    """

    sparse: SparseFeatures
    stripes: NDArray[np.int32]
    rows: NDArray[np.int64]


class _Share:
    """The share of one server in a collection: from the collection's features to the server's, and back."""

    def __init__(self, layout: TableLayout, store: EmbeddingStore, parts: Sequence[TablePart]) -> None:
        self.store = store
        self.is_cut = any(part.num_stripes > 1 for part in parts)
        self.feature_names = tuple(name for table in store.layout.tables for name in table.feature_names)
        tables = list(enumerate(layout.feature_tables))
        wanted = [(f, part.stripe) for part in parts for f, table in tables if table.name == part.table]
        self._wanted = np.array(wanted, dtype=np.int64)  # features of the collection, with the stripe that is here
        self.features = torch.from_numpy(self._wanted[:, 0])

    def select(self, striped: _Striped | SparseFeatures) -> SparseFeatures:
        """The ids whose rows are here, as rows of their stripes."""
        if isinstance(striped, SparseFeatures):  # no table is cut
            return striped.select(self.feature_names)
        return self._select_rows(striped) if self.is_cut else striped.sparse.select(self.feature_names)

    def positions(self, striped: _Striped | SparseFeatures) -> Tensor:
        """Where the ids of :meth:`select` are among the batch's, int64."""
        if isinstance(striped, SparseFeatures):
            return self.select(striped.with_values(torch.arange(striped.values.numel()))).values
        numbered = np.arange(len(striped.rows))
        sparse = striped.sparse.with_values(torch.from_numpy(numbered))
        return self.select(_Striped(sparse, striped.stripes, numbered)).values

    def _select_rows(self, striped: _Striped) -> SparseFeatures:
        sparse = striped.sparse
        num_ids, weighted = sparse.values.numel(), sparse.weights is not None
        # The stripes of a table do not overlap, so no id is kept twice.
        values = torch.empty_like(sparse.values)
        offsets = torch.zeros(len(self.feature_names) * sparse.batch_size + 1, dtype=torch.int64)
        weights = torch.empty(num_ids if weighted else 0)
        kept = keep_stripes(
            striped.rows,
            striped.stripes,
            (_NO_IDS if sparse.is_single_hot else sparse.bag_offsets()).numpy(),
            (weights if sparse.weights is None else sparse.weights).numpy(),
            self._wanted,
            sparse.batch_size,
            values.numpy(),
            offsets.numpy(),
            weights.numpy(),
        )
        return SparseFeatures(
            self.feature_names, values[:kept], offsets=offsets, weights=weights[:kept] if weighted else None
        )


class StoreBackend(TableBackend):
    """Rows in stores: every process that is bound to the same stores trains the same rows, without a lock.

    Bags are pooled where the rows live. A table that is cut by rows is pooled in parts, and the partial sums are added
    here. Requests to several stores travel at once. Gradients are applied as they come, each worker's with the full
    learning rate; nothing is gathered over ranks. ``step`` counts the updates of all workers.

    Args:
        layout: The collection's tables.
        optimizer: The update rule.
        stores: Where the rows are: for each store the parts that it holds, in the order of its tables.

    Attributes:
        stored: The tables as the stores have them, whatever of them is kept here besides.
        num_early_lookups: Lookups whose rows were asked for ahead of them (:meth:`prefetch`).
        meet: Waits until every process that trains these rows has come here. Nobody else does, by default.

    Raises:
        ValueError: the parts do not hold every row exactly once.

    Communication: per lookup and server, its ids (8 bytes each, lengths and weights where there are any) out and
    ``[B, S, D]`` floats back; the same again, all outwards, per update.
    """

    def __init__(
        self,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        stores: Sequence[tuple[EmbeddingStore, Sequence[TablePart]]],
    ) -> None:
        super().__init__(layout, optimizer)
        _check_cover(layout, [part for _, parts in stores for part in parts])
        grows = all(isinstance(store, DynamicEmbeddingStore) for store, _ in stores)
        self.stored = (DynamicTables if grows else StoredTables)(layout, self.row_shapes, stores)
        self._shares = [_Share(layout, store, parts) for store, parts in stores]
        stripes = {part.table: part.num_stripes for _, parts in stores for part in parts}
        self._num_stripes = np.array([stripes[table.name] for table in layout.feature_tables], dtype=np.int64)
        whole = len(stores) == 1 and stores[0][0].layout == layout
        self._only = stores[0][0] if whole else None
        self.meet: Callable[[], object] = _nobody_else
        # The batch that is looked up next, and what waits for its rows; None where nobody has announced it.
        self._early: tuple[SparseFeatures, Callable[[], _Found]] | None = None
        self.num_early_lookups = 0
        self._first_has_all_features = self._shares[0].features.tolist() == list(range(len(layout.feature_tables)))

    @classmethod
    def create(
        cls,
        name: str,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        servers: Sequence[Stores],
        plan: PlacementPlan | None = None,
        seed: int = 0,
        dynamic: DynamicRows | None = None,
        normalization: StalenessNormalization | None = None,
        **options: Any,
    ) -> Self:
        """Make, or open, a collection's stores where a plan puts them.

        Args:
            name: The collection's name in the plan, and the stores' name on every server.
            layout: The collection's tables.
            optimizer: The update rule.
            servers: In the order of the plan's server indices.
            plan: Where the rows go; by default all to the first server.
            seed: Seed of the rows that the servers draw.
            dynamic: Make rows when they are first trained. They start the same wherever the plan puts them.
            normalization: Give rows versions, and let stale gradients count as this says.
            options: Further arguments of the class.

        Raises:
            ValueError: the plan is for another number of servers, or has other tables.
        """
        if plan is None:
            own = tuple(TablePart(name, table.name, table.num_embeddings, server=0) for table in layout.tables)
        elif plan.num_servers != len(servers):
            raise ValueError(f"the plan places tables on {plan.num_servers} servers, got {len(servers)}.")
        else:
            own = plan.parts_of(name)
        _check_cover(layout, own)
        stores = []
        for index, server in enumerate(servers):
            here = _in_order(layout, [part for part in own if part.server == index])
            if here:
                store_layout = part_layout(layout, here)
                # Parts of one table on two servers must not start with the same rows. Dynamic ones are drawn by keys.
                own_seed = seed if dynamic else seed + index
                keyed = dynamic and keep_keys(dynamic, layout, here)
                kinds: dict[str, Any] = {"dynamic": keyed, "normalization": normalization}
                store = server.create_embedding_store(name, store_layout, optimizer, seed=own_seed, **kinds)
                stores.append((store, here))
        return cls(layout, optimizer, stores=stores, **options)

    @property
    def stores(self) -> list[EmbeddingStore]:
        """The stores that hold the rows."""
        return [share.store for share in self._shares]

    @property
    def dynamic(self) -> DynamicTables | None:
        """Access by id to rows that exist only once they are trained; ``None`` where all rows exist."""
        return self.stored if isinstance(self.stored, DynamicTables) else None

    @property
    def is_versioned(self) -> bool:
        """Whether rows have versions; a ticket then has those that its lookup saw."""
        return self._shares[0].store.normalization is not None

    @property
    def asks_servers(self) -> bool:
        """Whether rows come in messages, and not from this machine's memory: it helps then to know batches early."""
        return any(store.is_remote for store in self.stores)

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:  # noqa: D102 - inherited
        local = sparse.to("cpu")  # where the stores are
        early, self._early = self._early, None
        if early is not None and _are_alike(early[0], local):
            pooled_BFD, versions_N = early[1]()
            self.num_early_lookups += 1
        else:
            _drop(early)
            pooled_BFD, versions_N = self._begin_lookup(local)()
        return pooled_BFD.to(sparse.device), Ticket(sparse if versions_N is None else local, versions_N)

    def prefetch(self, sparse: SparseFeatures) -> None:
        """Ask for the rows of the batch that is looked up next: they travel while the present one is trained.

        They lack this worker's update by the present batch, as they may lack those of others.
        """
        _drop(self._early)
        local = sparse.to("cpu")
        self._early = (local, self._begin_lookup(local)) if self.asks_servers else None

    def _begin_lookup(self, local: SparseFeatures) -> Callable[[], _Found]:
        """Ask for a batch's rows, and their versions where they have some; what it returns waits for them."""
        if not self.is_versioned:
            pooled = self._begin_pooled_lookup(local)
            return lambda: (pooled(), None)
        if self._only is not None:
            return self._only.begin_versioned_lookup(local)
        striped = self._striped(local)
        pending = [share.store.begin_versioned_lookup(share.select(striped)) for share in self._shares]

        def answer() -> _Found:
            answers = [answer() for answer in pending]
            versions_N = torch.zeros_like(local.values)
            for share, (_, versions) in zip(self._shares, answers, strict=True):
                versions_N[share.positions(striped)] = versions
            return self._joined([pooled for pooled, _ in answers]), versions_N

        return answer

    def lookup_frozen(self, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        return self._begin_pooled_lookup(sparse.to("cpu"))().to(sparse.device)

    def _begin_pooled_lookup(self, local: SparseFeatures) -> Callable[[], Tensor]:
        if self._only is not None:
            return self._only.begin_pooled_lookup(local)
        striped = self._striped(local)
        answers = [share.store.begin_pooled_lookup(share.select(striped)) for share in self._shares]
        return lambda: self._joined([answer() for answer in answers])

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The servers' sums, each ``[B, S, D]``, as those of the collection's features."""
        if self._first_has_all_features:
            pooled_BFD, added = parts[0], 1
        else:
            batch_size, features = parts[0].shape[0], len(self.layout.feature_tables)
            pooled_BFD, added = torch.zeros(batch_size, features, self.layout.embedding_dim), 0
        for share, part in zip(self._shares[added:], parts[added:], strict=True):
            pooled_BFD.index_add_(1, share.features, part)
        return pooled_BFD

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:  # noqa: D102
        ticket = Ticket.joined(tickets)
        sparse, grad_BFD, versions_N = ticket.sparse.to("cpu"), grad_BFD.to("cpu"), ticket.versions
        if self._only is not None:
            self._only.apply_gradients(sparse, grad_BFD, lr=lr, versions=versions_N)
            return
        striped = self._striped(sparse)
        for share in self._shares:
            grad_BSD = grad_BFD.index_select(1, share.features)
            versions = None if versions_N is None else versions_N[share.positions(striped)]
            rows = share.select(striped)
            share.store.apply_gradients(rows, grad_BSD, lr=lr, versions=versions)

    @property
    def observed(self) -> StalenessHistogram:
        """The staleness of the rows in this process's updates, as far as the stores have told of it."""
        seen = StalenessHistogram()
        for store in self.stores:
            seen.update(store.observed)
        return seen

    def _striped(self, sparse: SparseFeatures) -> _Striped | SparseFeatures:
        """The batch with its ids divided, if a table is cut: once for all stores."""
        if not any(share.is_cut for share in self._shares):
            return sparse
        bounds = np.array(sparse.feature_bounds(), dtype=np.int64)
        ids: NDArray[np.int64] = sparse.values.numpy()
        stripes, rows = np.empty(len(ids), dtype=np.int32), np.empty(len(ids), dtype=np.int64)
        stripe_rows(ids, bounds, self._num_stripes, stripes, rows)
        return _Striped(sparse, stripes, rows)

    def flush(self) -> None:  # noqa: D102 - inherited
        for store in self.stores:
            store.flush()

    def invalidate(self) -> None:
        """Flush, then forget what is kept of rows, after which somebody may write to the stores."""
        _drop(self._early)
        self._early = None
        self.flush()

    @contextmanager
    def replacing_rows(self) -> Iterator[None]:
        """Rows are written between two meetings: behind every update, and before anybody's next lookup.

        Communication: twice :attr:`meet`.
        """
        self.invalidate()
        self.meet()
        yield
        self.flush()
        self.meet()

    @property
    def step(self) -> int:
        """Updates that the tables have seen, from all workers."""
        return max(store.step for store in self.stores)

    @step.setter
    def step(self, value: int) -> None:
        for store in self.stores:
            store.step = value

    def read(self, table: str, name: str) -> Tensor:  # noqa: D102 - inherited
        return self.read_rows(table, name, 0, self.stored.tables[table])

    def write(self, table: str, name: str, values: Tensor) -> None:  # noqa: D102 - inherited
        self.write_rows(table, name, 0, values)

    def read_rows(self, table: str, name: str, first_row: int, num_rows: int) -> Tensor:
        """A copy of a stretch of a table's ``weight``, of a state, ``version`` or ``change``: ``[num_rows, ...]``."""
        return self.stored.read(table, name, slice(first_row, first_row + num_rows))

    def write_rows(self, table: str, name: str, first_row: int, values: Tensor) -> None:
        """The reverse of :meth:`read_rows`."""
        self.stored.write(table, name, slice(first_row, first_row + len(values)), values)

    @property
    def row_keys(self) -> list[str]:  # noqa: D102 - inherited
        ids = [f"{table.name}.{IDS}" for table in self.layout.tables] if self.dynamic else []
        return ids + super().row_keys

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        with self.replacing_rows():
            super()._load_from_state_dict(*arguments, **options)

    def _save_rows(self, destination: dict[str, Any], prefix: str) -> None:
        if self.dynamic:
            self.dynamic.save(destination, prefix)
        else:
            super()._save_rows(destination, prefix)

    def _load_rows(
        self, state_dict: Mapping[str, Any], prefix: str, missing_keys: list[str], error_msgs: list[str]
    ) -> None:
        if self.dynamic:
            self.dynamic.load(state_dict, prefix, missing_keys, error_msgs)
        else:
            super()._load_rows(state_dict, prefix, missing_keys, error_msgs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"meet": _nobody_else, "_early": None}  # a copy is this process's alone

    def extra_repr(self) -> str:
        """Names the tables, the rule and how many stores there are."""
        return f"{super().extra_repr()}; stores={len(self._shares)}"


def table_costs(
    name: str,
    layout: TableLayout,
    optimizer: RowOptimizer,
    costs: Mapping[str, float] | None = None,
    *,
    seen: Mapping[str, NDArray[np.int64]] | None = None,
    grows: bool = False,
    normalization: StalenessNormalization | None = None,
) -> list[TableCost]:
    """A collection's tables as :func:`~lightning_recsys.placement.place_tables` takes them.

    Args:
        name: The collection's name.
        layout: Its tables.
        optimizer: The update rule, whose state takes room beside the rows, as does each row's clock.
        costs: Measured cost by table name.
        seen: The ids that some batches looked up, by table name.
        grows: Rows are made as they are trained.
        normalization: What stale gradients count, where each row has a version, which takes room as well.
    """
    num_bytes = row_bytes(layout, optimizer, normalization)
    return [
        TableCost(
            name,
            table.name,
            table.num_embeddings,
            num_bytes,
            cost=None if costs is None else costs[table.name],
            seen=None if seen is None else seen[table.name],
            grows=grows,
        )
        for table in layout.tables
    ]


def part_layout(layout: TableLayout, parts: Sequence[TablePart]) -> TableLayout:
    """The tables of a server that holds these parts of a collection, in their order.

    A part that is not a whole table is named after its rows, and so are its features: ``movies[1::4]``.
    """
    tables = {table.name: table for table in layout.tables}
    return TableLayout(tuple(_part_table(tables[part.table], part) for part in parts))


def _part_table(table: EmbeddingBagConfig, part: TablePart) -> EmbeddingBagConfig:
    if part.num_stripes == 1:
        return table
    rows = f"[{part.stripe}::{part.num_stripes}]"
    return dataclasses.replace(
        table,
        name=table.name + rows,
        num_embeddings=part.num_rows,
        feature_names=tuple(feature + rows for feature in table.feature_names),
    )


def _nobody_else() -> None:
    pass


def _are_alike(one: SparseFeatures, other: SparseFeatures) -> bool:
    """Whether two batches have the same pooled rows."""
    if one.weights is None or other.weights is None:
        return one.weights is other.weights and same_ids(one, other)
    return same_ids(one, other) and torch.equal(one.weights, other.weights)


def _drop(early: tuple[SparseFeatures, Callable[[], _Found]] | None) -> None:
    """Wait for rows that nobody looks up: a connection keeps a request until somebody has had its answer."""
    if early is not None:
        early[1]()


def _in_order(layout: TableLayout, parts: Sequence[TablePart]) -> list[TablePart]:
    order = [table.name for table in layout.tables]
    return sorted(parts, key=lambda part: (order.index(part.table), part.stripe))


def _check_cover(layout: TableLayout, parts: Sequence[TablePart]) -> None:
    """Every row of every table has exactly one place."""
    unknown = {part.table for part in parts} - {table.name for table in layout.tables}
    for table in layout.tables:
        own = sorted((x for x in parts if x.table == table.name), key=lambda part: part.stripe)
        found = [(part.stripe, part.num_stripes, part.num_rows) for part in own]
        count, rows = len(own), table.num_embeddings
        stripes = [(i, count, rows_in_stripe(rows, i, count)) for i in range(min(count, rows))]
        if found and not unknown and found == stripes:
            continue
        raise ValueError(
            f"a plan must place each row of table {table.name!r} (of {table.num_embeddings}) on exactly one server, and"
            f" no table that the collection lacks; got {[dataclasses.astuple(part) for part in parts]}."
        )
