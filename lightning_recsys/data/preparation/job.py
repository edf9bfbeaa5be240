"""From raw text to a folder of prepared rows: streaming, restartable, in bounded memory."""

from __future__ import annotations

import fcntl
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from lightning_recsys.__about__ import __version__
from lightning_recsys.data.module import Split
from lightning_recsys.data.preparation.learning import Learned, learn, learning_files
from lightning_recsys.data.preparation.parallel import ordered_map
from lightning_recsys.data.preparation.preprocessing import IdRule, Preprocessing
from lightning_recsys.data.preparation.segments import Records, Segment
from lightning_recsys.data.preparation.shards import GROUP_ROWS, IdBags, Rows, shard_schema
from lightning_recsys.data.preparation.source import ParsedBlock, RawSource
from lightning_recsys.data.preparation.splits import SPLITS, SplitRule
from lightning_recsys.data.preparation.vocabulary import load_table, vocabulary_file
from lightning_recsys.data.prepared.manifest import MANIFEST, Feature, Manifest, write_atomically
from lightning_recsys.data.raw import RawColumns, RawFormat, TextBlock

BLOCK_BYTES = 4 << 20
WORK = ".work"  # what a restart needs; removed at the end
VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class Progress:
    """How far the work is.

    Args:
        phase: ``learn`` while the training rows are read for statistics and vocabularies, then ``write``.
        rows: Rows that this process has read in this phase.
        bytes: Bytes of raw files that are done in this phase, by earlier runs too.
        total_bytes: Bytes of raw files that this phase reads.
    """

    phase: Literal["learn", "write"]
    rows: int
    bytes: int
    total_bytes: int


