"""What ``recipes/train.py`` does with a configuration, done by FuxiCTR: the same rows, sizes, epochs and batches."""

# Shape suffixes: N rows of a split, L longest bag.

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.fuxictr_models import LABEL, MODELS, feature_map
from fuxictr.pytorch.torch_utils import seed_everything
from recipe_tools.build import build_datamodule
from recipe_tools.record import RunRecord
from torch import Tensor

from lightning_recsys.data import Batch
from lightning_recsys.metrics import LogLoss, NormalizedEntropy, StreamingAUROC
from lightning_recsys.runtime import configure_worker

SIZES = ("embedding_dim", "hidden", "num_cross_layers", "bottom_hidden", "top_hidden")


class Loader:
    """Batches as FuxiCTR's readers give them, out of memory; in a new order at every pass where ``shuffle``."""

    def __init__(self, columns: dict[str, Tensor], *, batch_size: int, shuffle: bool) -> None:
        self.columns, self.batch_size, self.shuffle = columns, batch_size, shuffle
        self.rows = len(columns[LABEL])

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(self.rows) if self.shuffle else torch.arange(self.rows)
        for rows in order.split(self.batch_size):
            yield {name: column[rows] for name, column in self.columns.items()}


def train(config: dict[str, Any], record: RunRecord, *, model: str, learning_rate: float) -> None:
    """Fit, keep the epoch with the best validation AUC (FuxiCTR's default), and measure it on the test rows.

    Args:
        config: As ``recipes/train.py`` gets it; its data, seed, epochs and the sizes of its model are taken.
        record: Gets the metrics, under the names that our own runs give them.
        model: Name in :data:`benchmarks.peers.fuxictr_models.MODELS`.
        learning_rate: Of FuxiCTR's Adam.
    """
    seed_everything(config["seed"])
    configure_worker()
    datamodule = build_datamodule(config)
    batch_size = config["data"]["batch_size"]
    bags = [name for name, feature in datamodule.folder("train")[1].features.items() if feature.bag]
    rows = {split: datamodule.rows(split) for split in ("train", "validation", "test")}
    loaders = {
        split: Loader(
            as_columns(own.take(torch.arange(len(own))), bags=bags), batch_size=batch_size, shuffle=split == "train"
        )
        for split, own in rows.items()
    }
    longest = {name: column.shape[1] for name, column in loaders["train"].columns.items() if column.dim() == 2}
    sizes = {name: config["model"][name] for name in SIZES if name in config["model"]}
    with tempfile.TemporaryDirectory() as folder:
        columns = feature_map(
            Path(folder),
            embedding_dim=sizes.get("embedding_dim", 1),
            dense=dense_names(datamodule.num_dense),
            fields=datamodule.fields,
            bags=longest,
        )
        network = MODELS[model](columns, learning_rate=learning_rate, **sizes)
        network.fit(loaders["train"], epochs=config["trainer"]["max_epochs"], validation_data=loaders["validation"])
    for stage, split in (("val", "validation"), ("test", "test")):
        predicted = torch.from_numpy(network.predict(loaders[split]))
        for name, metric in (("auc", StreamingAUROC()), ("logloss", LogLoss()), ("ne", NormalizedEntropy())):
            metric.update(predicted, loaders[split].columns[LABEL])
            record.metrics[f"{stage}/{name}"] = float(metric.compute())


def dense_names(num_dense: int) -> list[str]:
    """Names of the numeric columns."""
    return [f"d{i}" for i in range(num_dense)]


def as_columns(rows: Batch, *, bags: Collection[str]) -> dict[str, Tensor]:
    """A column for each feature, ``[N]`` or, of those in ``bags``, ``[N, L]``, and the labels."""
    columns = dict(zip(dense_names(rows.dense.shape[1]), rows.dense.t().contiguous(), strict=True))
    lengths_FN = rows.sparse.bag_lengths().view(len(rows.sparse.keys), len(rows))
    ids = rows.sparse.values.split(lengths_FN.sum(1).tolist())
    for name, lengths_N, own in zip(rows.sparse.keys, lengths_FN, ids, strict=True):
        columns[name] = padded(lengths_N, own) if name in bags else own
    return columns | {LABEL: rows.labels}


def padded(lengths: Tensor, ids: Tensor) -> Tensor:
    """Bags as a matrix ``[N, L]``: each id one higher, filled up with 0.

    >>> padded(torch.tensor([2, 0, 1]), torch.tensor([7, 8, 0])).tolist()
    [[8, 9], [0, 0], [1, 0]]
    """
    present = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    matrix = torch.zeros(present.shape, dtype=torch.int64)
    matrix[present] = ids + 1
    return matrix
