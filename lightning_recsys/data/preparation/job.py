"""From raw text to a folder of prepared rows: streaming, restartable, in bounded memory."""

from __future__ import annotations

import fcntl
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
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
from lightning_recsys.data.options import Split, check_option
from lightning_recsys.data.preparation.learning import learn
from lightning_recsys.data.preparation.preprocessing import ColumnRules, Learned, Summary
from lightning_recsys.data.preparation.schema_split import BySchema, survey_rows
from lightning_recsys.data.preparation.segments import Records, Segment
from lightning_recsys.data.preparation.shards import GROUP_ROWS, Ids, Rows, shard_schema
from lightning_recsys.data.preparation.source import Progress, RawSource
from lightning_recsys.data.preparation.splits import SPLITS, SplitRule
from lightning_recsys.data.preparation.vocabulary import load_table, vocabulary_file
from lightning_recsys.data.prepared.manifest import MANIFEST, Feature, Manifest, write_atomically
from lightning_recsys.data.raw import Block, Position, RawColumns, RawFormat
from lightning_recsys.data.raw.columns import OnBadRow, SkippedRows
from lightning_recsys.data.raw.kernels import KeyTable

BLOCK_BYTES = 4 << 20
WORK = ".work"  # what a restart needs; removed at the end
VOCABULARY = "vocabulary"


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
        on_bad_row: OnBadRow = "error",
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
        self._check_inputs = check  # before the rows count as whole
        self._format = raw_format
        # Reads the files in passes over blocks, and says which split each row is in.
        self._source = RawSource(
            raw_format,
            files=files,
            split=split,
            on_bad_row=on_bad_row,
            block_bytes=block_bytes,
            num_threads=num_threads,
            on_progress=on_progress or (lambda _: None),
        )
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
        with self._lock(), self._source.threads():
            self._compare(self._once("plan", lambda: self._plan))
            self._survey()
            learned = self._rules.known(self._out / VOCABULARY, self._format) or self._learn()
            records = Records(self._work)
            features = self._features(learned)
            self._write(learned, records, features)
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

    def _once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The value that an earlier run has written down under a name; else it is made and written down now."""
        path = self._work / f"{name}.json"
        if not path.is_file():
            write_atomically(path, json.dumps(make()))
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

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

    def _survey(self) -> None:
        """Look at all rows, if the split needs that."""
        rule = self._source.split
        if isinstance(rule, BySchema) and rule.surveys:
            found = self._once("rows-before", lambda: survey_rows(self._source, rule, spill=self._work / "times"))
            self._source.rows_before, rule.bounds = found["rows_before"], tuple(found["bounds"])

    def _learn(self) -> Learned:
        folder, spill = self._out / VOCABULARY, self._work / "counts"
        learned = self._once("learned", lambda: asdict(learn(self._source, self._rules, folder=folder, spill=spill)))
        return Learned(**learned)

    def _write(self, learned: Learned, records: Records, features: Mapping[str, Feature]) -> None:
        """Write the segments that have no record yet."""
        folder = self._out / VOCABULARY
        tables = {name: load_table(folder / vocabulary_file(name)) for name in learned.vocabulary_sizes}
        schema = shard_schema(self._rules.dense_names(self._format), features)
        source, work = self._source, partial(self._transform, tables, learned.summary_IK)
        file, position = records.position
        whole = not len(records)  # else this process does not see all rows
        source.begin_pass("write", range(len(source.files)), first=file)
        while file < len(source.files):
            path, blocks = Path(source.files[file].path), source.read(file, position)
            for first in blocks:
                segment = islice(chain([first], blocks), self._blocks_per_segment)
                with Segment(self._out, len(records), path, schema=schema, compression=self._compression) as shards:
                    for block, rows, (parts, missing) in source.through(file, segment, partial(work, file)):
                        shards.write(rows, parts, missing)
                        position = block.next_position
                    records.append({"position": (file, *position), **shards.finish()})
            file, position = file + 1, Position()
        if whole:
            source.end_pass()

    def _transform(
        self, tables: Mapping[str, KeyTable], summary_IK: Summary, file: int, block: Block, rows: RawColumns
    ) -> tuple[dict[Split, Rows], dict[str, int]]:
        """The rows of a block by split as they are stored, and how many values each column lacks."""
        missing = dict(zip(self._format.dense, np.isnan(rows.dense_IN).sum(axis=1).tolist(), strict=True))
        missing |= {name: _num_missing(values) for name, values in rows.categories.items()}
        split_N = self._source.assign(file, block, rows)
        parts: dict[Split, Rows] = {}
        for position, split in enumerate(SPLITS):
            if (mask_N := split_N == position).any():
                parts[split] = self._stored(rows.keep(mask_N), tables, summary_IK)
        return parts, missing

    def _stored(self, rows: RawColumns, tables: Mapping[str, KeyTable], summary_IK: Summary) -> Rows:
        def ids(name: str, values: pa.Array) -> Ids:
            return self._rules.look_up(name, values, tables.get(name), self._format)

        return Rows(
            rows.labels_N,
            self._rules.dense_features(rows, summary_IK, self._format),
            {name: ids(name, values) for name, values in self._rules.categories(rows, self._format).items()},
            {name: replace(bags, values=ids(name, bags.values)) for name, bags in rows.bags.items()},
        )

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
        read = records.rows()
        for file in self._source.files:
            path = Path(file.path)
            read.setdefault(path, SkippedRows()).comments += self._format.num_comments(path)
        read |= self._format.side_rows()
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
                "rows": {str(path): rows.account for path, rows in read.items()},
                "skipped": {str(path): asdict(rows) for path, rows in read.items() if rows.bad},
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
