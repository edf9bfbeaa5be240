"""YAML into dataclasses, strictly: every error names the key and says what is allowed."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

T = TypeVar("T")


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that a mapping already has, where YAML would keep the last and say nothing.

    Dates stay the text that they are.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: {key!r} is listed twice. Keep one.")
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def load_yaml(path: Path, what: str = "a schema") -> Any:
    """The content of a schema file, or of another file of YAML, which messages call by ``what`` it is."""
    path = path.expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no schema file {path}. `lightning-recsys prepare schema` writes one from your data."
        )
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not {what}: {error}") from error


def make(kind: type[T], where: str, data: Any, **made: Any) -> T:
    """An instance of a dataclass from a mapping, each value checked against the field's type."""
    hints = get_type_hints(kind)
    allowed = [f for f in fields(kind) if f.name not in made]  # type: ignore[arg-type]
    check_keys(where, data, [f.name for f in allowed])
    for f in allowed:
        if f.name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{where}.{f.name} is missing.")
    return kind(**{key: convert(f"{where}.{key}", value, hints[key]) for key, value in data.items()}, **made)


def check_keys(where: str, data: Any, allowed: list[str]) -> None:
    """Raise ``ValueError`` unless ``data`` is a mapping with none but the allowed keys."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a mapping with some of the keys {', '.join(allowed)}; got {data!r}.")
    for key in data:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where} has no key {key!r}.{hint} Allowed: {', '.join(allowed)}.")


def convert(where: str, value: Any, kind: Any) -> Any:
    """The value as the type wants it, or an error that says what it wants."""
    for option in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        converted = _as(value, option)
        if converted is not None or option is type(None) is type(value):
            return converted
    raise ValueError(f"{where} must be {_describe(kind)}, got {value!r}.")


def _as(value: Any, kind: Any) -> Any:
    """The value if it is of that kind, else ``None``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        if get_args(kind)[0] is int:
            numbers = [value] if is_number else value
            whole = isinstance(numbers, list | tuple) and all(_as(number, int) is not None for number in numbers)
            return tuple(numbers) if whole else None
        if get_args(kind)[0] is float:
            numbers = [value] if is_number else value
            good = isinstance(numbers, list | tuple) and all(_as(number, float) is not None for number in numbers)
            return tuple(map(float, numbers)) if good else None
        words = [value] if isinstance(value, str) else value
        simple = isinstance(words, list | tuple) and all(
            isinstance(w, str | int | float) and not isinstance(w, bool) for w in words
        )
        return tuple(str(word) for word in words) if simple else None
    if kind is float:
        return float(value) if is_number else None
    if kind is int:
        return value if is_number and isinstance(value, int) else None
    return value if isinstance(value, kind) else None


def _describe(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "null"}
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return {int: "a list of whole numbers", float: "a list of numbers"}.get(get_args(kind)[0], "a list of strings")
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(kind))
    return names[kind]