class Preparation:
    """Turns raw files into prepared rows.

    The raw text is cut into blocks of whole lines; a number of blocks makes a segment, whose rows become one shard of
    each split. A segment is finished when its record is on the disk, after its shards. A process that is killed loses
    the segment it was at: :meth:`run` in a new process, with the same options and inputs, goes on behind the last
    record. Where training rows have to be learned from first (vocabularies, smallest values), that pass counts as one
    piece.

    Args:
        out: The folder to make.
        raw_format: How to read the lines.
        files: The raw files.
        split: Which rows are for evaluation; may bring files of its own.
        preprocessing: What happens to the columns.
        on_bad_row: ``error`` raises ``ValueError`` at the first bad row, ``skip`` counts them.
        shard_bytes: Raw text that makes a shard, at least; the last one of a file is smaller.
        compression: Of the shards: ``none``, or ``zstd``, which is a third smaller and slower to read.
        num_threads: Threads that parse.
        on_progress: Told after every block.

    Raises:
        ValueError: an option is not allowed, or a raw file is empty.
    """

    def __init__(
        self,
        out: Path,
        *,
        raw_format: RawFormat,
        files: Sequence[Path],
        split: SplitRule,
        preprocessing: Preprocessing,
        on_bad_row: Literal["error", "skip"] = "error",
        shard_bytes: int = 256 << 20,
        compression: Literal["none", "zstd"] = "none",
        num_threads: int = 2,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        _check("on_bad_row", on_bad_row, "error or skip", ok=on_bad_row in ("error", "skip"))
        _check("compression", compression, "none or zstd", ok=compression in ("none", "zstd"))
        _check("shard_bytes", shard_bytes, "at least 1", ok=shard_bytes >= 1)
        _check("num_threads", num_threads, "at least 1", ok=num_threads >= 1)
        self._out = out
        self._work = out / WORK
        self._preprocessing = preprocessing
        block_bytes = min(BLOCK_BYTES, shard_bytes)
        self._blocks_per_segment = max(1, shard_bytes // block_bytes)
        self._compression = compression
        self._num_threads = num_threads
        self._on_progress = on_progress or (lambda _: None)
        self._format = raw_format
        self._source = RawSource(raw_format, files=files, split=split, on_bad_row=on_bad_row, block_bytes=block_bytes)
        self._plan = {
            "options": {
                "data": raw_format.options(),
                "split": split.options(),
                "preprocessing": asdict(preprocessing),
                "on_bad_row": on_bad_row,
                "shard_bytes": shard_bytes,
                "compression": compression,
            },
            "inputs": [asdict(file) for file in self._source.files],
        }

    def run(self) -> Manifest:
        """Do what is left to do.

        Raises:
            ValueError: a row is bad (unless bad ones are skipped), or the folder was begun with other options or
                inputs, or another process is at work in it, or there are no training rows.
        """
        if (self._out / MANIFEST).is_file():
            manifest = Manifest.load(self._out)
            self._compare(manifest.details)
            shutil.rmtree(self._work, ignore_errors=True)  # where a run was killed at the very end
            return manifest
        self._work.mkdir(parents=True, exist_ok=True)
        with self._lock(), ThreadPoolExecutor(self._num_threads) as pool:
            self._begin()
            learned = self._learn(pool) if self._preprocessing.learns else Learned()
            records = Records(self._work)
            features = self._features(learned)
            self._write(pool, learned, records, features)
            manifest = self._manifest(learned, records, features)
            if not manifest.splits["train"]:
                raise ValueError(f"{self._out}: no row is left for training. See split and on_bad_row.")
            manifest.save(self._out)
        shutil.rmtree(self._work)
        return manifest

    # --- beginning, and going on -------------------------------------------------------------------------------------

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self._work / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it when the process dies
            except BlockingIOError:
                raise ValueError(f"{self._out}: another process is preparing rows in this folder.") from None
            yield

    def _begin(self) -> None:
        path = self._work / "plan.json"
        if path.is_file():
            self._compare(json.loads(path.read_text(encoding="utf-8")))
        else:
            write_atomically(path, json.dumps(self._plan))

    def _compare(self, begun: Mapping[str, Any]) -> None:
        plan = json.loads(json.dumps(self._plan))
        before, now = ({**_flat(x["options"]), "number of raw files": len(x["inputs"])} for x in (begun, plan))
        for old, new in zip(begun["inputs"], plan["inputs"], strict=False):
            before[f"raw file {old['path']}"] = f"{old['bytes']} bytes, checksum {old['fingerprint']}"
            now[f"raw file {old['path']}"] = (
                f"{new['bytes']} bytes, checksum {new['fingerprint']}" if new["path"] == old["path"] else new["path"]
            )
        for name in before | now:
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"{self._out} was begun with another {name}: {before.get(name)} then, {now.get(name)} now. Go on "
                    "with what it was begun with, choose another out, or remove the folder."
                )

    # --- the two passes ----------------------------------------------------------------------------------------------

    def _learn(self, pool: ThreadPoolExecutor) -> Learned:
        path = self._work / "learned.json"
        if path.is_file():
            return Learned.load(path)
        files = learning_files(self._source)
        learned = learn(
            self._source,
            self._preprocessing,
            folder=self._out / VOCABULARY,
            spill=self._work / "counts",
            pool=pool,
            ahead=self._num_threads + 1,
            report=self._reporter("learn", sum(self._source.files[i].bytes for i in files)),
        )
        learned.save(path)
        return learned

    def _write(
        self, pool: ThreadPoolExecutor, learned: Learned, records: Records, features: Mapping[str, Feature]
    ) -> None:
        """Write the segments that have no record yet."""
        folder = self._out / VOCABULARY
        tables = {name: load_table(folder / vocabulary_file(name)) for name in learned.vocabulary_sizes}
        rule = IdRule(self._preprocessing, tables=tables, number_base=self._format.number_base)
        schema = shard_schema(self._preprocessing.dense_names(self._format), features)
        minimum = np.array(learned.minimum)
        file, start, first_line = records.position
        total = sum(x.bytes for x in self._source.files)
        report = self._reporter("write", total)
        report(0, sum(x.bytes for x in self._source.files[:file]))
        while file < len(self._source.files):
            consumed = 0
            blocks = self._source.read(file, start=start, first_line=first_line)
            work = partial(self._transform, file, rule, minimum)
            for first in blocks:
                segment = islice(chain([first], blocks), self._blocks_per_segment)
                with Segment(self._out, len(records), schema=schema, compression=self._compression) as shards:
                    for parsed, rows, missing in ordered_map(pool, work, segment, ahead=self._num_threads + 1):
                        shards.write(parsed, rows, missing)
                        block = parsed.block
                        report(len(parsed.rows), block.consumed - consumed)
                        consumed = block.consumed
                    records.append({"position": (file, block.end, block.next_line), **shards.finish()})
            file, start, first_line = file + 1, 0, 1

    def _transform(
        self, file: int, rule: IdRule, minimum_I: NDArray[np.float64], block: TextBlock
    ) -> tuple[ParsedBlock, dict[Split, Rows], dict[str, int]]:
        """Parse a block; its rows by split as they are stored, and how many values each column lacks."""
        parsed = self._source.parse(file, block)
        rows = parsed.rows
        missing = dict(zip(self._format.dense, np.isnan(rows.dense_IN).sum(axis=1).tolist(), strict=True))
        missing |= {
            name: pc.sum(pc.equal(pc.binary_length(values), 0)).as_py() or 0 for name, values in rows.categories.items()
        }
        parts: dict[Split, Rows] = {}
        for position, split in enumerate(SPLITS):
            mask = parsed.split_N == position
            if mask.any():
                parts[split] = self._stored(rows if mask.all() else rows.keep(mask), rule, minimum_I)
        return parsed, parts, missing

    def _stored(self, rows: RawColumns, rule: IdRule, minimum_I: NDArray[np.float64]) -> Rows:
        return Rows(
            rows.labels_N,
            self._preprocessing.dense_features(rows, minimum_I),
            {
                name: rule.ids(name, values)
                for name, values in self._preprocessing.categories(rows, self._format).items()
            },
            {
                name: IdBags(rule.ids(name, bags.values), bags.lengths_N, bags.weights)
                for name, bags in rows.bags.items()
            },
        )

    def _reporter(self, phase: Literal["learn", "write"], total: int) -> Callable[[int, int], None]:
        rows = done = 0

        def report(more_rows: int, more_bytes: int) -> None:
            nonlocal rows, done
            rows += more_rows
            done += more_bytes
            self._on_progress(Progress(phase, rows, done, total))

        return report

    # --- what came of it ---------------------------------------------------------------------------------------------

    def _features(self, learned: Learned) -> dict[str, Feature]:
        features = {}
        bags = self._format.bags
        for name in (*self._preprocessing.category_names(self._format), *bags):
            size = learned.vocabulary_sizes.get(name)
            features[name] = Feature(
                self._preprocessing.num_ids if size is None else size + 1,
                bag=name in bags,
                weighted=bags.get(name, False),
                vocabulary=None if size is None else f"{VOCABULARY}/{vocabulary_file(name)}",
            )
        return features

    def _manifest(self, learned: Learned, records: Records, features: Mapping[str, Feature]) -> Manifest:
        return Manifest(
            dense=self._preprocessing.dense_names(self._format),
            features=features,
            splits={split: records.shards(split) for split in SPLITS},
            group_rows=GROUP_ROWS,
            details={
                **self._plan,
                "learned": {"minimum": list(learned.minimum), "min_count": learned.min_count},
                "statistics": records.statistics(),
                "versions": {
                    "lightning_recsys": __version__,
                    "python": platform.python_version(),
                    **{name: metadata.version(name) for name in ("numpy", "pyarrow")},
                },
            },
        )


def _check(name: str, value: object, allowed: str, *, ok: bool) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {value!r}.")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
