"""Embedding rows in mapped files: every process of the machine looks them up and trains them, without a lock."""

# Shape suffixes: B batch, F features, D embedding dim, U distinct rows of a request, R rows of the store, P rows of an
# exchange that are pushed, M fetched and C checked.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compiled.bfloat16 import as_loop_array
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.embeddings.kernels.numba_kernel import gather_for
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.stores.digests import DIGEST, digest_rows
from lightning_recsys.stores.exchange import RowExchange, RowValues
from lightning_recsys.stores.exchange_loops import add_rows, compare_clocks, move_clocks
from lightning_recsys.stores.folders import counters
from lightning_recsys.stores.folders.mapped_arrays import MappedArrays, Shapes
from lightning_recsys.stores.interfaces import Rows
from lightning_recsys.stores.plain import rows_to_plain
from lightning_recsys.stores.row_files import CLOCK, STEP, RowFiles, as_matrix, row_arrays
from lightning_recsys.stores.versions import VERSION, check_versions
from lightning_recsys.sync import StalenessNormalization

KIND = "embedding"
_BLOCK_BYTES = 1 << 24  # rows are drawn this many bytes at a time, so that a table may be larger than memory


class MappedEmbeddingStore(RowFiles):
    """Rows and optimizer state in files that all processes of the machine map, served by the local kernels.

    Two processes that train the same row at the same instant may lose one of the two updates, as Hogwild accepts;
    updates of different rows never disturb each other, and ``step`` counts every one.

    Args:
        folder: The folder that :meth:`create` made.

    Attributes:
        rows: The rows themselves, ``[R, D]``. Who writes to it writes for everybody.
        row_state: The optimizer state of all rows, by name.
        row_shapes: Shape of what one row has of ``weight`` and of each state.

    Raises:
        FileNotFoundError: there is no such folder.
        RuntimeError: a file of the folder is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._open(MappedArrays(folder))

    def _open(self, arrays: MappedArrays) -> None:
        super()._open(arrays)
        self._choose_kernels(self.layout)

    @classmethod
    def create(
        cls,
        folder: Path,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        seed: int,
        normalization: StalenessNormalization | None = None,
    ) -> MappedEmbeddingStore:
        """Make the files of a store, with rows drawn in blocks.

        Raises:
            FileExistsError: the folder is there already.
            OSError: there is no room for all of its rows.
            TypeError: a rule that is none of :mod:`lightning_recsys.optim`.
        """
        meta = {"kind": KIND, **rows_to_plain(layout, optimizer, normalization)}
        shapes: Shapes = {
            **row_arrays(layout.num_rows, layout, optimizer, normalization),
            "counters": ("int64", (1,)),
        }
        store = cls.__new__(cls)
        store._open(
            MappedArrays.create(folder, meta, shapes, lambda arrays: _draw_rows(arrays, layout, optimizer, seed))
        )
        return store

    @property
    def rows(self) -> Tensor:  # noqa: D102 - in the class
        return self.arrays["weight"]

    @property
    def row_state(self) -> dict[str, Tensor]:  # noqa: D102 - in the class
        return self._state

    @property
    def clocks(self) -> Tensor:
        """How many updates each row has seen in exchanges, int32 ``[R]``: the memory itself, as :attr:`rows` is."""
        return self.arrays[CLOCK]

    def lookup(self, rows_U: Tensor) -> Tensor:  # noqa: D102 - inherited
        dim, out = self.layout.embedding_dim, torch.empty(rows_U.numel(), self.layout.embedding_dim)
        if not gather_for(dim)(rows_U.contiguous().numpy(), as_loop_array(self.rows), out.numpy()):
            raise IndexError(
                f"rows must be in [0, {self.layout.num_rows}), got {int(rows_U.min())} to {int(rows_U.max())}."
            )
        return out

    def pooled_lookup(self, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        return self._kernel.lookup(self.rows, sparse)

    def begin_versioned_lookup(self, sparse: SparseFeatures) -> Callable[[], tuple[Tensor, Tensor]]:  # noqa: D102
        self._check_versioned()
        # Before the rows: an update that begins between the two counts as one that they lack, which overstates their
        # staleness by one. One that is under way, which has moved the version and not yet all of the rows, counts as
        # one that they have: among processes that map a store, staleness is understated by the updates that others were
        # writing at that instant. A server ends one request before it begins the next.
        versions_N = self.arrays[VERSION].index_select(0, self.layout.rows_of(sparse))
        pooled_BFD = self.pooled_lookup(sparse)
        return lambda: (pooled_BFD, versions_N)

    def apply_gradients(  # noqa: D102 - inherited
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> Tensor | None:
        check_versions(self.normalization, versions, sparse.values.numel())
        return self._train_bags(sparse, grad_BFD, versions, lr=lr)

    def begin_gradients(
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> tuple[Tensor, Callable[[], Tensor | None]]:
        """Do the part of :meth:`apply_gradients` that changes nothing; the arguments are right.

        Returns:
            The rows that will be trained, int64, in most cases each once; and what trains them, to be called before
            another update of the store begins.
        """
        rows, train = self._begin_bags(sparse, grad_BFD, versions, lr=lr)
        return torch.from_numpy(rows), train

    def apply_row_gradients(  # noqa: D102 - inherited
        self, rows_U: Tensor, grads_UD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> Tensor | None:
        self._check_row_gradients(rows_U, grads_UD, versions)
        return self._train_places(rows_U.contiguous().numpy(), grads_UD.contiguous().numpy(), versions, lr=lr)

    def begin_exchange(self, request: RowExchange) -> Callable[[], RowValues]:  # noqa: D102 - inherited
        request.check(self.layout.num_rows, self.row_shapes)
        self.push_updates(request)
        values = self.fetch_and_check(request)
        return lambda: values

    def push_updates(self, request: RowExchange) -> None:
        """The pushes of a request that was checked."""
        if request.num_steps:
            counters.add(self.arrays["counters"], STEP, request.num_steps)
        rows_P = request.push_rows.contiguous().numpy()
        sent_P, clocks = request.push_clocks.contiguous().numpy(), as_matrix(self.clocks)
        for name, amounts in request.updates.items():
            sign = np.float32(-1 if name == "weight" else 1)
            add_rows(rows_P, as_matrix(amounts), as_matrix(self.arrays[name]), sign, clocks, sent_P)
        move_clocks(rows_P, sent_P, clocks, request.clock == "sum")

    def fetch_and_check(self, request: RowExchange) -> RowValues:
        """The fetches and checks of a request that was checked; changes nothing."""
        wanted_M, all_clocks = request.fetch_rows, self.clocks.numpy()
        clocks_M = all_clocks.take(wanted_M.numpy())
        values = {"weight": self.lookup(wanted_M)}
        values.update((name, self.arrays[name].index_select(0, wanted_M)) for name in self._states)
        stale_C = np.zeros(request.check_rows.numel(), dtype=np.bool_)
        if request.staleness is not None:
            rows_C, own_C = (x.contiguous().numpy() for x in (request.check_rows, request.check_clocks))
            compare_clocks(rows_C, own_C, all_clocks[:, None], request.staleness, stale_C)
        return RowValues(values, torch.from_numpy(clocks_M), torch.from_numpy(stale_C))

    def read_rows(self, name: str, rows: Rows) -> Tensor:  # noqa: D102 - inherited
        found = self._memory_of(self._array_of(name), rows)
        if name == DIGEST:
            return digest_rows(found.float())
        return found.clone() if isinstance(rows, slice) else found

    def write_rows(self, name: str, rows: Rows, values: Tensor) -> None:  # noqa: D102 - inherited
        self._check_values(name, rows, values)
        if isinstance(rows, slice):
            self._memory_of(name, rows).copy_(values)
        else:
            self.arrays[name].index_copy_(0, rows, values)

    def _memory_of(self, name: str, rows: Rows) -> Tensor:
        """The memory of a stretch of rows; copies of others."""
        if isinstance(rows, slice):
            self._check_stretch(rows)
            return self.arrays[name][rows]
        return self.arrays[name].index_select(0, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, here or in another process, is the same store.
        return type(self), (self.arrays.folder,)


def _draw_rows(arrays: MappedArrays, layout: TableLayout, optimizer: RowOptimizer, seed: int) -> None:
    """Write initial rows and state, block by block; what is 0 is not written, for the files are zeros already."""
    generator = torch.Generator().manual_seed(seed)
    block_rows = max(_BLOCK_BYTES // (4 * layout.embedding_dim), 1)
    state_of_zeros = optimizer.initial_state(torch.zeros(1, layout.embedding_dim))
    starts = layout.table_starts
    for table in layout.tables:
        first, end = starts[table.name], starts[table.name] + table.num_embeddings
        if not table.init_std:
            for name, state in state_of_zeros.items():
                if state.any():
                    arrays[name][first:end] = state[0]
            continue
        for start in range(first, end, block_rows):
            stop = min(start + block_rows, end)
            rows = torch.empty(stop - start, layout.embedding_dim).normal_(0.0, table.init_std, generator=generator)
            arrays["weight"][start:stop] = rows
            for name, state in optimizer.initial_state(rows.to(layout.dtype).float()).items():
                if state.any():
                    arrays[name][start:stop] = state
