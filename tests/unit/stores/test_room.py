"""Room for files that are mapped: what counts as free, and pages that a file lacks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowAdagrad
from lightning_recsys.stores import DynamicRows, MappedStores
from lightning_recsys.stores.folders import room
from lightning_recsys.stores.folders.room import fill_holes, free_bytes, has_holes

ROWS = 3000
LAYOUT = TableLayout((EmbeddingBagConfig("t", ROWS, 64, ("x",), init_std=0.0),))


def group(folder, names, *, limit, used, caches=0):
    """The files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names.limit).write_text(f"{limit}\n")
    (folder / names.used).write_text(f"{used}\n")
    first, second = names.caches
    (folder / "memory.stat").write_text(f"anon 12\n{first} {caches // 2}\n{second} {caches - caches // 2}\n")


@pytest.mark.parametrize(
    ("version", "listed"),
    [
        (room._VERSION_2, "0::/pods/mine\n"),
        (room._VERSION_1, "5:cpu,cpuacct:/\n4:memory:/pods/mine\n0::/\n"),
    ],
    ids=["version 2", "version 1"],
)
def test_free_memory_when_control_groups_have_limits_then_the_least_that_one_leaves_counts(
    tmp_path, monkeypatch, version, listed
):
    root = tmp_path / "groups"
    top = root / "memory" if version is room._VERSION_1 else root
    own = tmp_path / "own"
    own.write_text(listed)
    monkeypatch.setattr(room, "_MEMORY", tmp_path)
    free = free_bytes(tmp_path)
    monkeypatch.setattr(room, "_CONTROL_GROUPS", root)
    monkeypatch.setattr(room, "_OWN_GROUPS", own)
    assert free_bytes(tmp_path) == pytest.approx(free, rel=0.2), "no group is to be seen"
    group(top / "pods" / "mine", version, limit="max" if version is room._VERSION_2 else 2**63 - 4096, used=5000)
    assert free_bytes(tmp_path) == pytest.approx(free, rel=0.2), "none has a limit"
    group(top / "pods", version, limit=100_000, used=90_000, caches=2001)
    assert free_bytes(tmp_path) == 12_001
    group(top / "pods" / "mine", version, limit=20_000, used=5000, caches=0)
    assert free_bytes(tmp_path) == 12_001
    group(top / "pods" / "mine", version, limit=20_000, used=21_000, caches=0)
    assert free_bytes(tmp_path) == 0
    shutil.rmtree(top / "pods")
    group(top, version, limit=30_000, used=10_000)  # a container may see its own group as the root
    assert free_bytes(tmp_path) == 20_000


def test_free_disk_when_control_groups_limit_memory_then_is_what_the_disk_has(tmp_path, monkeypatch):
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(room, "_CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(room, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(room, "_MEMORY", Path("/proc"))  # another file system
    group(tmp_path / "groups", room._VERSION_2, limit=1000, used=0)
    assert free_bytes(tmp_path) > 1000


def without_zeros(folder):
    """A copy of a folder of stores, in files that lack the pages of zeros."""
    copy = folder.with_name(f"{folder.name}-copy")
    subprocess.run(["cp", "-r", "--sparse=always", str(folder), str(copy)], check=True)
    return copy


@pytest.mark.parametrize("dynamic", [None, DynamicRows()])
def test_files_when_they_lack_pages_then_opening_their_store_sets_them_aside_and_values_stay(tmp_path, dynamic):
    folder = tmp_path / "stores"
    folder.mkdir()
    stores = MappedStores(folder)
    store = stores.create_embedding_store("t", LAYOUT, RowAdagrad(), seed=0, dynamic=dynamic)
    rows = torch.arange(5, 2000, 7)
    store.apply_row_gradients(rows, torch.ones(rows.numel(), 64), lr=1.0)
    expected = store.lookup(rows)
    stores.close()
    copy = without_zeros(folder)
    lengths = {path: os.stat(folder / "t" / path.name).st_blocks * 512 for path in (copy / "t").glob("[!.]*")}
    lacking = [path for path, length in lengths.items() if has_holes(path.stat(), length)]
    assert {path.name for path in lacking} >= {"weight", "clock"}
    again = MappedStores(copy)
    assert torch.equal(again.embedding_store("t").lookup(rows), expected)
    again.close()
    for path in lacking:
        assert not has_holes(path.stat(), lengths[path]), path.name
        assert path.stat().st_size == (folder / "t" / path.name).stat().st_size


def test_pages_when_the_file_system_cannot_set_them_aside_then_the_file_stays_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"")
    os.truncate(path, 1 << 20)
    monkeypatch.setattr(room.ctypes, "get_errno", lambda: 95)
    monkeypatch.setattr(room.ctypes, "CDLL", lambda *_, **__: type("C", (), {"fallocate": lambda *_: -1}))
    with path.open("r+b") as file:
        fill_holes(file.fileno(), 1 << 20, what="it", folder=tmp_path)
        assert has_holes(path.stat(), 1 << 20)
        monkeypatch.setattr(room.ctypes, "get_errno", lambda: 28)
        with pytest.raises(
            OSError, match=r"it needs 1,048,576 bytes in .*they were refused \(No space left on device\)"
        ):
            fill_holes(file.fileno(), 1 << 20, what="it", folder=tmp_path)
