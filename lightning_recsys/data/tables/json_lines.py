"""Files of JSON lines: one object a line, whose members are the columns of a row."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from lightning_recsys.data.tables.words import mixed_words, typed_array

Place: TypeAlias = tuple[str, ...]
"""Where a column is: the names of the structures or objects around it, and its own."""

_QUOTED_CHARACTERS = 80
_HALF = "\\ud"  # as JSON begins half of a character beyond 16 bits


class NotAnObjectError(ValueError):
    """A line is no JSON, or is JSON of another kind."""


def parse_line(line: bytes | str) -> dict[str, Any]:
    """The object of a line.

    Raises:
        NotAnObjectError: the line holds none; the message says what is wrong, without the place.
    """
    shown = line.decode("utf-8", "backslashreplace") if isinstance(line, bytes) else line
    shown = repr(shown if len(shown) <= _QUOTED_CHARACTERS else shown[:_QUOTED_CHARACTERS] + "...")
    try:
        text = line.decode() if isinstance(line, bytes) else line
        found = json.loads(text)
        if _HALF in text:  # perhaps of a character that JSON writes as two of them
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise NotAnObjectError(
            f"must be in UTF-8 (or name its encoding in the schema, such as encoding: latin-1), got {shown}"
        ) from None
    except UnicodeEncodeError:
        raise NotAnObjectError(f"must be text, and holds half a character: {shown}") from None
    except (ValueError, RecursionError) as error:
        raise NotAnObjectError(f"must be a JSON object, but is no JSON ({error}): {shown}") from None
    if not isinstance(found, dict):
        raise NotAnObjectError(f"must be a JSON object, got {shown}")
    return found


def find_places(lines: Iterable[bytes | str], path: Path) -> list[Place]:
    """The columns of the objects of some lines, in the order in which they come up; bad lines have none.

    An object within an object has no column of its own: its members have, wherever it is in some row.

    Args:
        lines: The first lines of the file, of which none is empty.
        path: The file that they come from, for messages.

    Raises:
        ValueError: none of the lines is an object, or the file is one list or one object over several lines.

    >>> find_places(['{"a": null, "b": [1]}', '{"a": {"c": 1, "d": {}}}'], Path("rows.jsonl"))
    [('a', 'c'), ('b',)]
    """
    found: dict[Place, bool] = {}  # whether any row has a value there
    told = ""
    for number, line in enumerate(lines):
        try:
            row = parse_line(line)
        except NotAnObjectError as error:
            told = told or str(error)
            text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
            if number == 0 and (text.lstrip()[:1] == "[" or text.strip() == "{"):
                raise ValueError(
                    f"{path} is JSON, but not one object a line. Write it so: pandas.read_json('in.json')"
                    ".to_json('out.jsonl', orient='records', lines=True)."
                ) from None
            continue
        for place, value in _members(row, ()):
            found[place] = found.get(place, False) or value is not None
    if not found:
        raise ValueError(f"{path} has no JSON object with members among its first lines. {told}".strip())
    inner = {place[:depth] for place in found for depth in range(1, len(place))}
    order = [place for place, has_value in found.items() if has_value or place not in inner]
    first = {place[0]: number for number, place in reversed(list(enumerate(found)))}
    return sorted(order, key=lambda place: first[place[0]])


def _members(row: Mapping[str, Any], around: Place) -> Iterable[tuple[Place, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _members(value, (*around, name))
        else:
            yield (*around, name), value


def parse_lines(
    lines: Sequence[bytes | str],
    places: Mapping[str, Place],
    *,
    lists: Container[str] | None = None,
    decimal: str = ".",
) -> tuple[dict[str, pa.ChunkedArray], dict[int, tuple[str | None, str]]]:
    """Some columns of some lines.

    Args:
        lines: The lines, of which none is empty.
        places: The columns to read, and where each is.
        lists: Those of them that take lists; ``None`` for all.
        decimal: What stands before the fraction of a number in texts.

    Returns:
        The columns, without bad rows; and what is wrong with each of those, by its number from 1: the column, ``None``
        where it is the whole line, and the words. A member that a line does not have is missing.

    >>> columns, bad = parse_lines(['{"a": {"b": 1}}', "{}", '{"a": {"b": {}}}', "7"], {"a.b": ("a", "b")})
    >>> columns["a.b"].to_pylist(), bad[3]
    ([1, None], ('a.b', 'must be a value or a list of values, got {}'))
    >>> bad[4]
    (None, "must be a JSON object, got '7'")
    """
    bad: dict[int, tuple[str | None, str]] = {}
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_line(line))
        except NotAnObjectError as error:
            rows.append({})
            bad[number] = None, str(error)
    columns = {name: _values(rows, place) for name, place in places.items()}
    for name, values in columns.items():
        takes_lists = lists is None or name in lists
        wanted = "a value or a list of values" if takes_lists else "one value (lists belong under multi_valued)"
        for row, value in _nested(values, lists=takes_lists):
            shown = json.dumps(value)
            shown = shown if len(shown) <= _QUOTED_CHARACTERS else shown[:_QUOTED_CHARACTERS] + "..."
            bad.setdefault(row + 1, (name, f"must be {wanted}, got {shown}"))
    if bad:
        good = [row for row in range(len(rows)) if row + 1 not in bad]
        columns = {name: [values[row] for row in good] for name, values in columns.items()}
    return {name: pa.chunked_array([as_column(values, decimal=decimal)]) for name, values in columns.items()}, dict(
        sorted(bad.items())
    )


def _values(rows: Sequence[Mapping[str, Any]], place: Place) -> list[Any]:
    found: Sequence[Any] = rows
    for name in place:
        found = [x.get(name) if isinstance(x, dict) else None for x in found]
    return list(found)


def _nested(values: Sequence[Any], *, lists: bool) -> list[tuple[int, Any]]:
    """The rows whose value is an object, or a list where there may be none or of objects or lists, and those values."""
    if not {dict, list} & set(map(type, values)):
        return []
    return [
        (row, value)
        for row, value in enumerate(values)
        if isinstance(value, dict)
        or (isinstance(value, list) and not (lists and all(not isinstance(item, dict | list) for item in value)))
    ]


def as_column(values: Sequence[Any], *, decimal: str = ".") -> pa.Array:
    """Values as Python has them as a column, of one type where they have one, else of words.

    What a value is called in a vocabulary does not depend on those beside it.

    Args:
        values: One for each row, ``None`` where it is missing; lists have no objects or lists among their items.
        decimal: What stands before the fraction of a number in texts among them.

    >>> as_column([1, 2.5, None]).to_pylist(), as_column([1, "a"]).to_pylist(), as_column([["a"], [1]]).to_pylist()
    ([1.0, 2.5, None], ['1', 'a'], [['a'], ['1']])
    """
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.nulls(len(values), pa.string())
    if kinds == {list}:
        items = as_column([item for value in values if value is not None for item in value], decimal=decimal)
        starts, filled = [], 0
        for value in values:
            starts.append(None if value is None else filled)
            filled += 0 if value is None else len(value)
        return pa.ListArray.from_arrays(pa.array([*starts, filled], pa.int32()), items)
    if kinds == {int, float}:
        with suppress(pa.ArrowInvalid, OverflowError):  # of whole numbers that no float holds
            return pa.array(values, pa.float64())
    return typed_array(values) if len(kinds) == 1 else pa.array(mixed_words(values, decimal=decimal), pa.string())
