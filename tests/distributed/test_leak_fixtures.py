"""The automatic fixtures fail a test that leaves something behind, and only such a test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKY = """
import os, pathlib, signal, socket, subprocess, sys, threading, time, weakref
from types import SimpleNamespace
import conftest, psutil, pytest, torch

KEPT, ENDED, STATUS = [], threading.Event(), psutil.Process.status

def test_environment():
    os.environ["LEFT"] = "1"

def test_environment_change():
    os.environ["PATH"] += ":"

def test_file():
    pathlib.Path("left.txt").write_text("")

def test_open_file(tmp_path):
    KEPT.append(open(tmp_path / "left.txt", "w"))

def test_port():
    KEPT.append(socket.create_server(("127.0.0.1", 0)))

def test_thread():
    threading.Thread(target=ENDED.wait, name="left", daemon=True).start()

def test_process():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))

def test_shared_memory():
    pathlib.Path(f"/dev/shm/lightning_recsys-{os.getpid()}-left").touch()

def test_signal_handler():
    signal.signal(signal.SIGUSR1, lambda *_: None)
"""

CLEAN = """
def test_nothing_left_by_the_tests_before():
    assert "LEFT" not in os.environ
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert KEPT[-1].wait() == -signal.SIGKILL
    ENDED.set()

def test_settings():
    torch.set_num_threads(3)
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

def test_settings_are_restored():
    assert (torch.tensor([1e-39], dtype=torch.float32) * 1).item() > 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert not torch.distributed.is_initialized()

def test_grace():
    conftest.GRACE_SECONDS = 60.0  # however slow the machine is; nothing below leaves anything behind
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    subprocess.Popen(["sleep", "0.1"])

def test_process_that_ends_between_two_looks_at_it():
    ended = subprocess.Popen(["sleep", "0.2"])

    def status_once_it_has_ended(process):
        ended.wait()
        return STATUS(process)

    psutil.Process.status = status_once_it_has_ended

def test_garbage_when_the_machine_had_no_time_for_us(monkeypatch):
    psutil.Process.status = STATUS
    cycle = [(kept := set())]
    cycle.append(cycle)
    is_there, hours = weakref.ref(kept), iter(range(0, 10**6, 3600))
    del cycle, kept
    monkeypatch.setattr(conftest, "time", SimpleNamespace(monotonic=lambda: next(hours), sleep=time.sleep))
    assert conftest._after_grace(lambda: ["it"] if is_there() is not None else []) == []

@pytest.mark.parametrize("again", [0, 1])
def test_random_numbers(again):
    KEPT.append(torch.rand(1).item())
    assert KEPT[-1] == KEPT[-1 - again]
"""

LEFT_BEHIND = {
    "test_environment": "environment variables behind: LEFT='1'",
    "test_environment_change": "environment variables behind: PATH=",
    "test_file": r"files in the working directory \(use tmp_path\) behind: left.txt",
    "test_open_file": r"open files behind: .*left\.txt",
    "test_port": "listening ports behind: ",
    "test_thread": "threads behind: left",
    "test_process": r"processes behind: .*time\.sleep",
    "test_shared_memory": "shared memory behind: lightning_recsys-.*-left",
    "test_signal_handler": "signal handlers behind: SIGUSR1",
}


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux only")
def test_fixtures_when_a_test_leaves_something_behind_then_fail_it_and_no_other(tmp_path):
    conftest = CONFTEST.read_text().replace("GRACE_SECONDS = 5.0", "GRACE_SECONDS = 0.4")
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_leaky.py").write_text(LEAKY + CLEAN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    try:
        report = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    finally:
        for path in Path("/dev/shm").glob("lightning_recsys-*-left"):
            path.unlink()
    blamed = dict(re.findall(r"ERROR at teardown of (\w+) _+\n(.*)", report))
    assert blamed.keys() == LEFT_BEHIND.keys(), report
    for name, message in LEFT_BEHIND.items():
        assert re.search(message, blamed[name]), blamed[name]
    assert re.search(rf"\b17 passed, {len(LEFT_BEHIND)} errors", report), report
