"""Data sets of Ray Data as ids and numbers, by a schema: learned and encoded in Ray's tasks, block by block."""

# Shape suffixes: N rows.

from __future__ import annotations

import logging
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.data import Dataset, ExecutionOptions
from ray.train import DataConfig

from lightning_recsys.data.frames import frame_file
from lightning_recsys.data.guesses.guessing import guess_schema
from lightning_recsys.data.options import Split, check_option
from lightning_recsys.data.preparation import SchemaRules
from lightning_recsys.data.preparation.encoding import Encoding
from lightning_recsys.data.preparation.preprocessing import Summary
from lightning_recsys.data.preparation.shards import Ids, Rows, shard_schema
from lightning_recsys.data.preparation.vocabulary import ValueCounter, count_values
from lightning_recsys.data.prepared.manifest import Feature
from lightning_recsys.data.raw import RawColumns, TabularFormat
from lightning_recsys.data.raw.columns import OnBadRow, SkippedRows
from lightning_recsys.data.raw.kernels import KeyTable
from lightning_recsys.data.tables.schema import Schema, feature_name
from lightning_recsys.data.tables.schema_parts import Split as SchemaSplit

_BLOCK_ROWS = 1 << 16  # that a task parses at a time
_SAMPLED_ROWS = 1 << 16  # by which a schema is guessed
_ALL = 2**62  # values of all vocabularies, of which as of tables that are files none is too many
_SPLITS: tuple[Split, ...] = ("train", "validation", "test")
log = logging.getLogger(f"pytorch_lightning.{__name__}")


class EncodedDatasets:
    """Data sets whose rows are ids and numbers, and what was learned of them: :func:`encode_datasets` makes them.

    What travels to workers by pickle is what they say of the rows; the data sets themselves reach workers through Ray.

    Args:
        datasets: The encoded data sets by split. They are encoded anew in each epoch, in tasks of Ray Data, unless you
            put ``datasets["train"].materialize()`` in its place, which keeps the encoded rows in Ray's object store.
        schema: What the columns mean.
        encoding: The vocabularies and statistics of the training rows.
        rows_read: By split, how many rows there are, and how many of them were used and skipped.
    """

    def __init__(
        self,
        datasets: Mapping[Split, Dataset],
        schema: Schema,
        encoding: Encoding,
        rows_read: Mapping[Split, Mapping[str, int]],
    ) -> None:
        self.datasets = dict(datasets)
        self.schema = schema
        self.encoding = encoding
        self.rows_read = {split: dict(rows) for split, rows in rows_read.items()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"datasets": {}}

    @staticmethod
    def data_config(*, split: bool = True) -> DataConfig:
        """``TorchTrainer(dataset_config=...)`` for these rows, which come to workers in one order, always.

        Args:
            split: Whether each worker gets a share of the rows; under DES, whose processes have batches in common, each
                gets all.
        """
        options = ExecutionOptions(preserve_order=True)
        return DataConfig("all" if split else [], execution_options=options, enable_shard_locality=False)


