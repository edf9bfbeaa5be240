"""The manifest of a folder of prepared rows: ``manifest.json``, written last, so that its presence says it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "lightning_recsys.prepared"
FORMAT_VERSION = 1
LABEL = "label"
WEIGHTS_SUFFIX = ":weights"  # column of a bag's weights: the feature's name and this


@dataclass(frozen=True)
class Feature:
    """A categorical feature.

    Args:
        num_embeddings: Ids are below this.
        bag: Each row holds a list of ids; otherwise exactly one.
        weighted: Each id of a bag has a weight.
        vocabulary: File of the values behind the ids, relative to the folder; ``None`` where ids are hashes.
    """

    num_embeddings: int
    bag: bool = False
    weighted: bool = False
    vocabulary: str | None = None


@dataclass(frozen=True)
class Shard:
    """A Parquet file of rows.

    Args:
        path: Relative to the folder.
        rows: Number of rows in the file.
        bytes: Size of the file.
        blake2b: Checksum of the file, as ``b2sum`` prints it.
    """

    path: str
    rows: int
    bytes: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a folder of prepared rows.

    Args:
        dense: Names of the dense features, in the order of the batches.
        features: The categorical features by name, in the order of the batches.
        splits: The shards of ``train``, ``validation`` and ``test``; a split without rows has none.
        group_rows: Rows of a row group; the last one of a shard may be smaller.
        details: What the reader does not need: options, inputs, statistics, versions.
    """

    dense: tuple[str, ...]
    features: Mapping[str, Feature]
    splits: Mapping[str, tuple[Shard, ...]]
    group_rows: int
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_embeddings(self) -> dict[str, int]:
        """Number of embeddings of each categorical feature, in the order of the batches."""
        return {name: feature.num_embeddings for name, feature in self.features.items()}

    def layout_digest(self, split: str) -> str:
        """A digest, 16 characters: equal for folders with the same rows in the same order, whatever their values are.

        Files that the same rows were written to by other versions of a library have it in common.
        """
        features = [(name, x.num_embeddings, x.bag, x.weighted) for name, x in self.features.items()]
        rows = [shard.rows for shard in self.splits[split]]
        layout = json.dumps([self.dense, features, rows, self.group_rows])
        return blake2b(layout.encode(), digest_size=8).hexdigest()

    def is_whole(self, root: Path) -> bool:
        """Whether each shard is in the folder and has its size, and each vocabulary is there."""
        if not all((root / feature.vocabulary).is_file() for feature in self.features.values() if feature.vocabulary):
            return False
        shards = (shard for part in self.splits.values() for shard in part)
        return all((path := root / shard.path).is_file() and path.stat().st_size == shard.bytes for shard in shards)

    @classmethod
    def load(cls, root: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            ValueError: the folder has none, or it is not one of ours, or of a newer version.
        """
        path = root / MANIFEST
        if not path.is_file():
            raise ValueError(
                f"{root} holds no {MANIFEST}: it is not a folder of prepared rows, or its preparation has not ended. "
                f"Run lightning-recsys prepare with out={root} (again: it goes on where it was stopped)."
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Prepare the rows again.") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} does not describe prepared rows: its format is not {FORMAT!r}.")
        if content["format_version"] > FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {content['format_version']}, and this version of lightning_recsys reads "
                f"up to {FORMAT_VERSION}. Update it, or prepare the rows again."
            )
        return cls(
            dense=tuple(content["dense"]),
            features={name: Feature(**feature) for name, feature in content["features"].items()},
            splits={
                split: tuple(Shard(**shard) for shard in about["shards"]) for split, about in content["splits"].items()
            },
            group_rows=content["group_rows"],
            details=content["details"],
        )

    def save(self, root: Path) -> None:
        """Write the manifest so that a crash leaves either none or all of it."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dense": list(self.dense),
            "features": {name: asdict(feature) for name, feature in self.features.items()},
            "splits": {
                split: {"rows": sum(shard.rows for shard in shards), "shards": [asdict(shard) for shard in shards]}
                for split, shards in self.splits.items()
            },
            "group_rows": self.group_rows,
            "details": dict(self.details),
        }
        write_atomically(root / MANIFEST, json.dumps(content, indent=1) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is either not there or whole, also after a crash or power failure."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
    publish(temporary, path)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name: synced to the disk first, so that the name never stands for a torn file."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
