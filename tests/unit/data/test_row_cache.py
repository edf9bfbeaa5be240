"""The cache of prepared rows: made once, whoever asks and is killed; what is used stays, the rest makes room."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prepared_folder import write_folder

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.preparation import Preparation
from lightning_recsys.data.preparation.cache import RowCache
from lightning_recsys.data.prepared import Manifest

SCHEMA = {"files": "clicks.csv", "label": "click", "categorical": ["user"], "split": {"validation": 0, "test": 0}}


def maker(calls: list[Path], rows: int = 10) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        calls.append(folder)
        write_folder(folder, train=[rows])

    return prepare


def size_of(cache: RowCache) -> int:
    return sum(entry.bytes for entry in cache.entries())


def use(cache: RowCache, key: str, calls: list[Path]) -> None:
    """Look an entry up and let it go, at a time of its own."""
    _, lease = cache.look_up(key, maker(calls))
    lease.close()
    time.sleep(0.01)


# --- one entry -------------------------------------------------------------------------------------------------------


def test_entry_when_looked_up_again_then_is_not_made_again(tmp_path):
    calls: list[Path] = []
    for _ in range(2):
        folder, lease = RowCache(tmp_path / "cache").look_up("a", maker(calls))
        lease.close()
    assert calls == [folder] == [tmp_path / "cache" / "a"]


def test_entry_when_a_shard_is_cut_short_or_gone_then_is_made_again(tmp_path):
    cache, calls = RowCache(tmp_path), []
    folder, reading = cache.look_up("a", maker(calls))  # somebody who reads it meanwhile is no obstacle
    shard = folder / "train" / "0.parquet"
    for spoil in (lambda: os.truncate(shard, 100), shard.unlink, (folder / "manifest.json").unlink):
        spoil()
        use(cache, "a", calls)
        assert Manifest.load(folder).is_whole(folder)
    assert len(calls) == 4
    reading.close()


def test_entry_when_its_input_is_wrong_then_nothing_stays(tmp_path):
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise ValueError("row 3")

    with pytest.raises(ValueError, match="row 3"):
        RowCache(tmp_path).look_up("a", fail)
    assert not (tmp_path / "a").exists()


def test_entry_when_a_file_is_missing_then_the_error_says_which(tmp_path):
    def fail(folder: Path) -> None:
        raise FileNotFoundError("clicks.csv is not there")

    with pytest.raises(FileNotFoundError, match=r"^clicks\.csv is not there$"):
        RowCache(tmp_path).look_up("a", fail)


def test_lock_when_a_process_was_forked_meanwhile_then_is_free_afterwards(tmp_path):
    sleepers = []

    def fork_and_prepare(folder: Path) -> None:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        sleepers.append(process)
        write_folder(folder, train=[10])

    cache = RowCache(tmp_path)
    cache.look_up("a", fork_and_prepare)[1].close()
    try:
        assert not cache.entries()[0].in_use
    finally:
        sleepers[0].kill()
        sleepers[0].join()


def count_and_prepare(root: Path) -> None:
    """Look up an entry that takes a while, and note who made it."""

    def prepare(folder: Path) -> None:
        time.sleep(0.3)
        write_folder(folder, train=[10])
        (root / f"made-by-{os.getpid()}").touch()

    folder, _ = RowCache(root / "cache").look_up("a", prepare)
    assert Manifest.load(folder).is_whole(folder)


def test_entry_when_several_processes_ask_at_once_then_one_makes_it(tmp_path):
    processes = [
        multiprocessing.get_context("fork").Process(target=count_and_prepare, args=(tmp_path,)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("made-by-*"))) == 1


def die_while_preparing(root: Path) -> None:
    def prepare(folder: Path) -> None:
        write_folder(folder, train=[10])
        (folder / "manifest.json").unlink()  # as it is before the last step
        os.kill(os.getpid(), signal.SIGKILL)

    RowCache(root).look_up("a", prepare)


def test_entry_when_its_maker_is_killed_then_is_not_taken_for_whole_and_the_next_goes_on(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=die_while_preparing, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    cache, calls = RowCache(tmp_path), []
    (entry,) = cache.entries()
    assert (entry.rows, entry.in_use) == (None, False)
    use(cache, "a", calls)
    assert len(calls) == 1
    assert cache.entries()[0].rows == 10


# --- room ------------------------------------------------------------------------------------------------------------


def test_cache_when_it_is_full_then_what_was_not_used_for_longest_goes(tmp_path):
    calls: list[Path] = []
    free = RowCache(tmp_path)
    use(free, "a", calls)
    one = size_of(free)
    cache = RowCache(tmp_path, max_bytes=2.5 * one)
    for key in ("b", "a", "c", "d"):
        use(cache, key, calls)
    assert [entry.key for entry in cache.entries()] == ["c", "d"]
    assert [path.name for path in calls] == ["a", "b", "c", "d"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.lock", "d", "d.lock"]


def test_cache_when_a_process_reads_an_entry_then_it_stays_and_goes_once_nobody_does(tmp_path):
    cache, calls = RowCache(tmp_path, max_bytes=1), []
    folder, lease = cache.look_up("a", maker(calls))
    copy = pickle.loads(pickle.dumps(lease))
    use(cache, "b", calls)  # is too large for the cache, and only it may go, once it is not new any more
    assert cache.entries()[0].in_use
    lease.close()
    assert [entry.key for entry in cache.shrink(0)] == ["b"]
    assert Manifest.load(folder).is_whole(folder)
    copy.close()
    assert [entry.key for entry in cache.shrink(0)] == ["a"]
    assert list(tmp_path.iterdir()) == []


# --- the data module -------------------------------------------------------------------------------------------------


def module(folder: Path, **options) -> TabularDataModule:
    data = TabularDataModule(schema=SCHEMA, root=folder, cache=folder / "cache", **options)
    data.setup("fit")
    return data


def write(folder: Path, users: str, *, keep_time: bool = False) -> None:
    path = folder / "clicks.csv"
    before = path.stat() if keep_time else None
    path.write_text("click,user\n" + "".join(f"{i % 2},{user}\n" for i, user in enumerate(users)))
    if before is not None:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def ids(data: TabularDataModule) -> list[int]:
    rows = data.rows("train")
    return rows.take(torch.arange(len(rows))).sparse.values.tolist()


@pytest.mark.parametrize("keep_time", [False, True])
def test_rows_when_the_file_has_changed_then_are_the_new_ones(tmp_path, keep_time):
    write(tmp_path, "aab")
    old = module(tmp_path)
    assert ids(old) == [2, 2, 3]
    write(tmp_path, "abb", keep_time=keep_time)  # of the same size; even of the same time
    assert ids(module(tmp_path)) == [3, 2, 2]
    assert ids(old) == [2, 2, 3]  # what a run has begun with stays


def test_rows_when_a_copy_has_their_time_or_they_are_asked_for_otherwise_then_hang_on_what_matters_only(tmp_path):
    write(tmp_path, "aab")
    module(tmp_path)
    cache = RowCache(tmp_path / "cache")
    write(tmp_path, "aab", keep_time=True)  # another inode, as of a file that was copied with its time
    module(tmp_path, batch_size=7, seed=3, shuffle_window=0, drop_last=True)
    assert len(cache.entries()) == 1
    module(tmp_path, on_bad_row="skip")
    os.utime(tmp_path / "clicks.csv")
    module(tmp_path)
    assert len(cache.entries()) == 3


def test_file_when_it_changes_while_it_is_read_then_says_so_and_keeps_nothing(tmp_path, monkeypatch):
    write(tmp_path, "aab")
    run = Preparation.run

    def change_then_run(self):
        write(tmp_path, "abbb")
        return run(self)

    monkeypatch.setattr(Preparation, "run", change_then_run)
    with pytest.raises(ValueError, match=r"clicks\.csv: a file has changed while it was read\. Start again"):
        module(tmp_path)
    assert all(entry.rows is None for entry in RowCache(tmp_path / "cache").entries())


def test_module_when_it_lives_then_its_rows_are_not_removed(tmp_path):
    write(tmp_path, "aab")
    data = module(tmp_path, cache_gigabytes=0)
    assert RowCache(tmp_path / "cache").shrink(0) == []
    assert ids(data) == [2, 2, 3]


def test_cache_when_it_is_not_named_then_is_where_the_system_keeps_such(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert RowCache().folder == tmp_path / "lightning_recsys"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert RowCache().folder == Path.home() / ".cache" / "lightning_recsys"


def test_cache_when_it_is_no_folder_or_too_small_then_says_what_to_do():
    with pytest.raises(TypeError, match=r"data.cache must be a folder, or null for .*, got False\. Rows are always"):
        TabularDataModule(schema=SCHEMA, cache=False)
    with pytest.raises(ValueError, match=r"data.cache_gigabytes must be at least 0, got -1"):
        TabularDataModule(schema=SCHEMA, cache_gigabytes=-1)
