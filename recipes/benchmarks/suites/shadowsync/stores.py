"""Lookups in stores through shared memory, beside the bare kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import cycle

from benchmarks.harness.bars import Bar
from benchmarks.harness.report import Result, Row
from benchmarks.harness.turns import Turn, in_turns
from benchmarks.harness.workload import Workload
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.launchers import ServerSpec, Sidecars
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.parameter_server import connect
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore

Variant = Callable[[Turn], None]


def measure(*, shapes: list[tuple[int, int]], rounds: int, seconds: float) -> tuple[list[Result], list[Bar]]:
    """Pooled lookups of whole batches.

    Args:
        shapes: Width and batch size of the lookups.
        rounds: Of each measurement.
        seconds: Of each variant in each round.
    """
    results: list[Result] = []
    bars = []
    for dim, batch_size in shapes:
        row = _mapped(dim, batch_size, rounds=rounds, seconds=seconds)
        results.append(row)
        bars.append(
            Bar(
                f"shm / bare FBGEMM kernel, pooled lookups, {row.workload}",
                row.measured.ratio("shm", "bare FBGEMM"),
                "at least",
                0.9,
            )
        )
    return results, bars


def _mapped(dim: int, batch_size: int, *, rounds: int, seconds: float) -> Row:
    """The bare kernels look up the same rows in ordinary memory."""
    work = Workload()
    batches = [batch.sparse for batch in work.batches(batch_size)]
    with served_rows(work, dim) as (endpoint, layout), closing(connect(endpoint)) as stores:
        store = stores.embedding_store("rows")
        assert isinstance(store, MappedEmbeddingStore)
        kernels = {"bare FBGEMM": "fbgemm", "bare kernel of ours": "auto"}
        rows = store.rows.clone()
        variants: dict[str, Variant] = {"shm": _pooled(store.pooled_lookup, batches)}
        for name, kernel in kernels.items():
            bare = choose_kernel(kernel, layout, store.optimizer, rows.device)  # type: ignore[arg-type]
            variants[name] = _pooled(lambda sparse, bare=bare: bare.lookup(rows, sparse), batches)
        measured = in_turns(variants, rounds=rounds, seconds=seconds)
    return Row(f"D={dim}, B={batch_size}", measured, base="bare FBGEMM")


def _pooled(lookup: Callable[[SparseFeatures], Tensor], batches: list[SparseFeatures]) -> Variant:
    def run(turn: Turn) -> None:
        for sparse in cycle(batches):
            lookup(sparse)
            turn.step_done(sparse.batch_size)

    return run


@contextmanager
def served_rows(work: Workload, dim: int) -> Iterator[tuple[str, TableLayout]]:
    """A server that has the workload's tables in one store; its endpoint and the tables."""
    layout = TableLayout(tuple(EmbeddingBagConfig(name, rows, dim, (name,)) for name, rows in work.fields.items()))
    with Sidecars([ServerSpec("embedding", 0)]) as sidecars:
        (endpoint,) = sidecars.endpoints["embedding"]
        with closing(connect(endpoint)) as stores:
            stores.create_embedding_store("rows", layout, RowWiseAdagrad(), seed=0)
        yield endpoint, layout
