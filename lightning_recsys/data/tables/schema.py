"""The description of a table of rows: files, columns, and the rule of a click. Written in YAML, one key per fact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml  # type: ignore[import-untyped]

from lightning_recsys.data.tables.features import Categorical, Dense, Input, MultiValued, Vector
from lightning_recsys.data.tables.label import LabelRule
from lightning_recsys.data.tables.schema_parts import VALUE_KEYS, Join, Label, Split, TableFormat, require
from lightning_recsys.typed_yaml import check_keys, convert, load_yaml, make

T = TypeVar("T")

DEFAULT_SHARE = 0.1
SPLITS = ["train", "validation", "test", "predict"]
FEATURES: dict[str, type] = {
    "dense": Dense,
    "vectors": Vector,
    "categorical": Categorical,
    "multi_valued": MultiValued,
}
FORMAT_KEYS = [f.name for f in fields(TableFormat)]
KEYS = ["files", *FORMAT_KEYS, "label", "defaults", *FEATURES, "time", "ignore", "joins", "split"]


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A table of rows, and what its columns mean.

    Read one with :meth:`from_yaml` or :meth:`from_dict`; ``docs/schema.md`` lists the keys.

    Args:
        files: For ``train``, ``validation`` and ``test`` the paths or globs of their files; ``predict`` names files
            whose rows need no label.
        table: The format in which those files are written.
        formats: Formats of single paths or globs among them that are written in another way.
        label: The column of the label, and how 0 and 1 are made of it.
        dense: The numeric features by name.
        vectors: Lists of numbers, each as long in every row: so many numeric features more.
        categorical: The features with one id per row, by name.
        multi_valued: The features with a bag of ids per row, by name.
        time: Column with the time of a row: numbers or ISO 8601.
        ignore: Columns that are known and not used.
        joins: The side tables whose columns are appended to the rows.
        split: How evaluation rows are parted from training rows.
        comments: Remarks for :meth:`to_yaml`, by feature or column; ``schema.<key>`` for a key (lines behind the
            features of one), ``schema.`` for all.
        num_rows: Number of rows of the training files, by their sizes where not all were read; of a guessed schema.
        present: Share of the rows that have a value, by column; of a guessed schema.
        fitting: Share of those that are what the column was taken for; of a guessed schema.

    Raises:
        ValueError: see :meth:`from_dict`.
    """

    files: Mapping[Literal["train", "validation", "test", "predict"], tuple[str, ...]]
    label: Label
    table: TableFormat = field(default_factory=TableFormat)
    formats: Mapping[str, TableFormat] = field(default_factory=dict)
    dense: Mapping[str, Dense] = field(default_factory=dict)
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    categorical: Mapping[str, Categorical] = field(default_factory=dict)
    multi_valued: Mapping[str, MultiValued] = field(default_factory=dict)
    time: str | None = None
    ignore: tuple[str, ...] = ()
    joins: tuple[Join, ...] = ()
    split: Split = field(default_factory=Split)
    comments: Mapping[str, str] = field(default_factory=dict, compare=False)
    num_rows: int | None = field(default=None, compare=False)
    present: Mapping[str, float] = field(default_factory=dict, compare=False)
    fitting: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self._check_uses()
        self._check_split()
        self.table.check("schema")
        for path, table in self.formats.items():
            table.check(f"schema.files, {path}")
        for i, join in enumerate(self.joins):
            join.table.check(f"schema.joins[{i}]")
        LabelRule(self.label.rule)
        require(bool(self.files), "schema.files must name at least one file, such as files: {train: rows.csv}.")
        require(
            any(getattr(self, key) for key in FEATURES),
            f"schema needs at least one feature: a column under {', '.join(FEATURES)}.",
        )
        for key in FEATURES:
            for name, feature in getattr(self, key).items():
                feature.check(f"schema.{key}.{name}")
        for name, feature in self.categorical.items():
            self._check_cross(f"schema.categorical.{name}.cross", feature)
        self._check_sources()

    def usual_format(self, rows: str, *, in_file: bool = True) -> TableFormat:
        """The format of rows for which the schema names none: that of the training rows.

        Args:
            rows: What to call them in an error message.
            in_file: Whether they lie in a file; else only what tells what their values mean counts.

        Raises:
            ValueError: the files of training are written in several ways.
        """
        tables = [self.formats.get(path, self.table) for path in self.files.get("train", ())] or [self.table]
        if not in_file:
            tables = [replace(self.table, **{key: getattr(table, key) for key in VALUE_KEYS}) for table in tables]
        require(
            all(table == tables[0] for table in tables),
            f"{rows}: the files of training are written in several ways, so it is open how this is. "
            + (
                "Name it under schema.files with its own keys, such as predict: {path: new.csv, missing: ['', NA]}."
                if in_file
                else f"Write those in one way, as to {', '.join(VALUE_KEYS)}."
            ),
        )
        return tables[0]

    @classmethod
    def from_yaml(cls, path: str | Path) -> Schema:
        """Read a schema file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not YAML, repeats a key, or as for :meth:`from_dict`.
        """
        return _parse(load_yaml(Path(path)))

    @classmethod
    def from_dict(cls, schema: Mapping[str, object]) -> Schema:
        """Read a schema from plain dictionaries and lists, with the keys of a schema file.

        Raises:
            ValueError: a key is unknown, missing or has a value of the wrong kind; the message names it and says what
                is allowed.

        >>> Schema.from_dict({"files": "clicks.csv", "label": "click", "categorical": ["user", "item"]}).label.column
        'click'
        """
        return _parse(schema)

    def to_yaml(self) -> str:
        """The schema as a file that :meth:`from_yaml` reads, with its comments."""
        return "".join(f"{line}\n" for line in _lines(self))

    def share(self, split: Literal["validation", "test"]) -> float:
        """Share of the training files' rows that go to an evaluation split; 0 if it has files of its own."""
        if split in self.files:
            return 0.0
        share = getattr(self.split, split)
        return DEFAULT_SHARE if share is None else float(share)

    def uses(self) -> Iterator[tuple[str, str]]:
        """Every column that is spoken for, with the key that does; some stand there more than once."""
        yield from ((source.column, key) for source, key in self.inputs())
        yield from ((column, "ignore") for column in self.ignore)

    def inputs(self) -> Iterator[tuple[Input, str]]:
        """The values that are read from each column, with the key that asks for them."""
        yield Input(self.label.column, "label"), "label"
        for key in FEATURES:
            for name, feature in getattr(self, key).items():
                for part, made_from in self.parts(name, feature):
                    yield from ((source, key) for source in part.inputs(made_from))
        if self.time is not None:
            yield Input(self.time, "time"), "time"

    def parts(self, name: str, feature: Any) -> Iterator[tuple[Any, str]]:
        """A feature with its name; of a cross, those that it lists, where a column is a feature without options."""
        if isinstance(feature, Categorical) and feature.cross:
            yield from ((self.categorical.get(part, Categorical()), part) for part in feature.cross)
        else:
            yield feature, name

    @property
    def numeric(self) -> dict[str, Dense]:
        """All numeric features, those that vectors are made of behind the others, in the order of the batches."""
        numbers = {
            place: Dense(standardize=vector.standardize)
            for name, vector in self.vectors.items()
            for place in vector.places(name)
        }
        return {**self.dense, **numbers}

    def _check_uses(self) -> None:
        named = [(name, key) for key in FEATURES for name in getattr(self, key)]
        seen: dict[str, str] = {}
        for name, key in (
            (self.label.column, "label"),
            *named,
            *((name, "ignore") for name in self.ignore),
            *([] if self.time is None else [(self.time, "time")]),
        ):
            both = {key, seen.get(name)} <= {"time", *FEATURES}
            hint = f" Or give the feature another name, and column: {name} among its options." if both else ""
            require(
                name not in seen,
                f"column {name!r} stands under schema.{seen.get(name)} and under schema.{key}. Keep one.{hint}",
            )
            seen[name] = key
        features = list(map(feature_name, (*self.categorical, *self.multi_valued)))
        require(
            len(set(features)) == len(features),
            f"two of the columns {', '.join(sorted(features))} have the same name once dots become underscores. "
            "Rename one.",
        )

    def _check_sources(self) -> None:
        """Refuse features made from the label or from columns that are not to be used."""
        for key in FEATURES:
            for name, feature in getattr(self, key).items():
                for part, made_from in self.parts(name, feature):
                    for source in part.inputs(made_from):
                        where = f"schema.{key}.{name} is made from column {source.column!r}"
                        require(source.column != self.label.column, f"{where}, which is the label.")
                        require(source.column not in self.ignore, f"{where}, which stands under schema.ignore as well.")

    def _check_cross(self, where: str, feature: Categorical) -> None:
        for part in feature.cross:
            crossed = part in self.categorical and self.categorical[part].cross
            require(not crossed, f"{where} lists {part!r}, which is a cross itself. List what that one does.")
            for key in ("dense", "vectors", "multi_valued"):
                require(
                    part not in getattr(self, key),
                    f"{where} lists {part!r}, which stands under schema.{key}. Cross categorical features, or columns "
                    f"that are no features: {{column: {part}}} under another name makes a categorical one of it.",
                )

    def _check_split(self) -> None:
        for name in ("validation", "test"):
            given = getattr(self.split, name)
            require(
                not (given and name in self.files),
                f"schema.split.{name} and schema.files.{name} both say where {name} rows come from. Keep one.",
            )
            require(
                given is None or 0 <= given < 1, f"schema.split.{name} must be at least 0 and below 1, got {given}."
            )
        total = self.share("validation") + self.share("test")
        require(total < 1, f"schema.split leaves no training rows: validation and test take {total:g} of all.")
        require(
            self.split.by != "time" or self.time is not None,
            "schema.split.by is time, but schema.time names no column.",
        )


