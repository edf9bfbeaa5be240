"""Anybody's own rows, in CSV, TSV or Parquet, by a schema alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lightning_recsys.data.module import CTRDataModule, Split
from lightning_recsys.data.rows import InMemoryRows
from lightning_recsys.data.tables.bad_rows import OnBadRow
from lightning_recsys.data.tables.encoding import Encoder
from lightning_recsys.data.tables.examples import Examples
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.splitting import split_by_share, split_by_time
from lightning_recsys.data.tables.table_reader import TableReader


class TabularDataModule(CTRDataModule):
    """Rows of one's own files, held in memory: what the columns mean is said by a schema.

    Vocabularies, means and deviations are learned from the training rows alone. They are part of a checkpoint, so that
    a model can be evaluated on new files without the rows that it was trained on: hand the checkpoint's entry to
    :meth:`load_state_dict`, or ``ckpt_path`` to the trainer.

    Args:
        schema: Path of a schema file, or its content; see ``docs/data.md``.
        root: Where the schema's relative paths start; the schema file's own folder if absent, else the current one.
        batch_size: Rows per batch and rank.
        on_bad_row: ``error`` stops at the first row that does not fit the schema, and says where it is; ``skip`` leaves
            such rows out, counts them in :attr:`skipped_rows` and logs what was wrong.
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
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, drop_last=drop_last)
        if on_bad_row not in get_args(OnBadRow):
            raise ValueError(f"data.on_bad_row must be {' or '.join(get_args(OnBadRow))}, got {on_bad_row!r}.")
        folder = Path()
        if isinstance(schema, str | Path):
            folder = Path(schema).parent
            schema = Schema.from_yaml(schema)
        self.schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
        self.skipped_rows: dict[str, int] = {}
        self._root = (folder if root is None else Path(root)).expanduser().absolute()
        self._on_bad_row: OnBadRow = on_bad_row
        self._encoder: Encoder | None = None
        self._rows: dict[Split, InMemoryRows | None] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read what training needs; what only evaluation needs is read once it is asked for.

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
        return len(self.schema.dense)

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each categorical feature, in the order of the batches."""
        return self._learned().fields

    def has(self, split: Split) -> bool:
        """Whether there is such a split."""
        return split == "train" or split in self.schema.files or self.schema.share(split) > 0

    def rows(self, split: Split) -> InMemoryRows | None:
        """The rows of a split, read at first use; ``None`` where there is no such split."""
        if split not in self._rows:
            self._load(split)
        return self._rows[split]

    def state_dict(self) -> dict[str, Any]:
        """What was learned from the training rows."""
        return {} if self._encoder is None else {"encoder": self._encoder.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Encode rows, from now on, as the run did that this state is from.

        Raises:
            ValueError: that run had other columns.
        """
        encoder = Encoder.from_state_dict(self.schema, state_dict["encoder"])
        if encoder != self._encoder:
            self._encoder = encoder
            self._rows.clear()

    def _learned(self) -> Encoder:
        if self._encoder is None:
            self._load("train")
        assert self._encoder is not None
        return self._encoder

    def _load(self, split: Split) -> None:
        reader = TableReader(self.schema, root=self._root, on_bad_row=self._on_bad_row)
        if split in self.schema.files and split != "train":
            encoder = self._learned()
            self._rows[split] = encoder.encode(reader.read(split))
        elif not self.has(split):
            self._rows[split] = None
        else:
            self._load_training_files(reader)
        self.skipped_rows.update(reader.skipped)

    def _load_training_files(self, reader: TableReader) -> None:
        """The training rows, and those evaluation rows that are parted from them."""
        examples = reader.read("train")
        parts = self._split(examples)
        if self._encoder is None:
            self._check_labels(examples.numbers(self.schema.label.column)[parts["train"]])
            self._encoder = Encoder.learn(self.schema, examples.take(parts["train"]))
        for split, rows in parts.items():
            self._rows[split] = self._encoder.encode(examples.take(rows))

    def _split(self, examples: Examples) -> dict[Split, np.ndarray[Any, np.dtype[np.int64]]]:
        shares = {"validation": self.schema.share("validation"), "test": self.schema.share("test")}
        if self.schema.split.by == "time":
            assert self.schema.time is not None
            parts = split_by_time(examples.numbers(self.schema.time), **shares)
        else:
            parts = split_by_share(examples.num_rows, seed=self.schema.split.seed, **shares)
        named: dict[Split, np.ndarray[Any, np.dtype[np.int64]]] = dict(zip(get_args(Split), parts, strict=True))
        wanted = {split: rows for split, rows in named.items() if shares.get(split, 1)}
        for split, rows in wanted.items():
            if not len(rows):
                raise ValueError(
                    f"schema.split leaves no {split} rows of {examples.num_rows}. Use more rows or other shares."
                )
        return wanted

    def _check_labels(self, labels: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        if len(np.unique(labels)) < 2:
            rule = f" under the rule {self.schema.label.rule!r}" if self.schema.label.rule else ""
            raise ValueError(
                f"all {len(labels)} training rows have the label {labels[0]:g}{rule} on column "
                f"{self.schema.label.column!r}. There is nothing to learn; check schema.label."
            )
