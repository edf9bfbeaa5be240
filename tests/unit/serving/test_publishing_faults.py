"""Whatever fails while a version is published or read leaves the last one as it was, and nothing behind."""

import errno
import fcntl
import io
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from published import Sums, Trained, save_program

from lightning_recsys.errors import PublishedVersionError, PublisherReplacedError
from lightning_recsys.serving import ModelReader, dense, release, roll_back
from lightning_recsys.serving.cli import main
from lightning_recsys.serving.dense import DensePart, export_apart
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.hub import save_pretrained
from lightning_recsys.serving.manifest import MANIFEST
from lightning_recsys.serving.publishing import claims

URL = "memory://faults"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return save_program(tmp_path_factory.mktemp("program") / "p.pt2")


@pytest.fixture
def trained(program, tmp_path):
    made = Trained(program, tmp_path / "stores", tmp_path / "model")
    yield made
    made.close()


@pytest.fixture
def bucket(monkeypatch):
    for name, seconds in (("RENEW", 60.0), ("WATCH", 0.0), ("LOOK", 0.01), ("SETTLE", 0.0)):
        monkeypatch.setattr(claims, f"{name}_SECONDS", seconds)
    files = fsspec.filesystem("memory")
    files.makedirs("faults", exist_ok=True)
    own = files._open

    def open_apart(path, mode="rb", **options):
        """Two readers of a file have a place each in it; fsspec's share one, which no bucket's do."""
        found = own(path, mode, **options)
        return io.BytesIO(found.getvalue()) if mode == "rb" else found

    monkeypatch.setattr(files, "_open", open_apart)
    yield files
    monkeypatch.undo()  # what a test has replaced of it
    files.rm("faults", recursive=True)


