"""The first pass: what has to be known of the training rows before a row can be written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from lightning_recsys.data.preparation.preprocessing import ColumnRules, Learned, Summary
from lightning_recsys.data.preparation.source import RawSource
from lightning_recsys.data.preparation.vocabulary import ValueCounter, count_values
from lightning_recsys.data.raw import Block, RawColumns


def learn(source: RawSource, rules: ColumnRules, *, folder: Path, spill: Path) -> Learned:
    """Read the training rows once; writes the vocabularies.

    Args:
        source: The raw files whose training rows are read.
        rules: The rules that say which vocabularies and statistics are learned.
        folder: The folder that the vocabularies are written to.
        spill: A folder for counts that do not fit into memory.
    """
    min_counts = rules.vocabularies(source.format)
    counter = ValueCounter(list(min_counts), folder=spill)
    total: Summary | None = None

    def look(file: int, block: Block, rows: RawColumns) -> tuple[Summary, dict[str, pa.Table]]:
        rows = rows.keep(source.assign(file, block, rows) == 0)
        columns = {}
        if min_counts:
            columns = rules.categories(rows, source.format)
            columns |= {name: bags.values for name, bags in rows.bags.items()}
        return rules.summary(rows, source.format), {name: count_values(columns[name]) for name in min_counts}

    files = [i for i, split in enumerate(source.splits) if split in (None, "train")]
    for *_, (summary, counts) in source.pass_over("learn", files, look):
        total = summary if total is None else rules.merge(total, summary)
        counter.add(counts)
    dense = [] if total is None else total.tolist()
    if not min_counts:
        return Learned(dense)
    sizes, least = counter.write(folder, min_count=min_counts, max_vocabulary=rules.max_vocabulary)
    return Learned(dense, sizes, least, least > min(min_counts.values()))
