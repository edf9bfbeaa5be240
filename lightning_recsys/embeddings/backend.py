"""Where a collection's rows live: the interface, and the backend that keeps them in the process."""

# Shape suffixes: B batch, F features, D embedding dim, N ids of the batch, R rows of all tables.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recsys.embeddings.config import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import Kernel, KernelName, TableLayout, choose_kernel
from lightning_recsys.embeddings.replication import gather_over_ranks, num_replicas
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowOptimizer


class Backend(nn.Module, ABC):
    """Serves the rows of one :class:`EmbeddingBagCollection`; a distributed strategy supplies another one.

    The features that it gets are resolved: in the collection's feature order, ids checked, mean pooling folded into
    the per-sample weights. Its state dict holds ``<table>.weight`` and ``<table>.<state>`` for every table.
    """

    @abstractmethod
    def lookup(self, sparse: SparseFeatures) -> Tensor:
        """Sum each bag's (weighted) rows: float32 ``[B, F, D]`` without a graph."""

    @abstractmethod
    def apply_gradients(self, sparse: SparseFeatures, grad_BFD: Tensor, *, learning_rate: float) -> None:
        """Train the rows of ``sparse`` with the gradient ``[B, F, D]`` of what :meth:`lookup` returned for it."""


class LocalBackend(Backend):
    """All rows in this process, tables of one width behind each other in one tensor, so that one call serves them all.

    The rows and their optimizer state are parameters that need no gradient: they move with the module and
    ``DistributedDataParallel`` copies them from rank 0 at the start, but neither it nor a dense optimizer trains them.
    Where a process group of several ranks exists, every rank holds a replica of all rows: an update gathers the
    sparse gradients of all ranks and applies their mean everywhere, so the replicas stay equal bit for bit.

    Args:
        layout: The tables.
        optimizer: The update rule.
        kernel: A kernel's name, or ``auto``.

    Communication: per update and rank, one all-gather of the ids (8 bytes each) and one of the gradients
    ``[B, F, D]`` (4 bytes each).
    """

    rows: nn.Parameter

    def __init__(self, layout: TableLayout, optimizer: RowOptimizer, *, kernel: KernelName) -> None:
        super().__init__()
        self.layout = layout
        self.optimizer = optimizer
        self.kernel_name: KernelName = kernel
        self.step = 0
        self.rows = nn.Parameter(torch.empty(layout.num_rows, layout.embedding_dim), requires_grad=False)
        # Chosen at once, so that a name that cannot serve these tables fails here and not in the first batch.
        self.kernel: Kernel = choose_kernel(kernel, layout, optimizer, self.rows.device)
        self._draw_rows()
        state = optimizer.initial_state(self.rows.data)
        self._state_names = tuple(state)
        for name, tensor in state.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @property
    def row_state(self) -> dict[str, Tensor]:
        """Optimizer state of all rows, by name."""
        return {name: self.get_parameter(name).data for name in self._state_names}

    def _draw_rows(self) -> None:
        for table, rows in self._per_table(self.rows.data):
            if table.init_std:
                rows.normal_(0.0, table.init_std)
            else:
                rows.zero_()

    def lookup(self, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        return self.kernel.lookup(self.rows.data, sparse)

    def apply_gradients(self, sparse: SparseFeatures, grad_BFD: Tensor, *, learning_rate: float) -> None:  # noqa: D102
        if num_replicas() > 1:
            sparse, grad_BFD = gather_over_ranks(sparse, grad_BFD)
        self.step += 1
        self.kernel.apply_gradients(
            self.rows.data, self.row_state, sparse, grad_BFD, learning_rate=learning_rate, step=self.step
        )

    def _per_table(self, tensor: Tensor) -> Iterator[tuple[EmbeddingBagConfig, Tensor]]:
        starts = self.layout.table_starts
        for table in self.layout.tables:
            yield table, tensor[starts[table.name] : starts[table.name] + table.num_embeddings]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LocalBackend:
        if fn(torch.empty(0)).dtype != torch.float32:
            raise TypeError(
                "embedding rows are trained in float32 and cannot be cast. For mixed precision use "
                "Trainer(precision='bf16-mixed'), which leaves parameters alone."
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.kernel = choose_kernel(self.kernel_name, self.layout, self.optimizer, self.rows.device)
        return self

    def _table_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of every table's rows and state, under their state-dict names."""
        for table, rows in self._per_table(self.rows.data):
            yield f"{table.name}.weight", rows
        for name, tensor in self.row_state.items():
            for table, state in self._per_table(tensor):
                yield f"{table.name}.{name}", state

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._table_tensors():
            destination[prefix + name] = tensor
        for table in self.layout.tables:
            destination[f"{prefix}{table.name}.step"] = torch.tensor(self.step)

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
        expected = dict(self._table_tensors())
        for name, tensor in expected.items():
            saved = state_dict.get(prefix + name)
            if saved is None:
                missing_keys.append(prefix + name)
            elif saved.shape != tensor.shape:
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: the checkpoint has {list(saved.shape)}, the table has "
                    f"{list(tensor.shape)}."
                )
            else:
                tensor.copy_(saved)
        steps = [state_dict.get(f"{prefix}{table.name}.step") for table in self.layout.tables]
        self.step = max((int(step) for step in steps if step is not None), default=0)
        known = {prefix + name for name in expected} | {f"{prefix}{table.name}.step" for table in self.layout.tables}
        unexpected_keys.extend(key for key in state_dict if strict and key.startswith(prefix) and key not in known)

    def extra_repr(self) -> str:
        """Names the tables, the rule and the kernel."""
        tables = ", ".join(
            f"{table.name}: {table.num_embeddings} x {table.embedding_dim}" for table in self.layout.tables
        )
        return f"{tables}; {self.optimizer}; kernel={self.kernel_name}"
