"""Predictions of models of graphs into a file."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
from recipe_tools.build import Config, build_datamodule, build_task, seed_everything
from recipe_tools.trained import load_checkpoint, makes_rows, without_tables

from lightning_recsys.data.graph import NodeDataModule
from lightning_recsys.runtime import configure_worker
from lightning_recsys.tasks import load_for_prediction, predict_nodes, recommend

log = logging.getLogger("predict")


def predict_graph(config: Config) -> None:
    """Write the classes of all nodes of a run, or the best items of all of its users.

    Raises:
        ValueError: rows are named, which a graph does not have, or the file has no room for what is asked for.
    """
    out, embeddings = Path(config["out"]), bool(config["with_embeddings"])
    if out.suffix not in (".csv", ".parquet", ".pq"):
        raise ValueError(f"predictions go to a file named .csv or .parquet, got {out}.")
    if config["rows"] is not None or config["id"] is not None:
        raise ValueError(
            "data= and id= are for rows of clicks: a graph's nodes are those of its run, called as in its tables."
        )
    if embeddings and out.suffix == ".csv":
        raise ValueError("with_embeddings=true writes a list of numbers for each node: name out=....parquet.")
    if makes_rows(config):
        raise ValueError("checkpoint: rows of nodes that strategy.dynamic_rows made cannot be predicted from.")
    seed_everything(config["seed"])
    configure_worker()
    datamodule: Any = build_datamodule(config, checkpoint=load_checkpoint(config["checkpoint"]), stage="predict")
    task: Any = load_for_prediction(build_task(without_tables(config), datamodule), config["checkpoint"])
    if isinstance(datamodule, NodeDataModule):
        count = write_tables(out, predict_nodes(task, datamodule, embeddings=embeddings))
        log.info("Wrote %s: the classes of %s nodes.", out, f"{count:,}")
        return
    if embeddings:
        raise ValueError(
            "with_embeddings=true is for classes of nodes; embed_users_and_items gives those of users and items."
        )
    options = {"top_k": config["top_k"], "taken": config["taken"], "search": config["search"]}
    count = write_tables(out, recommend(task, datamodule, **options))
    log.info("Wrote %s: %s items for %s users.", out, f"{count:,}", f"{datamodule.interactions.num_users:,}")


def write_tables(path: Path, tables: Iterable[pa.Table]) -> int:
    """Write tables of the same columns to one file, which appears when it is whole; the number of their rows."""
    partial, count, writer = path.with_name(f"{path.name}.partial"), 0, None
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for table in tables:
            if writer is None:
                make = arrow_csv.CSVWriter if path.suffix == ".csv" else parquet.ParquetWriter
                writer = make(str(partial), table.schema)
            writer.write_table(table)
            count += len(table)
        if writer is not None:
            writer.close()
            partial.replace(path)
    finally:
        if writer is not None:
            writer.close()
        partial.unlink(missing_ok=True)
    return count
