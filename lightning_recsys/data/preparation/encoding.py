"""The vocabularies, means and deviations that are learned from the training rows of a table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.preparation.vocabulary import vocabulary_file
from lightning_recsys.data.prepared.manifest import Manifest
from lightning_recsys.data.raw.kernels import KeyTable, hash_values
from lightning_recsys.data.tables.columns import has_marks
from lightning_recsys.data.tables.earlier_words import present_words
from lightning_recsys.data.tables.features import Categorical, MultiValued
from lightning_recsys.data.tables.schema import FEATURES, Schema, feature_name

FIRST_ID = 2
"""Id of the first value of a vocabulary, the most frequent one; 0 is for unknown values."""

MISSING_ID = 1
"""Id of a missing value, where there is a vocabulary; it is 0 where values are hashed."""

FORMAT = 3
"""The version of vocabularies' words; a new one where :mod:`lightning_recsys.data.tables.words` names values anew."""


class Encoding:
    """Vocabularies of the categorical features, mean and deviation of the dense ones.

    Args:
        schema: Names the features, and which of them have vocabularies.
        vocabularies: The values of all features that are not hashed, by name: arrow strings, the most frequent first.
        statistics: Mean and standard deviation of each numeric feature after its transform, by name.
        words_format: The format of the words: :data:`FORMAT`, or an earlier one of a checkpoint.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        vocabularies: Mapping[str, pa.Array],
        statistics: Mapping[str, tuple[float, float]],
        words_format: int = FORMAT,
    ) -> None:
        self._schema, self._format = schema, words_format
        self.vocabularies = dict(vocabularies)
        self.statistics = dict(statistics)

    @classmethod
    def load(cls, schema: Schema, root: Path, manifest: Manifest) -> Encoding:
        """The results of a preparation: vocabularies and statistics."""
        return cls.read(schema, root / "vocabulary", manifest.details["learned"])

    @classmethod
    def read(cls, schema: Schema, folder: Path, learned: Mapping[str, Any]) -> Encoding:
        """The vocabularies of a folder, and under ``mean`` and ``deviation`` of what was learned the statistics."""
        files = {
            name: folder / vocabulary_file(feature_name(name))
            for name, feature in embedded(schema).items()
            if not feature.hash_buckets
        }
        tables = {name: pq.read_table(path, columns=["value"], use_threads=False) for name, path in files.items()}
        return cls(
            schema,
            vocabularies={name: table["value"].combine_chunks().cast(pa.string()) for name, table in tables.items()},
            statistics={
                name: (learned["mean"][feature_name(name)], learned["deviation"][feature_name(name)])
                for name in schema.numeric
            },
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Encoding) and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]  # holds whole vocabularies

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each feature, in the order of the batches."""
        return {
            feature_name(name): feature.hash_buckets + 1
            if feature.hash_buckets
            else len(self.vocabularies[name]) + FIRST_ID
            for name, feature in embedded(self._schema).items()
        }

    @property
    def summary_IK(self) -> NDArray[np.float64]:
        """The statistics as the rules of a schema take them: of each numeric feature one value, its mean and variance.

        Whatever number of values that stands for, means and deviations follow from it.
        """
        moments = [self.statistics[name] for name in self._schema.numeric]
        return np.array([[1, mean, std**2] for mean, std in moments]).reshape(-1, 3)

    def key_tables(self) -> dict[str, KeyTable]:
        """The vocabularies to look values up in, by the names of features in batches."""
        return {
            feature_name(name): KeyTable(hash_values(values.cast(pa.binary())))
            for name, values in self.vocabularies.items()
        }

    @property
    def digest(self) -> str:
        """A checksum: another one for whatever would be encoded otherwise."""
        digest = hashlib.blake2b(repr(sorted(self.statistics.items())).encode(), digest_size=16)
        for name, values in sorted(self.vocabularies.items()):
            digest.update(f"{name} {len(values)} ".encode())
            for tensor in _as_tensors(values).values():
                digest.update(tensor.numpy().tobytes())
        for name in sorted(self._renamed):
            digest.update(f"format {self._format} of {name} ".encode())
        return digest.hexdigest()

    def place_earlier(self, name: str, hashes: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of values in a vocabulary, where some were not found because it has their earlier names.

        Args:
            name: Name of the feature in batches.
            hashes: The hashes of the values' words.
            places: Their places from 1 on, 0 where a word is not in the vocabulary.
        """
        if places.all() or (renamed := self._renamed.get(name)) is None:
            return places
        table, earlier = renamed
        found: NDArray[np.int64] = np.where(places, places, earlier[table.ids(hashes)])
        return found

    @cached_property
    def _renamed(self) -> dict[str, tuple[KeyTable, NDArray[np.int64]]]:
        """By feature the words that have other names now: those, and their places, behind one for what is unknown.

        Earlier names go on to count: a text that looks like a decimal, say, is called what it was.
        """
        found: dict[str, tuple[KeyTable, NDArray[np.int64]]] = {}
        tables = (self._schema.table, *self._schema.formats.values())
        written = next((table for table in tables if has_marks(table)), None)
        for name, values in self.vocabularies.items() if self._format < (2 if written is None else FORMAT) else ():
            if getattr(embedded(self._schema)[name], "ngrams", None) is not None:
                continue  # pieces of texts
            words = present_words(values, words_format=self._format, written=written)
            changed = np.flatnonzero(np.asarray(pc.not_equal(words, values)))
            if len(changed):
                table = KeyTable(hash_values(words.take(pa.array(changed)).cast(pa.binary())))
                found[feature_name(name)] = table, np.append(0, changed + 1)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, in tensors and numbers."""
        return {
            "format": self._format,
            "vocabularies": {name: _as_tensors(values) for name, values in self.vocabularies.items()},
            "statistics": {name: list(numbers) for name, numbers in self.statistics.items()},
        }

    @classmethod
    def from_state_dict(cls, schema: Schema, state: Mapping[str, Any]) -> Encoding:
        """The inverse of :meth:`state_dict`; a state of an earlier version has no format.

        Raises:
            ValueError: it was learned for other columns, or for these in another order, or by a later version.
        """
        words_format = state.get("format", 1)
        if words_format > FORMAT:
            raise ValueError(
                f"the checkpoint has vocabularies of format {words_format}, which a later version of lightning_recsys "
                f"has written; this one reads formats up to {FORMAT}. Use that version."
            )
        wanted = [name for name, feature in embedded(schema).items() if not feature.hash_buckets]
        for kind, names in (("vocabularies", wanted), ("statistics", list(schema.numeric))):
            saved = list(state[kind])
            if saved != names and set(saved) == set(names):
                raise ValueError(
                    f"the checkpoint has {kind} in the order {', '.join(saved)}, but the schema has "
                    f"{', '.join(names)}. A model knows columns by their place: keep the order it was trained with."
                )
            if saved != names:
                raise ValueError(
                    f"the checkpoint has {kind} of {', '.join(sorted(saved))}, but the schema wants "
                    f"{', '.join(sorted(names))}. Evaluate with the schema that it was trained with."
                )
        vocabularies = {name: _from_tensors(saved) for name, saved in state["vocabularies"].items()}
        statistics = {name: (mean, std) for name, (mean, std) in state["statistics"].items()}
        return cls(schema, vocabularies=vocabularies, statistics=statistics, words_format=words_format)


def embedded(schema: Schema) -> dict[str, Categorical | MultiValued]:
    """The features that have ids, by name, in the order of the batches."""
    return {**schema.categorical, **schema.multi_valued}


def describe_features(schema: Schema) -> dict[str, dict[str, Any]]:
    """How columns become ids and numbers, by kind and name in the order of the batches; in plain containers."""
    plain = yaml.safe_load(schema.to_yaml())
    return {
        kind: {
            name: {key: value for key, value in options.items() if key != "min_count"}  # which vocabularies tell
            for name, options in plain.get(kind, {}).items()
        }
        for kind in FEATURES
    }


def check_features(trained: Mapping[str, Mapping[str, Any]], schema: Schema) -> None:
    """Compare the features of a checkpoint with those of a schema.

    Args:
        trained: What :func:`describe_features` said of the schema that was trained with.
        schema: By which rows are to be read.

    Raises:
        ValueError: a feature is made in another way, or their order is another one.
    """
    for kind, found in describe_features(schema).items():
        before = trained[kind]
        pairs: list[tuple[str, Any, Any]] = [(f"schema.{kind}", list(found), list(before))]
        pairs += [(f"schema.{kind}.{name}", found[name], before.get(name)) for name in found]
        for where, here, there in pairs:
            if here != there:
                raise ValueError(
                    f"{where} is {here}, and was {there} where the checkpoint was trained: the model would take ids "
                    "and numbers for others. Use the schema that it was trained with."
                )


def _as_tensors(strings: pa.Array) -> dict[str, Tensor]:
    """Strings as UTF-8 bytes, and where each starts: tensors, so that a checkpoint holds them as they are."""
    large = strings.cast(pa.large_string())
    _, offsets, data = large.buffers()
    if offsets is None or data is None:
        text, ends = np.zeros(0, dtype=np.uint8), np.zeros(len(strings) + 1, dtype=np.int64)
    else:
        starts = np.frombuffer(offsets, dtype=np.int64)[large.offset : large.offset + len(large) + 1]
        first, last = int(starts[0]), int(starts[-1])
        text, ends = np.frombuffer(data, dtype=np.uint8)[first:last], starts - first
    return {"bytes": torch.from_numpy(text.copy()), "offsets": torch.from_numpy(ends.copy())}


def _from_tensors(state: Mapping[str, Tensor]) -> pa.Array:
    """The strings that :func:`_as_tensors` wrote."""
    buffers = [None, *(pa.py_buffer(state[name].numpy()) for name in ("offsets", "bytes"))]
    strings = pa.Array.from_buffers(pa.large_string(), len(state["offsets"]) - 1, buffers)
    return strings.cast(pa.string())
