"""The rules of a schema for its columns: strings to ids, numbers to features."""

# Shape suffixes: N rows, I dense features, K numbers of a summary.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.data.preparation.encoding import FIRST_ID, MISSING_ID, Encoding, embedded
from lightning_recsys.data.preparation.preprocessing import ColumnRules, Learned, Summary
from lightning_recsys.data.preparation.shards import Ids
from lightning_recsys.data.preparation.vocabulary import write_values
from lightning_recsys.data.raw import RawColumns, RawFormat, TabularFormat
from lightning_recsys.data.raw.kernels import KeyTable, hash_values
from lightning_recsys.data.tables.features import Categorical, Dense, MultiValued
from lightning_recsys.data.tables.schema import Schema, feature_name
from lightning_recsys.data.tables.words import TRUTHS, truths_as_numbers

_ROUNDING = 1e-12  # of a mean: a deviation below that is none


@dataclass(frozen=True)
class SchemaRules(ColumnRules):
    """Follows the schema of a :class:`~lightning_recsys.data.raw.TabularFormat`.

    Means and deviations are put together from those of blocks of rows.

    Args:
        max_vocabulary: Values that all vocabularies together hold at most; beyond it the smallest ``min_count`` of the
            schema is raised until they fit, and the manifest says so.
        given: What was learned from other rows: nothing is learned from these.

    Raises:
        ValueError: ``max_vocabulary`` is not positive.
    """

    max_vocabulary: int = 6_000_000
    given: Encoding | None = None
    first_id: ClassVar[int] = FIRST_ID  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.max_vocabulary < 1:
            raise ValueError(f"preprocessing.max_vocabulary must be at least 1, got {self.max_vocabulary}.")

    def check(self, raw_format: RawFormat) -> None:
        """See the base class."""
        if not isinstance(raw_format, TabularFormat):
            raise ValueError(
                f"preprocessing=schema is for data=tabular; data={raw_format.name} has no schema. Use dlrm, torchrec, "
                "or bars."
            )

    def options(self) -> dict[str, object]:
        """See the base class."""
        given = None if self.given is None else self.given.digest
        return {"by": "schema", "max_vocabulary": self.max_vocabulary, "given": given}

    def known(self, folder: Path, raw_format: RawFormat) -> Learned | None:
        """See the base class."""
        if self.given is None:
            return None if raw_format.dense or self.vocabularies(raw_format) else Learned()
        for name, values in self.given.vocabularies.items():
            write_values(folder, feature_name(name), values)
        sizes = {feature_name(name): len(values) for name, values in self.given.vocabularies.items()}
        return Learned(self.given.summary_IK.tolist(), sizes)

    def num_hashed(self, raw_format: RawFormat) -> dict[str, int]:
        """See the base class."""
        buckets = {name: feature.hash_buckets for name, feature in _features(raw_format).items()}
        return {name: count + 1 for name, count in buckets.items() if count}

    def vocabularies(self, raw_format: RawFormat) -> dict[str, int]:
        """See the base class."""
        features = _features(raw_format).items()
        return {name: feature.min_count for name, feature in features if not feature.hash_buckets}

    def summary(self, rows: RawColumns, raw_format: RawFormat) -> Summary:
        """Count, mean and sum of squared differences from the mean of the transformed values that are there."""
        summary = np.zeros((len(raw_format.dense), 3))
        for i, (x_N, feature) in enumerate(zip(rows.dense_IN, _schema(raw_format).numeric.values(), strict=True)):
            known = _transform(x_N[~np.isnan(x_N)], feature)
            if len(known):
                summary[i] = len(known), known.mean(), known.var() * len(known)
        return summary

    def merge(self, a_IK: Summary, b_IK: Summary) -> Summary:
        """Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances"."""
        (n_a, mean_a, squares_a), (n_b, mean_b, squares_b) = a_IK.T, b_IK.T
        n = n_a + n_b
        share_b = n_b / np.maximum(n, 1)
        difference = mean_b - mean_a
        mean = mean_a + difference * share_b
        return np.stack([n, mean, squares_a + squares_b + difference**2 * n_a * share_b], axis=1)

    def describe(self, summary_IK: Summary, raw_format: RawFormat) -> dict[str, object]:
        """See the base class."""
        mean_I, std_I = _moments(summary_IK)
        names = raw_format.dense
        return {
            "mean": dict(zip(names, mean_I.tolist(), strict=True)),
            "deviation": dict(zip(names, std_I.tolist(), strict=True)),
        }

    def dense_features(self, rows: RawColumns, summary_IK: Summary, raw_format: RawFormat) -> NDArray[np.float32]:
        """See the base class."""
        features = np.empty(rows.dense_IN.shape, dtype=np.float32)
        options = _schema(raw_format).numeric.values()
        for i, (x_N, feature, mean, std) in enumerate(zip(rows.dense_IN, options, *_moments(summary_IK), strict=True)):
            features[i] = _standardize(x_N, feature, mean=mean, std=std)
        return features

    def look_up(self, name: str, values: pa.DictionaryArray, table: KeyTable | None, raw_format: RawFormat) -> Ids:
        """See the base class."""
        if table is None:  # the ids from 1 on; a value has the same one in every process and for ever
            hashes = hash_values(truths_as_numbers(values.dictionary))
            ids = (hashes % np.uint64(self.num_hashed(raw_format)[name] - 1)).astype(np.int64) + 1
            missing = 0
        else:
            hashes = hash_values(values.dictionary)
            places = _place_truths(hashes, table.ids(hashes).astype(np.int64), table)  # from 1 on, 0 where unknown
            places = places if self.given is None else self.given.place_earlier(name, hashes, places)
            ids, missing = np.where(places, places - 1 + FIRST_ID, 0), MISSING_ID
        codes = values.indices.fill_null(len(ids)).to_numpy()
        found: Ids = np.append(ids, missing)[codes]
        return found


