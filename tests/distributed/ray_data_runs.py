"""Runs from Ray Data on the cluster of this process, whose workers write the rows that they saw into a folder."""

import json

import numpy as np
import pyarrow as pa
import pytorch_lightning as pl
import ray.data
from ray.train import RunConfig, ScalingConfig

from lightning_recsys.data import TabularDataModule
from lightning_recsys.models import LogisticRegression
from lightning_recsys.ray import RayDataModule, encode_datasets, fit
from lightning_recsys.strategies import ForkserverDDPStrategy
from lightning_recsys.tasks import CTRTask

ROWS, BLOCKS, BATCH_SIZE, SAVED_AT = 1003, 7, 64, 3
SCHEMA = {
    "label": {"column": "clicked"},
    "dense": {"row": {"standardize": False}, "price": {}},
    "categorical": {"shop": {}, "user": {"hash_buckets": 50}},
    "multi_valued": {"tags": {"separator": "|"}},
}


def clicks(num_rows, seed):
    """A table with numbers, categories, a list and missing values; ``row`` is the number of each row."""
    draw = np.random.default_rng(seed)
    shops = draw.zipf(1.5, num_rows) % 20
    return pa.table(
        {
            "clicked": draw.integers(0, 2, num_rows),
            "row": np.arange(num_rows, dtype=np.float64),
            "price": pa.array(draw.normal(3, 2, num_rows), mask=draw.random(num_rows) < 0.1),
            "shop": pa.array([f"shop {shop}" for shop in shops], mask=draw.random(num_rows) < 0.05),
            "user": draw.integers(0, 1 << 40, num_rows),
            "tags": [[f"tag {tag}" for tag in draw.integers(0, 9, draw.integers(0, 4))] for _ in range(num_rows)],
        }
    )


class Seen(pl.Callback):
    """Writes down which rows each batch has; may save a checkpoint inside the first epoch."""

    def __init__(self, folder, part, *, saves=None):
        self.folder, self.part, self.saves = folder, part, saves

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        line = {"epoch": trainer.current_epoch, "rows": batch.dense[:, 0].long().tolist()}
        with (self.folder / f"{self.part}-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.saves is not None and trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.saves)


def train(rows, folder):
    """Train two epochs; then, from a checkpoint inside the first one, to the end of that once more."""
    middle = folder / "middle.ckpt"

    def work(worker):
        for part, last, saves, resumed in [("whole", 2, middle, None), ("resumed", 1, None, middle)]:
            data = RayDataModule(rows, batch_size=BATCH_SIZE, shuffle_rows=200)
            trainer = worker.trainer(
                accelerator="cpu",
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[Seen(folder, part, saves=saves)],
                num_sanity_val_steps=1 if saves else 0,
                max_epochs=last,
            )
            task = CTRTask(LogisticRegression(data.num_dense, data.fields))
            trainer.fit(task, datamodule=data, ckpt_path=resumed)

    fit(
        work,
        strategy=ForkserverDDPStrategy(),
        scaling=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        datasets=rows,
        run=RunConfig(name="data", storage_path=str(folder / "storage")),
    )


def main(folder):
    """Everything; returns what was found in this process."""
    table = clicks(ROWS, 0)
    train_rows, validation_rows = ray.data.from_arrow(table).repartition(BLOCKS), ray.data.from_arrow(clicks(100, 1))
    rows = encode_datasets({"train": train_rows, "validation": validation_rows}, schema=SCHEMA)
    # The same by way of a file, which no part of Ray has to do with.
    whole = SCHEMA | {"split": {"validation": 0.0, "test": 0.0}}
    from_file = TabularDataModule.from_frame(table, schema=whole, cache=folder / "cache", shuffle_window=0)
    from_file.batch_size = ROWS
    (batch,) = from_file.train_dataloader()
    found = next(iter(rows.datasets["train"].iter_batches(batch_size=None, batch_format="pyarrow")))
    train(rows, folder)
    return {
        "rows_read": rows.rows_read,
        "same_encoding": rows.encoding == from_file.encoding,
        "block": {name: found[name].to_pylist() for name in found.column_names},
        "fields": list(from_file.fields),
        "dense": batch.dense[: len(found)].tolist(),
        "ids": {name: batch.sparse.select([name]).values.tolist() for name in from_file.fields},
        "errors": errors(table),
    }


def errors(table):
    """What is said of data sets that cannot be encoded."""
    bad = table.set_column(0, "clicked", [[0, 1, 7] + [1] * (ROWS - 3)])
    said = {}
    for name, datasets, options in [
        ("bad row", {"train": ray.data.from_arrow(bad)}, {}),
        ("no column", {"train": ray.data.from_arrow(table.drop_columns(["shop"]))}, {}),
        ("one label", {"train": ray.data.from_arrow(table.set_column(0, "clicked", [[1] * ROWS]))}, {}),
        ("names", {"test": ray.data.from_arrow(table)}, {}),
        ("split", {"train": ray.data.from_arrow(table)}, {"schema": SCHEMA | {"split": {"validation": 0.2}}}),
    ]:
        try:
            encode_datasets(datasets, **{"schema": SCHEMA} | options)
        except ValueError as error:
            said[name] = str(error)
    skipping = encode_datasets({"train": ray.data.from_arrow(bad)}, schema=SCHEMA, on_bad_row="skip")
    said["skipped"] = skipping.rows_read
    guessed = encode_datasets({"train": ray.data.from_arrow(table)}, label="clicked")
    said["guessed"] = sorted(guessed.encoding.fields)
    return said
