"""Digests of rows: 64 bits for each row, by which one sees that it has changed since it was looked at last.

Nothing is counted or marked while rows are trained, so a row that was written by whatever means is found: by an update,
by a checkpoint that was loaded, or because it was forgotten and made anew. Two different rows have the same digest with
a probability of 2^-64. What it costs is one pass over the rows, without Python's lock.
"""

# Shape suffixes: U rows, D embedding dim.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compiled.hashing import mix
from lightning_recsys.compiled.loops import compile_rule

DIGEST = "digest"  # of each row, int64: read as if it were one of its arrays

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)


@compile_rule
def _digest(words, out):  # noqa: ANN001, ANN202
    """The digest of each row of 32-bit words ``[U, D]``; two words go through the hash together."""
    for row in range(words.shape[0]):
        digest = _GOLDEN
        for d in range(0, words.shape[1] - 1, 2):
            digest = mix(digest + (np.uint64(words[row, d]) | (np.uint64(words[row, d + 1]) << _32)))
        if words.shape[1] & 1:
            digest = mix(digest + np.uint64(words[row, -1]))
        out[row] = digest


def digest_rows(rows_UD: Tensor) -> Tensor:
    """The digest of each row's bits: float32 ``[U, D]`` -> int64 ``[U]``.

    >>> digests = digest_rows(torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]]))
    >>> (digests == digests[0]).tolist()
    [True, True, False]
    """
    out = np.empty(rows_UD.shape[0], dtype=np.uint64)
    _digest(rows_UD.detach().contiguous().numpy().view(np.uint32), out)
    return torch.from_numpy(out.view(np.int64))
