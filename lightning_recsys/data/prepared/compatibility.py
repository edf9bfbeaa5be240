"""Whether the ids and numbers of two folders of prepared rows mean the same: a model takes both for what it learned."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lightning_recsys.data.prepared.manifest import Manifest

_SIZES = ("num_ids", "min_count", "max_vocabulary")  # what they lead to is in the features and vocabularies
_COLUMNS = ("dense", "vectors", "categorical", "multi_valued")  # the keys of a schema that say how columns are encoded


def describe_encoding(root: Path, manifest: Manifest) -> dict[str, Any]:
    """The rules by which raw values became ids and numbers, by a name for messages; for a checkpoint.

    The rows, the split and how the raw files are written are not in it, so that a folder of other rows can have the
    same encoding.
    """
    options, learned = manifest.details.get("options", {}), manifest.details.get("learned", {})
    rules = {key: value for key, value in options.get("preprocessing", {}).items() if key not in _SIZES}
    schema = options.get("data", {}).get("schema", {})
    return {
        "order of the dense features": list(manifest.dense),
        "order of the categorical features": list(manifest.features),
        **{f"number of ids of {name}": feature.num_embeddings for name, feature in manifest.features.items()},
        **{f"preprocessing.{key}": value for key, value in rules.items() if key != "given"},
        **{f"schema.{key}": schema[key] for key in _COLUMNS if key in schema},
        **{f"{key} of the dense features": learned[key] for key in ("minimum", "mean", "deviation") if key in learned},
        **{
            f"vocabulary of {name}": _digest(root / feature.vocabulary)
            for name, feature in manifest.features.items()
            if feature.vocabulary and (root / feature.vocabulary).is_file()  # training does without the file
        },
    }


def check_encoding(trained: Mapping[str, Any], root: Path, found: Mapping[str, Any]) -> None:
    """Compare the encoding of a checkpoint with that of a folder.

    Args:
        trained: What :func:`describe_encoding` said of the rows that the checkpoint was trained on.
        root: The folder whose rows are to be read.
        found: What it says of that folder.

    Raises:
        ValueError: they differ; the message says in what.
    """
    different = [
        name
        for name in {**trained, **found}
        if trained.get(name) != found.get(name)
        and not (name.startswith("vocabulary of ") and (name not in trained or name not in found))
    ]
    if different:
        name, more = different[0], len(different) - 1
        raise ValueError(
            f"data.root={root} was prepared otherwise than the rows that the checkpoint was trained on: the {name} is "
            f"{_short(found.get(name))} here and was {_short(trained.get(name))} there"
            f"{f', and {more} more differ' if more else ''}. The model would take ids and numbers for others. Prepare "
            "the rows of both in one go (such as with split.by=file), with the same options; or train with "
            "data=tabular, whose checkpoints carry what was learned and encode new files by it."
        )


def _digest(vocabulary: Path) -> str:
    texts, lengths = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    with pq.ParquetFile(vocabulary) as file:
        for batch in file.iter_batches(columns=["value"], use_threads=False):
            texts.update(b"".join(batch["value"].to_pylist()))
            lengths.update(pc.binary_length(batch["value"]).to_numpy().astype(np.int64).tobytes())
    return texts.hexdigest() + lengths.hexdigest()


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."
