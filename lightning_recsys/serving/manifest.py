"""The manifest of a published version, as JSON that is checked field by field before anything else is read.

.. code-block:: text

    out/
      current.json            number and digest of the latest version; replaced in one step, after its files
      held.json               the same of the version that somebody went back to: while it is there, that one counts
      versions/17/
        manifest.json         what follows, with the size and the digest of every file
        model.safetensors     the dense part
        rows-0-3.arrow        rows of table 3 of collection 0: all of them in a base, the changed ones in an increment
        gone-0-3.arrow        ids whose rows were forgotten since the version before
        model.pt2             of a base: the dense part's program (torch.export)
        encoder.json, encoder.safetensors    of a base: how a request becomes numbers and ids

Versions make a chain: an increment names the version before it, and the digest of that one's manifest, which in turn
has the digests of its files. So a chain that begins at ``current.json`` can be checked as a whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.serving.rows.packing import ROW_FORMATS, RowFormat

FORMAT = 2
MANIFEST = "manifest.json"
CURRENT = "current.json"
HELD = "held.json"
MAX_MANIFEST_BYTES = 64 << 20
_FILE = re.compile(r"[a-z0-9][a-z0-9-]{0,60}\.(arrow|safetensors|pt2|json)")
_WRITTEN = re.compile(r"(rows|gone)-\d+-\d+\.arrow|model\.(safetensors|pt2)|encoder\.(json|safetensors)|manifest\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]{32}")


class ForeignFormatError(ValueError):
    """It is whole, but of the format of another version of this package.

    Args:
        found: The format that the manifest states.
    """

    def __init__(self, found: int) -> None:
        super().__init__(
            f"it is of format {found}, which another version of lightning_recsys has written; this one reads and writes"
            f" format {FORMAT}. Publish into a new folder, or use that version"
        )


@dataclass(frozen=True)
class FileEntry:
    """A file of a version.

    Args:
        size: Size of the file in bytes.
        sha256: SHA-256 digest of the file, in hexadecimal.
    """

    size: int
    sha256: str

    def __post_init__(self) -> None:
        _require(_is_count(self.size) and _matches(_DIGEST, self.sha256), f"{self!r:.120} describes no file")


@dataclass(frozen=True)
class Link:
    """Names a version so that no other can be taken for it.

    Args:
        version: Number of the version, from 1 on.
        digest: SHA-256 digest of the version's manifest, in hexadecimal.
    """

    version: int
    digest: str

    def __post_init__(self) -> None:
        _require(_is_count(self.version) and self.version > 0, f"{self.version!r:.40} is no number of a version")
        _require(_matches(_DIGEST, self.digest), f"{self.digest!r:.80} is no digest")


@dataclass(frozen=True)
class Drawing:
    """How rows that were never trained are drawn: by a function of seed and key.

    Args:
        seed: Seed of the values of all rows.
        first_key: Key of the row of id 0.
        key_step: By how much the keys of two successive ids differ.
    """

    seed: int
    first_key: int
    key_step: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _require(_is_count(value) and value < 2**64, f"drawing.{name} is {value!r:.40}")


@dataclass(frozen=True)
class TableRows:
    """A table, and what a version has of its rows.

    Args:
        config: Name, size and width of the table.
        file: The file with rows; ``None`` where there are none.
        num_rows: Number of rows in that file.
        gone_file: The file with ids of rows that were forgotten; ``None`` where there are none.
        num_gone: Number of ids in that file.
        drawing: Where rows come and go, how those are drawn that do not exist; ``None`` where all rows exist.
    """

    config: EmbeddingBagConfig
    file: str | None
    num_rows: int
    gone_file: str | None = None
    num_gone: int = 0
    drawing: Drawing | None = None

    def __post_init__(self) -> None:
        for name, count in ((self.file, self.num_rows), (self.gone_file, self.num_gone)):
            _require(name is None or _matches(_FILE, name), f"{name!r:.80} is no name of a file of a version")
            _require(_is_count(count) and (name is None) == (count == 0), f"{name!r:.80} has {count!r:.40} rows")
        _require(self.num_gone == 0 or self.drawing is not None, f"rows of {self.config.name!r} cannot be forgotten")


@dataclass(frozen=True)
class Collection:
    """A collection of tables of one width.

    Args:
        path: Path of the collection in the model, as ``named_modules`` gives it.
        tables: Its tables, in their order.
    """

    path: str
    tables: tuple[TableRows, ...]


@dataclass(frozen=True)
class Manifest:
    """A version.

    Args:
        version: Number of the version.
        kind: ``base`` has all rows, ``increment`` those that changed since the version before.
        run: The same for all versions of a training run, those after it was resumed from a checkpoint included.
        lineage: The same for a base and all that follows it, until the next base that is no compaction.
        previous: The version before; of an increment always there. Of a base only where its content is that of the
            version before, which it compacts.
        files: Size and digest of each file, by name.
        num_dense: Numeric features of the model.
        collections: The model's tables.
        rows: How rows are stored: float32, bf16 or int8; the same for a base and all that follows it.
        created: When the version was cut, in seconds since 1970.
        position: Where in the training data: ``epoch``, ``global_step``, ``examples``. ``examples_are`` says whether
            those are ``counted``, or ``estimated`` from rank 0's where each worker trains at its own speed.
        cut: How far the parts of the version lie apart, in updates and milliseconds.
    """

    version: int
    kind: Literal["base", "increment"]
    run: str
    lineage: str
    previous: Link | None
    files: Mapping[str, FileEntry]
    num_dense: int
    collections: tuple[Collection, ...]
    rows: RowFormat
    created: float
    position: Mapping[str, Any] = field(default_factory=dict)
    cut: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(_is_count(self.version) and self.version > 0, f"{self.version!r:.40} is no number of a version")
        _require(self.kind in ("base", "increment"), f"its kind is {self.kind!r:.40}")
        _require(_matches(_HEX, self.lineage) and _matches(_HEX, self.run), "its run and lineage are none")
        _require(_is_count(self.num_dense), f"num_dense is {self.num_dense!r:.40}")
        _require(type(self.created) in (float, int) and abs(self.created) < 1e12, f"created is {self.created!r:.40}")
        _require(isinstance(self.position, Mapping) and isinstance(self.cut, Mapping), "its position is none")
        _require(self.num_dense > 0 or len(self.collections) > 0, "it has neither collections nor numeric features")
        _require(self.rows in ROW_FORMATS, f"its rows are {self.rows!r:.40}")
        _require(self.kind == "base" or self.previous is not None, "it is an increment to no version")
        _require(self.previous is None or self.previous.version < self.version, "it follows a later version")
        for name in self.files:
            _require(_matches(_FILE, name), f"{name!r:.80} is no name of a file of a version")
        named = [x for c in self.collections for t in c.tables for x in (t.file, t.gone_file) if x is not None]
        _require(len(set(named)) == len(named), "two tables share a file")
        _require(set(named) <= set(self.files), "it names files without their digests")
        of_rows = {name for name in self.files if name.endswith(".arrow")}
        _require(of_rows <= set(named), "it has rows of no table")

    @property
    def is_base(self) -> bool:
        """Whether it has all rows."""
        return self.kind == "base"

    def to_json(self) -> bytes:
        """The manifest as a file."""
        # Without `indent` and `asdict`, which are loops of Python that hold up the thread that trains.
        return json.dumps({"format": FORMAT, **vars(self)}, default=_fields).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read the text that :meth:`to_json` wrote.

        Raises:
            ValueError: it is no manifest; the message says where.
        """
        try:
            plain = json.loads(data)
            _take_format(plain)
            plain["files"] = {name: FileEntry(**entry) for name, entry in plain["files"].items()}
            plain["previous"] = None if plain["previous"] is None else Link(**plain["previous"])
            plain["collections"] = tuple(_collection(**collection) for collection in plain["collections"])
            return cls(**plain)
        except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"it is no manifest ({type(error).__name__}: {error!s:.120})") from error


