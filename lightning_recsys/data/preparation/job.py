"""From raw text to a folder of prepared rows: streaming, restartable, in bounded memory."""

from __future__ import annotations

import fcntl
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_recsys.__about__ import __version__
from lightning_recsys.data.files import InputFile
from lightning_recsys.data.module import Split, check_option
from lightning_recsys.data.preparation.learning import learn
from lightning_recsys.data.preparation.parallel import ordered_map
from lightning_recsys.data.preparation.preprocessing import ColumnRules, Learned, Summary
from lightning_recsys.data.preparation.schema_split import BySchema, survey_rows
from lightning_recsys.data.preparation.segments import Records, Segment
from lightning_recsys.data.preparation.shards import GROUP_ROWS, Ids, Rows, shard_schema
from lightning_recsys.data.preparation.source import ParsedBlock, RawSource
from lightning_recsys.data.preparation.splits import SPLITS, SplitRule, Survey
from lightning_recsys.data.preparation.vocabulary import load_table, vocabulary_file
from lightning_recsys.data.prepared.manifest import MANIFEST, Feature, Manifest, write_atomically
from lightning_recsys.data.raw import Block, Position, RawColumns, RawFormat
from lightning_recsys.data.raw.kernels import KeyTable

BLOCK_BYTES = 4 << 20
WORK = ".work"  # what a restart needs; removed at the end
VOCABULARY = "vocabulary"
Phase = Literal["survey", "learn", "write"]