def feature_name(column: str) -> str:
    """A column's name as a feature: dots separate the parts of a state-dict key, so they become underscores."""
    return column.replace(".", "_")


def _parse(data: Any) -> Schema:
    """A schema from plain dictionaries and lists."""
    check_keys("schema", data, KEYS)
    for required in ("files", "label"):
        if data.get(required) is None:
            raise ValueError(f"schema.{required} is missing. A schema needs files, label and at least one feature.")
    label = data["label"]
    defaults = data.get("defaults") or {}
    check_keys("schema.defaults", defaults, list(FEATURES))
    features: dict[str, Any] = {
        key: _parse_columns(f"schema.{key}", data.get(key) or {}, kind, defaults.get(key) or {})
        for key, kind in FEATURES.items()
    }
    joins = data.get("joins") or []
    if not isinstance(joins, list | tuple):
        raise ValueError(f"schema.joins must be a list of side tables, got {joins!r}.")
    files, formats = _parse_files(data)
    return Schema(
        files=files,
        table=_parse_format("schema", data),
        formats=formats,
        label=Label(column=label) if isinstance(label, str) else make(Label, "schema.label", label),
        time=convert("schema.time", data.get("time"), str | None),
        ignore=convert("schema.ignore", data.get("ignore") or (), tuple[str, ...]),
        joins=tuple(_parse_join(f"schema.joins[{i}]", join) for i, join in enumerate(joins)),
        split=make(Split, "schema.split", data.get("split") or {}),
        **features,
    )