def _fields(value: object) -> dict[str, Any]:
    fields = vars(value)
    if isinstance(value, EmbeddingBagConfig):  # of whose fields readers know these: rows have the version's format
        return {name: field for name, field in fields.items() if name != "dtype"}
    return fields


def is_written_here(name: str) -> bool:
    """Whether a writer of versions gives this name to a file: what has another one is somebody else's.

    >>> [is_written_here(name) for name in ("rows-0-12.arrow", "manifest.json", "thesis.tex", "index.json")]
    [True, True, False, False]
    """
    return _WRITTEN.fullmatch(name) is not None


def digest_of(data: bytes) -> str:
    """The SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def current_to_json(link: Link) -> bytes:
    """A file that names a version: the latest one, or the one that is held."""
    return json.dumps({"format": FORMAT, **asdict(link)}).encode()


def current_from_json(data: bytes) -> Link:
    """The inverse of :func:`current_to_json`.

    Raises:
        ValueError: the text is something else.
    """
    try:
        plain = json.loads(data)
        _take_format(plain)
        return Link(**plain)
    except (TypeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it names no version ({error!s:.120})") from error


def _take_format(plain: Any) -> None:
    found = plain.pop("format", None) if isinstance(plain, dict) else None
    if type(found) is not int:
        raise ValueError("it has no format")
    if found != FORMAT:
        raise ForeignFormatError(found)


def _collection(path: Any, tables: Any) -> Collection:
    _require(isinstance(path, str), "the path of a collection is no text")
    rows = tuple(_table(**table) for table in tables)
    _require(bool(rows) and len({x.config.embedding_dim for x in rows}) == 1, f"collection {path!r:.80} has no width")
    return Collection(path, rows)


def _table(config: Any, drawing: Any, **others: Any) -> TableRows:
    names = config["feature_names"]
    _require(isinstance(names, list) and all(isinstance(x, str) for x in names), "names of features are no texts")
    _require(isinstance(config["name"], str), "the name of a table is no text")
    _require(all(_is_count(config[x]) for x in ("num_embeddings", "embedding_dim")), "the size of a table is none")
    _require(isinstance(config["init_std"], float | int), "init_std is no number")
    made = EmbeddingBagConfig(**{**config, "feature_names": tuple(names)})
    return TableRows(made, **others, drawing=None if drawing is None else Drawing(**drawing))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
