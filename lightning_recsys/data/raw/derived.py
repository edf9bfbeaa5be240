"""Features that are made once side tables are joined: parts of times, ages, bins, crosses, the numbers of vectors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_recsys.data.raw.cleaning import Column, Numbers
from lightning_recsys.data.tables.columns import fixed_time
from lightning_recsys.data.tables.features import Categorical, Dense, Input
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.data.tables.words import BETWEEN, truths_as_numbers

_HOUR, _DAY = 3600, 86400
_FIRST_WEEKDAY = 3  # 1970 began on a Thursday; Monday is 0


def derive(columns: Mapping[Input, Column], schema: Schema) -> dict[str, Column]:
    """All features of a schema by their names; each number of a vector is one.

    Args:
        columns: Everything that the schema's features are made from, all of as many rows.
        schema: Names the features, and what each is made from.
    """
    made: dict[str, Column] = {name: _number(columns, name, feature) for name, feature in schema.dense.items()}
    for name, vector in schema.vectors.items():
        numbers = columns[vector.inputs(name)[0]]
        assert isinstance(numbers, np.ndarray)
        made |= dict(zip(vector.places(name), numbers.T, strict=True))
    for name, feature in schema.categorical.items():
        parts = [_category(columns, *part) for part in schema.parts(name, feature)]
        made[name] = _cross(parts) if feature.cross else parts[0]
    return made | {name: columns[feature.inputs(name)[0]] for name, feature in schema.multi_valued.items()}


def _number(columns: Mapping[Input, Column], name: str, feature: Dense) -> Column:
    """A number, or the days from a time to another, NaN where one is missing."""
    first, *others = (columns[source] for source in feature.inputs(name))
    if feature.age_at is None:
        return first
    until = others[0] if others else fixed_time(feature.age_at)
    assert isinstance(first, np.ndarray)
    assert isinstance(until, np.ndarray | float)
    days: Numbers = (until - first) / _DAY
    return days


def _category(columns: Mapping[Input, Column], feature: Categorical, name: str) -> pa.DictionaryArray:
    """The values of a column, or of a part of the time there, or the bins of its numbers."""
    (source,) = feature.inputs(name)
    column = columns[source]
    if feature.transform == "none" and not feature.edges:
        return column
    assert isinstance(column, np.ndarray)
    known = np.nan_to_num(column)
    if feature.edges:
        number, count = np.searchsorted(feature.edges, known, side="right"), len(feature.edges) + 1
    elif feature.transform == "hour":
        number, count = np.floor(known / _HOUR) % 24, 24
    else:
        number, count = (np.floor(known / _DAY) + _FIRST_WEEKDAY) % 7, 7
    codes = pa.array(number.astype(np.int32), mask=np.isnan(column))
    return pa.DictionaryArray.from_arrays(codes, pa.array([str(i) for i in range(count)]))


def _cross(parts: list[pa.DictionaryArray]) -> pa.DictionaryArray:
    """The values of some features together; missing where all of them are.

    True and false are 1 and 0 in it, whichever way they are written.
    """
    parts = [_with_numbers_for_truths(part) for part in parts]
    words = [pa.concat_arrays([part.dictionary, pa.array([""], pa.string())]) for part in parts]  # the last: missing
    codes = [part.indices.fill_null(len(part.dictionary)).to_numpy().astype(np.int64) for part in parts]
    group = codes[0]
    for code, word in zip(codes[1:], words[1:], strict=True):
        _, group = np.unique(group * len(word) + code, return_inverse=True)  # numbered anew, so that it stays small
    _, rows = np.unique(group, return_index=True)  # one of each group
    values = pc.binary_join_element_wise(
        *(word.take(pa.array(code[rows])) for word, code in zip(words, codes, strict=True)), BETWEEN
    )
    missing = np.all([code == len(part.dictionary) for part, code in zip(parts, codes, strict=True)], axis=0)
    return pa.DictionaryArray.from_arrays(pa.array(group.astype(np.int32), mask=missing), values)


def _with_numbers_for_truths(part: pa.DictionaryArray) -> pa.DictionaryArray:
    merged = truths_as_numbers(part.dictionary).dictionary_encode()
    return pa.DictionaryArray.from_arrays(merged.indices.take(part.indices), merged.dictionary)