def encode_datasets(
    datasets: Mapping[Split, Dataset],
    *,
    schema: str | Path | Mapping[str, Any] | Schema | None = None,
    label: str | None = None,
    root: str | Path | None = None,
    on_bad_row: OnBadRow = "error",
) -> EncodedDatasets:
    """Learn vocabularies and statistics of the training rows, and encode all rows, in tasks of Ray Data.

    The data sets are read once here: nothing is learned from rows that are not for training, and theirs are counted.
    Exact counts of the values come to this process, whose memory is bounded (``ValueCounter``).

    Args:
        datasets: The rows by split: ``train``, and ``validation`` and ``test`` where there are such.
        schema: What the columns mean, without ``files`` and ``split``; guessed by the first 65,536 training rows if
            absent.
        label: The column that says what is a click, for the guess.
        root: Where relative paths of side tables start, which all nodes see; the folder of the schema's file if absent,
            or the present one.
        on_bad_row: ``error`` raises at the first bad row, ``skip`` leaves bad rows out and counts them.

    Raises:
        ValueError: there is no data set for training, or one of another name; the schema has a mistake, or splits rows;
            a row is bad, or a column missing; or all training rows have one label.
    """
    check_option("on_bad_row", on_bad_row, "error or skip", ok=on_bad_row in ("error", "skip"))
    if "train" not in datasets or not set(datasets) <= set(_SPLITS):
        raise ValueError(f"datasets needs train, and may have validation and test, got {list(datasets)}.")
    if schema is not None and label is not None:
        raise ValueError("label is for the guess of a schema: with schema=, name it there.")
    if isinstance(schema, str | Path):
        root = Path(schema).parent if root is None else root
        schema = Schema.from_yaml(schema)
    elif schema is None:
        schema = _guessed(datasets["train"], label)
    elif not isinstance(schema, Schema):
        schema = Schema.from_dict({**schema, "files": {"train": "-"}})
    if schema.split != SchemaSplit():
        raise ValueError(
            "schema.split splits the rows of files; here each data set is a split. Leave it out, and split by Ray Data,"
            " as Dataset.train_test_split does."
        )
    schema = replace(schema, files={"train": ("-",)}, formats={})
    reading = _Reading(schema, Path(root or "").absolute(), on_bad_row)  # tasks may be in another folder
    with tempfile.TemporaryDirectory() as folder:
        survey = {split: _survey(dataset, split, reading, Path(folder)) for split, dataset in datasets.items()}
        _check_labels(survey["train"], schema)
        for split, found in survey.items():
            if found.read.bad:
                log.info(found.read.describe(Path(split)))
        encoding = _learned(survey["train"], reading, Path(folder))
    known = ray.put(encoding)
    encoded = {split: _in_blocks(rows, _Encode(_pickled(reading, split), known)) for split, rows in datasets.items()}
    return EncodedDatasets(encoded, schema, encoding, {split: found.read.account for split, found in survey.items()})


@dataclass(frozen=True)
class _Reading:
    """The way to read a table, in a task."""

    schema: Schema
    root: Path
    on_bad_row: OnBadRow
    name: str = "train"  # as errors call the table

    @cached_property
    def format(self) -> TabularFormat:
        return TabularFormat(schema=self.schema, root=self.root, on_bad_row=self.on_bad_row)

    def rows(self, table: pa.Table) -> tuple[RawColumns, SkippedRows]:
        """The good rows, and an account of all."""
        path, read = Path(self.name), SkippedRows()
        rows = self.format.parse_table(path, table)
        read.add(path, len(rows.lines_N), rows.bad, on_bad_row=self.on_bad_row)
        return rows, read


@lru_cache(maxsize=4)
def _opened(pickled: bytes) -> _Reading:
    """The way to read a table, kept by each process of Ray: side tables are read once, and not for each block."""
    reading: _Reading = pickle.loads(pickled)  # noqa: S301 - of our own driver
    return reading


# --- What is learned --------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """The findings of some rows."""

    read: SkippedRows
    positives: int
    summary: Summary | None
    counts: dict[str, pa.Table]


@dataclass
class _Surveyed:
    """The findings of all rows of a data set."""

    read: SkippedRows
    positives: int
    summaries: list[Summary]
    counts: ValueCounter | None


@dataclass(frozen=True)
class _Look:
    """Looks at some rows, in a task."""

    reading: bytes
    learns: bool

    def __call__(self, table: pa.Table) -> pa.Table:
        try:
            found: _Found | ValueError = self._found(table)
        except ValueError as error:  # which Ray would tell with pages of its own, and as another type
            found = error
        return pa.table({"found": pa.array([pickle.dumps(found)], pa.large_binary())})

    def _found(self, table: pa.Table) -> _Found:
        reading = _opened(self.reading)
        rows, read = reading.rows(table)
        found = _Found(read, int(rows.labels_N.sum()), None, {})
        if self.learns:
            rules, raw_format = SchemaRules(), reading.format
            columns = rules.categories(rows, raw_format) | {name: bags.values for name, bags in rows.bags.items()}
            found.summary = rules.summary(rows, raw_format)
            found.counts = {name: count_values(columns[name]) for name in rules.vocabularies(raw_format)}
        return found