def _place_truths(hashes: NDArray[np.uint64], places: NDArray[np.int64], table: KeyTable) -> NDArray[np.int64]:
    """The places of values, where true and false that are written as no training row had them are those that it had.

    A truth is 1 in a column of numbers, ``True`` in a file of pandas, and a truth in Parquet and JSON.
    """
    if places.all():
        return places
    for words in TRUTHS:
        same = hash_values(pa.array(words, pa.string()).cast(pa.binary()))
        known = table.ids(same)
        if known.any():
            places = np.where((places == 0) & np.isin(hashes, same), known[known > 0][0], places)
    return places


def _schema(raw_format: RawFormat) -> Schema:
    assert isinstance(raw_format, TabularFormat)
    return raw_format.schema


def _features(raw_format: RawFormat) -> dict[str, Categorical | MultiValued]:
    return {feature_name(name): feature for name, feature in embedded(_schema(raw_format)).items()}


def _transform(numbers: NDArray[np.float64], feature: Dense) -> NDArray[np.float64]:
    """The numbers of a dense feature after its transform."""
    if feature.transform == "log":
        logarithms: NDArray[np.float64] = np.sign(numbers) * np.log1p(np.abs(numbers))
        return logarithms
    return numbers


def _standardize(numbers: NDArray[np.float64], feature: Dense, *, mean: float, std: float) -> NDArray[np.float64]:
    """A dense feature as models get it, from its numbers with NaN where one is missing.

    ``mean`` and ``std`` are those of the transformed numbers of the training rows.
    """
    if feature.fill != "mean":
        numbers = np.where(np.isnan(numbers), feature.fill, numbers)
    numbers = _transform(numbers, feature)
    numbers = np.where(np.isnan(numbers), mean, numbers)
    return (numbers - mean) / std if feature.standardize else numbers


def _moments(summary_IK: Summary) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and deviations; such that a constant column becomes 0."""
    n, mean, squares = summary_IK.reshape(-1, 3).T  # where there are no dense features, too
    std = np.sqrt(squares / np.maximum(n, 1))
    return mean, np.where(std > _ROUNDING * np.abs(mean), std, 1)
