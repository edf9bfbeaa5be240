"""Texts as bags of n-grams: a compiled loop over their bytes finds them, so that no word becomes a Python object."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_recsys.compiled.loops import compile_rule
from lightning_recsys.data.raw.columns import Bags
from lightning_recsys.data.raw.kernels import text_of

_BETWEEN = {"words": r"[^\pL\pM\pN_]+", "characters": r"[\s\pZ]+"}
_SPACE = 32


def ngram_bags(texts: pa.Array, of: Literal["words", "characters"], *, sizes: Sequence[int], limit: int) -> Bags:
    """The n-grams of each text, in the order in which they begin, as often as they stand there.

    Texts are in lower case. Words are letters, digits and underscores, with one space between them in an n-gram; among
    characters, each run of white space is one space, and none is at the ends. A text that is shorter than an n-gram has
    none of it.

    Args:
        texts: One string a row; a row without a text has an empty one, for nulls are not allowed here.
        of: Whether an n-gram is made of words or of characters.
        sizes: Number of words or characters in an n-gram: one or more choices.
        limit: Number of n-grams that are kept of a text, the first ones.

    >>> bags = ngram_bags(pa.array(["Red, red wine!", ""]), "words", sizes=[1, 2], limit=9)
    >>> bags.values.to_pylist(), bags.lengths_N.tolist()
    (['red', 'red red', 'red', 'red wine', 'wine'], [5, 0])
    >>> ngram_bags(pa.array(["Ho  ho"]), "characters", sizes=[3], limit=9).values.to_pylist()
    ['ho ', 'o h', ' ho']
    """
    plain = pc.replace_substring_regex(pc.utf8_lower(texts), pattern=_BETWEEN[of], replacement=" ")
    text, starts = text_of(pc.utf8_trim(plain, " ").cast(pa.binary()))
    room = np.minimum(np.diff(starts).astype(np.int64) * len(sizes), limit)
    begins, ends = (np.empty(int(room.sum()), dtype=np.int32) for _ in range(2))
    lengths_N = np.empty(len(texts), dtype=np.int64)
    pieces = np.empty((2, int(np.diff(starts).max(initial=0))), dtype=np.int32)
    found = _find_ngrams(text, starts, of == "words", np.array(sizes, np.int64), limit, pieces, begins, ends, lengths_N)
    offsets = np.concatenate([[0], np.cumsum(ends[:found] - begins[:found], dtype=np.int64)])
    data = np.empty(int(offsets[-1]), dtype=np.uint8)
    _copy_ngrams(text, begins[:found], offsets, data)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    encoded = pa.Array.from_buffers(pa.large_string(), found, buffers).dictionary_encode()
    return Bags(pa.DictionaryArray.from_arrays(encoded.indices, encoded.dictionary.cast(pa.string())), lengths_N)


@compile_rule
def _find_ngrams(text, starts, of_words, sizes, limit, pieces, begins, ends, lengths_N):  # noqa: ANN001, ANN202
    found = 0
    for row in range(len(lengths_N)):
        position, stop = starts[row], starts[row + 1]
        count, before = 0, found
        while position < stop:
            pieces[0, count] = position
            position += 1
            if of_words:
                while position < stop and text[position] != _SPACE:
                    position += 1
            else:
                while position < stop and text[position] & 0xC0 == 0x80:  # the rest of a letter of several bytes
                    position += 1
            pieces[1, count] = position
            position += of_words
            count += 1
        for first in range(count):
            for size in sizes:
                if first + size <= count and found - before < limit:
                    begins[found] = pieces[0, first]
                    ends[found] = pieces[1, first + size - 1]
                    found += 1
        lengths_N[row] = found - before
    return found


@compile_rule
def _copy_ngrams(text, begins, offsets, data):  # noqa: ANN001, ANN202
    for i in range(len(begins)):
        for j in range(offsets[i + 1] - offsets[i]):
            data[offsets[i] + j] = text[begins[i] + j]
