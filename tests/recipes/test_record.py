"""What a run writes down of where it came from, and says of its data."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest
import recipe_helpers  # noqa: F401 - puts the recipes on the path
from recipe_tools import record, report
from recipe_tools.build import self_contained

from lightning_recsys.data import TabularDataModule


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_git_commit_when_the_recipe_is_installed_in_somebodys_repository_then_is_none(tmp_path, monkeypatch):
    installed = tmp_path / "venv" / "record.py"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr(record, "__file__", str(installed))
    assert record.git_commit() is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    assert record.git_commit() is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "ours")
    assert record.git_commit() == git(tmp_path, "rev-parse", "HEAD")
    installed.write_text("changed")
    assert record.git_commit() == git(tmp_path, "rev-parse", "HEAD") + "-dirty"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"files": {"train": "a.csv"}, "label": {"column": "click"}, "categorical": {"user": None, "item": None}}),
        ({"files": {"test": "b.csv"}}, {"files": {"train": "a.csv", "test": "b.csv"}}),
        ({"label": {"rule": ">= 4"}}, {"label": {"column": "click", "rule": ">= 4"}}),
        ({"categorical": {"user": {"min_count": 2}}}, {"categorical": {"user": {"min_count": 2}, "item": None}}),
    ],
)
def test_schema_when_one_key_is_changed_then_what_stands_beside_it_in_short_stays(tmp_path, changes, expected):
    path = tmp_path / "s.yaml"
    path.write_text("files: a.csv\nlabel: click\ncategorical: [user, item]\n")
    data = {"schema": str(path), "root": None, "schema_changes": changes}
    schema = self_contained({"data": data})["data"]["schema"]
    assert schema == schema | expected


def test_unknown_ids_when_they_are_most_then_a_line_names_column_and_rows(tmp_path, caplog):
    (tmp_path / "train.csv").write_text("click,user,city\n1,a,x\n0,b,y\n1,a,y\n0,b,x\n")
    (tmp_path / "test.csv").write_text("click,user,city\n1,c,x\n0,d,z\n1,e,y\n0,b,x\n")
    schema = {"files": {"train": "train.csv", "test": "test.csv"}, "label": "click", "split": {"validation": 0}}
    data = TabularDataModule(
        schema=schema | {"categorical": ["user", "city"]}, root=tmp_path, batch_size=4, cache=tmp_path / "cache"
    )
    data.setup()
    with caplog.at_level(logging.WARNING):
        assert report.unknown_ids(data) == {"test": {"user": 0.75, "city": 0.25}}
    (said,) = [line.getMessage() for line in caplog.records]
    assert said == "user: 75 % of the test rows' ids are unknown to training, and share one embedding."


def test_files_when_there_are_many_then_those_that_lost_rows_are_told_one_by_one_and_all_rows_are_counted():
    whole = {"rows": 1000, "used": 1000, "skipped": 0, "comments": 0}
    read = {f"/data/day={day}/clicks.csv": whole for day in range(20)}
    read["/data/day=13/clicks.csv"] = {"rows": 1000, "used": 297, "skipped": 3, "comments": 700}
    lines = dict(report.rows_of_files(read))
    assert next(iter(lines.items())) == ("Rows of day=13/clicks.csv", "1,000 = 297 used + 3 skipped + 700 comments")
    assert lines["Rows of 12 other files"] == "12,000 = 12,000 used + 0 skipped + 0 comments"
    assert len(lines) == report.FILES + 1


def test_run_when_another_one_writes_to_its_folder_then_is_refused(tmp_path):
    first = record.RunRecord(tmp_path, config={}, overrides=["first"], alone=True)
    with first, pytest.raises(ValueError, match=r"another run writes to .*same second.*hydra\.run\.dir="):
        record.RunRecord(tmp_path, config={}, overrides=["second"], alone=True).__enter__()
    assert record.completed_record(tmp_path)["overrides"] == ["first"]
    with record.RunRecord(tmp_path, config={}, overrides=["third"], alone=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [record.FILE_NAME]
