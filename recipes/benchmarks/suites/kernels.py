"""Suite ``kernels``: lookup and update of embedding rows alone, every kernel and rule, one thread.

The base is FBGEMM's own module with rowwise Adagrad; for tables of width 1 it holds rows of width 4, the narrowest that
it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from benchmarks.harness.choices import check_numbers
from benchmarks.harness.report import Row
from benchmarks.harness.turns import Turn, in_turns
from benchmarks.harness.workload import Workload
from benchmarks.peers.floor import table_batched_embeddings

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, KernelName, RowDtype
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowWiseAdagrad

Variant = Callable[[Turn], None]


@dataclass(frozen=True)
class Tables:
    """The workload's tables at one width, and a gradient for what a batch looks up.

    Args:
        work: The rows.
        dim: Width of the tables.
        batch_size: Examples a batch.
    """

    work: Workload
    dim: int
    batch_size: int

    def fbgemm_module(self, turn: Turn) -> None:
        """FBGEMM as it comes."""
        width = max(self.dim, 4)
        tables = table_batched_embeddings(self.work, width)
        offsets = torch.arange(self.work.num_fields * self.batch_size + 1)
        gradient = torch.randn(self.batch_size, self.work.num_fields * width) * 1e-3
        for batch in cycle(self.work.batches(self.batch_size)):
            tables(batch.sparse.values, offsets).backward(gradient)
            turn.step_done(self.batch_size)

    def collection(
        self,
        optimizer: RowOptimizer,
        kernel: KernelName,
        *,
        check_ids: bool = True,
        dtype: RowDtype = RowDtype.FLOAT32,
    ) -> Variant:
        """Ours, with one kernel."""

        def run(turn: Turn) -> None:
            tables = [
                EmbeddingBagConfig(name, rows, self.dim, (name,), dtype=dtype)
                for name, rows in self.work.fields.items()
            ]
            collection = EmbeddingBagCollection(tables, optimizer=optimizer, kernel=kernel, check_ids=check_ids)
            gradient = torch.randn(self.batch_size, self.work.num_fields, self.dim) * 1e-3
            for batch in cycle(self.work.batches(self.batch_size)):
                resolved = collection.resolve(batch.sparse)
                _, ticket = collection.embedding_bags.lookup(resolved)
                collection.embedding_bags.apply_gradients([ticket], gradient, lr=0.01)
                turn.step_done(self.batch_size)

        return run


def run(*, dims: list[int], batch_sizes: list[int], rounds: int, seconds: float) -> list[Row]:
    """Measure every kernel at every width and batch size; each pair is one interleaved measurement.

    Raises:
        ValueError: a number too small to measure anything with.
    """
    check_numbers("suite.dims", dims)
    check_numbers("suite.batch_sizes", batch_sizes)
    check_numbers("suite.rounds", rounds)
    work, rows = Workload(), []
    for dim in dims:
        for batch_size in batch_sizes:
            tables = Tables(work, dim, batch_size)
            variants: dict[str, Variant] = {"fbgemm module": tables.fbgemm_module}
            if dim % 4 == 0:
                variants["fbgemm"] = tables.collection(RowWiseAdagrad(), "fbgemm")
            variants["numba"] = tables.collection(RowWiseAdagrad(), "numba")
            variants["numba, weight decay"] = tables.collection(RowWiseAdagrad(weight_decay=0.01), "numba")
            variants["numba, ids unchecked"] = tables.collection(RowWiseAdagrad(), "numba", check_ids=False)
            variants["numba, bfloat16 rows"] = tables.collection(RowWiseAdagrad(), "numba", dtype=RowDtype.BFLOAT16)
            variants["numba Adagrad"] = tables.collection(RowAdagrad(), "numba")
            variants["numba Adam"] = tables.collection(RowAdam(), "numba")
            variants["numba FTRL"] = tables.collection(RowFTRL(), "numba")
            variants["torch"] = tables.collection(RowWiseAdagrad(), "torch")
            measured = in_turns(variants, rounds=rounds, seconds=seconds)
            rows.append(Row(f"D={dim}, B={batch_size}", measured, base="fbgemm module"))
    return rows
