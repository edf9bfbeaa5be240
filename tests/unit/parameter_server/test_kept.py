"""Bytes that are replaced as a whole: whatever is killed, and however full the file system is."""

import os
import signal
import time

import pytest

from lightning_recsys.parameter_server.requests import kept
from lightning_recsys.parameter_server.requests.kept import KeptBytes


def opened(folder):
    return KeptBytes(folder / "kept", what="what is kept")


@pytest.mark.parametrize("writes_before", [0, 1, 2, 5])
@pytest.mark.parametrize("steps", range(5))
def test_bytes_when_killed_at_any_step_then_the_write_before_is_whole_or_the_new_one_is(
    tmp_path, monkeypatch, writes_before, steps
):
    """Of the four steps that write two parts so many are made, and of the next one its first half."""
    write, made = kept._write, []

    def killed(descriptor, content, at):
        made.append(at)
        if len(made) > steps:
            write(descriptor, content[: len(content) // 2], at)
            raise KeyboardInterrupt
        write(descriptor, content, at)

    before = [f"content {number} ".encode() * 100 for number in range(writes_before)]
    first = opened(tmp_path)
    for content in before:
        first.write(content)
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_write", killed)
        try:
            first.write(b"new", b"er")
        except KeyboardInterrupt:
            assert steps < 4
    first.close()
    next_one = opened(tmp_path)
    assert next_one.read() == (b"newer" if steps == 4 else before[-1] if before else None)
    next_one.write(b"last")
    assert opened(tmp_path).read() == b"last"


def test_bytes_when_their_process_is_killed_again_and_again_then_what_is_read_is_one_write(tmp_path):
    seen = []
    for _ in range(10):
        pid = os.fork()
        if not pid:
            own = opened(tmp_path)
            number = int((own.read() or b"0").split()[0])
            while True:
                number += 1
                own.write(f"{number} ".encode(), f"{number} ".encode() * (number % 7 * 1000))
        time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        numbers = (opened(tmp_path).read() or b"0").split()
        seen.append(int(numbers[0]))
        assert set(numbers) == {numbers[0]}
        assert len(numbers) == 1 + seen[-1] % 7 * 1000
    assert seen == sorted(seen)
    assert seen[-1] > 10


def test_bytes_when_a_write_was_large_then_later_ones_give_most_of_its_room_back(tmp_path):
    own = opened(tmp_path)
    for content in (b"x" * (8 << 20), b"", b"small", b"again"):
        own.write(content)
        assert own.read() == content
    sizes = [path.stat().st_blocks * 512 for path in sorted(tmp_path.iterdir())]
    assert all(kept._ROOM <= size <= kept._LASTING_ROOM for size in sizes)
    own.remove()
    assert list(tmp_path.iterdir()) == []


def test_bytes_when_there_is_no_room_then_refused_with_what_is_missing_and_the_write_before_stays(
    tmp_path, monkeypatch
):
    own = opened(tmp_path)
    own.write(b"before")
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", refuse)
        patch.setattr("lightning_recsys.stores.folders.room.free_bytes", lambda folder: 1000)
        own.write(b"x" * 50_000)  # for which there is room
        with pytest.raises(
            OSError, match=r"what is kept needs 65,536 bytes in .* and 1,000 are there: 64,536 are missi"
        ):
            own.write(b"y" * 100_000)
    assert own.read() == opened(tmp_path).read() == b"x" * 50_000


def refuse(*_):
    raise OSError(28, "No space left on device")
