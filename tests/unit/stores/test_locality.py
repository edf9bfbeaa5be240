"""Which folders are this machine's own: the same kernel, the same folder, and no file system of a network."""

import os
import shutil

import pytest

from lightning_recsys.stores.folders import locality
from lightning_recsys.stores.folders.locality import file_system, place_of, why_not_local

ROOT = "22 1 0:1 / / rw,relatime - ext4 /dev/vda rw"


@pytest.fixture
def mounts(monkeypatch, tmp_path):
    """Has the kernel say that the folders are on these file systems."""

    def say(*lines):
        table = tmp_path / "mountinfo"
        table.write_text("\n".join((ROOT, *lines)) + "\n")
        monkeypatch.setattr(locality, "MOUNTS", table)

    return say


@pytest.fixture
def folder(tmp_path, mounts):
    mounts()
    folder = tmp_path / "stores"
    folder.mkdir()
    return folder


def test_folder_when_it_is_this_machines_then_is_local(folder):
    assert why_not_local(folder, place_of(folder)) is None


def test_folder_when_reached_by_another_name_then_is_local(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert why_not_local(tmp_path / "link", place_of(folder)) is None


def test_folder_when_copied_then_is_not(folder, tmp_path):
    (folder / "content").write_text("the same")
    place = place_of(folder)
    folder.rename(tmp_path / "original")
    shutil.copytree(tmp_path / "original", folder)
    assert "is another folder here" in why_not_local(folder, place)


def test_folder_when_the_kernel_is_another_then_is_not(folder, monkeypatch):
    place = place_of(folder)
    monkeypatch.setattr(locality, "boot_id", lambda: "of another machine, which has the same folder")
    assert "another machine" in why_not_local(folder, place)


def test_folder_when_no_kernel_says_which_it_is_then_is_not(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(locality, "BOOT_ID", tmp_path / "nothing")
    assert "another machine" in why_not_local(folder, place_of(folder))


def test_folder_when_there_is_none_then_is_not(folder):
    place = place_of(folder)
    folder.rmdir()
    assert "is not on this machine" in why_not_local(folder, place)


@pytest.mark.parametrize(
    "kind",
    [
        *("nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "gpfs", "9p", "afs", "fuse.sshfs", "fuse.glusterfs"),
        *("glusterfs", "beegfs", "virtiofs", "ocfs2", "gfs2", "orangefs", "not-known-yet"),
    ],
)
def test_folder_when_on_a_file_system_that_others_may_have_then_is_not(folder, mounts, kind):
    mounts(f"30 22 0:52 / {folder} rw,relatime shared:1 - {kind} server:/export rw")
    assert f"({kind}) that may be other machines'" in why_not_local(folder, place_of(folder))


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "xfs", "btrfs", "zfs", "overlay"])
def test_folder_when_on_a_file_system_of_one_kernel_then_is_local(folder, mounts, kind):
    mounts(f"30 22 0:52 / {folder.parent} rw shared:1 master:2 - {kind} none rw")
    assert why_not_local(folder, place_of(folder)) is None


def test_file_system_when_mounts_lie_over_each_other_then_is_the_last_ones(folder, mounts):
    mounts(f"30 22 0:51 / {folder} rw - tmpfs none rw", f"31 30 0:52 / {folder} rw - nfs4 server:/x rw")
    assert file_system(folder) == "nfs4"


def test_file_system_when_a_line_has_the_folders_device_then_is_that_ones(folder, mounts):
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts(f"30 22 {number} / {folder.parent} rw - xfs /dev/x rw", f"31 30 0:52 / {folder} rw - nfs server:/x rw")
    assert file_system(folder) == "xfs"


def test_file_system_when_the_path_has_blanks_then_is_found(tmp_path, mounts):
    spaced = tmp_path / "a b"
    spaced.mkdir()
    mounts(f"30 22 0:52 / {str(spaced).replace(' ', chr(92) + '040')} rw - nfs server:/x rw")
    assert file_system(spaced) == "nfs"


def test_file_system_when_nothing_tells_then_is_unknown_and_not_local(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(locality, "MOUNTS", tmp_path / "nothing")
    assert file_system(folder) == ""
    assert "(unknown)" in why_not_local(folder, place_of(folder))


def test_file_system_when_read_from_this_kernel_then_shared_memory_is_one():
    assert file_system(locality.Path("/dev/shm")) == "tmpfs"