def _parse_files(data: Mapping[str, Any]) -> tuple[dict[Any, tuple[str, ...]], dict[str, TableFormat]]:
    """The paths of each split, and the formats of those that are written in another way than the others."""
    files = data["files"]
    if not isinstance(files, Mapping) or "path" in files:
        files = {"train": files}
    check_keys("schema.files", files, SPLITS)
    found, formats = {}, {}
    for split, entries in files.items():
        where, paths = f"schema.files.{split}", []
        for entry in entries if isinstance(entries, list | tuple) else [entries] if entries else []:
            if isinstance(entry, Mapping):
                check_keys(where, entry, ["path", *FORMAT_KEYS])
                path = convert(f"{where}.path", entry.get("path"), str)
                formats[path] = _parse_format(where, {**data, **entry})
            else:
                path = convert(where, entry, str)
            paths.append(path)
        if paths:
            found[split] = tuple(paths)
    return found, formats


def _parse_format(where: str, data: Mapping[str, Any]) -> TableFormat:
    return make(TableFormat, where, {key: data[key] for key in FORMAT_KEYS if key in data})


def _parse_join(where: str, data: Any) -> Join:
    check_keys(where, data, ["file", "column", "key", *FORMAT_KEYS])
    own = {key: value for key, value in data.items() if key not in FORMAT_KEYS}
    own.setdefault("key", own.get("column"))
    return make(Join, where, own, table=_parse_format(where, data))


