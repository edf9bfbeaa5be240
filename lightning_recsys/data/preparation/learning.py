"""The first pass: what has to be known of the training rows before a row can be written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from lightning_recsys.data.preparation.parallel import ordered_map
from lightning_recsys.data.preparation.preprocessing import ColumnRules, Summary
from lightning_recsys.data.preparation.source import RawSource
from lightning_recsys.data.preparation.vocabulary import ValueCounter, count_values
from lightning_recsys.data.prepared.manifest import write_atomically
from lightning_recsys.data.raw import Block

Report = Callable[[int, int], None]
"""Takes the rows and the bytes of raw files that were read since the last call."""


@dataclass(frozen=True)
class Learned:
    """What was learned from the training rows.

    Args:
        dense: What the rules keep of each dense feature, shape ``[I, K]``.
        vocabulary_sizes: Values of each vocabulary; empty where ids are hashed.
        min_count: How often the rarest value of a vocabulary occurs, at least.
        raised: Whether that is more than was asked for, so that vocabularies are not too large.
    """

    dense: Sequence[Sequence[float]] = ()
    vocabulary_sizes: Mapping[str, int] = field(default_factory=dict)
    min_count: int = 0
    raised: bool = False

    @classmethod
    def load(cls, path: Path) -> Learned:
        """What :meth:`save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        write_atomically(path, json.dumps(asdict(self)))

    @property
    def summary_IK(self) -> Summary:
        """``dense`` as an array."""
        return np.array(self.dense)


def learning_files(source: RawSource) -> list[int]:
    """Numbers of the files that hold training rows."""
    return [i for i, split in enumerate(source.splits) if split in (None, "train")]


def learn(
    source: RawSource,
    rules: ColumnRules,
    *,
    folder: Path,
    spill: Path,
    pool: ThreadPoolExecutor,
    ahead: int,
    report: Report,
) -> Learned:
    """Read the training rows once; writes the vocabularies.

    Args:
        source: The raw files.
        rules: What is to be learned.
        folder: Where the vocabularies go.
        spill: A folder for counts that do not fit into memory.
        pool: Threads that parse and count.
        ahead: How many blocks may be in work.
        report: Told after each block.
    """
    min_counts = rules.vocabularies(source.format)
    counter = ValueCounter(list(min_counts), folder=spill)
    summaries: list[Summary] = []

    def look(task: tuple[int, Block]) -> tuple[Block, int, Summary, dict[str, pa.Table]]:
        file, block = task
        parsed = source.parse(file, block)
        rows = parsed.rows.keep(parsed.split_N == 0)
        columns = {}
        if min_counts:
            columns = rules.categories(rows, source.format)
            columns |= {name: bags.values for name, bags in rows.bags.items()}
        counts = {name: count_values(columns[name]) for name in min_counts}
        return block, len(parsed.rows), rules.summary(rows, source.format), counts

    for file in learning_files(source):
        consumed = 0
        tasks = ((file, block) for block in source.read(file))
        for block, num_rows, summary, counts in ordered_map(pool, look, tasks, ahead=ahead):
            summaries = [rules.merged([*summaries, summary])]
            counter.add(counts)
            report(num_rows, block.consumed - consumed)
            consumed = block.consumed
    dense = rules.merged(summaries).tolist()
    if not min_counts:
        return Learned(dense)
    sizes, least = counter.write(folder, min_count=min_counts, max_vocabulary=rules.max_vocabulary)
    return Learned(dense, sizes, least, least > min(min_counts.values()))
