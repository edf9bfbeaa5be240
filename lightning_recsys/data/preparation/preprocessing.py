"""Named ways to turn raw columns into features."""

# Shape suffixes: N rows, I dense features, K numbers of a summary.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.data.preparation.shards import Ids
from lightning_recsys.data.raw import RawColumns, RawFormat, TabularFormat
from lightning_recsys.data.raw.kernels import KeyTable, hash_values, parse_keys

Summary = NDArray[np.float64]

_NO_BUCKET = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Learned:
    """The statistics and vocabularies of the training rows.

    Args:
        dense: What the rules keep of each dense feature, shape ``[I, K]``.
        vocabulary_sizes: Values of each vocabulary; empty where ids are hashed.
        min_count: How often the rarest value of a vocabulary occurs, at least.
        raised: Whether that is more than was asked for, so that vocabularies are not too large.
    """

    dense: Sequence[Sequence[float]] = ()
    vocabulary_sizes: Mapping[str, int] = field(default_factory=dict)
    min_count: int = 0
    raised: bool = False

    @property
    def summary_IK(self) -> Summary:
        """``dense`` as an array."""
        return np.array(self.dense)


class ColumnRules(ABC):
    """The interface of rules: how the columns of a raw format become ids and numbers.

    Attributes:
        first_id: Id of the first value of a vocabulary.
        max_vocabulary: Values that all vocabularies together hold at most.
    """

    first_id: int
    max_vocabulary: int

    @abstractmethod
    def check(self, raw_format: RawFormat) -> None:
        """Raise ``ValueError`` if rows of this format are not for these rules."""

    @abstractmethod
    def options(self) -> dict[str, object]:
        """The settings of the rules, for the manifest."""

    @abstractmethod
    def known(self, folder: Path, raw_format: RawFormat) -> Learned | None:
        """The statistics that are known before any row is read; ``None`` where the training rows must be read for them.

        Vocabularies are written, if there are any that are known.

        Args:
            folder: The folder that vocabularies are written to; it is made if it is not there.
            raw_format: The format of the raw files, which gives the order of the dense features.
        """

    def dense_names(self, raw_format: RawFormat) -> tuple[str, ...]:
        """Names of the dense features that come out."""
        return raw_format.dense

    def category_names(self, raw_format: RawFormat) -> tuple[str, ...]:
        """Names of the single-valued categorical features that come out."""
        return raw_format.categories

    @abstractmethod
    def num_hashed(self, raw_format: RawFormat) -> dict[str, int]:
        """Number of ids of each categorical feature, bags included, whose ids are hashed."""

    @abstractmethod
    def vocabularies(self, raw_format: RawFormat) -> dict[str, int]:
        """Which categorical features have vocabularies, and how often a value must occur to be in it."""

    def categories(self, rows: RawColumns, raw_format: RawFormat) -> dict[str, pa.Array]:
        """Values of the single-valued categorical features."""
        return dict(rows.categories)

    @abstractmethod
    def summary(self, rows: RawColumns, raw_format: RawFormat) -> Summary:
        """The statistics of the dense features of some training rows, shape ``[I, K]``."""

    @abstractmethod
    def merge(self, a_IK: Summary, b_IK: Summary) -> Summary:
        """The summary of some training rows and others, from those of both."""

    @abstractmethod
    def describe(self, summary_IK: Summary, raw_format: RawFormat) -> dict[str, object]:
        """A summary in words, for the manifest."""

    @abstractmethod
    def dense_features(self, rows: RawColumns, summary_IK: Summary, raw_format: RawFormat) -> NDArray[np.float32]:
        """The dense features, shape ``[I, N]``; the summary is that of the training rows."""

    @abstractmethod
    def look_up(self, name: str, values: pa.Array, table: KeyTable | None, raw_format: RawFormat) -> Ids:
        """Ids of a feature's values.

        Args:
            name: Name of the feature.
            values: The values of some rows, as the format gives them.
            table: Its vocabulary; ``None`` where ids are hashed.
            raw_format: The format of the raw files that the values come from.
        """


