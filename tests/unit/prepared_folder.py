"""Small folders of prepared rows, in which each row knows its number."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_recsys.data.preparation.shards import GROUP_ROWS, Rows, ShardWriter, shard_schema
from lightning_recsys.data.prepared import Feature, Manifest
from lightning_recsys.data.raw.columns import Bags

FEATURES = {"row": Feature(1_000_000), "small": Feature(7)}


def rows_of(start: int, stop: int, *, bags: bool = False) -> Rows:
    """Rows ``start`` to ``stop``: the number is dense feature and id; row ``n`` has ``n % 4`` tags, ``n % 50`` each."""
    numbers = np.arange(start, stop)
    lengths = numbers % 4
    tags = Bags(np.repeat(numbers % 50, lengths), lengths, np.repeat(numbers, lengths).astype(np.float32))
    return Rows(
        (numbers % 2).astype(np.float32),
        np.stack([numbers, -numbers]).astype(np.float32),
        {"row": numbers, "small": numbers % 7},
        {"tags": tags} if bags else {},
    )


def write_folder(
    root: Path,
    *,
    train: list[int],
    validation: tuple[int, ...] = (),
    test: tuple[int, ...] = (),
    bags: bool = False,
    compression: str = "none",
) -> Path:
    """Shards of so many rows each; rows are numbered through, training first."""
    features = FEATURES | ({"tags": Feature(50, bag=True, weighted=True)} if bags else {})
    schema = shard_schema(("number", "negative"), features)
    splits, start = {}, 0
    for split, sizes in (("train", train), ("validation", validation), ("test", test)):
        shards = []
        for i, size in enumerate(sizes):
            writer = ShardWriter(root, f"{split}/{i}.parquet", schema=schema, compression=compression)
            writer.write(rows_of(start, start + size, bags=bags))
            shards.append(writer.finish())
            start += size
        splits[split] = tuple(shards)
    Manifest(("number", "negative"), features, splits, GROUP_ROWS).save(root)
    return root
