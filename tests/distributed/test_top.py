"""``lightning-recsys top``: servers and workers, those that do not answer, in a terminal and printed once."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from ports import free_port
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from server_helpers import running

from lightning_recsys import cli, top
from lightning_recsys.monitoring import Monitored, MonitoringEndpoint, announce
from lightning_recsys.parameter_server import connect

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def worker_metrics(steps=lambda: 7):
    entropy = GaugeMetricFamily("lightning_recsys_worker_normalized_entropy", "", labels=["rank", "over"])
    entropy.add_metric(["3", "run"], 0.9)
    entropy.add_metric(["3", "window"], 0.8125)
    telemetry = GaugeMetricFamily("lightning_recsys_worker_telemetry", "", labels=["rank", "name", "statistic"])
    telemetry.add_metric(["3", "comm/sent_bytes", "value"], 4096)
    telemetry.add_metric(["3", "rows/staleness", "mean"], 2.5)
    telemetry.add_metric(["3", "rows/staleness", "p99"], 9)
    steps_metric = CounterMetricFamily("lightning_recsys_worker_steps", "", value=steps())
    rate = GaugeMetricFamily("lightning_recsys_worker_examples_per_second", "", value=12_345)
    return [entropy, telemetry, steps_metric, rate]


def rows_of(printed):
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    return {line[0]: line for line in lines}


def test_top_when_printed_once_then_has_servers_workers_and_who_does_not_answer(tmp_path, capsys):
    dead = f"http://127.0.0.1:{free_port()}"
    gone = "ipc:///missing/socket"
    (tmp_path / "stores").mkdir()
    with running(tmp_path / "stores") as server, MonitoringEndpoint() as endpoint:
        endpoint.set_ready(worker_metrics)
        announce(tmp_path / "run", Monitored("worker-3", endpoint.url))
        announce(tmp_path / "run", Monitored("embedding-0", server.endpoint))
        with_center = connect(server.endpoint, transport="tcp")
        with_center.create_dense_store("center", torch.zeros(1000))
        assert cli.main(["top", str(tmp_path / "run"), dead, gone, "--once", "--timeout", "1"]) == 0
        rows = rows_of(capsys.readouterr().out)
        with_center.close()
    assert rows["worker-3"][1:6] == ["12,345", "", "0.8125", "2.5", ""]
    assert rows["worker-3"][6] == "0 B"  # sent within the second
    assert rows["worker-3"][9] == "step 7"
    assert rows["embedding-0"][9] == "1 clients, 0 rows"
    assert float(rows["embedding-0"][2].replace(",", "")) > 0  # our own question
    assert rows["embedding-0"][7].endswith("KiB")
    assert rows["embedding-0"][8] == "0 B"
    assert "does not answer: [Errno 111] Connection refused" in rows[dead][9]
    assert "does not answer: " in rows[gone][9]
    assert [x for x in rows if x] == [dead, gone, "embedding-0", "worker-3"]


def test_top_when_processes_come_and_go_then_their_rows_do(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    watching = top.Top([str(run)], keys=None, timeout=5)
    try:
        assert watching.look().caption == "nobody has said yet where to ask"
        with MonitoringEndpoint() as endpoint:
            path = announce(run, Monitored("worker-0", endpoint.url))
            assert "has not begun, or is something else" in next(iter(watching.look().columns[-1].cells))
            counts = iter((100, 103))
            endpoint.set_ready(lambda: worker_metrics(lambda: next(counts)))
            assert list(watching.look().columns[-1].cells) == ["step 100"]
        assert next(iter(watching.look().columns[-1].cells)).startswith("does not answer: ")
        path.unlink()
        assert watching.look().row_count == 0
    finally:
        watching.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("top")]


@pytest.mark.parametrize(
    ("place", "sentence"), [("{}/missing", "there is no folder"), ("s3://bucket/run", "is no place: http://")]
)
def test_top_when_a_place_is_none_then_says_so_in_one_line(tmp_path, capsys, place, sentence):
    assert cli.main(["top", place.format(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sentence in err


def test_top_when_in_a_terminal_then_redraws_until_ctrl_c():
    with MonitoringEndpoint() as endpoint:
        looks = []
        endpoint.set_ready(lambda: worker_metrics(lambda: looks.append(1) or len(looks)))
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "lightning_recsys", "top", endpoint.url]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "20"}
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        shown = b""
        deadline = time.monotonic() + 120
        while b"step 3" not in shown and time.monotonic() < deadline:
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        os.close(ours)
    assert all(f"step {x}".encode() in shown for x in (1, 2, 3))
