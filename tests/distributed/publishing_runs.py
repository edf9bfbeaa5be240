"""Runs that publish, and a callback that holds the last version against the rows where they are trained."""

import json
import shutil
from pathlib import Path

import pytorch_lightning as pl
import torch

from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.serving import Manifest, ModelReader
from lightning_recsys.serving.publishing import publisher as module


class Held(pl.Callback):
    """Behind the publisher: notes on rank 0 how the last version differs from the model when all have trained."""

    def __init__(self, publisher, program, result):
        self.publisher, self.program, self.result = publisher, str(program), str(result)

    def setup(self, trainer, pl_module, stage):
        # The program was made by the test, once for all runs: it takes seconds.
        module.export_apart = lambda part, num_dense, target: shutil.copyfile(self.program, target)

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            self.publisher._work.wait()  # so that every version is written that is due

    def on_train_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        model, wrong, live = ModelReader(self.publisher.url).model, [], 0
        for path, collection in pl_module.model.named_modules():
            if not isinstance(collection, EmbeddingBagCollection):
                continue
            backend = collection.embedding_bags
            for table in collection.tables:
                if getattr(backend, "dynamic", None) is not None:
                    ids = backend.dynamic.live_ids()[table.name]
                    live += len(ids)
                    ids = torch.cat([ids, torch.arange(table.num_embeddings)])  # those that do not exist are drawn
                    rows = backend.dynamic.read(table.name, "weight", ids)
                else:
                    ids = torch.arange(table.num_embeddings)
                    rows = backend.read(table.name, "weight")
                if not torch.equal(model.rows_of(path, table.name, ids), rows):
                    wrong.append(f"{path} {table.name}")
        state = dict(pl_module.model.named_parameters())
        whole = [name for name, value in model.weights.items() if value.shape == state[name].shape]  # not cut by fields
        wrong += [name for name in whole if not torch.equal(model.weights[name], state[name])]
        manifest = model.manifest
        with open(self.result, "w") as file:
            json.dump(
                {
                    "wrong": wrong,
                    "live": live,
                    "world_size": trainer.world_size,
                    "version": model.version,
                    "gone": sum(
                        table.num_gone
                        for path in Path(self.publisher.url).glob("versions/*/manifest.json")
                        for collection in Manifest.from_json(path.read_bytes()).collections
                        for table in collection.tables
                    ),
                    "examples": manifest.position["examples"],
                    "cut": manifest.cut,
                },
                file,
            )
