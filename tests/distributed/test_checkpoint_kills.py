"""A process that is killed at any step of a save leaves one of two checkpoints whole, whatever kind each of them is."""

import itertools
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn

from lightning_recsys.checkpoints import FolderCheckpointIO, ReadsFolders, save_folder
from lightning_recsys.checkpoints import files as checkpoint_files

# What a program does to files, by the names of Python's audit events; each of them may be its last.
STEPS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.move", "shutil.copyfile")
KILLED = 77


def checkpoint(number):
    return {"state_dict": {"weight": torch.full((64,), float(number))}, "global_step": number}


def save_file(path, number):
    FolderCheckpointIO().save_checkpoint(checkpoint(number), path)


def save_as_folder(path, number):
    save_folder(path, checkpoint(number))


KINDS = {"file": save_file, "folder": save_as_folder}


def save_until(step, save, path):
    """Save in a process of its own, which is gone before its step of this number; whether it came so far."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # which ends a process that hangs
        steps = itertools.count(1)

        def look(event, arguments):
            mode = arguments[1] or "" if event == "open" else "w"
            if event in STEPS and set(mode) & set("wx") and next(steps) == step:
                os._exit(KILLED)

        sys.addaudithook(look)
        try:
            save(path, 2)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, KILLED)
    return os.waitstatus_to_exitcode(status) == KILLED


def number_of(path):
    """The checkpoint that is there, which is whole."""
    found = FolderCheckpointIO().load_checkpoint(path)
    assert torch.equal(found["state_dict"]["weight"], checkpoint(found["global_step"])["state_dict"]["weight"])
    return found["global_step"]


@pytest.mark.parametrize(
    ("before", "after", "exchanges"),
    [
        ("file", "file", True),
        ("file", "folder", True),
        ("folder", "file", True),
        ("file", "folder", False),
        ("folder", "file", False),
    ],
)
def test_save_when_killed_at_any_step_then_one_checkpoint_is_whole_and_the_next_save_clears_up(
    before, after, exchanges, tmp_path, monkeypatch
):
    """Where the file system cannot let a file and a folder change places, a reader looks in two places."""
    if not exchanges:
        monkeypatch.setattr(checkpoint_files, "_exchange", lambda *_: False)
    first, path = tmp_path / "first", tmp_path / "run" / "last.ckpt"
    KINDS[before](first / path.name, 1)
    # Another file system than the checkpoint's, from which nothing can be renamed; its name says whose it is.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"kills-{os.getpid()}-") as elsewhere:
        monkeypatch.setenv("TMPDIR", elsewhere)
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert os.stat(elsewhere).st_dev != tmp_path.stat().st_dev
        seen, killed = [], True
        while killed:
            shutil.rmtree(path.parent, ignore_errors=True)
            shutil.copytree(first, path.parent)
            killed = save_until(len(seen) + 1, KINDS[after], path)
            assert not os.listdir(elsewhere)
            if exchanges:
                assert path.exists(), "whoever reads without this package finds one as well"
            seen.append(number_of(path))
            save_file(path, 3)
            assert number_of(path) == 3
            assert os.listdir(path.parent) == [path.name]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 2)
    assert len(seen) > 2


class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2))


class ReadingTask(Task, ReadsFolders):
    pass


@pytest.mark.parametrize(("task", "plugins"), [(Task, [FolderCheckpointIO()]), (ReadingTask, [])])
def test_single_device_when_it_saves_with_the_plugin_then_nothing_goes_through_tmpdir(
    task, plugins, tmp_path, monkeypatch
):
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        plugins=plugins,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task())
    monkeypatch.setattr(tempfile, "mkstemp", None)  # which fsspec calls for a file of a transaction
    monkeypatch.setattr(shutil, "move", None)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    trainer.save_checkpoint(f"file://{tmp_path}/again.ckpt")
    for name in ("model.ckpt", "again.ckpt"):
        assert torch.load(tmp_path / name)["global_step"] == 1


def test_folder_of_something_else_when_a_file_is_saved_there_then_refused_and_left_alone(tmp_path):
    (tmp_path / "mine").write_text("dear")
    with pytest.raises(IsADirectoryError, match="a folder lies there that is no checkpoint"):
        save_file(tmp_path, 1)
    assert [x.name for x in Path(tmp_path).iterdir()] == ["mine"]
