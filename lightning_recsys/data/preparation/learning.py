"""The first pass: what has to be known of the training rows before a row can be written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.data.preparation.parallel import ordered_map
from lightning_recsys.data.preparation.preprocessing import Preprocessing
from lightning_recsys.data.preparation.source import RawSource
from lightning_recsys.data.preparation.vocabulary import ValueCounter, count_values
from lightning_recsys.data.prepared.manifest import write_atomically
from lightning_recsys.data.raw import TextBlock

Report = Callable[[int, int], None]
"""Takes the rows and the bytes of raw files that were read since the last call."""


@dataclass(frozen=True)
class Learned:
    """What was learned from the training rows.

    Args:
        minimum: Smallest value of each dense feature; empty where it is not needed.
        vocabulary_sizes: Values of each vocabulary; empty where ids are hashed.
        min_count: How often the rarest value of a vocabulary occurs, at least.
    """

    minimum: tuple[float, ...] = ()
    vocabulary_sizes: Mapping[str, int] = field(default_factory=dict)
    min_count: int = 0

    @classmethod
    def load(cls, path: Path) -> Learned:
        """What :meth:`save` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(tuple(content["minimum"]), content["vocabulary_sizes"], content["min_count"])

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        write_atomically(path, json.dumps(asdict(self)))


def learning_files(source: RawSource) -> list[int]:
    """Numbers of the files that hold training rows."""
    return [i for i, split in enumerate(source.splits) if split in (None, "train")]


def learn(
    source: RawSource,
    preprocessing: Preprocessing,
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
        preprocessing: What is to be learned.
        folder: Where the vocabularies go.
        spill: A folder for counts that do not fit into memory.
        pool: Threads that parse and count.
        ahead: How many blocks may be in work.
        report: Told after each block.
    """
    counted = preprocessing.ids == "vocabulary"
    names = [*preprocessing.category_names(source.format), *source.format.bags] if counted else []
    counter = ValueCounter(names, folder=spill)
    minimum = np.full(len(source.format.dense), np.inf)

    def look(task: tuple[int, TextBlock]) -> tuple[TextBlock, int, NDArray[np.float64], dict[str, pa.Table]]:
        file, block = task
        parsed = source.parse(file, block)
        rows = parsed.rows.keep(parsed.split_N == 0)
        smallest = np.nan_to_num(rows.dense_IN).min(axis=1, initial=np.inf)
        columns = {}
        if counted:
            columns = preprocessing.categories(rows, source.format)
            columns |= {name: bags.values for name, bags in rows.bags.items()}
        return block, len(parsed.rows), smallest, {name: count_values(values) for name, values in columns.items()}

    for file in learning_files(source):
        consumed = 0
        for block, num_rows, smallest, counts in ordered_map(
            pool, look, ((file, block) for block in source.read(file)), ahead=ahead
        ):
            minimum = np.minimum(minimum, smallest)
            counter.add(counts)
            report(num_rows, block.consumed - consumed)
            consumed = block.consumed
    learned = Learned(tuple(np.where(np.isfinite(minimum), minimum, 0).tolist()))
    if not counted:
        return learned
    sizes, min_count = counter.write(
        folder, min_count=preprocessing.min_count, max_vocabulary=preprocessing.max_vocabulary
    )
    return Learned(learned.minimum, sizes, min_count)
