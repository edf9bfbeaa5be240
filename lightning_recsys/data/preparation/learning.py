"""The first pass: what has to be known of the training rows before a row can be written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from lightning_recsys.data.preparation.parallel import ordered_map
from lightning_recsys.data.preparation.preprocessing import ColumnRules, Learned, Summary
from lightning_recsys.data.preparation.source import ParsedBlock, RawSource
from lightning_recsys.data.preparation.vocabulary import ValueCounter, count_values
from lightning_recsys.data.raw import Block

Report = Callable[[int, int], None]
"""Takes the rows and the bytes of raw files that were read since the last call."""


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
        source: The raw files whose training rows are read.
        rules: The rules that say which vocabularies and statistics are learned.
        folder: The folder that the vocabularies are written to.
        spill: A folder for counts that do not fit into memory.
        pool: Threads that parse and count.
        ahead: How many blocks may be in work.
        report: Called after each block that was read.
    """
    min_counts = rules.vocabularies(source.format)
    counter = ValueCounter(list(min_counts), folder=spill)
    summaries: list[Summary] = []

    def look(task: tuple[int, Block]) -> tuple[ParsedBlock, Summary, dict[str, pa.Table]]:
        file, block = task
        parsed = source.parse(file, block)
        rows = parsed.rows.keep(parsed.split_N == 0)
        columns = {}
        if min_counts:
            columns = rules.categories(rows, source.format)
            columns |= {name: bags.values for name, bags in rows.bags.items()}
        counts = {name: count_values(columns[name]) for name in min_counts}
        return parsed, rules.summary(rows, source.format), counts

    files = [i for i, split in enumerate(source.splits) if split in (None, "train")]
    source.begin_pass()
    for file in files:
        consumed = 0
        tasks = ((file, block) for block in source.read(file))
        for parsed, summary, counts in ordered_map(pool, look, tasks, ahead=ahead):
            source.count(file, parsed.rows)
            summaries = [rules.merged([*summaries, summary])]
            counter.add(counts)
            report(len(parsed.rows), parsed.block.consumed - consumed)
            consumed = parsed.block.consumed
    source.end_pass(files)
    dense = rules.merged(summaries).tolist()
    if not min_counts:
        return Learned(dense)
    sizes, least = counter.write(folder, min_count=min_counts, max_vocabulary=rules.max_vocabulary)
    return Learned(dense, sizes, least, least > min(min_counts.values()))
