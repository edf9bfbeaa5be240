"""The cache of prepared rows: made once, whoever asks and is killed; what is used stays, the rest makes room."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from prepared_folder import write_folder

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.preparation import BySchema, Preparation, SchemaRules
from lightning_recsys.data.preparation.cache import RowCache
from lightning_recsys.data.preparation.segments import Records
from lightning_recsys.data.prepared import Manifest
from lightning_recsys.data.raw import TabularFormat

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
        (folder / "begun").touch()
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


def prepare_table(root: Path, folder: Path) -> None:
    raw_format = TabularFormat(schema=SCHEMA, root=root)
    Preparation(
        folder,
        raw_format=raw_format,
        files=raw_format.files("train"),
        split=BySchema(raw_format),
        preprocessing=SchemaRules(),
        shard_bytes=64,
    ).run()


def die_after_the_first_record(root: Path) -> None:
    append = Records.append

    def append_and_die(self: Records, record: dict) -> None:
        append(self, record)
        os.kill(os.getpid(), signal.SIGKILL)

    Records.append = append_and_die  # type: ignore[method-assign]  # in this process, which ends here
    RowCache(root / "cache").look_up("a", partial(prepare_table, root))


def test_entry_when_a_preparation_is_killed_then_the_next_keeps_the_shards_that_are_finished(tmp_path):
    write(tmp_path, "abcdefgh" * 30)
    process = multiprocessing.get_context("fork").Process(target=die_after_the_first_record, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    shards = tmp_path / "cache" / "a" / "train"
    (finished,) = shards.glob("*.parquet")
    inode = finished.stat().st_ino
    folder, _ = RowCache(tmp_path / "cache").look_up("a", partial(prepare_table, tmp_path))
    assert finished.stat().st_ino == inode
    assert len(list(shards.glob("*.parquet"))) > 5
    prepare_table(tmp_path, tmp_path / "at-once")
    whole = Manifest.load(tmp_path / "at-once")
    assert Manifest.load(folder).splits == whole.splits  # checksums among them
    assert sum(shard.rows for shard in whole.splits["train"]) == 240


def test_entry_when_made_then_only_its_owner_reads_it(tmp_path):
    folder, _ = RowCache(tmp_path / "cache").look_up("a", maker([]))
    assert [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "cache", folder)] == ["0o700", "0o700"]


def test_entry_when_its_vocabulary_is_gone_then_is_made_again(tmp_path):
    write(tmp_path, "aab")
    folder = module(tmp_path).folder("train")[0]
    (folder / "vocabulary" / "user.parquet").unlink()
    assert list(module(tmp_path).state_dict()["encoder"]["vocabularies"]) == ["user"]
    assert (folder / "vocabulary" / "user.parquet").is_file()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_entry_when_the_disk_takes_nothing_then_says_what_to_set(tmp_path, number):
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(
        OSError, match=rf"{os.strerror(number)}.* kept in {tmp_path}: name a folder .* as data\.cache"
    ) as e:
        RowCache(tmp_path).look_up("a", fail)
    assert e.value.errno == number


def test_entry_when_the_cache_is_a_file_then_says_what_to_set(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"/file.* name a folder that can be written to, .* as data\.cache"):
            RowCache(folder).look_up("a", maker([]))


def test_entry_when_the_raw_file_cannot_be_read_then_the_cache_is_not_blamed(tmp_path):
    def fail(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "clicks.csv"))

    with pytest.raises(PermissionError) as e:
        RowCache(tmp_path / "cache").look_up("a", fail)
    assert "data.cache" not in str(e.value)


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


def test_cache_when_an_entry_is_larger_than_the_limit_then_the_others_stay_beside_it(tmp_path):
    calls: list[Path] = []
    free = RowCache(tmp_path)
    use(free, "a", calls)
    use(free, "b", calls)
    cache = RowCache(tmp_path, max_bytes=1.5 * size_of(free))
    _, lease = cache.look_up("large", maker(calls, rows=20_000))
    assert [entry.key for entry in cache.entries()] == ["a", "b", "large"]
    lease.close()
    made: list[list[str]] = []

    def prepare(folder: Path) -> None:
        made.append([entry.key for entry in cache.entries() if entry.rows is not None])
        write_folder(folder, train=[10])

    cache.look_up("c", prepare)
    assert made == [["a", "b"]]  # there was room before it was needed


def refuse(monkeypatch: pytest.MonkeyPatch, refused: Path) -> None:
    """What is another user's: root, as which tests may run, may open it all the same."""
    open_file = os.open

    def open_or_refuse(path, *arguments, **options):
        if Path(path) == refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_or_refuse)


