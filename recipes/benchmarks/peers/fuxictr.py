"""FuxiCTR as its users run it: its layers, its dense Adam, its ``fit`` and, in one of two variants, its reader.

Beside this package's environment: ``pip install --no-deps fuxictr==2.3.10`` and
``pip install scikit-learn polars "ray[data]" h5py tqdm``.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.harness.turns import Turn
from benchmarks.harness.workload import Workload
from torch import Tensor

from lightning_recsys.data import Batch

HIDDEN: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom_hidden": [512, 256, 64], "top_hidden": [512, 256]},
    "deepfm": {"hidden": [400, 400, 400]},
    "wide_deep": {"hidden": [400, 400]},
    "dcn": {"hidden": [400, 400], "num_cross_layers": 3},
}


def is_available() -> bool:
    """Whether FuxiCTR is installed."""
    return importlib.util.find_spec("fuxictr") is not None


def variant(work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
    """FuxiCTR with its reader of ``.npz`` files as a variant of :func:`benchmarks.harness.turns.in_turns`.

    The reader works in the training process: one thread, as everything else that is measured.
    """

    def read(columns: Any, folder: Path) -> Iterable[dict[str, Tensor]]:
        from fuxictr.pytorch.dataloaders import RankDataLoader

        path = folder / "train.npz"
        rows = as_columns(work, work.batches(work.rows)[0])
        np.savez(path, **{name: column.numpy() for name, column in rows.items()})
        train, _ = RankDataLoader(
            columns, stage="train", train_data=str(path), batch_size=batch_size, num_workers=0, data_format="npz"
        )
        return train

    return trained_on(read, work, model)


def preloaded(work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
    """FuxiCTR on batches that lie ready in memory."""
    return trained_on(lambda *_: [as_columns(work, batch) for batch in work.batches(batch_size)], work, model)


def trained_on(
    read: Callable[[Any, Path], Iterable[dict[str, Tensor]]], work: Workload, model: str
) -> Callable[[Turn], None]:
    """FuxiCTR's ``fit``, one epoch after the other until the turn ends it."""
    from benchmarks.peers.fuxictr_models import LABEL, MODELS, feature_map

    def run(turn: Turn) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            dense = [f"d{i}" for i in range(work.num_dense)]
            columns = feature_map(folder, embedding_dim=work.dim, dense=dense, fields=work.fields, bags={})
            network = MODELS[model](columns, learning_rate=1e-3, embedding_dim=work.dim, **HIDDEN[model])
            network._eval_steps = 2**62  # training alone is measured
            step = network.train_step

            def counted_step(batch: dict[str, Tensor]) -> Tensor:
                loss = step(batch)
                turn.step_done(len(batch[LABEL]))
                return loss

            network.train_step = counted_step
            network.fit(read(columns, folder), epochs=2**62)

    return run


def as_columns(work: Workload, batch: Batch) -> dict[str, Tensor]:
    """A batch as FuxiCTR takes it: one column for each feature, and the label."""
    ids = batch.sparse.values.view(work.num_fields, -1)
    dense = {f"d{i}": batch.dense[:, i].contiguous() for i in range(work.num_dense)}
    return dense | dict(zip(work.fields, ids, strict=True)) | {"label": batch.labels}
