"""Embedding rows for ids without bound: a row is made when it is first trained, and memory grows with those only."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, U distinct rows of a request.

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.embeddings.config import EmbeddingBagConfig
from lightning_recsys.embeddings.int64_ids import NUM_IDS, as_int64, in_order
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.stores.checks import check_rows
from lightning_recsys.stores.digests import DIGEST, digest_rows
from lightning_recsys.stores.dynamic.drawing import RowDrawing
from lightning_recsys.stores.dynamic.key_index import KeyIndex
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.exchange import RowExchange, RowValues
from lightning_recsys.stores.exchange_loops import add_rows, compare_clocks, move_clocks
from lightning_recsys.stores.folders import counters
from lightning_recsys.stores.folders.mapped_arrays import MappedArrays, Shapes
from lightning_recsys.stores.interfaces import DynamicEmbeddingStore, Rows
from lightning_recsys.stores.plain import from_plain, rows_to_plain
from lightning_recsys.stores.row_files import CLOCK, STEP, RowFiles, as_matrix, row_arrays, row_bytes
from lightning_recsys.stores.versions import VERSION, check_versions
from lightning_recsys.sync import StalenessNormalization

KIND = "dynamic"
COUNTERS = 4
LIVE_COUNTER = 1
_KEYS = "row_keys"  # of each slot the bits of its row's number turned, 0 where it has none
_LOCK = "lock"
_GROWTH_BYTES = 1 << 22  # room is made in pieces of this size, whatever is there already
_MAX_SLOTS = 2**31 - 1
_UNTRAINED = -1  # in the place of a clock: of a row that nothing has changed since it was made, so its clock is 0
_LIVE, _ALLOCATED, _HIGH = LIVE_COUNTER, 2, 3  # behind STEP


class HashEmbeddingStore(RowFiles, DynamicEmbeddingStore):
    """Rows that exist from their first update on, found by a hash table; see :class:`DynamicRows`.

    Rows, state, clocks and keys lie in slots, in files that are mapped as long as the file system is large and grow
    four mebibytes at a time; what is there is never moved or copied. The hash table is in the process's own memory and
    is made from the keys when a store is opened (some seconds for ten million rows). One process has a store open at a
    time; others go through its server. Its threads wait for each other.

    A row's slot is filled before its key is written, and an expired row's key is taken out before its slot is used
    again, each with one store of 8 bytes: whenever the process is killed, every key has a whole row. The first values
    are those that a missing row has, so rows made for an update that then did not happen change nothing.

    Args:
        folder: The folder that :meth:`create` made.

    Attributes:
        arrays: The files. ``weight``, the rule's states and ``clock`` are indexed by slot.
        dynamic: The rules by which rows are made and forgotten.
        row_shapes: Shape of what one row has of ``weight`` and of each state.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: a file lacks pages of its rows, and there is no room for them.
        RuntimeError: the store is open already, or a file of the folder is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = _lock(folder)  # held until the store is closed: this process alone has it open
        self._open(arrays := MappedArrays(folder))
        self.dynamic, layout = from_plain(DynamicRows, arrays.meta["dynamic"]), self.layout
        # What follows never changes while the store is open. `_capacity` counts slots: what the mapped files could
        # become. A kernel sees the slots as the rows of one large table.
        self._capacity = arrays["weight"].shape[0]
        features = tuple(feature for table in layout.tables for feature in table.feature_names)
        self._choose_kernels(
            TableLayout(
                (
                    EmbeddingBagConfig(
                        "slots", self._capacity, layout.embedding_dim, features, dtype=layout.tables[0].dtype
                    ),
                )
            )
        )
        self.seed = int(arrays.meta["seed"])
        self._drawing = RowDrawing(layout, *self.dynamic.keys(layout.table_starts.values()), seed=self.seed)
        self._slot_bytes = _slot_bytes(layout, self.optimizer, self.normalization)
        self._mutex = threading.RLock()  # held by every call that looks at rows or makes some
        arrays.keep(int(arrays["counters"][_ALLOCATED]))
        self._make_room(1)
        self._index = self._new_index()  # from a row's number to its slot; made anew where all rows are cleared
        self._note_size()

    @classmethod
    def create(
        cls,
        folder: Path,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        seed: int,
        dynamic: DynamicRows,
        normalization: StalenessNormalization | None = None,
    ) -> HashEmbeddingStore:
        """Make a store without rows.

        Raises:
            FileExistsError: the folder is there already.
            OSError: there is no room for the first rows.
            TypeError: a rule that is none of :mod:`lightning_recsys.optim`.
            ValueError: more rows than there are int64, or not one first key for each table.
        """
        if layout.num_rows > NUM_IDS:
            raise ValueError(
                f"a store counts at most 2**64 - 1 rows, and {[table.name for table in layout.tables]} have "
                f"{layout.num_rows}: make num_embeddings smaller, or give several features one table."
            )
        for numbers in (dynamic.first_keys, dynamic.key_steps):
            if numbers is not None and len(numbers) != len(layout.tables):
                raise ValueError(
                    f"first_keys and key_steps must have one for each of {len(layout.tables)} tables, got {dynamic}."
                )
        stats, slot_bytes = os.statvfs(folder.parent), _slot_bytes(layout, optimizer, normalization)
        # Twice the rows that can be: lookups draw missing rows into slots behind those in use.
        capacity = min(2 * layout.num_rows, max(stats.f_blocks * stats.f_frsize // slot_bytes, 1), _MAX_SLOTS)
        growing: Shapes = {
            **row_arrays(capacity, layout, optimizer, normalization),
            _KEYS: ("int64", (capacity,)),
        }
        meta = {
            "kind": KIND,
            **rows_to_plain(layout, optimizer, normalization),
            "dynamic": dataclasses.asdict(dynamic),
            "seed": seed,
        }
        shapes = {**growing, "counters": ("int64", (COUNTERS,))}
        MappedArrays.create(folder, meta, shapes, lambda arrays: None, growing=growing.keys()).close()
        return cls(folder)

    # --- Lookups: they make no rows ----------------------------------------------------------------------------------

    def lookup(self, rows_U: Tensor) -> Tensor:  # noqa: D102 - inherited
        with self._mutex:
            return self._gather(_array(rows_U), ["weight"], touch=True)["weight"].float()

    def pooled_lookup(self, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        with self._mutex:
            rows_N = self.layout.rows_of(sparse).numpy()
            slots_N, absent = self._index.find(rows_N)
            if absent:
                missing = np.flatnonzero(slots_N < 0)
                rows_U, inverse = np.unique(rows_N[missing], return_inverse=True)
                places_U = self._index.high + np.arange(rows_U.size)  # behind all slots in use, and not taken
                self._make_room(self._index.high + rows_U.size)
                self._draw(rows_U, places_U)
                slots_N[missing] = places_U[inverse]
            slots = dataclasses.replace(sparse, values=torch.from_numpy(slots_N))
            return self._kernel.lookup(self.arrays["weight"], slots)

    def begin_versioned_lookup(self, sparse: SparseFeatures) -> Callable[[], tuple[Tensor, Tensor]]:  # noqa: D102
        self._check_versioned()
        with self._mutex:
            versions_N = self._gather(self.layout.rows_of(sparse).numpy(), [VERSION], touch=False)[VERSION]
            pooled_BFD = self.pooled_lookup(sparse)
        return lambda: (pooled_BFD, versions_N)

    def read_rows(self, name: str, rows: Rows) -> Tensor:  # noqa: D102 - inherited
        array = self._array_of(name)
        with self._mutex:
            values = self._gather(self._numbers(rows), [array], touch=False)[array]
        return digest_rows(values.float()) if name == DIGEST else values

    def live_rows(self) -> Tensor:  # noqa: D102 - inherited
        return in_order(self.rows_in_slots(0, self.num_slots))

    def rows_in_slots(self, first: int, count: int) -> Tensor:
        """The rows that exist in a stretch of slots, int64, in the order of the slots."""
        with self._mutex:
            keys = self.arrays[_KEYS][first : min(first + count, self.num_slots)].numpy()
            rows = ~keys[keys != 0]
            slots, _ = self._index.find(rows, touch=False)
            return torch.from_numpy(rows[slots >= 0])

    @property
    def num_slots(self) -> int:
        """Slots that were ever in use, the first ones."""
        return self._index.high

    @property
    def clocks(self) -> Tensor:
        """How many updates the row of each slot has seen in exchanges, int32; a copy."""
        return self.arrays[CLOCK].clamp(min=0)

    @property
    def num_live(self) -> int:  # noqa: D102 - inherited
        return self._index.num_rows

    def _gather(self, rows_U: np.ndarray, names: list[str], *, touch: bool) -> dict[str, Tensor]:
        slots_U, absent = self._index.find(rows_U, touch=touch)
        missing = torch.from_numpy(np.flatnonzero(slots_U < 0))
        slots_U[missing] = 0
        values = {name: self.arrays[name].index_select(0, torch.from_numpy(slots_U)) for name in names}
        if absent:
            first = self._first_values(rows_U[missing.numpy()])
            for name in names:
                values[name][missing] = first[name]
        return values

    def _first_values(self, rows_U: np.ndarray) -> dict[str, Tensor]:
        weight = torch.from_numpy(self._drawing.draw(rows_U)).to(self.layout.dtype)
        clocks = torch.zeros(rows_U.size, dtype=torch.int32)
        tags = {name: torch.zeros(rows_U.size, dtype=self.arrays[name].dtype) for name in self._tags}
        return {"weight": weight, **self.optimizer.initial_state(weight.float()), CLOCK: clocks, **tags}

    def _draw(self, rows_U: np.ndarray, slots_U: np.ndarray) -> None:
        """Write the first values of rows into these slots."""
        weight = self.arrays["weight"]
        if weight.dtype == torch.float32:
            self._drawing.draw_into(rows_U, slots_U, weight.numpy())
        else:
            weight[torch.from_numpy(slots_U)] = torch.from_numpy(self._drawing.draw(rows_U)).to(weight.dtype)

    # --- Updates: they do --------------------------------------------------------------------------------------------

    def admit(self, rows_N: np.ndarray, counts_N: np.ndarray | None = None, *, always: bool = False) -> np.ndarray:
        """Let the present update name rows: their slots, made where they have earned one, otherwise -1.

        To do it again before the update ends changes nothing. Where rows expire, the clock of a row that an exchange
        may still have to make from a worker's copy is ``_UNTRAINED``; it is so in the file, too, so that the push of a
        killed server, sent again to the next one, finds the row as it would have.

        Args:
            rows_N: They; one that is named twice counts once.
            counts_N: How many updates the present one stands for, for each row, int32; by default one. Rows are
                distinct where it is given.
            always: Make all of them; not by an update.
        """
        slots_N, absent = self._index.find(rows_N)
        if absent:
            missing = np.flatnonzero(slots_N < 0)
            named, first = np.unique(rows_N[missing], return_index=True)
            counts = None if counts_N is None else counts_N[missing][first]
            self._make_room(self._index.high + named.size)
            rows_U, slots_U = self._index.admit(named, counts, always=always)
            self._note_size()
            if rows_U.size:
                self._draw(rows_U, slots_U)
                slots = torch.from_numpy(slots_U)
                for name, state in self.optimizer.initial_state(self.arrays["weight"][slots].float()).items():
                    self.arrays[name][slots] = state
                is_new = self.dynamic.expire_after is not None and not always
                self.arrays[CLOCK][slots] = _UNTRAINED if is_new else 0
                for name in self._tags:
                    self.arrays[name][slots] = 0  # another row may have been there
                self._index.publish(rows_U, slots_U)
                slots_N[missing] = self._index.find(rows_N[missing])[0]
        return slots_N

    def apply_gradients(  # noqa: D102 - inherited
        self, sparse: SparseFeatures, grad_BFD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> Tensor | None:
        check_versions(self.normalization, versions, sparse.values.numel())
        with self._mutex:
            slots_N = self.admit(self.layout.rows_of(sparse).numpy())
            self._note_trained(slots_N)
            kept = None if versions is None else versions[torch.from_numpy(slots_N >= 0)]
            counts = self._train_bags(_admitted(sparse, slots_N), grad_BFD, kept, lr=lr)
            self._end_update()
        return counts

    def apply_row_gradients(  # noqa: D102 - inherited
        self, rows_U: Tensor, grads_UD: Tensor, *, lr: float, versions: Tensor | None = None
    ) -> Tensor | None:
        self._check_row_gradients(rows_U, grads_UD, versions)
        with self._mutex:
            slots_U, grads = self.admit(_array(rows_U)), grads_UD.contiguous().numpy()
            kept = slots_U >= 0
            if not kept.all():
                slots_U, grads = slots_U[kept], grads[kept]
                versions = None if versions is None else versions[torch.from_numpy(kept)]
            self._note_trained(slots_U)
            counts = self._train_places(slots_U, grads, versions, lr=lr)
            self._end_update()
        return counts

    def begin_exchange(self, request: RowExchange) -> Callable[[], RowValues]:  # noqa: D102 - inherited
        request.check(self.layout.num_rows, self.row_shapes)
        with self._mutex:
            if request.changes_rows:
                self.push_updates(request)
            values = self.fetch_and_check(request)
        return lambda: values

    def push_updates(self, request: RowExchange) -> None:
        """The pushes of a request that was checked, as far as they are admitted."""
        slots_P = self.admit(_array(request.push_rows), _array(request.updates_per_push))
        kept = slots_P >= 0
        slots_P = slots_P[kept]
        sent_P, clocks = _array(request.push_clocks)[kept], as_matrix(self.arrays[CLOCK])
        untrained = np.zeros(slots_P.size, dtype=np.bool_)
        if request.copies:
            untrained = self.arrays[CLOCK].numpy()[slots_P] == _UNTRAINED
        for name, amounts in request.updates.items():
            sign = np.float32(-1 if name == "weight" else 1)
            trained_P, amounts_P = slots_P[~untrained], as_matrix(amounts)[kept][~untrained]
            add_rows(trained_P, amounts_P, as_matrix(self.arrays[name]), sign, clocks, sent_P[~untrained])
        for name, copies in request.copies.items():
            array, slots = self.arrays[name], torch.from_numpy(slots_P[untrained])
            array[slots] = copies[torch.from_numpy(kept)][torch.from_numpy(untrained)].to(array.dtype)
        self._note_trained(slots_P)
        move_clocks(slots_P, sent_P, clocks, request.clock == "sum")
        counters.add(self.arrays["counters"], STEP, request.num_steps)
        self._end_update()

    def fetch_and_check(self, request: RowExchange) -> RowValues:
        """The fetches and checks of a request that was checked; changes nothing."""
        values = self._gather(_array(request.fetch_rows), [*self.row_shapes, CLOCK], touch=True)
        values["weight"] = values["weight"].float()
        clocks_C = self._gather(_array(request.check_rows), [CLOCK], touch=True)[CLOCK].clamp_(min=0).numpy()
        stale_C = np.zeros(clocks_C.size, dtype=np.bool_)
        if request.staleness is not None:
            own_C, all_C = _array(request.check_clocks), np.arange(clocks_C.size)
            compare_clocks(all_C, own_C, clocks_C[:, None], request.staleness, stale_C)
        return RowValues(values, values.pop(CLOCK).clamp_(min=0), torch.from_numpy(stale_C))

    def insert(self, rows_U: Tensor) -> None:  # noqa: D102 - inherited
        check_rows(rows_U, self.layout.num_rows)
        with self._mutex:
            self.admit(_array(rows_U), always=True)

    def write_rows(self, name: str, rows: Rows, values: Tensor) -> None:  # noqa: D102 - inherited
        self._check_values(name, rows, values)
        rows_U = self._numbers(rows)
        check_rows(torch.from_numpy(rows_U), self.layout.num_rows)
        with self._mutex:
            slots_U = self.admit(rows_U, always=True)
            self.arrays[name].index_copy_(0, torch.from_numpy(slots_U), values)
            self._note_trained(slots_U)

    def clear(self) -> None:  # noqa: D102 - inherited
        with self._mutex:
            self.arrays["counters"][_HIGH] = 0  # from here on none of the keys counts
            self.arrays[_KEYS][: self._index.high] = 0
            self._index = self._new_index()
            self._note_size()

    def _new_index(self) -> KeyIndex:
        keys, high = self.arrays[_KEYS].numpy(), int(self.arrays["counters"][_HIGH])
        return KeyIndex(keys, high, admission=self.dynamic.admission, expire_after=self.dynamic.expire_after)

    def _note_trained(self, slots_N: np.ndarray) -> None:
        """Rows in these slots are no longer what they were made as; slots below 0 are none."""
        if self.dynamic.expire_after is not None:
            slots, clocks = slots_N[slots_N >= 0], self.arrays[CLOCK].numpy()
            clocks[slots[clocks[slots] == _UNTRAINED]] = 0

    def _end_update(self) -> None:
        self._index.advance()
        self._note_size()

    # --- Room --------------------------------------------------------------------------------------------------------

    def _make_room(self, slots: int) -> None:
        """Let the files be long enough for the first ``slots`` slots."""
        there = int(self.arrays["counters"][_ALLOCATED])
        if slots <= there:
            return
        piece = max(_GROWTH_BYTES // self._slot_bytes, 1)
        stop = min(-(-slots // piece) * piece, self._capacity)
        folder = self.arrays.folder
        try:
            if slots > self._capacity:
                raise OSError(errno.ENOSPC, "the store is full")
            self.arrays.grow(there, stop)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no room for more rows in {folder}, which has {there:,} of {self._slot_bytes} bytes"
                f" ({error.strerror}). admission or expire_after make fewer rows.",
            ) from error
        self.arrays["counters"][_ALLOCATED] = stop

    def _note_size(self) -> None:
        """Write down what the next process needs, and who looks at the files from outside."""
        numbers = self.arrays["counters"]
        numbers[_HIGH], numbers[_LIVE] = self._index.high, self._index.num_rows

    def _numbers(self, rows: Rows) -> np.ndarray:
        """The rows' numbers, int64."""
        if not isinstance(rows, slice):
            return _array(rows)
        self._check_stretch(rows)
        return as_int64(rows.start) + np.arange(rows.stop - rows.start)

    def close(self) -> None:  # noqa: D102 - inherited
        super().close()
        self._lock.close()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> HashEmbeddingStore:
        return self  # a copy in this process is the same store

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self.arrays.folder} is open in one process at a time: run a server for it, and connect to that."
        )


def _slot_bytes(layout: TableLayout, optimizer: RowOptimizer, normalization: StalenessNormalization | None) -> int:
    """The bytes of a slot in all files together: a row and its key."""
    return row_bytes(layout, optimizer, normalization) + 8


def _lock(folder: Path) -> Any:
    """Hold the folder; the system lets go of it when the process ends, however it ends."""
    file = (folder / _LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RuntimeError(
            f"{folder} is open already, here or in another process, and a store with dynamic rows is open once at a "
            "time: use the object that is there, or go through its server (tcp://host:port)."
        ) from None
    return file


def _admitted(sparse: SparseFeatures, slots_N: np.ndarray) -> SparseFeatures:
    """The features with slots for ids, without those that have none."""
    kept_N = slots_N >= 0
    if kept_N.all():
        return dataclasses.replace(sparse, values=torch.from_numpy(slots_N))
    counts = np.zeros(kept_N.size + 1, dtype=np.int64)
    np.cumsum(kept_N, out=counts[1:])
    kept = torch.from_numpy(kept_N)
    return SparseFeatures(
        sparse.keys,
        torch.from_numpy(slots_N)[kept],
        offsets=torch.from_numpy(counts)[sparse.bag_offsets()],
        weights=None if sparse.weights is None else sparse.weights[kept],
    )


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().numpy()
