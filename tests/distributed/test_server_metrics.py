"""A server's metrics over HTTP, from a process of its own: ready, scraped under load, killed, ended."""

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

from lightning_recsys.parameter_server import cli, connect

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def samples(url):
    families = text_string_to_metric_families(get(f"{url}/metrics"))
    return {(x.name, *x.labels.values()): x.value for family in families for x in family.samples}


@contextmanager
def server(folder, port=0):
    command = [sys.executable, "-m", cli.__name__, "--folder", str(folder), "--metrics-port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        told = [process.stdout.readline() for _ in range(2)]
        assert told[0].startswith("lightning-recsys-server metrics: http://127.0.0.1:"), told
        assert told[0].endswith("/metrics\n")
        assert told[1].startswith("lightning-recsys-server ready: "), told
        yield process, told[0].split()[-1].removesuffix("/metrics"), told[1].split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_server_when_scraped_while_it_works_then_counts_every_request_and_its_restarts(tmp_path):
    port = free_port()
    with server(tmp_path / "stores", port) as (process, url, endpoint):
        assert url == f"http://127.0.0.1:{port}"
        assert get(f"{url}/ready") == "ready\n"
        assert get(f"{url}/health") == "ok\n"
        stores = connect(endpoint, transport="tcp", timeout=60)
        assert stores.status()["metrics"] == url
        center = stores.create_dense_store("center", torch.ones(1000))
        for _ in range(3):
            for _ in range(20):
                center.elastic_average(torch.zeros(1000), alpha=0.1)
            told = samples(url)
        assert told["lightning_recsys_server_requests_total", "elastic_average"] == 60
        assert told["lightning_recsys_server_received_bytes_total", "elastic_average"] > 60 * 4000
        assert told["lightning_recsys_server_sent_bytes_total", "elastic_average"] > 60 * 4000
        assert told["lightning_recsys_server_request_seconds_count", "elastic_average"] == 60
        assert told["lightning_recsys_server_pushes_total",] == 61
        assert told["lightning_recsys_server_clients",] == 1
        assert told["lightning_recsys_server_memory_bytes", "used"] >= 4000
        assert told["lightning_recsys_server_restarts_total",] == 0
        process.kill()
        process.wait()
        with server(tmp_path / "stores", port) as (process, url, _):
            center.elastic_average(torch.zeros(1000), alpha=0.1)
            told = samples(url)
            assert told["lightning_recsys_server_restarts_total",] == 1
            # The client may have sent it a second time before the first was answered: a request then, and no push.
            assert told["lightning_recsys_server_requests_total", "elastic_average"] >= 1
            assert told["lightning_recsys_server_pushes_total",] == 1
            stores.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            with pytest.raises(urllib.error.URLError):
                get(f"{url}/health")


def test_server_when_its_port_or_its_folder_is_taken_then_says_so_in_one_line_and_ends(tmp_path):
    with server(tmp_path / "stores") as (_, url, _):
        port = url.rpartition(":")[2]
        for folder, other, sentence in (
            ("other", port, f"cannot tell metrics at 127.0.0.1 port {port}: Address already in use"),
            ("stores", "0", "another server serves"),
        ):
            command = [sys.executable, "-m", cli.__name__, "--folder", str(tmp_path / folder), "--metrics-port", other]
            second = subprocess.run(command, capture_output=True, text=True, timeout=100)
            assert second.returncode == 1
            assert second.stderr.count("\n") == 1
            assert sentence in second.stderr
        assert get(f"{url}/health") == "ok\n"


def test_server_when_stopped_while_somebody_asks_for_metrics_without_end_then_ends(tmp_path):
    with (
        server(tmp_path / "stores") as (process, url, _),
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as idle,
    ):
        idle.sendall(b"GET /metrics HTTP/1.0\r\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
