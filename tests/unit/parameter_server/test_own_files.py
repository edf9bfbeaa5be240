"""Folders and files of one user: what is another's, open to others, or a link is refused."""

import os

import pytest

from lightning_recsys.parameter_server.access.own_files import check_own_folder, make_own_folder, open_own
from lightning_recsys.parameter_server.server import Server, serve


def test_folder_when_made_then_is_this_user_s_alone(tmp_path):
    before = os.umask(0)
    try:
        make_own_folder(tmp_path / "more" / "stores")
    finally:
        os.umask(before)
    assert (tmp_path / "more" / "stores").stat().st_mode & 0o777 == 0o700
    check_own_folder(tmp_path / "more" / "stores")
    make_own_folder(tmp_path / "more" / "stores")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_server_when_its_folder_is_open_to_others_then_says_what_to_do(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match=f"is open to others \\(mode {mode:o}\\): chmod 700 {tmp_path}"):
        Server(tmp_path)
    assert not list(tmp_path.iterdir())


def test_server_when_its_folder_is_a_link_then_does_not_follow_it(tmp_path):
    (tmp_path / "stores").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("stores")
    with pytest.raises(PermissionError, match="link is a link; name the folder that it leads to"):
        serve(tmp_path / "link")
    assert not list((tmp_path / "stores").iterdir())


def test_server_when_its_folder_is_another_user_s_then_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to the user with the number"):
        Server(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="is not a file of this user alone"):
        open_own(tmp_path / "file")


def test_server_when_its_lock_is_a_link_then_does_not_follow_it(tmp_path):
    (tmp_path / "stores").mkdir(mode=0o700)
    (tmp_path / "stores" / ".server.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is a link, which is not followed"):
        Server(tmp_path / "stores")
    assert not (tmp_path / "elsewhere").exists()


def test_server_when_it_needs_keys_then_makes_no_folder(tmp_path):
    with pytest.raises(ValueError, match="so it needs keys"):
        serve(tmp_path / "stores", bind="tcp://0.0.0.0:0")
    assert not (tmp_path / "stores").exists()
