"""An endpoint in this process: what it answers, to whom, and what is left of it."""

import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from lightning_recsys.monitoring import MonitoringEndpoint

pytestmark = pytest.mark.timeout(60)


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def status_of(url):
    try:
        get(url)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


def test_endpoint_when_asked_then_tells_metrics_health_and_readiness():
    with MonitoringEndpoint() as endpoint:
        assert get(f"{endpoint.url}/health") == "ok\n"
        assert status_of(f"{endpoint.url}/ready") == 503
        endpoint.set_ready(lambda: [CounterMetricFamily("cakes", "Number of cakes", value=3)])
        assert status_of(f"{endpoint.url}/ready") == 200
        families = {x.name: x for x in text_string_to_metric_families(get(f"{endpoint.url}/metrics"))}
        assert [(x.name, x.value) for x in families["cakes"].samples] == [("cakes_total", 3)]
        assert families["process_resident_memory_bytes"].samples[0].value > 1e6
        assert status_of(f"{endpoint.url}/other") == 404
        endpoint.set_unready()
        assert status_of(f"{endpoint.url}/ready") == 503
        assert "cakes" not in get(f"{endpoint.url}/metrics")
        assert status_of(f"{endpoint.url}/health") == 200


def test_endpoint_when_closed_with_idle_and_half_requests_then_leaves_nothing_and_the_port_is_free():
    before = set(threading.enumerate())
    endpoint = MonitoringEndpoint()
    port = int(endpoint.url.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    idle[0].sendall(b"GET /health HT")
    assert status_of(f"{endpoint.url}/health") == 200  # slow ones hold nobody up
    endpoint.close()
    endpoint.close()
    assert set(threading.enumerate()) == before
    for peer in idle:
        peer.close()
    with MonitoringEndpoint(port=port) as again:
        assert again.url == endpoint.url
        with pytest.raises(OSError, match=f"cannot tell metrics at 127.0.0.1 port {port}: Address already in use"):
            MonitoringEndpoint(port=port)


def test_endpoint_when_made_unready_then_waits_for_the_scrape_under_way():
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def collect():
        begun.set()
        go_on.wait(20)
        ended.append("scrape")
        return []

    with MonitoringEndpoint(collect=collect) as endpoint:
        scrape = threading.Thread(target=get, args=(f"{endpoint.url}/metrics",))
        scrape.start()
        assert begun.wait(20)
        unready = threading.Thread(target=lambda: (endpoint.set_unready(), ended.append("unready")))
        unready.start()
        go_on.set()
        for thread in (scrape, unready):
            thread.join(20)
    assert ended == ["scrape", "unready"]


def test_endpoint_when_asked_over_ipv6_then_answers():
    try:
        endpoint = MonitoringEndpoint(host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with endpoint:
        assert endpoint.url.startswith("http://[::1]:")
        assert get(f"{endpoint.url}/health") == "ok\n"