@pytest.mark.parametrize("refused", ["a.lock", "a/.lease"])
def test_cache_when_an_entry_is_another_users_then_it_counts_as_in_use(tmp_path, monkeypatch, refused):
    calls: list[Path] = []
    use(RowCache(tmp_path), "a", calls)
    refuse(monkeypatch, tmp_path / refused)
    cache = RowCache(tmp_path, max_bytes=1)
    use(cache, "b", calls)
    assert [(entry.key, entry.in_use) for entry in cache.entries()] == [("a", True), ("b", False)]
    assert [entry.key for entry in cache.shrink(0)] == ["b"]
    with pytest.raises(PermissionError, match=r"a\.lock|\.lease.*as data\.cache"):
        cache.look_up("a", maker(calls))


def test_cache_when_files_vanish_while_they_are_listed_then_goes_on(tmp_path, monkeypatch):
    cache, calls = RowCache(tmp_path), []
    use(cache, "a", calls)
    scan = os.scandir

    def remove_then_scan(path="."):
        if str(path) == str(tmp_path / "a" / "train"):
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", remove_then_scan)
    assert [entry.key for entry in cache.entries()] == ["a"]


def test_cache_when_room_cannot_be_made_then_the_rows_are_there_all_the_same(tmp_path, monkeypatch, caplog):
    def fail(path, **options):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    use(RowCache(tmp_path), "a", [])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        folder, lease = RowCache(tmp_path, max_bytes=1).look_up("b", maker([]))
    lease.close()
    assert Manifest.load(folder).is_whole(folder)
    assert "Could not make room in" in caplog.text


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


def test_file_when_it_changes_while_it_is_read_then_the_rows_never_count_as_whole(tmp_path, monkeypatch):
    write(tmp_path, "aab")
    saved = []
    monkeypatch.setattr(Manifest, "save", lambda self, root: saved.append(root))
    shards = Records.shards

    def change_then_list(self, split):
        os.utime(tmp_path / "clicks.csv")
        return shards(self, split)

    monkeypatch.setattr(Records, "shards", change_then_list)
    with pytest.raises(ValueError, match=r"clicks\.csv: a file has changed while it was read\. Start again"):
        module(tmp_path)
    assert saved == []


def test_checkpoint_when_the_rows_that_it_learned_from_are_there_then_they_are_not_prepared_again(tmp_path):
    write(tmp_path, "aab")
    state = module(tmp_path).state_dict()
    later = TabularDataModule(schema=SCHEMA, root=tmp_path, cache=tmp_path / "cache")
    later.load_state_dict(state)
    later.setup("fit")
    assert ids(later) == [2, 2, 3]
    assert len(RowCache(tmp_path / "cache").entries()) == 1
    write(tmp_path, "abb")  # other rows, by the same ids
    other = TabularDataModule(schema=SCHEMA, root=tmp_path, cache=tmp_path / "cache")
    other.load_state_dict(state)
    other.setup("fit")
    assert ids(other) == [2, 3, 3]


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


def test_folder_when_it_has_locks_and_folders_of_others_then_they_are_no_entries(tmp_path):
    for name, content in (("uv", "version = 1"), ("download", "")):
        (tmp_path / f"{name}.lock").write_text(content)
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").touch()
    (tmp_path / "poetry.lock").write_text("[[package]]")
    cache = RowCache(tmp_path)
    use(cache, "a", [])
    assert [entry.key for entry in cache.entries()] == ["a"]
    assert [entry.key for entry in cache.shrink(0)] == ["a"]
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {"uv.lock", "uv/data", "download.lock", "download/data", "poetry.lock"}
