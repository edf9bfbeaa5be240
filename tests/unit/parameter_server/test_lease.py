"""Who has a server that outlives runs, by a clock that the test moves."""

import threading
from types import SimpleNamespace

import pytest

from lightning_recsys.errors import RequestRefusedError, ServerInUseError
from lightning_recsys.parameter_server.access import lease as lease_module
from lightning_recsys.parameter_server.access.lease import LEASE, LEASE_SECONDS, Lease, RunLease
from lightning_recsys.strategies.common.run.identity import JOB, run_id, run_in_words


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lease(tmp_path, clock):
    return Lease(tmp_path, clock=clock)


def test_lease_when_nobody_has_it_then_is_granted_and_another_run_is_told_who_has_it(lease, clock):
    assert lease.holder is None
    assert lease.take("a", "ada's") == {"granted": True}
    clock.now += 3
    assert lease.take("b", "bob's") == {"granted": False, "holder": "ada's", "seconds": 3.0, "signs": 1}
    assert lease.holder == "ada's"


def test_lease_when_renewed_then_lasts_and_another_run_sees_that_its_holder_lives(lease, clock):
    for signs in range(1, 20):
        lease.take("a", "ada's")
        clock.now += LEASE_SECONDS / 2
        assert lease.take("b", "bob's")["signs"] == signs


def test_lease_when_its_holder_is_not_heard_of_then_ends_by_itself(lease, clock):
    lease.take("a", "ada's")
    clock.now += LEASE_SECONDS
    assert lease.holder is None
    assert lease.take("b", "bob's")["granted"]
    assert not lease.take("a", "ada's")["granted"]  # it comes back to life


def test_lease_when_it_ended_and_nobody_took_it_then_is_its_holders_again(lease, clock):
    lease.take("a", "ada's")
    clock.now += 10 * LEASE_SECONDS  # a machine that slept
    assert lease.take("a", "ada's")["granted"]
    assert not lease.take("b", "bob's")["granted"]


def test_lease_when_given_back_then_is_free_at_once_and_only_its_holder_can(lease, tmp_path):
    lease.take("a", "ada's")
    lease.give_back("b")
    assert not lease.take("b", "bob's")["granted"]
    lease.give_back("a")
    lease.give_back("a")
    assert not (tmp_path / LEASE).exists()
    assert lease.take("b", "bob's")["granted"]


def test_lease_when_the_server_starts_again_then_is_its_holders_for_the_whole_time(lease, clock, tmp_path):
    lease.take("a", "ada's")
    clock.now += 10 * LEASE_SECONDS  # in which no run could be heard of
    again = Lease(tmp_path, clock=clock)
    assert not again.take("b", "bob's")["granted"]
    assert again.take("a", "ada's")["granted"]
    clock.now += LEASE_SECONDS
    assert Lease(tmp_path, clock=clock).take("a", "ada's")["granted"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "a"}'])
def test_lease_when_its_file_is_damaged_then_nobody_has_it(tmp_path, content):
    (tmp_path / LEASE).write_text(content)
    assert Lease(tmp_path).take("b", "bob's")["granted"]


def test_run_id_when_our_launcher_starts_the_ranks_then_is_new_each_time():
    assert run_id(launched_by_others=False) != run_id(launched_by_others=False)


def test_run_id_when_torchrun_starts_ranks_again_then_stays_and_another_job_has_another(monkeypatch):
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    first = run_id(launched_by_others=True)
    assert run_id(launched_by_others=True) == first
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert run_id(launched_by_others=True) != first
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr("lightning_recsys.strategies.common.run.identity.boot_id", lambda: "another machine's")
    assert run_id(launched_by_others=True) != first


def test_run_when_put_in_words_then_has_process_and_machine():
    assert run_in_words().startswith("process ")
    assert len(run_in_words()) < 200


def test_renewal_when_refused_once_then_is_tried_again_until_the_server_is_anothers(monkeypatch):
    answers = [
        {"granted": True},
        RequestRefusedError("ipc://x", "lease", "OSError: no space left"),
        {"granted": False, "holder": "bob's", "seconds": 1.0, "signs": 1},
    ]

    class Server:
        endpoint = "ipc://x"

        def __init__(self, endpoint, **options):
            pass

        def request(self, operation, *, arguments):
            if operation != "lease":
                return None
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(value=answer)

        def close(self):
            pass

    monkeypatch.setattr(lease_module, "Connection", Server)
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.01)
    lease = RunLease(["ipc://x"], keys=None, run="a", holder="ada's")
    for thread in lease._threads:
        thread.join(timeout=30)
    lease.close()
    assert not answers
    with pytest.raises(ServerInUseError, match="bob's"):
        lease.check()


def test_renewal_when_one_server_does_not_answer_then_the_others_hear_of_the_run_all_the_same(monkeypatch):
    heard, gone, asked = threading.Semaphore(0), threading.Event(), {"ipc://dead": 0, "ipc://alive": 0}

    class Server:
        def __init__(self, endpoint, **options):
            self.endpoint = endpoint

        def request(self, operation, *, arguments):
            if operation == "lease":
                asked[self.endpoint] += 1
                if self.endpoint == "ipc://alive":
                    heard.release()
                elif asked[self.endpoint] > 1:  # it died after it had lent itself: the connection tries for minutes
                    gone.wait(30)
            return SimpleNamespace(value={"granted": True})

        def close(self):
            pass

    monkeypatch.setattr(lease_module, "Connection", Server)
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.01)
    lease = RunLease(["ipc://dead", "ipc://alive"], keys=None, run="a", holder="ada's")
    try:
        assert all(heard.acquire(timeout=10) for _ in range(5))
        assert asked["ipc://dead"] <= 2
    finally:
        gone.set()
        lease.close()
