"""A model as a folder in the layout of the Hugging Face Hub: weights, configuration, and a model card with its metrics.

.. code-block:: text

    README.md               the model card
    config.json             what the model is, and size and digest of every file that follows
    model.safetensors       the dense part's weights
    model.pt2               its program (torch.export)
    rows-0-3.arrow          rows of table 3 of collection 0
    encoder.json, encoder.safetensors    how a row becomes numbers and ids
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from torch import nn

from lightning_recsys.errors import PublishedVersionError
from lightning_recsys.serving.export import export_model
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.manifest import MAX_MANIFEST_BYTES, Link, Manifest, digest_of
from lightning_recsys.serving.reader import PublishedModel, open_version
from lightning_recsys.serving.rows.packing import RowFormat

CARD = "README.md"
CONFIG = "config.json"
_LIBRARY = "lightning_recsys"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_TYPES = {"auc": "roc_auc", "ne": "normalized_entropy", "logloss": "log_loss", "calibration": "calibration"}


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    num_dense: int,
    name: str,
    datamodule: object = None,
    metrics: Mapping[str, float] | None = None,
    data: str = "unknown",
    rows: RowFormat = "float32",
) -> Manifest:
    """Write a model that is trained, with a model card.

    Args:
        model: ``forward(dense, sparse) -> logits``, with its rows.
        folder: A new folder of this machine, or an empty one.
        num_dense: Number of numeric features of the model.
        name: Name of the model, for the card: letters, digits, ``.``, ``_`` and ``-``.
        datamodule: Where raw rows are encoded as its rows are; without one they have ids.
        metrics: Metrics for the card, by their names, such as ``{"test/auc": 0.81}``.
        data: What it was trained on, in a word, for the card.
        rows: How rows are stored: ``float32``, ``bf16`` or ``int8``.

    Raises:
        FileExistsError: there are files in the folder.
        ValueError: the name is none, the folder is a URL, or the model has no rows here.
        FloatingPointError: the model has diverged.
    """
    if "://" in str(folder):
        raise ValueError(f"{folder}: a model is saved in a folder of this machine; give one, and upload it from there.")
    target = Path(folder)
    if not _NAME.fullmatch(name):
        raise ValueError(f"name takes letters, digits, '.', '_' and '-', got {name!r}.")
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} has files already: give a new folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        manifest = export_model(model, temporary, num_dense=num_dense, datamodule=datamodule, rows=rows)
        files = Path(temporary) / "versions" / "1"
        (files / "manifest.json").unlink()
        kind = type(model).__name__
        config = {"library_name": _LIBRARY, "model_type": kind, "manifest": json.loads(manifest.to_json())}
        (files / CONFIG).write_text(json.dumps(config, indent=1))
        (files / CARD).write_text(_card(manifest, kind, name, data, metrics or {}))
        if target.exists():
            target.rmdir()
        shutil.move(files, target)
    return manifest


def load_pretrained(url: str | Path, *, cache: str | Path | None = None) -> PublishedModel:
    """Open what :func:`save_pretrained` wrote; ``predict(rows)`` scores raw rows.

    Its program is code: open only models whose makers you trust.

    Args:
        url: The folder, or a URL that fsspec knows: ``hf://USER/MODEL`` with ``huggingface_hub`` installed.
        cache: Where files of a URL are kept; see :class:`~lightning_recsys.serving.files.VersionFolder`.

    Raises:
        PublishedVersionError: a file is missing or damaged.
    """
    folder = _HubFolder(url, cache=cache)
    link, manifest = folder.find(1)
    return open_version(folder, link, manifest)


class _HubFolder(VersionFolder):
    """A folder with one version, whose files lie beside its card."""

    def place(self, version: int, name: str) -> str:
        return name

    def name(self, version: int) -> str:
        return self.url

    def find(self, version: int) -> tuple[Link, Manifest]:
        try:
            data = self._read(CONFIG, MAX_MANIFEST_BYTES)
            return Link(1, digest_of(data)), Manifest.from_json(json.dumps(json.loads(data)["manifest"]).encode())
        except OSError as error:
            raise PublishedVersionError(self.url, f"its {CONFIG} cannot be read ({error.strerror or error})") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PublishedVersionError(
                self.url, f"its {CONFIG} is none of lightning_recsys ({error!s:.120})"
            ) from error


def _card(manifest: Manifest, model_type: str, name: str, data: str, metrics: Mapping[str, float]) -> str:
    task = {"type": "tabular-classification", "name": "click-through rate prediction"}
    values = [
        {"type": _TYPES.get(key.rpartition("/")[2], key.rpartition("/")[2]), "name": key, "value": float(value)}
        for key, value in metrics.items()
    ]
    result = {"task": task, "dataset": {"type": data, "name": data}, "metrics": values}
    head: dict[str, Any] = {"library_name": _LIBRARY, "pipeline_tag": "tabular-classification"}
    head["tags"] = ["click-through-rate", "recommendation", model_type]
    if values:
        head["model-index"] = [{"name": name, "results": [result]}]
    tables = [(t.config, t.num_rows) for collection in manifest.collections for t in collection.tables]
    size = sum(entry.size for entry in manifest.files.values())
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).rstrip(),
        "---",
        f"# {name}",
        "",
        f"{model_type} for click-through rates, trained on {data} with lightning_recsys. {manifest.num_dense} numeric"
        f" features, {len(tables)} tables of embeddings, {size:,} bytes; rows are {manifest.rows}.",
        "",
        "```python",
        "from lightning_recsys.serving.hub import load_pretrained",
        "",
        f'model = load_pretrained("{name}")  # this folder, or hf://USER/MODEL',
        "model.predict([model.encoder.example()])",
        "```",
        "",
        "Loading runs the model's program, which is code.",
    ]
    if values:
        lines += ["", "| metric | value |", "| --- | --- |", *(f"| {x['name']} | {x['value']:.4f} |" for x in values)]
    lines += ["", "| table | features | ids | rows | width |", "| --- | --- | --- | --- | --- |"]
    for config, count in tables:
        features = ", ".join(config.feature_names)
        lines.append(f"| {config.name} | {features} | {config.num_embeddings:,} | {count:,} | {config.embedding_dim} |")
    return "\n".join(lines) + "\n"
