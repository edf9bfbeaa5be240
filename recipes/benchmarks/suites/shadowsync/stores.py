"""Lookups in stores: through shared memory beside the bare kernels, over TCP beside ``torch.distributed.rpc``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import cycle, islice

import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.report import Result, Row
from benchmarks.harness.turns import Turn, in_turns
from benchmarks.harness.workload import Workload
from benchmarks.peers import torch_rpc
from torch import Tensor

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout, choose_kernel
from lightning_recsys.launchers import ServerSpec, Sidecars
from lightning_recsys.optim import RowWiseAdagrad
from lightning_recsys.parameter_server import connect
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore

Variant = Callable[[Turn], None]


def measure(
    *, shapes: list[tuple[int, int]], rounds: int, seconds: float, warm_lookups: int
) -> tuple[list[Result], list[Bar]]:
    """Both comparisons.

    Args:
        shapes: Width and batch size of pooled lookups. (Lookups over a socket are 128 wide, 3,328 rows each.)
        rounds: Of each measurement.
        seconds: Of each variant in each round.
        warm_lookups: Over each connection before the first round.
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
    results.append(_remote(dim=128, batch_size=128, rounds=rounds, seconds=seconds, warm_lookups=warm_lookups))
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


def _remote(*, dim: int, batch_size: int, rounds: int, seconds: float, warm_lookups: int) -> Row:
    """One request at a time, each for the rows of a batch, without pooling; the servers are processes of their own."""
    work = Workload()
    sizes = torch.tensor(list(work.fields.values()))
    starts = (sizes.cumsum(0) - sizes).unsqueeze(1)
    wanted = [(batch.sparse.values.view(len(sizes), -1) + starts).flatten() for batch in work.batches(batch_size)]

    with (
        served_rows(work, dim) as (endpoint, layout),
        closing(connect(endpoint, transport="tcp")) as stores,
        torch_rpc.lookups(wanted, layout.num_rows, dim, warm_lookups=warm_lookups) as over_rpc,
    ):
        lookup = stores.embedding_store("rows").lookup
        for rows_U in islice(cycle(wanted), warm_lookups):
            lookup(rows_U)

        def rpc(turn: Turn) -> None:
            while True:
                turn.step_done(over_rpc(turn.seconds) * batch_size)

        def tcp(turn: Turn) -> None:
            for rows_U in cycle(wanted):
                lookup(rows_U)
                turn.step_done(batch_size)

        measured = in_turns({"torch RPC": rpc, "tcp": tcp}, rounds=rounds, seconds=seconds)
    return Row(f"{len(wanted[0]):,} rows of width {dim}, a socket", measured, base="torch RPC")


@contextmanager
def served_rows(work: Workload, dim: int) -> Iterator[tuple[str, TableLayout]]:
    """A server that has the workload's tables in one store; its endpoint and the tables."""
    layout = TableLayout(tuple(EmbeddingBagConfig(name, rows, dim, (name,)) for name, rows in work.fields.items()))
    with Sidecars([ServerSpec("embedding", 0)]) as sidecars:
        (endpoint,) = sidecars.endpoints["embedding"]
        with closing(connect(endpoint)) as stores:
            stores.create_embedding_store("rows", layout, RowWiseAdagrad(), seed=0)
        yield endpoint, layout
