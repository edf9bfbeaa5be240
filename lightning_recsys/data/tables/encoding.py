"""What is learned from the training rows, and how it turns examples into numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.rows import InMemoryRows
from lightning_recsys.data.tables.columns import Categories
from lightning_recsys.data.tables.examples import Examples, Numbers
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.schema_parts import Categorical, Dense
from lightning_recsys.data.tables.vocabulary import HashBuckets, IdMapping, Vocabulary


class Encoder:
    """Vocabularies of the categorical features, mean and deviation of the dense ones.

    Args:
        schema: The columns.
        vocabularies: Of all features that are not hashed, by name.
        statistics: Mean and standard deviation of each dense feature after its transform, by name.
    """

    def __init__(
        self, schema: Schema, *, vocabularies: dict[str, Vocabulary], statistics: dict[str, tuple[float, float]]
    ) -> None:
        self._schema = schema
        self._vocabularies = vocabularies
        self._statistics = statistics
        self._mappings: dict[str, IdMapping] = {
            name: HashBuckets(feature.hash_buckets) if feature.hash_buckets else vocabularies[name]
            for name, feature in _features(schema).items()
        }

    @classmethod
    def learn(cls, schema: Schema, examples: Examples) -> Encoder:
        """From training rows, and from these alone: what only validation or test rows hold stays unknown."""
        vocabularies = {
            name: Vocabulary.learn(_strings(schema, examples, name), min_count=feature.min_count)
            for name, feature in _features(schema).items()
            if not feature.hash_buckets
        }
        statistics = {
            name: _statistics(transform(examples.numbers(name), feature)) for name, feature in schema.dense.items()
        }
        return cls(schema, vocabularies=vocabularies, statistics=statistics)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Encoder)
            and self._statistics == other._statistics
            and self._vocabularies.keys() == other._vocabularies.keys()
            and all(v.strings.equals(other._vocabularies[name].strings) for name, v in self._vocabularies.items())
        )

    __hash__ = None  # type: ignore[assignment]  # holds whole vocabularies

    @property
    def fields(self) -> dict[str, int]:
        """Number of embeddings of each feature, in the order of the batches."""
        return {feature_name(name): mapping.num_embeddings for name, mapping in self._mappings.items()}

    def encode(self, examples: Examples) -> InMemoryRows:
        """Rows of numbers."""
        schema = self._schema
        size = max(mapping.num_embeddings for mapping in self._mappings.values())
        dtype = np.int32 if size <= np.iinfo(np.int32).max else np.int64
        ids = [self._ids(name, examples.categories(name)) for name in schema.categorical]
        dense = [self._standardize(name, examples.numbers(name)) for name in schema.dense]
        bags = {}
        for name in schema.multi_valued:
            column = examples.bags(name)
            items = self._ids(name, column.items).astype(dtype)
            bags[feature_name(name)] = (torch.from_numpy(column.offsets), torch.from_numpy(items))
        return InMemoryRows(
            dense=_side_by_side(dense, examples.num_rows, np.float32),
            single_hot=tuple(feature_name(name) for name in schema.categorical),
            ids=_side_by_side(ids, examples.num_rows, dtype),
            bags=bags,
            labels=torch.from_numpy(examples.numbers(schema.label.column).astype(np.float32)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, in tensors and numbers."""
        return {
            "vocabularies": {name: vocabulary.state_dict() for name, vocabulary in self._vocabularies.items()},
            "statistics": {name: list(numbers) for name, numbers in self._statistics.items()},
        }

    @classmethod
    def from_state_dict(cls, schema: Schema, state: dict[str, Any]) -> Encoder:
        """The encoder that :meth:`state_dict` came from.

        Raises:
            ValueError: it was learned for other columns.
        """
        wanted = {name for name, feature in _features(schema).items() if not feature.hash_buckets}
        for kind, names in (("vocabularies", wanted), ("statistics", set(schema.dense))):
            saved = set(state[kind])
            if saved != names:
                raise ValueError(
                    f"the checkpoint has {kind} of {', '.join(sorted(saved))}, but the schema wants "
                    f"{', '.join(sorted(names))}. Evaluate with the schema that it was trained with."
                )
        vocabularies = {name: Vocabulary.from_state_dict(saved) for name, saved in state["vocabularies"].items()}
        statistics = {name: (mean, std) for name, (mean, std) in state["statistics"].items()}
        return cls(schema, vocabularies=vocabularies, statistics=statistics)

    def _ids(self, name: str, column: Categories) -> NDArray[np.int64]:
        mapping = self._mappings[name]
        # One id for each distinct string, then one look-up for each row; the last one is for -1, a missing value.
        return np.append(mapping.ids(column.values), mapping.missing_id)[column.codes]

    def _standardize(self, name: str, numbers: Numbers) -> Numbers:
        mean, std = self._statistics[name]
        return standardize(numbers, self._schema.dense[name], mean=mean, std=std)


def feature_name(column: str) -> str:
    """A column's name as a feature: dots separate the parts of a state-dict key, so they become underscores."""
    return column.replace(".", "_")


def _features(schema: Schema) -> dict[str, Categorical]:
    return {**schema.categorical, **schema.multi_valued}


def _strings(schema: Schema, examples: Examples, name: str) -> Categories:
    return examples.categories(name) if name in schema.categorical else examples.bags(name).items


def transform(numbers: Numbers, feature: Dense) -> Numbers:
    """The numbers of a dense feature after its transform."""
    if feature.transform == "log":
        logarithms: Numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
        return logarithms
    return numbers


def standardize(numbers: Numbers, feature: Dense, *, mean: float, std: float) -> Numbers:
    """A dense feature as models get it.

    Args:
        numbers: Its numbers, NaN where one is missing.
        feature: Its options.
        mean: Of the transformed numbers of the training rows.
        std: Their standard deviation.
    """
    if feature.fill != "mean":
        numbers = np.where(np.isnan(numbers), feature.fill, numbers)
    numbers = transform(numbers, feature)
    numbers = np.where(np.isnan(numbers), mean, numbers)
    return (numbers - mean) / std if feature.standardize else numbers


def _statistics(numbers: Numbers) -> tuple[float, float]:
    """Mean and standard deviation of the numbers that are there; such that a constant column becomes 0."""
    known = numbers[~np.isnan(numbers)]
    if not len(known):
        return 0.0, 1.0
    std = float(known.std())
    return float(known.mean()), std if std > 0 else 1.0


def _side_by_side(columns: list[Any], num_rows: int, dtype: Any) -> Tensor:
    table = np.empty((num_rows, len(columns)), dtype=dtype)
    for place, column in enumerate(columns):
        table[:, place] = column
    return torch.from_numpy(table)
