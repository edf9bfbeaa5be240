"""Five tables as people have them, from file to predictions: guess, train, predict, without an edit of the schema."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest
from recipe_helpers import train_here

from lightning_recsys.data import Schema, guess_schema

ROWS = 600
RNG = random.Random(0)


def click(strength: float) -> int:
    return int(RNG.random() < 0.15 + 0.7 * strength)


def write(path: Path, header: str, rows: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in (header, *rows)))
    return path


def numeric_ids(folder: Path) -> tuple[Path, Path, str]:
    """Numbers only: two columns of ids with gaps, one of amounts; pandas' index in front."""
    users, items = RNG.sample(range(10_000, 99_999), 40), RNG.sample(range(100, 5_000), 30)
    rows = []
    for i in range(ROWS):
        user = RNG.randrange(40)
        rows.append(f"{i},{users[user]},{RNG.choice(items)},{RNG.lognormvariate(1, 1):.2f},{click(user % 2)}")
    path = write(folder / "numbers.csv", ",customer,article,amount,bought", rows)
    new = write(folder / "new.csv", ",customer,article,amount", [row.rpartition(",")[0] for row in rows[:50]])
    return path, new, "customer"


def with_times(folder: Path) -> tuple[Path, Path, str]:
    """Times with offsets, decimal commas, another separator."""
    rows = []
    for i in range(ROWS):
        city = RNG.choice(["Bonn", "New York", "Graz", "Linz"])
        price = f"{RNG.random() * 100:.2f}".replace(".", ",")
        at = f"2026-03-{1 + i * 28 // ROWS:02d}T{i % 24:02d}:{i % 60:02d}:00+01:00"
        rows.append(f"{at};{city};{price};{click(city == 'Graz')}")
    path = write(folder / "times.csv", "shown;city;price;click", rows)
    new = write(folder / "new.csv", "city;price", [";".join(row.split(";")[1:3]) for row in rows[:50]])
    return path, new, "city"


def with_lists(folder: Path) -> tuple[Path, Path, str]:
    """Parquet with lists; in text they stand with spaces."""
    columns: dict[str, list[object]] = {"viewer": [], "tags": [], "words": [], "label": []}
    for _ in range(ROWS):
        tags = RNG.sample(["a", "b", "c", "d"], RNG.randrange(1, 4))
        columns["viewer"].append(f"v{RNG.randrange(30)}")
        columns["tags"].append(tags)
        columns["words"].append(" ".join(RNG.choices(["old", "new", "red", "big", "ten"], k=3)))
        columns["label"].append(click("a" in tags))
    parquet.write_table(pa.table(columns), folder / "lists.parquet")
    parquet.write_table(pa.table({x: columns[x][:50] for x in ("words", "viewer", "tags")}), folder / "new.parquet")
    return folder / "lists.parquet", folder / "new.parquet", "viewer"


def unlabelled_test(folder: Path) -> tuple[Path, Path, str]:
    """As competitions hand them out: ids of rows, names twice, the test file without the label."""
    rows = []
    for i in range(ROWS):
        kind = RNG.choice("xyz")
        rows.append(f"row{i:05},{kind},{RNG.randrange(7)},{RNG.gauss(0, 1):.3f},{click(kind == 'x')}")
    path = write(folder / "train.csv", "id,kind,size,score,target", rows)
    new = write(folder / "test.csv", "id,kind,size,score", [row.rpartition(",")[0] for row in rows[:50]])
    return path, new, "id"


def ordinary(folder: Path) -> tuple[Path, Path, str]:
    """Names and numbers, tabs."""
    rows = []
    for _ in range(ROWS):
        job = RNG.choice(["cook", "nurse", "clerk"])
        rows.append(
            f"{RNG.randrange(18, 70)}\t{job}\t{RNG.randrange(5, 90) * 1000}\t{'yes' if click(job == 'cook') else 'no'}"
        )
    path = write(folder / "people.tsv", "age\tjob\tincome\tclicked", rows)
    new = write(folder / "new.tsv", "age\tjob\tincome", [row.rpartition("\t")[0] for row in rows[:50]])
    return path, new, "job"


EXPECTED = {
    numeric_ids: {"categorical": {"customer", "article"}, "dense": {"amount"}, "ignore": {""}},
    with_times: {"categorical": {"city"}, "dense": {"price"}},
    with_lists: {"categorical": {"viewer"}, "multi_valued": {"tags", "words"}},
    unlabelled_test: {"categorical": {"kind", "size"}, "dense": {"score"}, "ignore": {"id"}},
    ordinary: {"categorical": {"job"}, "dense": {"age", "income"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_table_then_goes_from_file_to_predictions_by_its_guess(make, composed, run_forked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, new, column = make(tmp_path)
    label = {numeric_ids: "bought"}.get(make)
    (tmp_path / "schema.yaml").write_text(guess_schema(path, label=label).to_yaml())
    schema = Schema.from_yaml(tmp_path / "schema.yaml")
    for use, names in EXPECTED[make].items():
        assert set(getattr(schema, use)) == names, use
    overrides = ["data=tabular", "data.schema=schema.yaml", "model=deepfm", "data.batch_size=20", "trainer=cpu"]
    quiet = ["logger=none", "callbacks/progress_bar=none", "model.hidden=[8]", "trainer.max_epochs=4"]
    record = train_here(composed("train", *overrides, *quiet, "model.embedding_dim=4"), tmp_path / "run")
    assert record.metrics["test/auc"] > 0.6
    line = [f"checkpoint={record.details['checkpoint']}", f"data={new}", f"id={column}", "out=predictions.csv"]
    done = run_forked("predict.py", *line, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "predictions.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == [column, "prediction"]
    assert len(rows) == 50
    assert len({prediction for _, prediction in rows}) > 2
    if path.suffix != ".parquet":
        separators = {".csv": schema.table.separator or ",", ".tsv": "\t"}
        options = arrow_csv.ParseOptions(delimiter=separators[path.suffix])
        ids = arrow_csv.read_csv(new, parse_options=options)[column].to_pylist()
        assert [row[0] for row in rows] == [str(x) for x in ids]