@dataclass(frozen=True)
class Preprocessing(ColumnRules):
    r"""The transforms of the columns.

    Args:
        dense: ``log``: :math:`\ln(\max(x, 0) + 1)`, a missing x is 0. ``log_shift``: :math:`\ln(x - m + 2)` with m the
            smallest value of the training rows, to which smaller ones are raised; a missing x is 0 before. ``bucket``:
            dense features become categorical: x above 2 is replaced with :math:`\lfloor \ln(x)^2 \rfloor`, any other
            with :math:`\lfloor x \rfloor`; missing is a category of its own.
        ids: ``hash``: the value modulo ``num_ids`` where it is a number (as Criteo's are, in hexadecimal), else its
            64-bit hash modulo ``num_ids``; a missing value has id 0. ``vocabulary``: values that occur in at least
            ``min_count`` training rows are numbered from 1 by falling frequency, missing is a value like any other;
            all others share id 0.
        num_ids: Ids of each categorical feature where they are hashed.
        min_count: See ``ids``.
        max_vocabulary: Values that all vocabularies together hold at most. Beyond it ``min_count`` is raised until they
            fit; the manifest then says so. A million values take up to 64 MB while rows are written, and about
            150 MB while the vocabulary of a single field with so many is sorted.

    Raises:
        ValueError: a name or number is not allowed.
    """

    dense: Literal["log", "log_shift", "bucket"] = "log"
    ids: Literal["hash", "vocabulary"] = "hash"
    num_ids: int = 100_000
    min_count: int = 10
    max_vocabulary: int = 6_000_000

    def __post_init__(self) -> None:
        if self.dense not in ("log", "log_shift", "bucket"):
            raise ValueError(f"preprocessing.dense must be log, log_shift or bucket, got {self.dense!r}.")
        if self.ids not in ("hash", "vocabulary"):
            raise ValueError(f"preprocessing.ids must be hash or vocabulary, got {self.ids!r}.")
        for name in ("num_ids", "min_count", "max_vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"preprocessing.{name} must be at least 1, got {getattr(self, name)}.")

    first_id: ClassVar[int] = 1  # type: ignore[misc]

    def check(self, raw_format: RawFormat) -> None:
        """See the base class."""
        if isinstance(raw_format, TabularFormat):
            raise ValueError(
                "data=tabular needs preprocessing=schema: its schema says what happens to the columns, one by one."
            )

    def options(self) -> dict[str, object]:
        """See the base class."""
        return asdict(self)

    def known(self, folder: Path, raw_format: RawFormat) -> Learned | None:
        """See the base class."""
        return None if self.ids == "vocabulary" or self.dense == "log_shift" else Learned()

    def dense_names(self, raw_format: RawFormat) -> tuple[str, ...]:
        """See the base class."""
        return () if self.dense == "bucket" else raw_format.dense

    def category_names(self, raw_format: RawFormat) -> tuple[str, ...]:
        """See the base class."""
        return (*(raw_format.dense if self.dense == "bucket" else ()), *raw_format.categories)

    def num_hashed(self, raw_format: RawFormat) -> dict[str, int]:
        """See the base class."""
        return {} if self.ids == "vocabulary" else dict.fromkeys(self._features(raw_format), self.num_ids)

    def vocabularies(self, raw_format: RawFormat) -> dict[str, int]:
        """See the base class."""
        return dict.fromkeys(self._features(raw_format), self.min_count) if self.ids == "vocabulary" else {}

    def categories(self, rows: RawColumns, raw_format: RawFormat) -> dict[str, pa.Array]:
        """See the base class."""
        buckets = {}
        if self.dense == "bucket":
            buckets = {name: bucket_text(x_N) for name, x_N in zip(raw_format.dense, rows.dense_IN, strict=True)}
        return {**buckets, **rows.categories}

    def summary(self, rows: RawColumns, raw_format: RawFormat) -> Summary:
        """The smallest values, shape ``[I, 1]``; infinity of no rows."""
        smallest: Summary = np.nan_to_num(rows.dense_IN).min(axis=1, initial=np.inf, keepdims=True)
        return smallest

    def merge(self, a_IK: Summary, b_IK: Summary) -> Summary:
        """See the base class."""
        smallest: Summary = np.minimum(a_IK, b_IK)
        return smallest

    def describe(self, summary_IK: Summary, raw_format: RawFormat) -> dict[str, object]:
        """See the base class."""
        return {"minimum": summary_IK.ravel().tolist()}

    def dense_features(self, rows: RawColumns, summary_IK: Summary, raw_format: RawFormat) -> NDArray[np.float32]:
        """See the base class."""
        if self.dense == "bucket":
            return np.empty((0, len(rows)), dtype=np.float32)
        x_IN = np.nan_to_num(rows.dense_IN, nan=0.0)
        if self.dense == "log":
            features: NDArray[np.float64] = np.log1p(np.maximum(x_IN, 0))
        else:
            features = np.log(np.maximum(x_IN - summary_IK, 0) + 2)
        return features.astype(np.float32)

    def look_up(self, name: str, values: pa.Array, table: KeyTable | None, raw_format: RawFormat) -> Ids:
        """See the base class."""
        if table is not None:
            return table.ids(hash_values(values))
        base = raw_format.number_base.get(name)
        keys = hash_values(values) if base is None else parse_keys(values, base=base)[0]
        ids = keys % np.uint64(self.num_ids)
        return ids.astype(np.int32) if self.num_ids <= 1 << 31 else ids.astype(np.int64)

    def _features(self, raw_format: RawFormat) -> tuple[str, ...]:
        return (*self.category_names(raw_format), *raw_format.bags)


def buckets(x_N: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bucket of each number; the lowest 64-bit integer where it is missing.

    >>> buckets(np.array([-1.0, 2.0, 3.0, 100.0, np.nan])).tolist()
    [-1, 2, 1, 21, -9223372036854775808]
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        logarithmic = np.floor(np.log(np.maximum(x_N, 1)) ** 2)
        bucket: NDArray[np.int64] = np.where(x_N > 2, logarithmic, np.floor(x_N)).astype(np.int64)
    bucket[np.isnan(x_N)] = _NO_BUCKET
    return bucket


def bucket_text(x_N: NDArray[np.float64]) -> pa.Array:
    """Buckets as text, empty where missing.

    >>> bucket_text(np.array([100.0, np.nan])).to_pylist()
    [b'21', b'']
    """
    distinct, codes = np.unique(buckets(x_N), return_inverse=True)
    texts = pa.array(
        [b"" if bucket == _NO_BUCKET else str(bucket).encode() for bucket in distinct.tolist()], pa.binary()
    )
    return texts.take(pa.array(codes))
