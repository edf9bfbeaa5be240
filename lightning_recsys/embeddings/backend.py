"""Where a collection's rows live: the interface, and the backend that keeps them in the process."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, R rows of all tables.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_recsys.embeddings.config import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import Kernel, KernelName, TableLayout, choose_kernel
from lightning_recsys.embeddings.replication import gather_over_ranks, no_gradients, num_replicas
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.embeddings.ticket import Ticket
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.optim.swap import PERIOD


class Backend(nn.Module, ABC):
    """Serves the rows of one :class:`EmbeddingBagCollection`; a distributed strategy supplies another one.

    The features that it gets are resolved: in the collection's feature order, ids checked, mean pooling folded into
    the per-sample weights. Its state dict holds ``<table>.weight`` and ``<table>.<state>`` for every table.
    """

    @abstractmethod
    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:
        """Sum each bag's (weighted) rows: float32 ``[B, F, D]`` without a graph, and the name of this lookup."""

    @abstractmethod
    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:
        """Make one update of the rows that were looked up.

        Args:
            tickets: What :meth:`lookup` returned; several where their batches make one update together, as accumulated
                micro-batches do.
            grad_BFD: The gradient of the pooled rows, float32 ``[B, F, D]``; the batches' one behind the other.
            lr: Step size of this update.
        """

    def join_update(self, *, lr: float) -> None:
        """Take part in an update that other ranks may make of these rows; nothing, unless each rank has a replica.

        Args:
            lr: As for :meth:`apply_gradients`, which the others call.
        """
        return

    def lookup_frozen(self, sparse: SparseFeatures) -> Tensor:
        """Look up like :meth:`lookup`, without a gradient: frozen rows, or ``torch.no_grad()`` while training."""
        return self.lookup(sparse)[0]

    def lookup_fresh(self, sparse: SparseFeatures) -> Tensor:
        """Look up like :meth:`lookup_frozen` for evaluation: the rows as they are now, and no older copies."""
        return self.lookup_frozen(sparse)

    def prefetch(self, sparse: SparseFeatures) -> None:
        """Get ready for a later :meth:`lookup` of ``sparse``; nothing, unless rows travel."""
        return

    def announce(self, sparse: SparseFeatures, *, ahead: int) -> None:
        """Know that ``sparse`` will be looked up, after ``ahead`` other announced ones; nothing, unless rows leave."""
        return

    def flush(self) -> None:
        """Return when the rows have every update; at once, unless updates travel."""
        return


def row_shapes(layout: TableLayout, optimizer: RowOptimizer) -> dict[str, tuple[int, ...]]:
    """Shape of what one row has of ``weight`` and of each state: ``(D,)``, or ``()`` for one number."""
    row = torch.zeros(1, layout.embedding_dim, device="cpu")
    return {name: tuple(x.shape[1:]) for name, x in {"weight": row, **optimizer.initial_state(row)}.items()}


_BLOCK_ROWS = 1 << 20  # of bfloat16 rows that are made by way of float32 ones, so many at a time


