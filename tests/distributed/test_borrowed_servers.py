"""A server that outlives runs: one after the other and at once, with ranks that map its files and ranks that ask."""

import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch
from served_strategy import Model, ServedStrategy, make_trainer
from server_helpers import running
from test_lost_workers import WORLD, Counts, Dies, NumbersModule
from test_lost_workers import make_trainer as make_free_trainer
from two_hosts import two_hosts

from lightning_recsys.errors import RequestRefusedError, ServerInUseError, StoreReplacedError
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.access import lease as lease_module
from lightning_recsys.parameter_server.access.keys import JobKeys
from lightning_recsys.parameter_server.access.lease import RunLease
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.parameter_server.server import serve
from lightning_recsys.stores import MappedStores
from lightning_recsys.strategies import AsyncParameterServerStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

STEPS = 4  # of each of two ranks


class Mixed(ServedStrategy):
    """Rank 0 is on the server's machine, and rank 1 on another."""

    @property
    def maps_stores(self):
        return self.global_rank == 0


class Counting(Model):
    """Each step of each rank adds one to a vector, which rank 0 makes anew as strategies do."""

    def __init__(self, folder, *, wait=False):
        super().__init__()
        self.folder, self.wait = Path(folder), wait

    def on_train_start(self):
        (stores,) = self.trainer.strategy.stores("sync")
        assert isinstance(stores, (MappedStores, RemoteStores)[self.trainer.global_rank])
        if self.trainer.global_rank == 0:
            with suppress(KeyError):
                stores.remove("counter")
            stores.create_dense_store("counter", torch.zeros(1), optimizer=RowSGD())
            (self.folder / "started").touch()
            while self.wait and not (self.folder / "go").exists():
                time.sleep(0.02)
        self.trainer.strategy.barrier()
        self.counter = stores.dense_store("counter")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.counter.push_gradient(-torch.ones(1), lr=1.0)

    def on_train_end(self):
        self.counter.flush()
        self.trainer.strategy.barrier()
        (self.folder / f"counted-{self.trainer.global_rank}").write_text(f"{self.counter.pull().item():g}")


def fit(endpoint, folder, **options):
    trainer = make_trainer(strategy=Mixed(servers=[endpoint]))
    trainer.fit(Counting(folder, **options))
    assert trainer.callback_metrics["world_size"] == 2


def counted(folder):
    return [int((folder / f"counted-{rank}").read_text()) for rank in range(2)]


def test_runs_when_one_follows_the_other_then_each_trains_one_model_alone(tmp_path):
    (tmp_path / "stores").mkdir()
    with running(tmp_path / "stores") as server:
        for _ in range(2):
            fit(server.endpoint, tmp_path)
            assert counted(tmp_path) == [2 * STEPS] * 2
            assert server.handler.status()["run"] == "none"


def test_runs_when_at_once_then_the_second_is_refused_by_name_and_the_first_goes_on(tmp_path):
    (tmp_path / "stores").mkdir()
    with running(tmp_path / "stores") as server:
        arguments = {"args": (server.endpoint, tmp_path), "kwargs": {"wait": True}}
        first = fork_server_context().Process(target=fit, **arguments)
        first.start()
        try:
            while not (tmp_path / "started").exists():
                assert first.exitcode is None
                time.sleep(0.05)
            with pytest.raises(ServerInUseError, match=rf"{server.endpoint} is in use by another run \(process \d+ on"):
                fit(server.endpoint, tmp_path)
            (tmp_path / "go").touch()
            first.join(100)
            assert first.exitcode == 0
        finally:
            first.kill()
            first.join()
        assert counted(tmp_path) == [2 * STEPS] * 2


def test_lease_when_its_run_was_killed_then_the_next_run_gets_it_once_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "LOOK_SECONDS", 0.05)
    with running(tmp_path) as server:
        server.handler.clients.lease.take("killed", "process 1 on ada")
        with monkeypatch.context() as patch:
            patch.setattr(lease_module, "LEASE_SECONDS", 1.0)  # the second one's is not to end while it is looked at
            second = RunLease([server.endpoint], keys=None, run="second", holder="process 2 on bob")
        assert server.handler.status()["run"] == "process 2 on bob"
        second.close()
        second.close()
        assert server.handler.status()["run"] == "none"


def test_lease_when_the_server_is_lent_anew_then_its_holder_hears_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.05)
    with running(tmp_path) as server:
        first = RunLease([server.endpoint], keys=None, run="first", holder="process 1 on ada")
        slept, bob = 0.0, {"run": "second", "holder": "process 2 on bob"}
        monkeypatch.setattr(server.handler.clients.lease, "_clock", lambda: time.monotonic() + slept)
        try:
            first.check()
            with closing(connect(server.endpoint, transport="tcp", timeout=60)) as stores:
                while not stores.connection.request("lease", arguments=bob).value["granted"]:
                    slept += 100.0  # unless a renewal came just then
            first._threads[0].join()  # it ends with that
            with pytest.raises(ServerInUseError, match="process 2 on bob"):
                first.check()
        finally:
            first.close()
        assert server.handler.status()["run"] == "process 2 on bob"  # another's is not given back


