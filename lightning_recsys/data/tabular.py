"""Anybody's own rows, in any format that a schema may name, by that schema alone."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml  # type: ignore[import-untyped]
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.trainer.states import TrainerFn
from rich.console import Console

from lightning_recsys.__about__ import __version__
from lightning_recsys.data.files import check_md5, file_identities
from lightning_recsys.data.frames import FRAMES, frame_file
from lightning_recsys.data.guesses.guessing import guess_schema
from lightning_recsys.data.options import Split, check_option
from lightning_recsys.data.preparation import ByFile, BySchema, Preparation, SchemaRules, SplitRule
from lightning_recsys.data.preparation.cache import Lease, RowCache
from lightning_recsys.data.preparation.encoding import Encoding, check_features, describe_features
from lightning_recsys.data.preparation.progress import progress_bar
from lightning_recsys.data.prepared.manifest import Manifest
from lightning_recsys.data.prepared.module import PreparedReader
from lightning_recsys.data.raw import TabularFormat
from lightning_recsys.data.raw.columns import OnBadRow, SkippedRows
from lightning_recsys.data.tables.schema import Schema

_VERSION = 8  # of what a schema makes of a file: another one where ids, numbers or splits come out otherwise
_ALL = 1 << 31  # values of the vocabularies; more do not fit into their tables
_PATIENCE = 2.0  # seconds until a progress bar is shown

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PredictedRows:
    raw_format: TabularFormat
    column: str | None

    def __iter__(self) -> Iterator[pa.Array]:
        for path in self.raw_format.files("predict"):
            yield from self.raw_format.good_rows(path, self.column)


class TabularDataModule(PreparedReader):
    """Rows of one's own files: what the columns mean is said by a schema.

    The rows are prepared when they are first asked for, into a cache folder where later runs find them, and are read
    from there: in memory only a window of them at a time. Which rows those are hangs on the schema, ``on_bad_row``, and
    path, size, time of change and content (of both ends) of each file; a file that changed is prepared anew.

    Vocabularies, means and deviations are learned from the training rows alone. They are part of a checkpoint, so that
    a model can be evaluated on new files without the rows that it was trained on: hand the checkpoint's entry to
    :meth:`load_state_dict`, or ``ckpt_path`` to the trainer.

    Where the schema's ``files`` name some under ``predict``, a trainer predicts those: their rows need no label.

    Args:
        schema: Path of a schema file, or its content; see ``docs/schema.md``.
        root: Where the schema's relative paths start; the schema file's own folder if absent, else the current one.
        batch_size: Number of rows in the batch of one rank.
        on_bad_row: ``error`` stops at the first row that does not fit the schema, and says where it is; ``skip`` leaves
            such rows out, counts them in :attr:`skipped_rows` and logs what was wrong. What became of all rows of each
            file stands in :attr:`rows_read`.
        checksums: MD5 sums by file name, as a publisher states them: a file of that name with another sum is refused
            when it is prepared.
        cache: Folder for prepared rows; ``None`` for ``~/.cache/lightning_recsys`` (or below ``$XDG_CACHE_HOME``).
            Machines of one run may share it, and then prepare once; else each prepares into its own.
        cache_gigabytes: Once the folder takes more, rows that were not used for longest are removed from it.
        shuffle_window: Number of rows that are shuffled among each other; see
            :class:`~lightning_recsys.data.prepared.module.PreparedReader`, also for what follows. By default a table of
            up to a million rows is shuffled as a whole.
        reader: Whether each worker reads its rows (``local``) or one process of the machine reads for all (``shared``).
        prefetch_batches: Number of batches that are made ahead.
        seed: Order of the training rows; a new order each epoch. ``None`` counts as 0.
        drop_last: Leave out the training rows that do not fill a batch on every rank.

    Raises:
        FileNotFoundError: there is no such schema file.
        ValueError: the schema has a mistake, which the message names.
    """

    def __init__(
        self,
        *,
        schema: str | Path | Mapping[str, Any] | Schema,
        root: str | Path | None = None,
        batch_size: int = 2048,
        on_bad_row: OnBadRow = "error",
        checksums: Mapping[str, str] | None = None,
        cache: str | Path | None = None,
        cache_gigabytes: float = 50.0,
        shuffle_window: int = 1 << 20,
        reader: Literal["local", "shared"] = "local",
        prefetch_batches: int = 4,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            shuffle_window=shuffle_window,
            reader=reader,
            prefetch_batches=prefetch_batches,
            seed=seed,
            drop_last=drop_last,
        )
        check_option("data.on_bad_row", on_bad_row, "error or skip", ok=on_bad_row in ("error", "skip"))
        self._cache = RowCache(cache, max_bytes=1e9 * cache_gigabytes)
        raw_format = TabularFormat(schema=schema, root=root)
        self.schema, self._root = raw_format.schema, raw_format.root
        self._on_bad_row: OnBadRow = on_bad_row
        self._checksums = dict(checksums or {})
        self.skipped_rows: dict[str, int] = {}
        self.rows_read: dict[str, dict[str, int]] = {}  # by file: rows = used + skipped + comments
        self._encoding: Encoding | None = None  # that of a checkpoint, or what was learned, once it is asked for
        self._given = False  # whether it is that of a checkpoint: nothing is learned then
        self._folders: dict[Split, tuple[Path, Manifest]] = {}  # by the split whose files they were made from
        self._leases: dict[Split, Lease] = {}

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        label: str | None = None,
        *,
        validation: Any = None,
        test: Any = None,
        predict: Any = None,
        schema: str | Path | Mapping[str, Any] | Schema | None = None,
        dates: Literal["day_first", "month_first"] | None = None,
        cache: str | Path | None = None,
        **options: Any,
    ) -> TabularDataModule:
        """Rows of tables in memory, of pandas, polars, PyArrow, Hugging Face or whatever has ``__arrow_c_stream__``.

        A copy of each table is written into the folder ``frames`` of the cache, named by a digest of its content, and
        is read from there as a file is; a frame with the same content is not prepared twice. Copies that were not asked
        for in a week are removed.

        Args:
            frame: The rows to train on.
            label: The column that says what is a click; looked for if absent.
            validation: Rows for validation; a tenth of the others if absent.
            test: Rows for the test; a tenth of the others if absent.
            predict: Rows that are predicted, which need no label.
            schema: What the columns mean, without ``files``; guessed if absent (see
                :func:`~lightning_recsys.data.guess_schema`), and ``schema.to_yaml()`` of the data module shows it.
            dates: Whether ``01/02/2026`` is of February or of January, for the guess.
            cache: Folder for prepared rows, as of the class.
            options: The other arguments of the class.

        Raises:
            TypeError: a frame is no table.
            ValueError: a column has no type that Arrow knows; the schema has a mistake, or is given with ``label`` or
                ``dates``, which it has itself; or none can be guessed.

        >>> import tempfile
        >>> frame = pa.table({"clicked": [0, 1] * 50, "shop": ["a", "b", "c", "a", "b"] * 20})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = TabularDataModule.from_frame(frame, label="clicked", cache=folder)
        ...     data.fields
        {'shop': 5}
        """
        if schema is not None and (label is not None or dates is not None):
            raise ValueError("from_frame takes label and dates to guess a schema: with schema=, name them in it.")
        folder = RowCache(cache).folder / FRAMES
        given = {"train": frame, "validation": validation, "test": test, "predict": predict}
        files = {split: str(frame_file(rows, folder)) for split, rows in given.items() if rows is not None}
        if schema is None:
            schema = guess_schema(files["train"], label, dates=dates)
        elif isinstance(schema, str | Path):
            options.setdefault("root", Path(schema).parent)
            schema = Schema.from_yaml(schema)
        elif not isinstance(schema, Schema):
            schema = Schema.from_dict({**schema, "files": files})
        named: dict[Any, tuple[str, ...]] = {split: (file,) for split, file in files.items()}
        return cls(schema=replace(schema, files=named, formats={}), cache=cache, **options)

    def prepare_data(self) -> None:
        """Prepare the rows that the trainer's stage needs, as far as that is known before a checkpoint is loaded."""
        stage = None if self.trainer is None else self.trainer.state.fn
        if stage == TrainerFn.FITTING or (stage is None and not self._given):
            wanted: list[Split] = ["train", "validation"]
        elif stage is not None and (self._given or "train" in self._folders):
            others: dict[TrainerFn, Split] = {
                TrainerFn.VALIDATING: "validation",
                TrainerFn.PREDICTING: self.predicted_split,
            }
            wanted = [others.get(stage, "test")]
        else:
            return  # what is to be learned from may not be at hand, and not be needed
        if "train" in wanted and "train" not in self._folders:
            self._check_files()
        for split in wanted:
            if self.has(split):
                self.folder(split)

    def _check_files(self) -> None:
        """Read the first rows of the files of all splits: a run is not to end at its test because of a name.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: one is not what the schema says; the message names it.
        """
        trained_on = set(map(Path.resolve, self._format("train").files("train")))
        for split in self.schema.files.keys() - {"train"}:  # which is read at once
            raw_format = self._format(split)
            for path in raw_format.files(split):
                if path.resolve() in trained_on and split != "predict":
                    log.warning("%s is under files.train and under files.%s: its rows are trained on.", path, split)
                raw_format.check_file(path, on_bad_row=self._on_bad_row)

    def setup(self, stage: str | None = None) -> None:
        """Open what training needs; what only evaluation needs is opened once it is asked for.

        Because a trainer sets up data before it loads the checkpoint that may hold what was learned.
        """
        if stage in (None, "fit"):
            self.rows("train")
            self.rows("validation")
        if stage is None:
            self.rows("test")
        super().setup(stage)

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return len(self.schema.numeric)

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each categorical feature, in the order of the batches."""
        return self._encoding.fields if self._encoding is not None else self.folder("train")[1].num_embeddings

    def has(self, split: Split) -> bool:
        """Whether there is such a split."""
        return split == "train" or split in self.schema.files or (split != "predict" and self.schema.share(split) > 0)

    @property
    def predicted_split(self) -> Split:
        """The rows of the files that the schema names to be predicted, else those of the test."""
        return "predict" if "predict" in self.schema.files else "test"

    def unknown_ids(self, split: Split) -> dict[str, float]:
        """Share of the ids of a split that the training rows do not have, by feature; of those with vocabularies."""
        root, manifest = self.folder(split)
        found = {}
        for name, feature in manifest.features.items():
            if feature.vocabulary is not None:
                unknown = total = 0
                for shard in manifest.splits[self._place(split)]:
                    column = pq.read_table(root / shard.path, columns=[name], use_threads=False)[name]
                    ids = pc.list_flatten(column) if feature.bag else column
                    unknown += pc.sum(pc.equal(ids, 0)).as_py() or 0
                    total += len(ids)
                found[name] = unknown / max(total, 1)
        return found

    def predicted_rows(self, column: str | None = None) -> Iterable[pa.Array]:
        """The identifiers of the rows that are predicted, in their order and some at a time.

        They are read anew by each iteration, in any process.

        Args:
            column: A column of their files, as strings; ``None`` for the number of each row in its file, from 1.

        Raises:
            ValueError: of the iteration, if the schema names no files to predict, a file has no such column, or a row
                is bad and such rows are errors.
        """
        return _PredictedRows(self._format("predict"), column)

    def _format(self, origin: Split) -> TabularFormat:
        labelled = origin != "predict"
        return TabularFormat(schema=self.schema, root=self._root, on_bad_row=self._on_bad_row, labelled=labelled)

    def _place(self, split: Split) -> Split:
        return "test" if split == "predict" else split  # it has a folder of its own

    def folder(self, split: Split) -> tuple[Path, Manifest]:
        """The folder in the cache that holds a split, prepared at first use."""
        origin: Split = split if split in self.schema.files else "train"
        if origin not in self._folders:
            self._prepare(origin)
        return self._folders[origin]

    def state_dict(self) -> dict[str, Any]:
        """The vocabularies and statistics of the training rows, and the position in them."""
        if self._encoding is None and "train" not in self._folders:
            return {}
        features = describe_features(self.schema)
        return {"encoder": self.encoding.state_dict(), "features": features, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Encode rows, from now on, as the run did that this state is from, and go on where it was.

        Raises:
            ValueError: that run had other columns, or made other features of them.
        """
        super().load_state_dict(state_dict)
        encoding = Encoding.from_state_dict(self.schema, state_dict["encoder"])
        if "features" in state_dict:  # checkpoints of earlier versions do not tell
            check_features(state_dict["features"], self.schema)
        known = self._encoding is not None or "train" in self._folders
        if not known or encoding != self.encoding:
            self._encoding, self._given = encoding, True
            self._rows.clear()
            self._folders.clear()
            self._leases.clear()

    @property
    def encoding(self) -> Encoding:
        """Vocabularies and statistics of the training rows, which are prepared first unless a checkpoint had them."""
        if self._encoding is None:
            self._encoding = Encoding.load(self.schema, *self.folder("train"))
        return self._encoding

    def _prepare(self, origin: Split) -> None:
        """Find the rows that come from the files of a split, or prepare them."""
        raw_format = self._format(origin)
        files = raw_format.files(origin)
        given = self.encoding if origin != "train" or self._given else None
        split: SplitRule = BySchema(raw_format, own_files=False)
        if origin != "train":
            split = ByFile(**{self._place(origin): tuple(map(str, files))})
        identities = partial(file_identities, [*files, *raw_format.side_files()])
        before = identities()

        def check() -> None:
            if identities() != before:
                raise ValueError(f"{', '.join(map(str, files))}: a file has changed while it was read. Start again.")

        def prepare(folder: Path) -> None:
            check_md5(files, self._checksums)
            log.info("Preparing %s in %s", ", ".join(map(str, files)), folder)
            console = Console(stderr=True)
            with progress_bar(console, delay=_PATIENCE, transient=True) as show:
                Preparation(
                    folder,
                    raw_format=raw_format,
                    files=files if origin == "train" else [],
                    split=split,
                    preprocessing=SchemaRules(max_vocabulary=_ALL, given=given),
                    on_bad_row=self._on_bad_row,
                    num_threads=min(4, os.cpu_count() or 1),
                    on_progress=show if console.is_terminal else None,
                    check=check,
                ).run()

        schema = yaml.safe_load(self.schema.to_yaml())
        content = {
            "versions": [_VERSION, __version__],
            "schema": {key: value for key, value in schema.items() if key not in ("files", "split")},
            "split": [asdict(self.schema.split), self.schema.share("validation"), self.schema.share("test")],
            "origin": origin,
            "files": before,
            "formats": [asdict(raw_format.format_of(path)) for path in files],
            "on_bad_row": self._on_bad_row,
        }
        if self._checksums:
            content["checksums"] = self._checksums
        root, lease = self._look_up(content, given, prepare)
        manifest = Manifest.load(root)
        if given is None:
            self._check_labels(manifest)
        self._folders[origin], self._leases[origin] = (root, manifest), lease
        self.rows_read |= manifest.details["rows"]
        for path, skipped in manifest.details["skipped"].items():
            rows = SkippedRows(**skipped)
            self.skipped_rows[path] = rows.bad
            rank_zero_only(log.info)(rows.describe(path))

    def _look_up(
        self, content: Mapping[str, Any], given: Encoding | None, prepare: Callable[[Path], None]
    ) -> tuple[Path, Lease]:
        """The entry of these rows; that of a run which learned from them what is given, if there is one."""

        def key(digest: str | None) -> str:
            # Keys are not sorted: batches have the columns in the order of the schema, so another order is other rows.
            return hashlib.blake2b(json.dumps({**content, "given": digest}).encode(), digest_size=16).hexdigest()

        if given is not None and content["origin"] == "train" and (found := self._cache.find(key(None))) is not None:
            root, _ = found
            if Encoding.load(self.schema, root, Manifest.load(root)) == given:
                return found
        return self._cache.look_up(key(None if given is None else given.digest), prepare)

    def _check_labels(self, manifest: Manifest) -> None:
        num_rows = sum(shard.rows for shard in manifest.splits["train"])
        positives = manifest.details["statistics"]["positives"].get("train", 0)
        if positives in (0, num_rows):
            rule = f" under the rule {self.schema.label.rule!r}" if self.schema.label.rule else ""
            raise ValueError(
                f"all {num_rows} training rows have the label {min(positives, 1)}{rule} on column "
                f"{self.schema.label.column!r}. There is nothing to learn; check schema.label."
            )
