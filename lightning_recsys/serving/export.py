"""Publishes a model that is not trained any more."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lightning_recsys.data.prepared.module import PreparedDataModule
from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.serving.dense import DensePart, export_apart
from lightning_recsys.serving.encoders import encoder_of, warn_of_weights
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.manifest import Manifest
from lightning_recsys.serving.publishing.retention import check_counts
from lightning_recsys.serving.publishing.snapshots import backend_of, snapshot_of
from lightning_recsys.serving.publishing.writer import Cut, Skeleton, VersionWriter, counts_of
from lightning_recsys.serving.rows.packing import RowFormat, check_row_format


def export_model(
    model: nn.Module,
    url: str | Path,
    *,
    num_dense: int,
    datamodule: object = None,
    position: Mapping[str, Any] | None = None,
    keep_runs: int | None = None,
    rows: RowFormat = "float32",
) -> Manifest:
    """Publish a model as a base, and a run of its own. What was published there before stays.

    Args:
        model: ``forward(dense, sparse) -> logits``, with its rows.
        url: A folder, or a URL that fsspec knows.
        num_dense: Number of numeric features of the model.
        datamodule: Where requests are encoded as its rows are; without one they have ids.
        position: What the manifest says of the training: plain values.
        keep_runs: The versions of so many runs stay, this one included; ``None`` for all.
        rows: How rows are stored: ``float32``, ``bf16`` (half of the bytes), or ``int8`` (a quarter, and a scale each).

    Raises:
        ValueError: the model has no rows here, another run publishes there, or an argument is out of range.
        FloatingPointError: the model has diverged.
        RuntimeError: the dense part cannot be exported.
    """
    check_row_format(rows)
    check_counts(keep_runs=keep_runs)  # before the program is made
    if isinstance(datamodule, PreparedDataModule):
        warn_of_weights([name for name, feature in datamodule.manifest.features.items() if feature.weighted])
    part, folder, run = DensePart(model), VersionFolder(url), uuid.uuid4().hex
    collections = {path: x for path, x in model.named_modules() if isinstance(x, EmbeddingBagCollection)}
    backends = {path: backend_of(x) for path, x in collections.items()}
    tables = {path: snapshot_of(x.tables, x) for path, x in collections.items()}
    encoder = encoder_of(datamodule, part.features, num_dense)
    with RunFolder() as temporary, folder.locked(f"run {run}"):
        program = temporary / "program.pt2"
        export_apart(part, num_dense, program)
        writer = VersionWriter(folder, run=run, keep=1, keep_runs=keep_runs, compact_share=1.0, max_increments=1)
        dense = {name: tensor.clone() for name, tensor in part.model.state_dict().items()}  # tied ones, too
        cut = Cut(
            dense, position or {}, time.time(), backends, dict.fromkeys(backends, 0), backends, counts_of(backends)
        )
        return writer.publish(Skeleton(program, encoder, num_dense, tables, rows, part.buffer_names), cut)
