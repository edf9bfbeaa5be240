from __future__ import annotations

import csv
import json
import re
import shlex
import sys

import numpy as np
import prepare
import pytest
import yaml
from omegaconf import OmegaConf
from recipe_tools.command import command
from recipe_tools.jobs import prediction

from lightning_recsys import cli

TINY = ("model=lr", "data.batch_size=50", "logger=none", "callbacks/progress_bar=none")


@pytest.fixture(scope="module")
def own_rows(tmp_path_factory, run_forked):
    """Somebody's CSV file, and what a newcomer does with it: guess the schema, train, evaluate."""
    folder = tmp_path_factory.mktemp("own")
    generator = np.random.default_rng(0)
    users, prices = generator.integers(0, 20, 600), generator.normal(size=600)
    clicks = (generator.random(600) < (users % 5 + 1) / 6).astype(int)
    rows = [f"u{user},{price:.3f},{click}" for user, price, click in zip(users, prices, clicks, strict=True)]
    (folder / "clicks.csv").write_text("\n".join(["user,price,click", *rows]) + "\n")
    return folder, run_forked("prepare.py", "schema", "raw=clicks.csv", "out=clicks.yaml", folder=folder)


def test_schema_command_writes_a_schema_and_nothing_else(own_rows):
    folder, done = own_rows
    assert (done.returncode, done.stderr) == (0, "")
    first = "python recipes/train.py data=tabular data.schema=clicks.yaml data.batch_size=32 trainer.max_epochs=auto"
    assert done.stdout.splitlines()[-1].strip() == first
    schema = yaml.safe_load((folder / "clicks.yaml").read_text())
    assert schema["label"] == {"column": "click"}
    assert list(schema["categorical"]) == ["user"]
    assert {path.name for path in folder.iterdir()} >= {"clicks.csv", "clicks.yaml"}
    assert not list(folder.rglob("*.log"))


def test_schema_command_when_its_path_has_a_space_then_the_command_that_it_prints_can_be_copied(own_rows, run_forked):
    done = run_forked("prepare.py", "schema", "raw=clicks.csv", "out=my clicks.yaml", folder=own_rows[0])
    assert shlex.split(done.stdout.splitlines()[-1])[3] == "data.schema=my clicks.yaml"


def test_schema_command_keeps_a_schema_that_is_there_and_says_where_it_cannot_write(own_rows):
    folder, _ = own_rows
    before = (folder / "clicks.yaml").read_text()
    config = {
        "raw": str(folder / "clicks.csv"),
        "out": str(folder / "clicks.yaml"),
        "label": "user",
        "overwrite": False,
    }
    with pytest.raises(SystemExit, match=r"clicks.yaml exists. Choose another out=, or overwrite=true."):
        prepare.schema.__wrapped__(OmegaConf.create(config))
    assert (folder / "clicks.yaml").read_text() == before
    config |= {"out": str(folder / "clicks.csv" / "clicks.yaml"), "label": None, "dates": None}
    with pytest.raises(SystemExit, match="out: the schema cannot be written"):
        prepare.schema.__wrapped__(OmegaConf.create(config))


