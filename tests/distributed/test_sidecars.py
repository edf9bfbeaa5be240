"""Servers beside the workers of one machine: there while they run, back when they die, gone with all they made."""

import os
import signal
import socket
import stat
import time
from contextlib import closing, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from served_strategy import LoadedByWorkers, Model, ServedStrategy, die, fail, make_trainer
from server_helpers import listening_child
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_recsys.errors import RequestRefusedError
from lightning_recsys.launchers import ServerSpec, Sidecars
from lightning_recsys.launchers.sidecars import SHARED_MEMORY, Watch
from lightning_recsys.parameter_server.connect import connect
from lightning_recsys.parameter_server.messages.wire import Limits
from lightning_recsys.strategies import HETStrategy, ShadowSyncStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

SPECS = [ServerSpec("embedding", 0), ServerSpec("embedding", 1), ServerSpec("sync", 0)]


def listens(endpoint):
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix("ipc://")) == 0


def reaches(host, port):
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def other_addresses():
    """By which this machine is reached as well: a socket that listens to everybody listens there."""
    addresses = {x.address for found in psutil.net_if_addrs().values() for x in found if x.family == socket.AF_INET}
    return ["127.0.0.2", *sorted(addresses - {"127.0.0.1"})]


def pid_at(endpoint):
    """The process that listens there."""
    return listening_child(endpoint).pid


def kill(sidecars, endpoint):
    """Kill a server, and wait until that has come round."""
    os.kill(pid_at(endpoint), signal.SIGKILL)
    wait(sidecars.sentinels)


def test_server_when_its_spec_has_options_and_a_program_then_that_runs_with_them():
    specs = [
        ServerSpec("embedding", 0, options={"limits": Limits(message_bytes=300)}),
        ServerSpec("other", 0, program="lightning_recsys.parameter_server.server", node=3),
        ServerSpec("wrong", 0, program="json"),
    ]
    with Sidecars(specs[:2]) as sidecars:
        small, large = (connect(sidecars.endpoints[kind][0], transport="tcp") for kind in ("embedding", "other"))
        with closing(large):
            large.create_dense_store("center", torch.zeros(100)).flush()
        with pytest.raises(RequestRefusedError, match="at most 300 bytes"), closing(small):
            small.create_dense_store("center", torch.zeros(100)).flush()
    with pytest.raises(RuntimeError, match="Server wrong-0 did not start"), Sidecars(specs[2:]):
        pass
    assert [spec.node_among(2) for spec in specs] == [0, 3, 0]


def test_servers_when_entered_then_listen_where_nobody_else_comes_in_folders_that_carry_our_pid():
    with Sidecars(SPECS) as sidecars:
        endpoints = sidecars.endpoints
        assert [len(endpoints[kind]) for kind in ("embedding", "sync")] == [2, 1]
        flat = [*endpoints["embedding"], *endpoints["sync"]]
        assert len(set(flat)) == 3
        assert all(x.startswith(f"ipc://{sidecars.folder}/") and listens(x) for x in flat)
        assert stat.S_IMODE(sidecars.folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(Path(x.removeprefix("ipc://")).stat().st_mode) for x in flat} == {0o600}
        assert sidecars.folder.parent == SHARED_MEMORY
        assert sidecars.folder.name.startswith(f"lightning_recsys-{os.getpid()}-")
        assert sorted(x.name for x in sidecars.folder.iterdir() if x.is_dir()) == [
            "embedding-0",
            "embedding-1",
            "sync-0",
        ]
        folder = sidecars.folder
    assert not folder.exists()
    assert not any(listens(x) for x in flat)


def test_servers_when_none_are_wanted_then_nothing_is_made():
    with Sidecars(()) as sidecars:
        assert sidecars.folder is None
        assert sidecars.endpoints == {}
        assert sidecars.sentinels == []


def test_folder_when_named_then_files_lie_there_and_only_they_go(tmp_path):
    own = tmp_path / "disk" / ("a-long-name-" * 10)  # which no socket could have
    with Sidecars(SPECS[:1], store_folder=own) as sidecars:
        files, sockets = sidecars.folders
        assert files == sidecars.folder
        assert (files.parent, sockets.parent) == (own, SHARED_MEMORY)
        assert listens(sidecars.endpoints["embedding"][0])
    assert list(own.iterdir()) == []
    assert not sockets.exists()


def test_server_when_killed_then_comes_back_at_the_same_address_with_the_same_files(caplog):
    with Sidecars(SPECS[:2]) as sidecars:
        first, second = sidecars.endpoints["embedding"]
        kept = sidecars.folder / "embedding-0" / "kept"
        kept.touch()
        before = pid_at(first), pid_at(second)
        kill(sidecars, first)
        sidecars.look()
        assert sidecars.endpoints == {"embedding": [first, second]}
        assert listens(first)
        assert pid_at(first) != before[0]
        assert pid_at(second) == before[1]
        assert kept.exists()
    assert "embedding-0 was ended by SIGKILL; starting it again with the same files (1 of 3 times)" in caplog.text


def test_server_when_it_dies_once_too_often_then_the_error_names_it_and_how_it_ended():
    with Sidecars(SPECS, max_restarts=1) as sidecars:
        (endpoint,) = sidecars.endpoints["sync"]
        kill(sidecars, endpoint)
        sidecars.look()
        kill(sidecars, endpoint)
        with pytest.raises(
            RuntimeError, match=rf"Server sync-0 at {endpoint} was ended by SIGKILL, and max_restarts=1"
        ):
            sidecars.look()