def _parse_columns(where: str, data: Any, kind: type[T], defaults: Mapping[str, Any]) -> dict[str, T]:
    """Columns with their options, from a list of names or a mapping of names to options."""
    if isinstance(data, str):
        data = [data]
    if not isinstance(data, Mapping):
        names = convert(where, data, tuple[str, ...])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{where} lists {', '.join(twice)} twice. Keep one.")
        data = dict.fromkeys(names)
    columns = {}
    for name, options in data.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: the column name {name!r} is no string for YAML. Put it in quotes.")
        check_keys(f"{where}.{name}", options or {}, [f.name for f in fields(kind)])  # type: ignore[arg-type]
        columns[name] = make(kind, f"{where}.{name}", {**defaults, **(options or {})})
    return columns


def _lines(schema: Schema) -> Iterator[str]:
    """A schema file, line by line; what has its default value is left out."""

    def remark(key: str) -> str:
        return f"  # {schema.comments[key]}" if key in schema.comments else ""

    def section(key: str, items: list[tuple[str, str]]) -> Iterator[str]:
        if items:
            yield f"{key}:"
            yield from (f"  {text}{remark(name)}" for name, text in items)

    yield from (f"# {line}" for line in schema.comments.get("schema.", "").splitlines())
    entries = {split: [_entry(schema, path) for path in paths] for split, paths in schema.files.items()}
    files = {split: paths if len(paths) > 1 else paths[0] for split, paths in entries.items()}
    yield from section(
        "files", [(f"schema.files.{split}", f"{split}: {yaml_on_a_line(paths)}") for split, paths in files.items()]
    )
    yield from (
        f"{key}: {yaml_on_a_line(value)}{remark(f'schema.{key}')}" for key, value in _changed(schema.table).items()
    )
    yield f"label: {yaml_on_a_line(_changed(schema.label))}{remark('schema.label')}"
    for key in FEATURES:
        columns = getattr(schema, key).items()
        lines = [(name, f"{yaml_on_a_line(name)}: {yaml_on_a_line(_changed(column))}") for name, column in columns]
        suggested = schema.comments.get(f"schema.{key}", "").splitlines()
        yield from section(key, lines)
        yield from (f"# {key}:" for _ in suggested[:1] if not lines)
        yield from (f"  # {line}" if lines else f"#   {line}" for line in suggested)
    if schema.time is not None:
        yield f"time: {yaml_on_a_line(schema.time)}{remark(schema.time)}"
    yield from section("ignore", [(name, f"- {yaml_on_a_line(name)}") for name in schema.ignore])
    joins = [{"file": j.file, "column": j.column, "key": j.key, **_changed(j.table)} for j in schema.joins]
    yield from section("joins", [("schema.joins", f"- {yaml_on_a_line(join)}") for join in joins])
    yield f"split: {yaml_on_a_line(_changed(schema.split))}{remark('schema.split')}"


def _entry(schema: Schema, path: str) -> Any:
    """A path, with what is otherwise about its files."""
    own, usual = schema.formats.get(path, schema.table), schema.table
    changed = {f.name: getattr(own, f.name) for f in fields(own) if getattr(own, f.name) != getattr(usual, f.name)}
    return {"path": path, **_plain(changed)} if changed else path


def _changed(part: Any) -> dict[str, Any]:
    """The fields that do not have their default value."""
    values = {f.name: (getattr(part, f.name), f.default) for f in fields(part)}
    return _plain({name: value for name, (value, default) in values.items() if value != default})


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def yaml_on_a_line(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()