@dataclass(frozen=True)
class Progress:
    """How far the work is.

    Args:
        phase: ``survey`` while all rows are read to know how they are split, where that is needed; ``learn`` while the
            training rows are read for statistics and vocabularies; then ``write``.
        rows: Rows that this process has read in this phase.
        bytes: Bytes of raw files that are done in this phase, by earlier runs too.
        total_bytes: Bytes of raw files that this phase reads.
    """

    phase: Phase
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
        out: The folder that is made for the prepared rows.
        raw_format: The format of the raw files, which parses their lines.
        files: The raw files, in the order in which their rows are numbered.
        split: Which rows are for evaluation; may bring files of its own.
        preprocessing: The rules that make ids and numbers of the columns.
        on_bad_row: ``error`` raises ``ValueError`` at the first bad row, ``skip`` counts them.
        shard_bytes: Raw text that makes a shard, at least; the last one of a file is smaller.
        compression: How shards are compressed: ``none``, or ``zstd``, which is a third smaller and slower to read.
        num_threads: Number of threads that parse.
        on_progress: Told when a phase begins, and after every block.
        check: Called when all rows are written, before they count as whole; may raise.

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
        preprocessing: ColumnRules,
        on_bad_row: Literal["error", "skip"] = "error",
        shard_bytes: int = 256 << 20,
        compression: Literal["none", "zstd"] = "none",
        num_threads: int = 2,
        on_progress: Callable[[Progress], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        check_option("on_bad_row", on_bad_row, "error or skip", ok=on_bad_row in ("error", "skip"))
        check_option("compression", compression, "none or zstd", ok=compression in ("none", "zstd"))
        check_option("shard_bytes", shard_bytes, "at least 1", ok=shard_bytes >= 1)
        check_option("num_threads", num_threads, "at least 1", ok=num_threads >= 1)
        self._out = out
        self._work = out / WORK  # records of what is finished; there until the manifest is written
        preprocessing.check(raw_format)
        self._rules = preprocessing
        block_bytes = min(BLOCK_BYTES, shard_bytes)
        self._blocks_per_segment = max(1, shard_bytes // block_bytes)  # how many make a shard of each split
        self._compression = compression  # of the shards
        self._num_threads = num_threads  # that parse
        self._on_progress = on_progress or (lambda _: None)
        self._check_inputs = check  # before the rows count as whole
        self._format = raw_format
        # Reads the files in blocks, and says which split each row is in.
        self._source = RawSource(raw_format, files=files, split=split, on_bad_row=on_bad_row, block_bytes=block_bytes)
        # What a preparation that goes on must have in common with the one that began: it is refused otherwise.
        self._plan = {
            "options": {
                "data": raw_format.options(),
                "split": split.options(),
                "preprocessing": preprocessing.options(),
                "on_bad_row": on_bad_row,
                "shard_bytes": shard_bytes,
                "compression": compression,
            },
            "inputs": [asdict(file) for file in (*self._source.files, *map(InputFile.of, raw_format.side_files()))],
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
            self._survey(pool)
            learned = (
                self._learn(pool)
                if self._rules.learns(self._format)
                else self._rules.known(self._out / VOCABULARY, self._format)
            )
            records = Records(self._work)
            features = self._features(learned)
            self._write(pool, learned, records, features)
            manifest = self._manifest(learned, records, features)
            if None in self._source.splits and not manifest.splits["train"]:
                raise ValueError(f"{self._out}: no row is left for training. See split and on_bad_row.")
            self._check_inputs()
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
        moved = [names for names in zip(before, now, strict=False) if names[0] != names[1]]
        first, second = (", ".join(names) for names in zip(*moved, strict=True)) if moved else ("", "")
        for old, new in zip(begun["inputs"], plan["inputs"], strict=False):
            before[f"raw file {old['path']}"] = f"{old['bytes']} bytes, checksum {old['fingerprint']}"
            now[f"raw file {old['path']}"] = (
                f"{new['bytes']} bytes, checksum {new['fingerprint']}" if new["path"] == old["path"] else new["path"]
            )
        differences = {name: (before.get(name), now.get(name)) for name in before | now}
        differences["order of columns"] = first, second  # which is that of the shards; named last
        for name, (then, here) in differences.items():
            if then != here:
                raise ValueError(
                    f"{self._out} was begun with another {name}: {then} then, {here} now. Go on with "
                    "what it was begun with, choose another out, or remove the folder."
                )

    # --- the passes --------------------------------------------------------------------------------------------------

    def _survey(self, pool: ThreadPoolExecutor) -> None:
        """Look at all rows, if the split needs that."""
        rule, path = self._source.split, self._work / "survey.json"
        if not isinstance(rule, BySchema) or not rule.surveys:
            return
        if path.is_file():
            survey = Survey.from_json(path.read_text(encoding="utf-8"))
        else:
            survey = survey_rows(
                self._source,
                rule,
                spill=self._work / "times",
                pool=pool,
                ahead=self._num_threads + 1,
                report=self._reporter("survey", self._bytes(lambda split: split is None)),
            )
            write_atomically(path, survey.to_json())
        self._source.survey, rule.bounds = survey, survey.bounds

    def _learn(self, pool: ThreadPoolExecutor) -> Learned:
        path = self._work / "learned.json"
        if path.is_file():
            return Learned.load(path)
        learned = learn(
            self._source,
            self._rules,
            folder=self._out / VOCABULARY,
            spill=self._work / "counts",
            pool=pool,
            ahead=self._num_threads + 1,
            report=self._reporter("learn", self._bytes(lambda split: split in (None, "train"))),
        )
        learned.save(path)
        return learned

    def _write(
        self, pool: ThreadPoolExecutor, learned: Learned, records: Records, features: Mapping[str, Feature]
    ) -> None:
        """Write the segments that have no record yet."""
        folder = self._out / VOCABULARY
        tables = {name: load_table(folder / vocabulary_file(name)) for name in learned.vocabulary_sizes}
        schema = shard_schema(self._rules.dense_names(self._format), features)
        summary_IK = learned.summary_IK
        file, position = records.position
        whole = not len(records)  # else this process does not see all rows
        self._source.begin_pass(last=True)
        report = self._reporter("write", sum(x.bytes for x in self._source.files))
        report(0, sum(x.bytes for x in self._source.files[:file]))
        while file < len(self._source.files):
            consumed = 0
            blocks = self._source.read(file, position)
            work = partial(self._transform, file, tables, summary_IK)
            for first in blocks:
                segment = islice(chain([first], blocks), self._blocks_per_segment)
                path = Path(self._source.files[file].path)
                with Segment(self._out, len(records), path, schema=schema, compression=self._compression) as shards:
                    for parsed, rows, missing in ordered_map(pool, work, segment, ahead=self._num_threads + 1):
                        self._source.count(file, parsed.rows)
                        shards.write(parsed, rows, missing)
                        block = parsed.block
                        report(len(parsed.rows), block.consumed - consumed)
                        consumed = block.consumed
                    records.append({"position": (file, *block.next_position), **shards.finish()})
            file, position = file + 1, Position()
        if whole:
            self._source.end_pass(range(len(self._source.files)))

    def _transform(
        self, file: int, tables: Mapping[str, KeyTable], summary_IK: Summary, block: Block
    ) -> tuple[ParsedBlock, dict[Split, Rows], dict[str, int]]:
        """Parse a block; its rows by split as they are stored, and how many values each column lacks."""
        parsed = self._source.parse(file, block)
        rows = parsed.rows
        missing = dict(zip(self._format.dense, np.isnan(rows.dense_IN).sum(axis=1).tolist(), strict=True))
        missing |= {name: _num_missing(values) for name, values in rows.categories.items()}
        parts: dict[Split, Rows] = {}
        for position, split in enumerate(SPLITS):
            mask = parsed.split_N == position
            if mask.any():
                parts[split] = self._stored(rows.keep(mask), tables, summary_IK)
        return parsed, parts, missing

    def _stored(self, rows: RawColumns, tables: Mapping[str, KeyTable], summary_IK: Summary) -> Rows:
        def ids(name: str, values: pa.Array) -> Ids:
            return self._rules.look_up(name, values, tables.get(name), self._format)

        return Rows(
            rows.labels_N,
            self._rules.dense_features(rows, summary_IK, self._format),
            {name: ids(name, values) for name, values in self._rules.categories(rows, self._format).items()},
            {name: replace(bags, values=ids(name, bags.values)) for name, bags in rows.bags.items()},
        )

    def _bytes(self, wanted: Callable[[Split | None], bool]) -> int:
        """Size of the raw files whose rows are of a split, or are split."""
        files, splits = self._source.files, self._source.splits
        return sum(file.bytes for file, split in zip(files, splits, strict=True) if wanted(split))

    def _reporter(self, phase: Phase, total: int) -> Callable[[int, int], None]:
        rows = done = 0

        def report(more_rows: int, more_bytes: int) -> None:
            nonlocal rows, done
            rows += more_rows
            done += more_bytes
            self._on_progress(Progress(phase, rows, done, total))

        report(0, 0)  # a phase begins before its first block is done, which rates count from
        return report

    # --- what came of it ---------------------------------------------------------------------------------------------

    def _features(self, learned: Learned) -> dict[str, Feature]:
        features = {}
        bags, hashed = self._format.bags, self._rules.num_hashed(self._format)
        for name in (*self._rules.category_names(self._format), *bags):
            size = learned.vocabulary_sizes.get(name)
            features[name] = Feature(
                hashed[name] if size is None else size + self._rules.first_id,
                bag=name in bags,
                weighted=bags.get(name, False),
                vocabulary=None if size is None else f"{VOCABULARY}/{vocabulary_file(name)}",
            )
        return features

    def _manifest(self, learned: Learned, records: Records, features: Mapping[str, Feature]) -> Manifest:
        return Manifest(
            dense=self._rules.dense_names(self._format),
            features=features,
            splits={split: records.shards(split) for split in SPLITS},
            group_rows=GROUP_ROWS,
            details={
                **self._plan,
                "learned": {
                    **(self._rules.describe(learned.summary_IK, self._format) if learned.dense else {}),
                    "min_count": learned.min_count,
                    "raised": learned.raised,
                },
                "statistics": records.statistics(),
                "skipped": {
                    str(path): asdict(rows) for path, rows in (records.skipped() | dict(self._format.skipped())).items()
                },
                "versions": {
                    "lightning_recsys": __version__,
                    "python": platform.python_version(),
                    **{name: metadata.version(name) for name in ("numpy", "pyarrow")},
                },
            },
        )


def _num_missing(values: pa.Array) -> int:
    if pa.types.is_dictionary(values.type):
        return int(values.null_count)
    return pc.sum(pc.equal(pc.binary_length(values), 0)).as_py() or 0


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping) and value  # a column without options is there all the same
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat
