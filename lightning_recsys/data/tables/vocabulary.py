"""From strings to ids: by a vocabulary learned on the training rows, or by hashing."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recsys.data.hashing import hash_strings
from lightning_recsys.data.tables.columns import Categories

Ids = NDArray[np.int64]


class IdMapping(Protocol):
    """Gives every string an id, and missing values one of their own."""

    @property
    def num_embeddings(self) -> int:
        """Number of ids."""
        ...

    @property
    def missing_id(self) -> int:
        """The id of a missing value."""
        ...

    def ids(self, values: pa.StringArray) -> Ids:
        """Ids of the given strings."""
        ...


class Vocabulary:
    """Ids for the strings that training rows hold often enough: the most frequent one first.

    Id 0 stands for every other string, 1 for missing values, and the strings follow from 2. Where no training row is
    unknown, or none is missing, the embedding of that id is never trained.

    Args:
        strings: The known strings, in order.

    >>> column = Categories.from_strings(pa.chunked_array([["b", "a", "b", "rare"]]), strip=True, missing=[])
    >>> Vocabulary.learn(column, min_count=1).ids(pa.array(["a", "b", "new"])).tolist()
    [3, 2, 0]
    """

    missing_id = 1
    first_id = 2

    def __init__(self, strings: pa.StringArray) -> None:
        self.strings = strings

    @property
    def num_embeddings(self) -> int:
        """Number of ids."""
        return len(self.strings) + self.first_id

    def ids(self, values: pa.StringArray) -> Ids:
        """Ids of the given strings."""
        places = pc.fill_null(pc.index_in(values, value_set=self.strings), -self.first_id)
        ids: Ids = places.to_numpy().astype(np.int64) + self.first_id
        return ids

    @classmethod
    def learn(cls, column: Categories, *, min_count: int) -> Vocabulary:
        """The strings that a column holds ``min_count`` times or more; equally frequent ones in alphabetical order."""
        counts = column.counts()
        frequent = np.flatnonzero(counts >= min_count)
        strings = column.values.take(pa.array(frequent))
        table = pa.table({"count": counts[frequent], "string": strings})
        order = pc.sort_indices(table, sort_keys=[("count", "descending"), ("string", "ascending")])
        return cls(strings.take(order))

    def state_dict(self) -> dict[str, Tensor]:
        """The strings as UTF-8 bytes, and where each starts: tensors, so that a checkpoint holds them as they are."""
        text, ends = _utf8(self.strings)
        return {"bytes": torch.from_numpy(text.copy()), "offsets": torch.from_numpy(ends.copy())}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Vocabulary:
        """The vocabulary that :meth:`state_dict` came from."""
        buffers = [None, *(pa.py_buffer(state[name].numpy()) for name in ("offsets", "bytes"))]
        strings = pa.Array.from_buffers(pa.large_string(), len(state["offsets"]) - 1, buffers)
        return cls(strings.cast(pa.string()))


class HashBuckets:
    """Ids from a hash of the string: no vocabulary to learn, and new strings get ids too, which others may share.

    Id 0 stands for missing values. A string's id is the same in every process and on every platform.

    Args:
        num_buckets: Number of ids for strings.
    """

    missing_id = 0

    def __init__(self, num_buckets: int) -> None:
        self.num_embeddings = num_buckets + 1

    def ids(self, values: pa.StringArray) -> Ids:
        """Ids of the given strings."""
        return self.ids_of_hashes(hash_strings(*_utf8(values)))

    def ids_of_hashes(self, hashes: NDArray[np.uint64]) -> Ids:
        """Ids of the strings with these hashes; see :func:`~lightning_recsys.data.hashing.hash_strings`."""
        return (hashes % np.uint64(self.num_embeddings - 1)).astype(np.int64) + 1


def _utf8(strings: pa.StringArray) -> tuple[NDArray[np.uint8], Ids]:
    """All strings' bytes, and where each starts and the last one ends."""
    large = strings.cast(pa.large_string())
    _, offsets, data = large.buffers()
    if offsets is None or data is None:
        return np.zeros(0, dtype=np.uint8), np.zeros(len(strings) + 1, dtype=np.int64)
    starts = np.frombuffer(offsets, dtype=np.int64)[large.offset : large.offset + len(large) + 1]
    first, last = int(starts[0]), int(starts[-1])
    return np.frombuffer(data, dtype=np.uint8)[first:last], starts - first
