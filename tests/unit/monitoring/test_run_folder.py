"""The files by which the processes of a run are found."""

import pytest

from lightning_recsys.monitoring import Monitored, announce, monitored_in


def test_processes_when_announced_then_found_servers_first_and_by_number(tmp_path):
    run = tmp_path / "run"
    names = ["worker-10", "worker-2", "embedding-1", "sync-0", "embedding-0"]
    files = [announce(run, Monitored(name, f"http://127.0.0.1:{9000 + x}")) for x, name in enumerate(names)]
    assert [x.name for x in monitored_in(run)] == ["embedding-0", "embedding-1", "sync-0", "worker-2", "worker-10"]
    announce(run, Monitored("sync-0", "tcp://10.0.0.7:5790", keys="job.keys"))
    assert monitored_in(run)[2] == Monitored("sync-0", "tcp://10.0.0.7:5790", "job.keys")
    assert sorted(path.name for path in files[0].parent.iterdir()) == sorted(f"{x}.json" for x in names)
    for file in files:
        file.unlink()
    assert monitored_in(run) == []


def test_folder_when_missing_or_with_another_file_then_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        monitored_in(tmp_path / "missing")
    with pytest.raises(ValueError, match="letters, digits, _ and - only"):
        announce(tmp_path, Monitored("../x", "http://127.0.0.1:1"))
    announce(tmp_path, Monitored("worker-0", "http://127.0.0.1:1")).write_text("[]")
    with pytest.raises(ValueError, match=r"worker-0\.json does not say where"):
        monitored_in(tmp_path)