def _survey(dataset: Dataset, split: Split, reading: _Reading, scratch: Path) -> _Surveyed:
    """Read a data set once: its rows are counted, and those for training are learned from."""
    learns = split == "train"
    looks = _in_blocks(dataset, _Look(_pickled(reading, split), learns))
    names = SchemaRules().vocabularies(reading.format) if learns else {}
    counter = ValueCounter(list(names), folder=scratch / "counts") if names else None
    total = _Surveyed(SkippedRows(), 0, [], counter)
    with _in_order(looks):
        for table in map(_as_table, looks.iter_batches(batch_size=None, batch_format="pyarrow")):
            for pickled in table["found"].to_pylist():
                found: _Found | ValueError = pickle.loads(pickled)  # noqa: S301 - of our own task
                if isinstance(found, ValueError):
                    raise found
                _count(total.read, found.read)
                total.positives += found.positives
                if found.summary is not None:
                    total.summaries.append(found.summary)
                if counter is not None:
                    counter.add(found.counts)
    return total


def _count(total: SkippedRows, some: SkippedRows) -> None:
    total.good += some.good
    for kind, (example, count) in some.examples.items():
        first, before = total.examples.get(kind, (example, 0))
        total.examples[kind] = first, before + count


def _learned(survey: _Surveyed, reading: _Reading, scratch: Path) -> Encoding:
    rules, raw_format = SchemaRules(), reading.format
    summary = reduce(rules.merge, survey.summaries)
    if survey.counts is not None:
        min_counts = rules.vocabularies(raw_format)
        survey.counts.write(scratch, min_count=min_counts, max_vocabulary=_ALL)
    return Encoding.read(reading.schema, scratch, rules.describe(summary, raw_format))


def _check_labels(survey: _Surveyed, schema: Schema) -> None:
    if survey.positives in (0, survey.read.good):
        raise ValueError(
            f"all {survey.read.good} training rows have the label {min(survey.positives, 1)} in column"
            f" {schema.label.column!r}. There is nothing to learn; check schema.label."
        )


def _guessed(dataset: Dataset, label: str | None) -> Schema:
    batches = dataset.limit(_SAMPLED_ROWS).iter_batches(batch_size=None, batch_format="pyarrow")
    with tempfile.TemporaryDirectory() as folder:
        file = frame_file(pa.concat_tables(map(_as_table, batches), promote_options="default"), Path(folder))
        return replace(guess_schema(file, label), split=SchemaSplit())


# --- Encoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encode:
    """Makes ids and numbers of some rows, in a task."""

    reading: bytes
    encoding: ray.ObjectRef[Encoding]

    def __call__(self, table: pa.Table) -> pa.Table:
        reading, (encoding, tables) = _opened(self.reading), _known(self.encoding)
        rules, raw_format = SchemaRules(given=encoding), reading.format
        rows, _ = reading.rows(table)

        def ids(name: str, values: pa.DictionaryArray) -> Ids:
            return rules.look_up(name, values, tables.get(name), raw_format)

        return Rows(
            rows.labels_N,
            rules.dense_features(rows, encoding.summary_IK, raw_format),
            {name: ids(name, values) for name, values in rules.categories(rows, raw_format).items()},
            {name: replace(bags, values=ids(name, bags.values)) for name, bags in rows.bags.items()},
        ).to_table(shard_schema(raw_format.dense, _features(reading.schema, encoding)))


@lru_cache(maxsize=2)
def _known(encoding: ray.ObjectRef[Encoding]) -> tuple[Encoding, dict[str, KeyTable]]:
    """The vocabularies and statistics, fetched once by each process of Ray."""
    found: Encoding = ray.get(encoding)
    return found, found.key_tables()


def _features(schema: Schema, encoding: Encoding) -> dict[str, Feature]:
    """The features that have ids, by their names in batches."""
    bags = {feature_name(name) for name in schema.multi_valued}
    return {name: Feature(size, bag=name in bags) for name, size in encoding.fields.items()}


def _pickled(reading: _Reading, split: Split) -> bytes:
    return pickle.dumps(_Reading(reading.schema, reading.root, reading.on_bad_row, split))


def _as_table(batch: Any) -> pa.Table:
    assert isinstance(batch, pa.Table), "what was asked for"
    return batch


def _in_blocks(dataset: Dataset, work: Any) -> Dataset:
    return dataset.map_batches(work, batch_format="pyarrow", batch_size=_BLOCK_ROWS, zero_copy_batch=True)


@contextmanager
def _in_order(dataset: Dataset) -> Iterator[None]:
    """Meanwhile blocks come in one order, so that sums of floating-point numbers have the same bits in each run."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before
