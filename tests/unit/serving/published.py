"""A small model in training, as the tests of publishing have it: rows in stores, changed by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowSGD
from lightning_recsys.serving.encoders import IdEncoder
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.publishing.snapshots import backend_of, snapshot_of
from lightning_recsys.serving.publishing.writer import Cut, Skeleton, VersionWriter, counts_of
from lightning_recsys.stores import DynamicRows, MappedStores, StoreBackend

TABLES = (
    EmbeddingBagConfig("a", 300, 8, ("x", "y"), init_std=0.5),
    EmbeddingBagConfig("b", 50, 8, ("z",), init_std=0.1),
)
HUGE = (EmbeddingBagConfig("a", 2**48, 8, ("x", "y"), init_std=0.5), TABLES[1])
FEATURES = ("x", "y", "z")


class Sums(torch.nn.Module):
    """The sum of all pooled vectors, with a weight."""

    def __init__(self, tables=TABLES, **options):
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables, optimizer=RowSGD(lr=1.0), **options)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, dense, sparse):
        return self.weight * self.embeddings(sparse).sum((1, 2)) + dense.sum(1)


class Program(torch.nn.Module):
    """What `Sums` is without its tables; exported in a second, in this process."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, dense, pooled):
        return self.model.weight * pooled["embeddings"].sum((1, 2)) + dense.sum(1)


def save_program(path: Path) -> Path:
    batch = torch.export.Dim("batch")
    example = torch.zeros(3, 2), {"embeddings": torch.zeros(3, 3, 8)}
    shapes = ({0: batch}, {"embeddings": {0: batch}})
    torch.export.save(torch.export.export(Program(), example, dynamic_shapes=shapes, strict=False), path)
    return path


class Trained:
    """A model whose rows are in stores, and a writer that publishes it."""

    def __init__(
        self,
        program: Path,
        store_folder: Path,
        url: str | Path,
        *,
        dynamic: DynamicRows | None = None,
        dtype: str = "float32",
        **options,
    ):
        store_folder.mkdir(exist_ok=True)
        tables = tuple(replace(table, dtype=dtype) for table in (TABLES if dynamic is None else HUGE))
        self.model = Sums(tables, device=None if dynamic is None else "meta")
        self.stores = MappedStores(store_folder)
        layout = TableLayout(tables)
        backend = StoreBackend.create(
            "t", layout, self.model.embeddings.optimizer, servers=[self.stores], seed=5, dynamic=dynamic
        )
        self.model.embeddings.bind(backend)
        self.backend = backend
        self.options = {"run": "0" * 32, "keep": 100, "keep_runs": None, "compact_share": 1e9, "max_increments": 10**6}
        self.options |= options
        self.folder = VersionFolder(url)
        self.writer = VersionWriter(self.folder, **self.options)
        encoder = IdEncoder(dict.fromkeys(FEATURES, 50), 2)
        self.skeleton = Skeleton(program, encoder, 2, {"embeddings": snapshot_of(tables, self.model.embeddings)})

    def restart(self, **options):
        """Publish further on as the next process would."""
        self.options |= options
        self.writer = VersionWriter(self.folder, **self.options)

    def train(self, ids, lr=0.5):
        """One update of the rows of some ids, the same for all three features."""
        ids = torch.tensor(ids)
        sparse = SparseFeatures(FEATURES, ids.repeat(3))
        self.model.embeddings.embedding_bags.apply_gradients(
            [self.backend.lookup(sparse)[1]], torch.randn(len(ids), 3, 8), lr=lr
        )
        with torch.no_grad():
            self.model.weight.add_(0.25)

    def publish(self):
        dense = {"weight": self.model.weight.detach().clone()}
        backends = {"embeddings": backend_of(self.model.embeddings)}
        position = {"global_step": self.backend.step}
        cut = Cut(dense, position, time.time(), backends, {"embeddings": 0}, backends, counts_of(backends))
        return self.writer.publish(self.skeleton, cut)

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """As the stores have them."""
        return self.backend.stored.read(table, "weight", ids)

    def close(self):
        self.model.embeddings.unbind(copy_rows=False)
        self.stores.close()