def serve_on(host, folder, keys, pipe):
    """Serve, with leases that last as long as one is told, from any time on."""

    def set_seconds():
        while True:
            lease_module.LEASE_SECONDS = pipe.recv()
            pipe.send("set")

    host.enter()
    threading.Thread(target=set_seconds, daemon=True).start()
    serve(folder, bind=f"tcp://{host.address}:0", keys=keys, ready=pipe.send)


def run_on(host, name, endpoint, keys, pipe):
    """Ask for the lease whenever told to; say what came of it, and with a lease what comes of that."""
    host.enter()
    lease_module.RENEW_SECONDS = lease_module.LOOK_SECONDS = 0.1
    while pipe.recv():
        try:
            lease = RunLease([endpoint], keys=keys, run=name, holder=f"process 1 on {name}")
            pipe.send("taken")
            while not pipe.poll(0.05):
                lease.check()
            lease.close()
        except ServerInUseError as error:
            pipe.send(str(error))


def test_lease_when_its_run_is_cut_off_on_another_host_then_the_next_run_gets_it_and_the_first_hears_of_it(tmp_path):
    """The server and a second run are on one host; the link to the first run's host is cut, and mended."""
    keys, context = JobKeys.generate(), fork_server_context()
    with two_hosts() as (here, there), ExitStack() as stack:

        def start(function, *arguments):
            pipe, other = context.Pipe()
            process = context.Process(target=function, args=(*arguments, other), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            return pipe

        def hear(pipe):
            assert pipe.poll(60)
            return pipe.recv()

        def let_leases_last(seconds):
            server.send(seconds)
            assert hear(server) == "set"

        server = start(serve_on, here, tmp_path / "stores", keys.server)
        endpoint = hear(server)
        first = start(run_on, there, "ada", endpoint, keys.client)
        second = start(run_on, here, "bob", endpoint, keys.client)
        first.send(True)
        assert hear(first) == "taken"
        second.send(True)
        assert f"{endpoint} is in use by another run (process 1 on ada;" in hear(second)
        there.set_link("down")
        let_leases_last(0.5)  # while nobody has one who could be heard of
        second.send(True)
        assert hear(second) == "taken"
        let_leases_last(20.0)  # a holder that lives may have no turn for some seconds
        there.set_link("up")
        assert "process 1 on bob" in hear(first)
        for pipe in (first, second):
            pipe.send(False)


def test_store_when_made_anew_then_those_that_had_the_former_one_are_refused(tmp_path):
    with running(tmp_path) as server:
        options = {"transport": "tcp", "timeout": 20}
        with closing(connect(server.endpoint)) as mapped, closing(connect(server.endpoint, **options)) as remote:
            assert isinstance(mapped, MappedStores)
            old = mapped.create_dense_store("center", torch.zeros(3)), remote.dense_store("center")
            mapped.remove("center")
            mapped.create_dense_store("center", torch.ones(3))
            with pytest.raises(StoreReplacedError, match=r"center was removed or made anew by somebody else"):
                old[0].elastic_average(torch.full((3,), 9.0), alpha=0.5)
            for use in (old[1].pull, lambda: old[1].elastic_average(torch.full((3,), 9.0), alpha=0.5)):
                with pytest.raises(RequestRefusedError, match=r"the store center was removed or made anew"):
                    use()
            new = mapped.dense_store("center"), remote.dense_store("center")
            new[1].elastic_average(torch.zeros(3), alpha=0.5)  # and the connection goes on
            assert new[0].pull().tolist() == new[1].pull().tolist() == [0.5] * 3


def test_store_when_made_anew_past_its_server_then_the_server_has_the_new_one(tmp_path):
    with running(tmp_path) as server, closing(connect(server.endpoint, transport="tcp", timeout=20)) as remote:
        remote.create_dense_store("center", torch.zeros(2)).pull()
        files = MappedStores(tmp_path)  # knows of no server
        files.remove("center")
        with pytest.raises(KeyError, match="there is no store 'center'"):
            remote.dense_store("center")
        files.create_dense_store("center", torch.ones(2))
        assert remote.dense_store("center").pull().tolist() == [1.0, 1.0]


class AsksBehindDeath(Dies):
    """The first worker ends in mid-epoch; when its lease has ended another one asks the server who has it."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if (trainer.current_epoch, batch_idx, trainer.global_rank) == (0, self.batch + 1, 1):
            time.sleep(4)
            (stores,) = trainer.strategy.stores("embedding")
            (self.folder / "run").write_text(stores.connection.request("status").value["run"])


def test_lease_when_the_first_worker_is_killed_then_the_others_hold_it_to_the_end_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 3.0)  # the server's
    (tmp_path / "stores").mkdir()
    with running(tmp_path / "stores") as server:
        strategy = AsyncParameterServerStrategy(servers=[server.endpoint], transport="tcp")
        trainer = make_free_trainer(strategy, AsksBehindDeath(tmp_path, rank=0), max_epochs=1)
        trainer.fit(Counts(), NumbersModule())
        assert trainer.callback_metrics["world"] == WORLD - 1
        assert (tmp_path / "run").read_text().startswith("process ")
        assert server.handler.status()["run"] == "none"
