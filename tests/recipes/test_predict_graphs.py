"""From tables of a graph to a file of predictions: train.py and predict.py as people call them."""

from __future__ import annotations

import csv
import os

import numpy as np
import pyarrow.parquet as parquet
import pytest
from recipe_helpers import train_here

QUICK = ["model=graphsage", "trainer=cpu", "trainer.max_epochs=2", "callbacks/progress_bar=none"]
QUICK += ["model.hidden=8", "model.embedding_dim=8"]


def write(path, header, rows) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.mark.slow
def test_nodes_then_go_from_tables_to_a_file_of_classes(composed, run_forked, tmp_path):
    random = np.random.default_rng(0)
    nodes = [(f"p{i:03}", ("art", "bio", "")[i % 3], i % 3 + random.normal()) for i in range(90)]
    edges = [(f"p{a:03}", f"p{a % 3 + 3 * b:03}") for a, b in random.integers(0, 30, (200, 2)).tolist()]
    write(tmp_path / "nodes.csv", ("paper", "field", "size"), nodes)
    write(tmp_path / "edges.csv", ("from", "to"), edges)
    tables = [f"data.root={tmp_path}", "data.nodes.files=nodes.csv", "data.nodes.label=field"]
    config = composed("train", *QUICK, "data=graph", *tables, "data.edges.files=edges.csv")
    record = train_here(config, tmp_path / "run")
    assert {"test/accuracy", "val/macro_f1"} <= record.metrics.keys()
    line = [f"checkpoint={record.details['checkpoint']}", "with_embeddings=true"]
    done = run_forked("predict.py", *line, "out=classes.parquet", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the classes of 90 nodes" in done.stdout
    assert "Successfully loaded" not in done.stdout
    table = parquet.read_table(tmp_path / "classes.parquet")
    assert table.column_names == ["id", "prediction", "p_art", "p_bio", "embedding"]
    assert table["id"].to_pylist() == [name for name, *_ in nodes]
    assert {len(x) for x in table["embedding"].to_pylist()} == {8}
    art, bio = (table[f"p_{name}"].to_numpy() for name in ("art", "bio"))
    np.testing.assert_allclose(art + bio, 1, rtol=1e-5)
    assert table["prediction"].to_pylist() == np.where(art >= bio, "art", "bio").tolist()
    for option, message in (
        ("data=nodes.csv", "data= and id= are for rows of clicks"),
        ("out=classes.csv", "with_embeddings=true writes a list of numbers"),
        ("out=classes.txt", "a file named .csv or .parquet"),
    ):
        out = [] if option.startswith("out") else ["out=other.parquet"]
        done = run_forked("predict.py", *line, *out, option, folder=tmp_path)
        assert done.returncode == 1
        assert message in done.stderr
    write(tmp_path / "nodes.csv", ("paper", "field", "size"), nodes[::-1])
    done = run_forked("predict.py", *line, "out=other.parquet", folder=tmp_path)
    assert done.returncode == 1
    assert "not those that the checkpoint was trained on" in done.stderr
    assert not [name for name in os.listdir(tmp_path) if "other" in name]


@pytest.mark.slow
def test_users_then_go_from_tables_to_a_file_of_items(composed, run_forked, tmp_path):
    pairs = np.random.default_rng(0).choice(20 * 15, 150, replace=False).tolist()
    write(tmp_path / "taken.csv", ("who", "what", "at"), [(f"u{p // 15}", 10**10 + p % 15, p) for p in pairs])
    write(tmp_path / "users.csv", ("who", "age"), [(f"u{i}", 20 + i * 1.5) for i in range(20)])
    tables = [f"data.root={tmp_path}", "data.file=taken.csv", "data.user=who", "data.item=what"]
    tables += ["data.users.files=users.csv", "+data.users.dense=[age]", "data.time=at", "data.split.by=time"]
    record = train_here(composed("train", *QUICK, "data=links", *tables), tmp_path / "run")
    assert {"test/mrr", "val/ndcg", "test/recall"} <= record.metrics.keys()
    line = [f"checkpoint={record.details['checkpoint']}", "top_k=4"]
    done = run_forked("predict.py", *line, "out=items.csv", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "items.csv").open() as file:
        rows = list(csv.DictReader(file))
    taken = {(f"u{p // 15}", str(10**10 + p % 15)) for p in pairs}
    found = [(row["user"], row["item"]) for row in rows]
    assert len(set(found)) == len(found)
    assert not taken & set(found)
    for user in range(20):
        own = [row for row in rows if row["user"] == f"u{user}"]
        assert len(own) == min(4, 15 - sum(name == f"u{user}" for name, _ in taken))
        assert [int(row["rank"]) for row in own] == list(range(1, len(own) + 1))
        scores = [float(row["score"]) for row in own]
        assert scores == sorted(scores, reverse=True)
    done = run_forked("predict.py", *line, "out=items.csv", folder=tmp_path)
    assert "items.csv exists" in done.stderr
