"""Part ``requests`` of the ShadowSync suite: what is asked for over a link, by whom, and what it is held against."""

import threading
import time
from itertools import islice

import pytest
import torch
from benchmarks.harness.jobs import hosts
from benchmarks.harness.jobs.hosts import free_port
from benchmarks.harness.turns import Measurement
from benchmarks.harness.workload import Workload
from benchmarks.peers import bare_link, torch_rpc
from benchmarks.suites.het.link import Crossed, Told
from benchmarks.suites.shadowsync import requesting, requests
from benchmarks.suites.shadowsync.requesting import Asked

from lightning_recsys.launchers import ServerSpec, Sidecars

SIZE = {"batch_size": 8, "dim": 4, "rows": 32, "staleness": 5, "warm_steps": 3}


def asked(endpoint: str, *, staleness: int | None, rows: int = 32) -> Asked:
    """Batches of 8, rows 4 wide."""
    work = Workload(cardinalities=(50, 20), rows=rows, dim=4)
    return Asked(endpoint, "lo", None, work, batch_size=8, staleness=staleness, sent=0, received=0)


def test_bare_link_then_every_request_is_answered_until_the_client_leaves(capsys):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    server = threading.Thread(target=bare_link.serve, args=(endpoint, 70_000, 3_000_000), daemon=True)
    server.start()
    deadline = time.monotonic() + 20
    while "ready" not in capsys.readouterr().out and time.monotonic() < deadline:
        time.sleep(0.01)
    sent, _, received, _ = hosts.counted_by("lo")
    with bare_link.exchanges(endpoint, 70_000, 3_000_000) as exchange:
        for _ in range(3):
            exchange()
    server.join(30)
    assert not server.is_alive()
    now_sent, _, now_received, _ = hosts.counted_by("lo")
    assert min(now_sent - sent, now_received - received) >= 3 * 3_070_000  # loopback receives what it sends


def test_rpc_exchange_then_updates_are_added_before_rows_are_read(monkeypatch):
    monkeypatch.setattr(torch_rpc, "_rows", torch.zeros(4, 2))
    rows_UD = torch_rpc.exchange(torch.tensor([1, 3]), torch.ones(2, 2), torch.tensor([3, 0]))
    assert rows_UD.tolist() == [[1, 1], [0, 0]]


def test_lookups_then_a_step_asks_for_every_id_of_a_batch_and_counts_its_bytes():
    looked_up = []

    def look_up(rows_U):
        looked_up.append(rows_U)
        return torch.zeros(len(rows_U), 4)

    step = requesting._lookups(asked("", staleness=None), look_up)
    assert [step() for _ in range(5)] == [(16 * 8, 16 * 4 * 4)] * 5
    assert looked_up[0].equal(looked_up[4])  # four batches, again and again
    assert all(rows_U[:8].max() < 50 <= rows_U[8:].min() < rows_U[8:].max() < 70 for rows_U in looked_up)


@pytest.mark.distributed
def test_cache_operations_then_a_steps_bytes_are_those_of_what_it_missed_and_pushed():
    with Sidecars([ServerSpec("embedding", 0)]) as sidecars:
        (endpoint,) = sidecars.endpoints["embedding"]
        with requesting.by_ours(asked(endpoint, staleness=5, rows=320)) as step:
            steps = [step() for _ in range(30)]
    row = 4 * asked("", staleness=None).work.dim
    # A step pulls no more than the distinct rows of a batch, with a version each, and pushes no more than these.
    assert all(0 < received < 16 * (row + 16) for _, received in islice(steps, 2, None))
    assert all(0 < sent < 2 * 16 * (row + 24) for sent, _ in islice(steps, 2, None))


@pytest.fixture
def ratios(monkeypatch):
    """The part as if ours were 0.95 times as fast as RPC, whatever the link and whatever is asked."""

    def pretend(makes, rates, *, batch_size, rounds, seconds, read):
        measured = Measurement({"bare link": [200.0], "torch RPC": [100.0], "ours": [95.0]})
        return dict.fromkeys(rates, measured), {by: Told(Crossed(10, 101e6, 100e6), {}) for by in makes}

    monkeypatch.setattr(requests, "measure_on_links", pretend)
    monkeypatch.setattr(requests, "encryption_seconds", lambda: 1e-9)


def test_requests_then_lookups_have_bars_at_each_rate_and_all_bytes_are_held_against_those_expected(ratios):
    results, bars = requests.measure(asked=["lookups"], rates=["1gbit", "10gbit"], rounds=1, seconds=0.0, **SIZE)
    if not results:
        pytest.skip("there can be no network namespaces here")
    *rows, times, table = results
    assert [row.workload for row in rows] == [f"lookups of 208 rows, D=4, {rate}" for rate in ("1gbit", "10gbit")]
    assert rows[0].to_dict()["ours_over"] == {"bare link": 0.475, "torch RPC": 0.95}
    assert {bar.name: (bar.verdict, bar.limit) for bar in bars if "torch RPC, " in bar.name} == {
        f"lookups, ours with keys / torch RPC, {rate}": ("pass", 0.9) for rate in ("1gbit", "10gbit")
    }
    assert sum(bar.name.startswith("bytes on the interface off those expected") for bar in bars) == 3
    assert len(table.table().rows) == 3
    assert [line[1:4] for line in times.rows] == [["40.00", "80.00", "84.21"]] * 2


def test_requests_when_there_can_be_no_link_then_the_bars_say_not_measured(monkeypatch):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    results, bars = requests.measure(asked=["lookups", "cache"], rates=["1gbit"], rounds=1, seconds=0.0, **SIZE)
    assert results == []
    assert bars
    assert {bar.verdict for bar in bars} == {"not measured"}


def test_requests_when_something_else_is_asked_for_then_the_choices_are_named():
    with pytest.raises(ValueError, match=r"suite\.requests\.asked must be some of lookups, cache, got 'lookup'"):
        requests.measure(asked=["lookup"], rates=["1gbit"], rounds=1, seconds=0.0, **SIZE)
