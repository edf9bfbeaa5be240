"""Rows without labels: read, encoded as training did, told apart, predicted in order and written to a file."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest
import pytorch_lightning as pl
import torch

from lightning_recsys.callbacks import PredictionWriter
from lightning_recsys.data import TabularDataModule
from lightning_recsys.models import LogisticRegression
from lightning_recsys.tasks import CTRTask

SCHEMA = {
    "files": {"train": "train.csv", "predict": "new.csv"},
    "label": "click",
    "dense": ["age"],
    "categorical": ["user"],
    "time": "at",
    "ignore": ["request"],
    "split": {"by": "time", "validation": 0, "test": 0.25},
}
TRAIN = ["at,click,age,user", *(f"{i},{i % 2},{10 + i},u{i % 5}" for i in range(40))]
NEW = [
    "request,user,age",
    *(f"007{i},u{i % 7},{i}" for i in range(25)),
]  # no label, no time, other columns in other places


def load(folder, new=NEW, **change) -> TabularDataModule:
    for name, lines in (("train.csv", TRAIN), ("new.csv", new)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    data = TabularDataModule(
        schema=SCHEMA | change, root=folder, batch_size=10, **({"on_bad_row": "skip"} if new is not NEW else {})
    )
    data.setup("fit")
    return data


def predicted(data, path, column, **arguments):
    torch.manual_seed(0)
    task = CTRTask(LogisticRegression(data.num_dense, data.fields))
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter)
    writer = PredictionWriter(path, data.predicted_rows(column), columns=(column or "row", "p"))
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[writer], logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    kept = trainer.predict(task, datamodule=data, **arguments)
    return task, kept


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_rows_without_labels_when_predicted_then_a_file_of_ids_and_what_the_trainer_returns(tmp_path, name):
    data = load(tmp_path)
    _, kept = predicted(data, tmp_path / name, "request")
    if name.endswith("csv"):
        strings = arrow_csv.ConvertOptions(column_types={"request": "string"})
        table = arrow_csv.read_csv(tmp_path / name, convert_options=strings)
    else:
        table = parquet.read_table(tmp_path / name)
    assert table.column_names == ["request", "p"]
    assert table["request"].to_pylist() == [f"007{i}" for i in range(25)]
    torch.testing.assert_close(torch.tensor(table["p"].to_pylist(), dtype=torch.float32), torch.cat(kept))
    assert len(set(table["p"].to_pylist())) > 20
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_rows_without_labels_then_ids_are_those_of_training_and_unknown_ones_are_0(tmp_path):
    batch = load(tmp_path).rows("predict").take(torch.arange(7))
    assert batch.sparse.values.tolist()[5:] == [0, 0]
    assert min(batch.sparse.values.tolist()[:5]) >= 2


def test_bad_rows_when_skipped_then_the_others_keep_their_ids_and_numbers(tmp_path):
    new = [*NEW[:3], "0072,u1,old", "x,y", *NEW[4:]]
    data = load(tmp_path, new)
    predicted(data, tmp_path / "out.csv", None)
    rows = arrow_csv.read_csv(tmp_path / "out.csv")["row"].to_pylist()
    assert rows == [1, 2, *range(5, 27)]
    ids = [x for part in data.predicted_rows("request") for x in part.to_pylist()]
    assert ids == ["0070", "0071", *(f"007{i}" for i in range(3, 25))]


def test_id_column_when_it_is_that_of_the_labels_or_a_feature_then_is_carried_too(tmp_path):
    new = ["click,user,age", "?,u1,5", "later,u2,6"]
    data = load(tmp_path, new)
    for column, values in (("click", ["?", "later"]), ("user", ["u1", "u2"]), ("age", ["5", "6"])):
        assert [x for part in data.predicted_rows(column) for x in part.to_pylist()] == values


def test_id_column_then_stands_as_it_does_in_the_file(tmp_path):
    new = ["request,user,age", "1.0,u1,5", "-1,u1,5", ",u1,old", " NA ,u2,6", ",u2,6"]
    data = load(tmp_path, new, missing=["", "NA", -1])
    assert [x for part in data.predicted_rows("request") for x in part.to_pylist()] == ["1.0", "-1", "NA", ""]


def test_prediction_when_no_file_is_named_for_it_then_is_of_the_test_rows(tmp_path):
    data = load(tmp_path, files={"train": "train.csv"})
    assert data.predicted_split == "test"
    assert len(data.predict_dataloader()) == 1
    with pytest.raises(ValueError, match=r"schema\.files has no predict"):
        next(iter(data.predicted_rows()))


def test_writer_when_it_cannot_then_says_so_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"named \.csv or \.parquet, got out\.txt"):
        PredictionWriter("out.txt", [])
    data = load(tmp_path)
    with pytest.raises(ValueError, match=r"new\.csv has no column 'requests'\. It has request, user, age"):
        predicted(data, tmp_path / "out.csv", "requests")
    assert not list(tmp_path.glob("out.csv*"))
    writer = PredictionWriter(tmp_path / "few.csv", [pa.array(range(9))])
    trainer = pl.Trainer(accelerator="cpu", callbacks=[writer], logger=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match="more predictions than the 9 rows"):
        trainer.predict(CTRTask(LogisticRegression(data.num_dense, data.fields)), datamodule=data)
    assert not list(tmp_path.glob("few.csv*"))
