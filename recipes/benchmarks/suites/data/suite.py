"""Suite ``data``: preparing rows of Criteo's shape, and readers alone, in the page cache, nothing done with batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.harness.choices import check_choices, check_numbers
from benchmarks.harness.report import Result, Row
from benchmarks.harness.turns import Turn, in_turns
from benchmarks.harness.workload import Workload
from benchmarks.suites.data import preparation

from lightning_recsys.data import Batch, PreparedDataModule
from lightning_recsys.data.preparation.shards import GROUP_ROWS, Rows, ShardWriter, shard_schema
from lightning_recsys.data.prepared import Feature, Manifest
from lightning_recsys.data.prepared.service import Reader, receive_batches
from lightning_recsys.data.prepared.stream import StreamRequest, stream_batches

# Compression, rows to shuffle among, reader.
VARIANTS = {
    "local": ("none", 65_536, "local"),
    "local, no shuffling": ("none", 0, "local"),
    "local, zstd": ("zstd", 65_536, "local"),
    "shared": ("none", 65_536, "shared"),
    "shared, zstd": ("zstd", 65_536, "shared"),
}


def run(
    *,
    rows: int,
    batch_sizes: list[int],
    workers: list[int],
    rounds: int,
    seconds: float,
    prepare: list[str],
    prepare_rows: int,
) -> list[Result]:
    """Measure each reader: total rate of all workers, who take their batches in turn in one process.

    And, before that, the preparation of so many raw rows with each of these presets.

    Raises:
        ValueError: a preset that there is not, or a number too small to measure anything with.
    """
    check_choices("suite.prepare", prepare, preparation.PRESETS)
    check_numbers("suite.prepare_rows", prepare_rows)
    check_numbers("suite.batch_sizes", batch_sizes)
    check_numbers("suite.workers", workers)
    check_numbers("suite.rounds", rounds)
    check_numbers("suite.rows", rows, least=max(batch_sizes) * max(workers))
    measured: list[Result] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bars = preparation.measure(folder, rows=prepare_rows, presets=prepare)
        work = Workload(rows=rows)
        roots = {name: write_rows(work, folder / name, compression=name) for name in ("none", "zstd")}
        readers = {name: stack.enter_context(closing(Reader(root))) for name, root in roots.items()}
        for batch_size in batch_sizes:
            for world_size in workers:
                first = StreamRequest(batch_size, world_size=world_size)
                variants: dict[str, Any] = {
                    name: variant(
                        replace(first, window=window), roots[stored], readers[stored] if how == "shared" else None
                    )
                    for name, (stored, window, how) in VARIANTS.items()
                }
                result = in_turns(variants, rounds=rounds, seconds=seconds)
                measured.append(Row(f"B={batch_size}, {world_size} workers", result, base="local"))
    return [*measured, bars]


def variant(first: StreamRequest, root: Path, reader: Reader | None) -> Callable[[Turn], None]:
    """A reader as a variant of :func:`benchmarks.harness.turns.in_turns`."""
    data = PreparedDataModule(root=root)
    data.setup()
    rows = data.rows("train")
    assert rows is not None

    def stream(request: StreamRequest) -> Iterator[Batch]:
        if reader is not None:
            return receive_batches(reader.address, request, slots=4)
        return stream_batches(request, rows, ahead=4)

    def run(turn: Turn) -> None:
        for epoch in count():
            with ExitStack() as stack:
                requests = [replace(first, epoch=epoch, rank=rank) for rank in range(first.world_size)]
                streams: list[Any] = [stack.enter_context(closing(stream(request))) for request in requests]  # type: ignore[type-var]
                for batches in zip(*streams, strict=True):
                    turn.step_done(sum(map(len, batches)))

    return run


def write_rows(work: Workload, root: Path, *, compression: str) -> Path:
    """The rows of a workload as prepared shards of a few row groups each."""
    features = {name: Feature(num_ids) for name, num_ids in work.fields.items()}
    dense = tuple(f"d{i}" for i in range(work.num_dense))
    schema, shards = shard_schema(dense, features), []
    for i, batch in enumerate(work.loader(4 * GROUP_ROWS)):
        writer = ShardWriter(root, f"train/{i}.parquet", schema=schema, compression=compression)
        ids = dict(zip(features, batch.sparse.values.view(len(features), -1).numpy(), strict=True))
        writer.write(Rows(batch.labels.numpy(), batch.dense.t().contiguous().numpy(), ids, {}))
        shards.append(writer.finish())
    Manifest(dense, features, {"train": tuple(shards), "validation": (), "test": ()}, GROUP_ROWS).save(root)
    return root