@pytest.fixture(scope="module")
def trained(own_rows, run_forked):
    """The folder of a run on those rows."""
    folder, _ = own_rows
    done = run_forked(
        "train.py",
        *TINY,
        "data=tabular",
        "data.schema=clicks.yaml",
        "+data.schema.split.test=0.2",
        "hydra.run.dir=train",
        folder=folder,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "train"


def test_run_on_own_rows_has_logistic_regression_beside_it(trained):
    baseline = json.loads((trained / "metrics.json").read_text())["baseline"]
    assert baseline["share"] == 1
    assert baseline["auc"] > 0.6  # of twenty users, five kinds of them
    assert baseline["ne"] < 1


def test_one_key_of_the_schema_is_changed_on_the_command_line(trained):
    record = json.loads((trained / "metrics.json").read_text())
    assert record["config"]["data"]["schema"]["split"] == {"test": 0.2}
    assert record["config"]["data"]["schema"]["label"] == {"column": "click"}
    clicks = str(trained.parent / "clicks.csv")
    assert record["rows_read"] == {clicks: {"rows": 600, "used": 600, "skipped": 0, "comments": 0}}
    assert record["unknown_ids"] == {"validation": {"user": 0.0}, "test": {"user": 0.0}}


def test_checkpoint_of_own_rows_is_evaluated_without_their_schema_file(trained, run_forked, tmp_path):
    checkpoint = trained / "checkpoints/best.ckpt"
    evaluated = run_forked("evaluate.py", f"ckpt_path={checkpoint}", "hydra.run.dir=evaluate", folder=tmp_path)
    assert (evaluated.returncode, evaluated.stderr) == (0, "")
    whole, tested = (
        json.loads((folder / "metrics.json").read_text())["metrics"] for folder in (trained, tmp_path / "evaluate")
    )
    assert tested
    assert tested == {name: value for name, value in whole.items() if name.startswith("test/")}


def test_rows_without_labels_are_predicted_from_the_checkpoint_alone(trained, run_forked, tmp_path):
    (tmp_path / "new.csv").write_text("price,request,user\n0.5,007,u1\n,008,u2\n0.5,009,nobody\n")
    line = [f"checkpoint={trained}/checkpoints/best.ckpt", "data=new.csv", "id=request", "out=predictions.csv"]
    done = run_forked("predict.py", *line, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Wrote predictions.csv: 3 predictions." in done.stdout
    assert re.search(r"Rows of new\.csv +│ +3 = 3 used \+ 0 skipped \+ 0 comments", done.stdout)
    assert re.search(r"Ids of user unknown to training +│ +33\.3%", done.stdout)
    header, *rows = csv.reader((tmp_path / "predictions.csv").read_text().splitlines())
    assert header == ["request", "prediction"]
    assert [row[0] for row in rows] == ["007", "008", "009"]
    assert {path.name for path in tmp_path.iterdir()} == {"new.csv", "predictions.csv"}
    with pytest.raises(SystemExit, match=r"predictions\.csv exists\. Choose another out=, or overwrite=true\."):
        prediction.run(OmegaConf.create({"out": str(tmp_path / "predictions.csv"), "overwrite": False, "data": {}}))
    with pytest.raises(ValueError, match="id=request is a column of the rows that data= names"):
        prediction.predict({"task": {"_target_": "lightning_recsys.tasks.CTRTask"}, "id": "request", "rows": None})
    none = run_forked("predict.py", line[0], "data.schema.split.test=0", "out=none.csv", folder=tmp_path)
    assert "the run has no test rows to predict" in none.stderr
    again = run_forked("predict.py", *line, "data=[new.csv,nowhere.csv]", "overwrite=true", folder=tmp_path)
    assert again.returncode == 1
    assert "data: there is no file nowhere.csv" in again.stderr
    (tmp_path / "strange.csv").write_text("price,request,visitor\n0.5,007,u1\n")
    lacks = run_forked("predict.py", line[0], "data=strange.csv", "out=none.csv", folder=tmp_path)
    assert lacks.returncode == 1
    assert lacks.stderr.startswith("schema.categorical names column 'user', which is not in ")
    assert len(lacks.stderr.splitlines()) == 1
    (tmp_path / "unseen.csv").write_text("price,request,user\n0.5,007,v1\n0.5,008,v2\n")
    unseen = run_forked("predict.py", line[0], "data=unseen.csv", "out=unseen.csv.parquet", folder=tmp_path)
    assert "user: 100 % of the predicted rows' ids are unknown to training" in unseen.stdout


def test_messages_when_a_recipe_was_started_as_a_command_then_name_commands(tmp_path, monkeypatch, capsys):
    (tmp_path / "hello.py").write_text("from recipe_tools.command import command\nprint(command('train'))\n")
    monkeypatch.setattr(cli, "recipes_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    cli.run_recipe("hello", [])
    assert capsys.readouterr().out == "lightning-recsys train\n"
    assert command("train") == "python recipes/train.py"


def test_predict_when_the_users_own_model_raises_then_the_traceback_is_in_the_log_for_whoever_asks(
    tmp_path, monkeypatch, caplog
):
    def of_the_model(config):
        raise ValueError("the model's own")

    monkeypatch.setattr(prediction, "predict", of_the_model)
    monkeypatch.setattr(prediction, "plain", OmegaConf.to_container)
    monkeypatch.setattr(prediction, "be_quiet", lambda: None)
    cfg = OmegaConf.create({"out": str(tmp_path / "out.csv"), "overwrite": False})
    for level in ("INFO", "DEBUG"):
        caplog.clear()
        with caplog.at_level(level, "predict"), pytest.raises(SystemExit, match=r"^the model's own$"):
            prediction.run(cfg)
        assert ("in of_the_model" in caplog.text) == (level == "DEBUG")
