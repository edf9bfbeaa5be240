"""Folders of runs: whose they are, when they go, and which of others are cleared away."""

import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from lightning_recsys.launchers.folders import PREFIX, SOCKETS, RunFolder, remove_abandoned


def abandon(parent):
    """Make a folder and be killed."""
    path = RunFolder(parent).path
    (path / "embedding-0").mkdir()
    (path / "embedding-0" / "rows").touch()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def abandoned(tmp_path) -> Path:
    process = multiprocessing.get_context("fork").Process(target=abandon, args=(tmp_path,))
    process.start()
    process.join()
    (path,) = tmp_path.glob(f"lightning_recsys-{process.pid}-*")
    assert (path / "embedding-0" / "rows").exists()
    return path


def test_folder_when_its_parent_is_missing_then_made(tmp_path):
    with RunFolder(tmp_path / "disk" / "stores") as folder:
        assert folder.is_dir()


def test_folder_when_it_cannot_be_made_then_the_error_names_the_settings(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"no folder can be made in .*file/stores .*strategy\.store_folder for .* TMPDIR"):
        RunFolder(tmp_path / "file" / "stores")


def test_folder_when_its_process_was_killed_then_goes_with_the_next_run(tmp_path, abandoned):
    with RunFolder(tmp_path) as folder:
        assert folder.name.startswith(f"lightning_recsys-{os.getpid()}-")
        assert list(tmp_path.iterdir()) == [folder]
        with RunFolder(tmp_path) as second:  # ours is there, and locked
            assert {*tmp_path.iterdir()} == {folder, second}
    assert list(tmp_path.iterdir()) == []


def test_folder_when_locked_then_stays_though_its_process_id_is_nobodys(tmp_path, abandoned):
    """As seen from a container with process ids of its own."""
    folder = os.open(abandoned, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    remove_abandoned(tmp_path)
    assert abandoned.exists()
    os.close(folder)
    remove_abandoned(tmp_path)
    assert not abandoned.exists()


def test_folder_when_its_prefix_is_another_then_it_goes_with_the_next_of_that_prefix_only(tmp_path, abandoned):
    sockets = abandoned.rename(abandoned.with_name(abandoned.name.replace(PREFIX, SOCKETS)))
    remove_abandoned(tmp_path)
    assert sockets.exists()
    with RunFolder(tmp_path, prefix=SOCKETS) as folder:
        assert folder.name.startswith(f"pymp-{os.getpid()}-")
        assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["lightning_recsys-notes", "lightning_recsys-999999999", "other-999999999-x"])
def test_folder_when_it_is_no_runs_then_stays(tmp_path, name):
    (tmp_path / name).mkdir()
    remove_abandoned(tmp_path)
    assert (tmp_path / name).exists()


def test_folder_when_it_is_another_users_then_stays(tmp_path, abandoned, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.stat(abandoned).st_uid + 1)
    remove_abandoned(tmp_path)
    assert abandoned.exists()