def test_server_when_its_thread_watches_then_comes_back_until_restarts_are_used_up():
    with Sidecars(SPECS[:1], max_restarts=1) as sidecars:
        watch = Watch(sidecars)
        try:
            (endpoint,) = sidecars.endpoints["embedding"]
            first = pid_at(endpoint)
            os.kill(first, signal.SIGKILL)
            second = first
            while second == first:
                time.sleep(0.02)
                with suppress(AssertionError):
                    second = pid_at(endpoint)
            watch.check()
            os.kill(second, signal.SIGKILL)
            watch._thread.join()
            with pytest.raises(RuntimeError, match=r"embedding-0 .* was ended by SIGKILL, and max_restarts=1"):
                watch.check()
        finally:
            watch.stop()


def test_thread_that_watches_when_a_server_cannot_be_started_again_then_tells_why():
    def look():
        raise OSError("no space left on the device")

    ended, died = Pipe(duplex=False)
    died.close()
    watch = Watch(SimpleNamespace(sentinels=[ended], look=look))
    watch._thread.join()
    with closing(ended), pytest.raises(OSError, match="no space left"):
        watch.check()
    watch.stop()


def test_server_when_it_cannot_start_then_its_error_arrives_and_nothing_is_left():
    with (
        pytest.raises(RuntimeError, match=r"(?s)Server embedding-0 did not start:.*other machines"),
        Sidecars(SPECS[:1], address="0.0.0.0"),
    ):
        pass
    assert list(SHARED_MEMORY.glob(f"lightning_recsys-{os.getpid()}-*")) == []


def serve(*_, **__):
    """The program of a server that is never ready."""
    time.sleep(1000)


def test_server_when_it_is_too_slow_then_the_error_says_so(monkeypatch):
    monkeypatch.setattr("lightning_recsys.launchers.sidecars.START_SECONDS", 0.0)
    specs = [ServerSpec("embedding", 0, program=__name__)]
    with pytest.raises(RuntimeError, match="Server embedding-0 was not ready within 0 s"), Sidecars(specs):
        pass


# --- Around the workers ----------------------------------------------------------------------------------------------


class Noting(Model):
    """Writes down what a worker sees of the servers."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_start(self):
        endpoints = self.trainer.strategy.endpoints
        assert all(listens(x) for found in endpoints.values() for x in found)
        reached = [reaches(host, int(os.environ["MASTER_PORT"])) for host in ("127.0.0.1", *other_addresses())]
        assert reached == [True] + [False] * (len(reached) - 1)
        Path(self.folder, f"rank-{self.trainer.global_rank}").write_text(repr(endpoints))


def test_workers_when_fitted_then_know_the_servers_and_these_are_gone_afterwards(tmp_path):
    trainer = make_trainer()
    trainer.fit(Noting(tmp_path))
    assert trainer.callback_metrics["world_size"] == 2
    seen = [eval((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    assert {kind: len(found) for kind, found in seen[0].items()} == {"embedding": 2, "sync": 1}
    assert trainer.strategy.endpoints == {}
    assert not any(listens(x) for found in seen[0].values() for x in found)


@pytest.mark.parametrize(
    "make",
    [
        partial(ShadowSyncStrategy, num_trainers=2, min_rows=60, transport="tcp"),
        partial(HETStrategy, staleness=10, min_rows=60),
    ],
)
def test_loader_when_it_has_processes_then_each_worker_forks_them_beside_its_threads_and_connections(make):
    trainer = make_trainer(strategy=make(), max_epochs=2)
    trainer.fit(LoadedByWorkers())
    assert trainer.global_step == 8
    assert trainer.callback_metrics["world_size"] == 2


@pytest.mark.parametrize(
    ("third_step", "error", "message"),
    [(fail, ZeroDivisionError, "in step 3"), (die, ProcessExitedException, "Worker 1 was ended by SIGKILL")],
)
def test_servers_when_a_worker_fails_then_are_gone_and_the_trainer_can_be_used_again(third_step, error, message):
    strategy = ServedStrategy()
    strategy.min_workers = 2
    trainer = make_trainer(strategy=strategy)
    with pytest.raises(error, match=message):
        trainer.fit(Model(third_step))
    trainer.fit(Model())
    assert trainer.state.finished


def kill_sync_server(model, folder):
    """In worker 1; returns when it is back."""
    (endpoint,) = model.trainer.strategy.endpoints["sync"]
    server = listening_child(endpoint, psutil.Process(os.getppid()))  # of the fork server, as we are
    server.kill()
    server.wait()
    while not listens(endpoint):
        time.sleep(0.02)
    Path(folder, "back").touch()


def test_server_when_killed_in_a_run_then_is_back_and_the_run_goes_on(tmp_path):
    trainer = make_trainer()
    trainer.fit(Model(kill_sync_server, tmp_path))
    assert (tmp_path / "back").exists()
    assert trainer.state.finished


def test_run_when_a_server_is_gone_for_good_then_fails_and_says_which(tmp_path):
    trainer = make_trainer(strategy=ServedStrategy(max_restarts=0))
    with pytest.raises(RuntimeError, match=r"Server sync-0 at ipc://\S+ was ended by SIGKILL, and max_restarts=0"):
        trainer.fit(Model(kill_sync_server, tmp_path))
    assert not (tmp_path / "back").exists()