def test_lock_when_a_forked_process_has_its_file_open_still_then_it_is_given_back_all_the_same(tmp_path):
    folder = VersionFolder(tmp_path)
    with folder.locked("run 1"):
        names = {int(fd): os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        (lock,) = [fd for fd, name in names.items() if name == str(tmp_path / ".publisher.lock")]
        forked = os.dup(lock)  # the same open file, as a forked process has it
    try:
        with folder.locked("run 2"):
            assert (tmp_path / ".publisher.lock").read_text().startswith("run 2 ")
            os.fstat(forked)  # open all the while
    finally:
        os.close(forked)


def test_lock_when_its_holder_is_dead_then_the_next_waits_for_the_processes_that_it_forked(tmp_path, monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with (tmp_path / ".publisher.lock").open("w") as lock:
        lock.write(f"run 1 (process {dead.pid} on {socket.gethostname()})")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(claims, "DEAD_SECONDS", 0.2)
        with pytest.raises(ValueError, match=f"process {dead.pid} on "), VersionFolder(tmp_path).locked("run 2"):
            pass
        monkeypatch.setattr(claims, "DEAD_SECONDS", 60.0)
        ended = threading.Event()

        def end():
            ended.set()
            fcntl.flock(lock, fcntl.LOCK_UN)

        ends = threading.Timer(0.3, end)
        ends.start()
        with VersionFolder(tmp_path).locked("run 2"):
            assert ended.is_set()
        ends.join()


def test_remote_publisher_when_another_one_has_its_place_then_it_touches_nothing_of_that_one(bucket):
    folder, other = VersionFolder(URL), json.dumps({"token": "other", "holder": "run 2"}).encode()
    with folder.locked("run 1"):
        with pytest.raises(PublisherReplacedError, match=r"versions/1: .*run 2 publishes"), folder.writing(1) as path:  # noqa: PT012
            (path / "model.safetensors").write_bytes(b"mine")
            bucket.pipe_file("faults/publisher.json", other)
            bucket.pipe_file("faults/versions/1/model.safetensors", b"the other's")
        with pytest.raises(PublisherReplacedError), folder.writing(1):
            pytest.fail("it is not to be begun")
        assert bucket.cat_file("faults/versions/1/model.safetensors") == b"the other's"
    assert bucket.cat_file("faults/publisher.json") == other


def test_remote_version_when_a_file_of_it_fails_then_nothing_of_it_stays(bucket, monkeypatch):
    put_file = bucket.put_file

    def put(source, target):
        if target.endswith(MANIFEST):
            raise RuntimeError("gateway")  # of no class of Python's, as libraries of object stores raise them
        put_file(source, target)

    monkeypatch.setattr(bucket, "put_file", put)
    folder = VersionFolder(URL)
    with folder.locked("run 1"), pytest.raises(OSError, match="RuntimeError: gateway"), folder.writing(1) as path:  # noqa: PT012
        (path / MANIFEST).write_bytes(b"{}")
        (path / "model.safetensors").write_bytes(b"whole")
    assert folder.versions() == []


def test_remote_folder_when_its_library_raises_errors_of_its_own_then_they_are_os_errors(bucket, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("gateway")

    folder = VersionFolder(URL)
    for name in ("cat_file", "pipe_file", "ls", "rm", "rm_file"):
        monkeypatch.setattr(bucket, name, fail)
    calls = (folder.current, folder.versions, lambda: folder.remove(1), lambda: folder.locked("run 1").__enter__())
    for call in calls:
        with pytest.raises(OSError, match="RuntimeError: gateway"):
            call()
    with pytest.raises(PublishedVersionError, match=r"versions/1: its manifest is missing \(RuntimeError: gateway"):
        folder.find(1)


def test_claim_when_its_network_fails_for_a_moment_then_it_is_renewed_further_on(monkeypatch):
    for name, seconds in (("RENEW", 0.01), ("SETTLE", 0.0)):
        monkeypatch.setattr(claims, f"{name}_SECONDS", seconds)
    there, reads, renewed = {}, [], threading.Event()

    def read(name):
        reads.append(name)
        if name not in there:
            raise FileNotFoundError(name)
        if len(reads) in (3, 4):
            raise RuntimeError("gateway")
        return there[name]

    def write(name, data):
        there[name] = data
        if len(reads) > 4:
            renewed.set()

    with claims.Claim(read, write, there.pop, url=URL, holder="run 1"):
        assert renewed.wait(20)


def test_remote_folder_when_increments_are_compacted_then_the_cache_of_readers_has_none_of_it(
    program, tmp_path, bucket, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trained = Trained(program, tmp_path / "stores", URL, max_increments=1)
    try:
        trained.publish()
        trained.train([1])
        trained.publish()
        assert [trained.folder.find(version)[1].kind for version in (1, 2, 3)] == ["base", "increment", "base"]
        assert not (tmp_path / "cache").exists()
        reader = ModelReader(URL, cache=tmp_path / "downloads")
        some = torch.arange(50)
        assert torch.equal(reader.model.rows_of("embeddings", "a", some), trained.rows("a", some))
    finally:
        trained.close()


def go_back_to_the_oldest(folder):
    """Or to the oldest one after it, where it has just been removed; its number."""
    while True:
        try:
            return roll_back(folder.url, folder.versions()[0]).version
        except PublishedVersionError:
            assert folder.held() is None


@pytest.mark.parametrize("url", ["local", URL])
def test_version_when_gone_back_to_while_a_run_publishes_then_it_counts_until_it_is_released(
    program, tmp_path, bucket, url
):
    url = str(tmp_path / "model") if url == "local" else url
    trained = Trained(program, tmp_path / "stores", url, keep=2, max_increments=2)
    others, ended, failed = Trained(program, tmp_path / "others", url, run="1" * 32), threading.Event(), []
    turn = threading.Lock()  # of the publisher; a reader that opens the latest version would not keep up with it
    others.publish()  # version 1, of a run long past
    others.close()

    def publish():
        with trained.folder.locked("run 0"):
            trained.restart(keep_runs=1)
            while not ended.wait(0.001):
                with turn:
                    trained.train([3])
                    trained.publish()

    def run():
        try:
            publish()
        except BaseException as error:
            failed.append(error)

    def wait_for(count):
        """Until so many more versions are published."""
        wanted = trained.folder.current().version + count
        while trained.folder.current().version < wanted:
            assert not failed, failed

    roll_back(url, 1)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(6)
        assert ModelReader(url, cache=tmp_path / "cache").version == 1
        for _ in range(3):
            with turn:
                assert release(url) is not None
                reader = ModelReader(url, cache=tmp_path / "cache")
            assert reader.version > 1
            back = go_back_to_the_oldest(trained.folder)
            wait_for(6)
            reader.refresh()
            assert reader.version == ModelReader(url, cache=tmp_path / "cache").version == back
            assert trained.folder.versions()[0] <= back < trained.folder.versions()[-1] - 4
    finally:
        ended.set()
        thread.join()
        release(url)
        some = torch.arange(50)
        rows, expected = (
            ModelReader(url, cache=tmp_path / "cache").model.rows_of("embeddings", "a", some),
            trained.rows("a", some),
        )
        trained.close()
    assert not failed, failed
    assert torch.equal(rows, expected)
    assert release(url) is None


def warnings_of(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


def test_publisher_when_another_version_is_held_then_it_says_so_once_for_each(trained, tmp_path, caplog):
    url = tmp_path / "model"
    trained.publish()
    trained.publish()
    assert warnings_of(caplog) == []
    roll_back(url, 1)
    trained.publish()
    assert warnings_of(caplog) == [
        f"Version 1 of {url} counts, and not version 3, which is published now, nor those after it, until it is"
        f" released: lightning-recsys versions {url} --release"
    ]
    trained.publish()
    assert warnings_of(caplog) == []
    roll_back(url, 2)
    trained.publish()
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"Version 2 of {url} counts, and not version 5")
    release(url)
    trained.publish()
    assert warnings_of(caplog) == []


def test_publisher_when_the_hold_cannot_be_read_then_the_version_is_published_and_the_next_is_an_increment(
    trained, tmp_path, caplog
):
    trained.publish()
    (tmp_path / "model" / "held.json").write_bytes(b"{")
    for version in (2, 3):
        manifest = trained.publish()
        assert (manifest.version, manifest.kind, trained.folder.current().version) == (version, "increment", version)
        old, told = warnings_of(caplog)
        assert old.startswith("Versions that are too old stay for now: ")
        assert told.startswith(f"Version {version} of {tmp_path / 'model'} is published, and whether it counts cannot")
        assert "/held.json: is damaged: " in old
        assert "/held.json: is damaged: " in told


@pytest.mark.parametrize("name", ["held", "versions", "remove"])
def test_remote_publisher_when_the_network_fails_behind_a_version_then_that_one_is_published(
    program, tmp_path, bucket, monkeypatch, caplog, name
):
    trained = Trained(program, tmp_path / "stores", URL, keep=1)
    try:
        trained.publish()
        trained.restart()
        trained.publish()
        set_current = trained.folder.set_current

        def fail(*_):
            raise OSError("gateway")

        def published(link):
            set_current(link)
            monkeypatch.setattr(trained.folder, name, fail)

        monkeypatch.setattr(trained.folder, "set_current", published)
        trained.restart()
        manifest = trained.publish()
        assert (manifest.version, trained.folder.current().version) == (3, 3)
        assert trained.writer._last_manifest == manifest
        assert any("gateway" in warning for warning in warnings_of(caplog))
    finally:
        trained.close()


def test_remote_version_when_removed_while_somebody_goes_back_to_it_then_what_counted_counts_on(
    program, tmp_path, bucket, monkeypatch
):
    trained = Trained(program, tmp_path / "stores", URL)
    try:
        for _ in range(3):
            trained.publish()
        roll_back(URL, 2)
        remove = trained.folder.remove  # of a publisher that has not seen the hold
        monkeypatch.setattr(claims.time, "sleep", lambda seconds: remove(1))
        with pytest.raises(PublishedVersionError, match="versions/1: its manifest is missing"):
            roll_back(URL, 1)
        assert trained.folder.counting().version == 2
    finally:
        trained.close()


class CountedFile:
    """A new file whose writes are counted."""

    def __init__(self, file, counted):
        self._file, self.write = file, counted(file.write)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def test_disk_when_full_at_any_write_then_the_last_version_stays_as_it_was(trained, tmp_path, monkeypatch):
    trained.train([1])
    trained.publish()
    reader, calls, full_at = ModelReader(tmp_path / "model"), 0, 0
    opened, fsync = Path.open, os.fsync

    def counted(call):
        def call_unless_full(*arguments):
            nonlocal calls
            calls += 1
            if calls == full_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*arguments)

        return call_unless_full

    def open_counted(path, mode="r", **options):
        file = opened(path, mode, **options)
        return CountedFile(file, counted) if mode == "x+b" else file

    monkeypatch.setattr(Path, "open", open_counted)
    monkeypatch.setattr(os, "fsync", counted(fsync))
    failures = 0
    while True:
        trained.train([2])
        calls, full_at = 0, full_at + 1
        try:
            trained.publish()
        except OSError:
            failures += 1
        else:
            break
        again = ModelReader(tmp_path / "model")
        if again.version == reader.version:
            assert torch.equal(again.model.weights["weight"], reader.model.weights["weight"])
        else:  # the pointer was replaced, and what came after that failed
            assert torch.equal(again.model.weights["weight"], trained.model.weight)
        assert not list((tmp_path / "model").glob(".current*"))
    assert failures > 20
    assert reader.refresh()
    some = torch.arange(50)
    assert torch.equal(reader.model.rows_of("embeddings", "a", some), trained.rows("a", some))


def test_base_when_removed_while_it_is_downloaded_then_the_version_that_was_open_stays(
    program, tmp_path, bucket, monkeypatch
):
    trained = Trained(program, tmp_path / "stores", URL)
    try:
        trained.publish()
        reader = ModelReader(URL, cache=tmp_path / "downloads")
        before = reader.model
        trained.restart()
        trained.train([1])
        assert trained.publish().is_base
        get_file, fetched = bucket.get_file, []

        def get(source, target):
            fetched.append(source)
            get_file(source, target)
            trained.folder.remove(2)

        monkeypatch.setattr(bucket, "get_file", get)
        with pytest.raises(PublishedVersionError, match=r"versions/2: .* cannot be read"):
            reader.refresh()
        assert len(fetched) == 2  # the second one of its files is not there any more
        assert reader.model is before
        assert not [path for path in (tmp_path / "downloads").iterdir() if path.name.startswith(".")]
    finally:
        trained.close()


def test_folder_when_of_another_format_then_it_says_so_and_nothing_of_it_is_removed(trained, tmp_path):
    trained.publish()
    trained.publish()
    for name in ("current.json", "versions/1/manifest.json", "versions/2/manifest.json"):
        path = tmp_path / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
        with pytest.raises(PublishedVersionError, match=r"it is of format 1, .*Publish into a new folder"):
            trained.folder.current() if name == "current.json" else trained.folder.find(int(name.split("/")[1]))
    (tmp_path / "model" / "current.json").unlink()
    trained.restart()
    assert trained.folder.versions() == [1, 2]


@pytest.mark.parametrize("url", ["local", URL])
@pytest.mark.parametrize("foreign", ["thesis.tex", "chapters/1.tex", "index.json"])
def test_leftovers_when_a_folder_has_files_of_others_then_it_is_refused_and_nothing_is_removed(
    bucket, tmp_path, url, foreign
):
    url = str(tmp_path) if url == "local" else url
    files, root = fsspec.core.url_to_fs(url)
    written = ("versions/1/rows-0-0.arrow", f"versions/2/{foreign}", "versions/2/model.safetensors")
    for name in written:
        files.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        files.pipe_file(f"{root}/{name}", b"years of work")
    folder = VersionFolder(url)
    with pytest.raises(
        ValueError, match=rf"{url}/versions/2 .* {foreign.partition('/')[0]}, which no publisher .* {url}"
    ):
        folder.clear_leftovers()
    assert [files.cat_file(f"{root}/{name}") for name in written] == [b"years of work"] * 3
    files.rm(f"{root}/versions/2/{foreign.partition('/')[0]}", recursive=True)
    folder.clear_leftovers()  # the rest is what a killed publisher leaves
    assert folder.versions() == []


@pytest.mark.parametrize("change", ["moved", "cleared", "base", "manifest", "pointer", "torn"])
def test_folder_when_changed_under_a_publisher_then_its_next_version_is_a_base_that_opens(
    trained, tmp_path, change, caplog
):
    for step in range(3):
        trained.publish()
        trained.train([step])
    folder = tmp_path / "model"
    if change == "moved":
        folder.rename(tmp_path / "elsewhere")
    elif change == "pointer":
        trained.folder.set_current(trained.folder.find(2)[0])
    elif change == "torn":
        (folder / "current.json").write_bytes(b"{")
    else:
        gone = {"cleared": "versions", "base": "versions/1", "manifest": "versions/1/manifest.json"}[change]
        subprocess.run(["rm", "-r", folder / gone], check=True)
    assert [trained.publish().kind for _ in range(2)] == ["base", "increment"]
    assert trained.folder.current().version == 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(folder) in caplog.text
    reader, some = ModelReader(folder), torch.arange(50)
    assert torch.equal(reader.model.rows_of("embeddings", "a", some), trained.rows("a", some))


def test_follower_when_its_listener_fails_then_it_tells_again_and_follows(trained, tmp_path):
    trained.publish()
    told, heard = [], threading.Event()

    def tell(model):
        told.append(model.version)
        if len(told) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        if model.version == 2:
            heard.set()

    with ModelReader(tmp_path / "model") as reader:
        with pytest.raises(ValueError, match="above 0; got 0"):
            reader.follow(0.0)
        reader.follow(0.001, tell=tell)
        trained.publish()
        assert heard.wait(30)
    assert len(told) in (3, 4)


def test_temporary_files_when_a_publisher_was_killed_then_the_next_one_removes_them(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    with VersionFolder(URL).writing(1) as folder:
        left = folder.rename(tmp_path / folder.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
        assert left.name != folder.name
        folder.mkdir()
    assert list(tmp_path.iterdir()) == [left]
    with VersionFolder(URL).writing(2):
        assert not left.exists()
    assert not list(tmp_path.iterdir())


def test_export_when_a_disk_is_full_then_it_is_an_os_error_that_names_the_folder(tmp_path, monkeypatch, capsys):
    def run(command, **_):  # in this process: another one takes seconds to start
        with pytest.raises(SystemExit) as ended:
            dense._main(*command[3:])
        return subprocess.CompletedProcess(command, ended.value.code, stderr=f"a warning\n{capsys.readouterr().err}")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "nice", lambda _: None)
    monkeypatch.setattr(subprocess, "run", run)
    part, limits = DensePart(Sums()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100, limits[1])
    )  # bytes of a file: torch's writer fails as on a full disk
    try:
        with pytest.raises(OSError, match=f"the dense part cannot be written to {tmp_path}"):
            export_apart(part, 2, tmp_path / "p.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OSError, match=r"the dense part's program cannot be written to /dev: .*No space left on device"):
        export_apart(part, 2, Path("/dev/full"))
    assert not list(tmp_path.iterdir())


def test_layout_of_the_hub_when_the_folder_is_a_url_then_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="s3://bucket/x: a model is saved in a folder of this machine"):
        save_pretrained(Sums(), "s3://bucket/x", num_dense=2, name="x")
    assert not list(tmp_path.iterdir())


def test_going_back_when_the_folder_is_not_there_then_it_is_not_made(tmp_path, capsys):
    assert main([str(tmp_path / "mistyped"), "--roll-back", "3"]) == 1
    assert "mistyped: nothing was published there" in capsys.readouterr().err
    assert not (tmp_path / "mistyped").exists()


def test_folder_when_its_versions_are_a_link_then_it_is_refused_before_anything_is_published(program, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "versions").symlink_to(tmp_path / "elsewhere")
    folder = VersionFolder(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model/versions is a link, .*publish into the folder above .*elsewhere"):
        folder.locked("run 1").__enter__()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_follower_when_its_source_is_gone_then_it_warns_after_some_looks_and_once(trained, tmp_path, caplog):
    trained.publish()
    looks, failed, well = [], threading.Event(), threading.Event()

    def looked(look):
        looks.append(look)
        if look.failures == 6:
            failed.set()
        if failed.is_set() and not look.failures:
            well.set()

    with ModelReader(tmp_path / "model") as reader:
        (tmp_path / "model").rename(tmp_path / "elsewhere")
        reader.follow(0.001, warn_after=4, looked=looked)
        assert failed.wait(30)
        assert [x.failures for x in looks[:6]] == [1, 2, 3, 4, 5, 6]
        assert len({x.seen for x in looks[:6]}) == 1
        assert "current.json: it is not there any more" in looks[5].error
        assert [x.message[:7] for x in caplog.records if x.levelname == "WARNING"] == ["4 looks"]
        assert reader.version == 1
        (tmp_path / "elsewhere").rename(tmp_path / "model")
        assert well.wait(30)