class TableBackend(Backend):
    """A backend whose rows can be read and written, table by table; its state dict follows from that.

    Args:
        layout: The tables, and where each feature's rows lie in them.
        optimizer: The update rule of the rows.

    Attributes:
        step: Number of updates that the tables have had.
        has_rows_in_state_dict: Whether the state dict holds rows and optimizer state. Whoever saves and loads them by
            other means switches it off meanwhile; the steps stay in.
    """

    step: int
    has_rows_in_state_dict: bool = True

    def __init__(self, layout: TableLayout, optimizer: RowOptimizer) -> None:
        super().__init__()
        self.layout = layout
        self.optimizer = optimizer
        self.row_shapes = row_shapes(layout, optimizer)
        self.weight_dtype = layout.dtype

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of ``weight``, or of a state by its name."""
        return self.weight_dtype if name == "weight" else torch.float32

    @property
    def is_meta(self) -> bool:
        """Whether there are no rows behind it, so that they can neither be read nor written."""
        return False

    @abstractmethod
    def read(self, table: str, name: str) -> Tensor:
        """A table's ``weight``, or a state by its name; perhaps a view of it: ``[N, ...]``."""

    @abstractmethod
    def write(self, table: str, name: str, values: Tensor) -> None:
        """The reverse of :meth:`read`."""

    def read_rows(self, table: str, name: str, first_row: int, num_rows: int) -> Tensor:
        """Read like :meth:`read`, but only so many rows from ``first_row`` on."""
        return self.read(table, name)[first_row : first_row + num_rows]

    def write_rows(self, table: str, name: str, first_row: int, values: Tensor) -> None:
        """Write like :meth:`write`, from ``first_row`` on; here for rows in this process, which :meth:`read` gives."""
        self.read_rows(table, name, first_row, len(values)).copy_(values)

    @property
    def row_keys(self) -> list[str]:
        """The keys of rows and optimizer state in the state dict."""
        return [f"{table.name}.{name}" for name in self.row_shapes for table in self.layout.tables]

    @contextmanager
    def replacing_rows(self) -> Iterator[None]:
        """Meanwhile rows are written from outside; where several processes share them, all of them do this."""
        yield

    def extra_repr(self) -> str:
        """Tables and rule."""
        tables = ", ".join(f"{x.name}: {x.num_embeddings} x {x.embedding_dim}" for x in self.layout.tables)
        return f"{tables}; {self.optimizer}"

    def copy_from(self, other: TableBackend) -> None:
        """Take rows, optimizer state and step of another backend of the same tables and rule."""
        for name in self.row_shapes:
            for table in self.layout.tables:
                self.write(table.name, name, other.read(table.name, name))
        self.step = other.step

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for dtype in {self.weight_dtype, torch.float32}:
            if (cast := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
                raise TypeError(
                    f"embedding rows are kept as they were made, and cannot be cast ({dtype} to {cast}). For mixed "
                    "precision use Trainer(precision='bf16-mixed'), which leaves parameters alone; for rows in half "
                    "the bytes make the tables with dtype='bfloat16'."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.has_rows_in_state_dict:
            self._save_rows(destination, prefix)
        step = self.step
        for table in self.layout.tables:
            destination[f"{prefix}{table.name}.step"] = torch.tensor(step, device="cpu")

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.has_rows_in_state_dict:
            self._load_rows(state_dict, prefix, missing_keys, error_msgs)
        steps = [state_dict.get(f"{prefix}{table.name}.step") for table in self.layout.tables]
        self.step = max((int(step) for step in steps if step is not None), default=0)
        known = {prefix + key for key in (*self.row_keys, *(f"{table.name}.step" for table in self.layout.tables))}
        unexpected_keys.extend(key for key in state_dict if strict and key.startswith(prefix) and key not in known)

    def _save_rows(self, destination: dict[str, Any], prefix: str) -> None:
        for name in self.row_shapes:
            for table in self.layout.tables:
                destination[f"{prefix}{table.name}.{name}"] = self.read(table.name, name)

    def _load_rows(
        self, state_dict: Mapping[str, Any], prefix: str, missing_keys: list[str], error_msgs: list[str]
    ) -> None:
        for name, row_shape in self.row_shapes.items():
            for table in self.layout.tables:
                key, expected = f"{prefix}{table.name}.{name}", [table.num_embeddings, *row_shape]
                saved = state_dict.get(key)
                if saved is None and name == PERIOD:
                    continue  # a checkpoint of another rule, after which periods begin
                if saved is None:
                    missing_keys.append(key)
                elif list(saved.shape) != expected:
                    error_msgs.append(
                        f"size mismatch for {key}: the checkpoint has {list(saved.shape)}, the table has {expected}."
                    )
                else:
                    self.write(table.name, name, saved)


class LocalBackend(TableBackend):
    """All rows in this process, tables of one width behind each other in one tensor, so that one call serves them all.

    The rows and their optimizer state are parameters that need no gradient: they move with the module and
    ``DistributedDataParallel`` copies them from rank 0 at the start, but neither it nor a dense optimizer trains them.
    Where a process group of several ranks exists, every rank holds a replica of all rows: an update gathers the
    sparse gradients of all ranks and applies their mean everywhere, so the replicas stay equal bit for bit.
    (:attr:`replica_group` names other ranks than all.)

    Args:
        layout: The tables, and where each feature's rows lie in them.
        optimizer: The update rule of the rows.
        kernel: Name of a kernel (``torch``, ``numba``, ``fbgemm``), or ``auto`` to choose one by update rule, width and
            device.
        device: The device that the rows are made on; on ``meta`` there are none, and only another backend can serve the
            tables.

    Attributes:
        replica_group: The ranks that have these rows; ``None`` for all.

    Communication: per update and rank, one all-gather of the ids (8 bytes each) and one of the gradients
    ``[B, F, D]`` (4 bytes each).
    """

    rows: nn.Parameter

    def __init__(
        self,
        layout: TableLayout,
        optimizer: RowOptimizer,
        *,
        kernel: KernelName,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(layout, optimizer)
        self.kernel_name: KernelName = kernel
        self.step = 0
        self.replica_group: ProcessGroup | None = None
        num_rows = layout.num_rows
        if device is not None and torch.device(device).type == "meta":  # has no rows, and is to have a number of bytes
            num_rows = min(num_rows, 2**60 // layout.embedding_dim)
        rows = torch.empty(num_rows, layout.embedding_dim, device=device, dtype=layout.dtype)
        self.rows = nn.Parameter(rows, requires_grad=False)
        # Chosen at once, so that a name that cannot serve these tables fails here and not in the first batch.
        self.kernel: Kernel = self._choose_kernel()
        self._draw_rows()
        state = self._initial_state()
        self._state_names = tuple(state)
        for name, tensor in state.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _choose_kernel(self) -> Kernel:
        if not self.is_meta:
            return choose_kernel(self.kernel_name, self.layout, self.optimizer, self.rows.device)
        tables = (replace(table, num_embeddings=min(table.num_embeddings, 2**40)) for table in self.layout.tables)
        return choose_kernel(self.kernel_name, TableLayout(tuple(tables)), self.optimizer, torch.device("cpu"))

    @property
    def is_meta(self) -> bool:  # noqa: D102 - inherited
        return self.rows.is_meta

    @property
    def row_state(self) -> dict[str, Tensor]:
        """Optimizer state of all rows, by name."""
        return {name: self.get_parameter(name).data for name in self._state_names}

    def _draw_rows(self, seed: int | None = None) -> None:
        for table in self.layout.tables:
            rows = self.read(table.name, "weight")
            generator = None if seed is None else torch.Generator().manual_seed(seed ^ crc32(table.name.encode()))
            if not table.init_std:
                rows.zero_()
            elif rows.dtype == torch.float32:
                rows.normal_(0.0, table.init_std, generator=generator)
            else:
                for block in torch.split(rows, _BLOCK_ROWS):
                    drawn = torch.empty(block.shape, device=block.device)
                    block.copy_(drawn.normal_(0.0, table.init_std, generator=generator))

    def _initial_state(self) -> dict[str, Tensor]:
        rows = self.rows.data
        if rows.dtype == torch.float32 or len(rows) <= _BLOCK_ROWS or self.is_meta:
            return self.optimizer.initial_state(rows.float())
        state = {
            name: torch.empty(len(rows), *shape, device=rows.device)
            for name, shape in self.row_shapes.items()
            if name != "weight"
        }
        for first in range(0, len(rows), _BLOCK_ROWS):
            block = rows[first : first + _BLOCK_ROWS]
            for name, values in self.optimizer.initial_state(block.float()).items():
                state[name][first : first + len(block)] = values
        return state

    def keep(self, tables: Sequence[EmbeddingBagConfig]) -> TableBackend:
        """A backend with copies of some tables' rows; without rows where there are none (:meth:`make_rows`)."""
        if not tables:
            return NoTables(self)
        layout = TableLayout(tuple(tables))
        kept = LocalBackend(layout, self.optimizer, kernel=self.kernel_name, device="meta")
        if not self.is_meta:
            for name in self.row_shapes:
                kept._hold(torch.cat([self.read(table.name, name) for table in tables]), name)
        kept.step, kept.kernel = self.step, kept._choose_kernel()
        return kept

    def make_rows(self, *, seed: int, device: torch.device) -> None:
        """Make the rows that are not there: of each table the same ones, whatever other tables are here."""
        self._hold(torch.empty(self.layout.num_rows, self.layout.embedding_dim, dtype=self.weight_dtype))
        self._draw_rows(seed)
        for name, state in self._initial_state().items():
            self._hold(state, name)
        self.to(device)

    def _hold(self, values: Tensor, name: str = "weight") -> None:
        setattr(self, "rows" if name == "weight" else name, nn.Parameter(values, requires_grad=False))

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:  # noqa: D102 - inherited
        if self.is_meta:
            raise RuntimeError(
                f"the tables {[table.name for table in self.layout.tables]} have no rows here (device='meta'): train "
                "with a strategy that keeps rows in stores, such as shadowsync, or leave device out."
            )
        return self.kernel.lookup(self.rows.data, sparse), Ticket(sparse)

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:  # noqa: D102
        sparse = Ticket.joined(tickets).sparse
        if num_replicas(self.replica_group) > 1:
            sparse, grad_BFD = gather_over_ranks(sparse, grad_BFD, self.replica_group)
            if not len(grad_BFD):  # nobody has looked anything up
                return
        self.step += 1
        self.kernel.apply_gradients(self.rows.data, self.row_state, sparse, grad_BFD, lr=lr, step=self.step)

    def join_update(self, *, lr: float) -> None:  # noqa: D102 - inherited
        if num_replicas(self.replica_group) > 1:
            sparse, grad_BFD = no_gradients(self.layout, self.rows.device)
            self.apply_gradients([Ticket(sparse)], grad_BFD, lr=lr)

    def read(self, table: str, name: str) -> Tensor:  # noqa: D102 - inherited
        first, stop = (min(row, self.rows.shape[0]) for row in self.layout.row_range(table))
        return (self.rows if name == "weight" else self.get_parameter(name)).data[first:stop]

    def write(self, table: str, name: str, values: Tensor) -> None:  # noqa: D102 - inherited
        self.read(table, name).copy_(values)

    def _load_rows(
        self, state_dict: Mapping[str, Any], prefix: str, missing_keys: list[str], error_msgs: list[str]
    ) -> None:
        if not self.is_meta:
            super()._load_rows(state_dict, prefix, missing_keys, error_msgs)
        elif any(not state_dict[prefix + key].is_meta for key in self.row_keys if prefix + key in state_dict):
            # a copy into nothing would succeed
            error_msgs.append("the tables have no rows here (device='meta'): bind a store before the rows are loaded.")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.is_meta:
            try:
                fn(self.rows[:0])  # not all of them: torch makes room for them before it finds that they are not there
            except NotImplementedError:  # a move: nothing there that could
                return self
        super()._apply(fn, recurse)
        self.kernel = self._choose_kernel()
        return self

    def extra_repr(self) -> str:
        """Names the tables, the rule and the kernel."""
        return f"{super().extra_repr()}; kernel={self.kernel_name}"


class NoTables(TableBackend):
    """The backend of a process that has none of a collection's tables: it counts the updates."""

    def __init__(self, whole: LocalBackend) -> None:
        nn.Module.__init__(self)
        self.layout, self.optimizer, self.row_shapes = TableLayout(()), whole.optimizer, whole.row_shapes
        self.weight_dtype = whole.weight_dtype
        self.step = whole.step

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:  # noqa: D102 - inherited
        raise AssertionError("a collection without tables has nothing to look up")

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:  # noqa: D102
        self.step += 1

    def read(self, table: str, name: str) -> Tensor:  # noqa: D102 - inherited
        raise KeyError(table)

    def write(self, table: str, name: str, values: Tensor) -> None:  # noqa: D102 - inherited
        raise KeyError(table)
