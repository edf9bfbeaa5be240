"""What processes have used, against psutil."""

import os
import subprocess
import sys

import psutil
import pytest

from lightning_recsys.monitoring.processes import descendants, processor_seconds, resident_bytes

BUSY = "import subprocess, sys; x = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE);"
BUSY += " sum(range(10**7)); print(x.pid, flush=True); input(); x.communicate(b'\\n')"


def test_process_when_it_has_worked_then_its_time_memory_and_child_are_those_of_psutil():
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        child = int(process.stdout.readline())
        told = psutil.Process(process.pid)
        times = told.cpu_times()
        assert processor_seconds(process.pid) == pytest.approx(times.user + times.system, abs=0.03)
        assert processor_seconds(process.pid) > 0.05
        assert resident_bytes(process.pid) == pytest.approx(told.memory_info().rss, rel=0.05)
        assert descendants(process.pid) == [process.pid, child]
        assert {process.pid, child} <= set(descendants(os.getpid(), process.pid))
        process.communicate("\n", timeout=60)
    assert processor_seconds(process.pid) == resident_bytes(process.pid) == 0
