"""Runs of Ray Train on the cluster of two hosts that RAY_ADDRESS names; each leaves what came of it in a folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
import ray
import ray.train
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from test_lost_workers import NumbersModule
from test_replaced_workers import CountsTwice

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.models import DeepFM
from lightning_recsys.ray import RayServers, fit, path_in
from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    DESStrategy,
    ForkserverDDPStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)
from lightning_recsys.tasks import CTRTask

EPOCHS = 3
STRATEGIES = {
    "ddp": ForkserverDDPStrategy,
    "het": HETStrategy,
    "des": DESStrategy,
    "shadowsync": ShadowSyncStrategy,
    "async_ps": AsyncParameterServerStrategy,
    "hierarchical": partial(HierarchicalStrategy, num_groups=2, nets_per_trainer=1),
}
REPLACED = {  # the strategy, and the ranks that die
    "easgd-replaced": (ShadowSyncStrategy, [0]),
    "bmuf-replaced": (partial(ShadowSyncStrategy, algorithm="bmuf", rounds="foreground", gap=3), [1]),
    "async_ps-replaced": (AsyncParameterServerStrategy, [0]),
    "all-died": (ShadowSyncStrategy, [0, 1, 2]),
}


class Dies(pl.Callback):
    """Tells what each worker sees; some die once in the second epoch, of which the others leave some until others come.

    Args:
        folder: Where it is told.
        ranks: The ranks that die.
        waits: Whether the others wait for who is to take the place of the dead.
        server: The actor of a server that dies with them; none by default.
        host: All wait until one of the hosts has ended.
    """

    def __init__(self, folder, ranks, *, waits=False, server=None, host=False):
        self.folder, self.ranks, self.waits, self.server, self.host = folder, ranks, waits, server, host
        self.is_told = not host  # which ranks die, and not what becomes of a host

    def tell(self, **values):
        with (self.folder / f"rank-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def tell_seen(self, trainer):
        (self.folder / f"validated-{self.rank}").write_text(str(float(trainer.callback_metrics["seen"])))

    @property
    def rank(self):
        return ray.train.get_context().get_world_rank()

    def on_train_start(self, trainer, pl_module):
        launched = trainer.strategy.launched
        self.trained = 0
        self.tell(
            pid=os.getpid(),
            host=ray.util.get_node_ip_address(),
            epoch=trainer.current_epoch,
            world=trainer.world_size,
            replaces=bool(launched and launched.replaces),
        )

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch != 1:
            return
        if self.host:
            if not trainer.strategy.max_replacements:
                ray.train.get_all_reported_checkpoints()  # returns once Ray knows of all that were reported
            (self.folder / f"waits-{self.rank}").touch()
            while not (self.folder / "host-ended").exists():
                time.sleep(0.1)
            self.ranks, self.host = self._ranks_elsewhere(), False  # they have died
        died = self.folder / f"died-{self.rank}"
        if self.rank in self.ranks and batch_idx == 5 and self.is_told and not died.exists():
            if not trainer.strategy.max_replacements:
                ray.train.get_all_reported_checkpoints()  # returns once Ray knows of all that were reported
            died.touch()
            if self.server is not None:
                os.kill(ray.get(self.server.pid.remote()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        while self.waits and batch_idx == 15 and self.rank not in self.ranks and not self._are_replaced():
            time.sleep(0.05)
            for check in trainer.strategy.run_servers.checks:  # as before each step
                check()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.trained += 1
        if trainer.strategy.launched and trainer.strategy.launched.replaces and self.trained == 5:
            (self.folder / f"trains-{self.rank}").touch()

    def _ranks_elsewhere(self):
        """The ranks that began on another host than this one."""
        began = {path: json.loads(path.read_text().splitlines()[0]) for path in self.folder.glob("rank-*.jsonl")}
        here = ray.util.get_node_ip_address()
        return [int(path.stem.removeprefix("rank-")) for path, told in began.items() if told["host"] != here]

    def _are_replaced(self):
        """Whether somebody trains in the place of who was to die; of those on a lost host one leaves others nothing."""
        trains = [(self.folder / f"trains-{rank}").exists() for rank in self.ranks]
        return all(trains) if self.is_told else any(trains)

    def on_train_end(self, trainer, pl_module):
        total = sum(x.double().sum().item() for x in pl_module.state_dict().values())
        members = len(getattr(dist.group.WORLD, "members", ())) or dist.get_world_size()
        self.tell(end=trainer.current_epoch, total=total, members=members, first=trainer.is_global_zero)


def run(folder, name, strategy, make, *, workers, failures, dies, servers=None, storage, cpus=1):
    """Train; returns what came of it, and the seconds that it took."""

    def train(worker):
        task, data = make()
        trainer = worker.trainer(
            accelerator="cpu",
            max_epochs=EPOCHS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[dies],
        )
        trainer.fit(task, datamodule=data, ckpt_path=worker.checkpoint)
        if strategy.max_replacements:  # with those that have joined
            trainer.validate(task, datamodule=data, ckpt_path=worker.checkpoint, verbose=False)
            dies.tell_seen(trainer)

    began = time.monotonic()
    result = fit(
        train,
        strategy=strategy,
        scaling=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus}, placement_strategy="SPREAD"),
        servers=servers,
        run=RunConfig(name=name, storage_path=storage, failure_config=FailureConfig(max_failures=failures)),
    )
    came = {
        "last": path_in(result.checkpoint),
        "checkpoints": [path_in(checkpoint) for checkpoint, _ in result.best_checkpoints],
        "epoch": result.metrics["epoch"],
        "seconds": round(time.monotonic() - began, 1),
        "validated": [float(path.read_text()) for path in folder.glob("validated-*")],
    }
    (folder / "result.json").write_text(json.dumps(came))


def clicks():
    data = SyntheticDataModule(batch_size=64, train_rows=2048, val_rows=256, test_rows=64, cardinalities=[50, 20, 30])
    return CTRTask(DeepFM(data.num_dense, data.fields, embedding_dim=8, hidden=[16])), data


def counts():
    return CountsTwice(), NumbersModule()


def end_host(namespace, folder, workers):
    """End all that runs on a host, as a loss of power would, once workers are in the second epoch."""
    while len(list(folder.glob("waits-*"))) < workers:
        time.sleep(0.1)
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout.split()
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    (folder / "host-ended").touch()


def main(folder, names, other_host):
    ray.init(log_to_driver=False)
    storage = str(folder / "storage")
    for name in names:
        own = folder / name
        own.mkdir()
        try:
            train(own, name, other_host, storage=storage)
        except Exception as error:
            (own / "result.json").write_text(json.dumps({"error": repr(error)[-3000:]}))
    ray.shutdown()


def train(own, name, other_host, **common):
    if name in STRATEGIES:
        dies = Dies(own, [1])
        run(own, name, STRATEGIES[name](), clicks, workers=2, failures=1, dies=dies, **common)
    elif name in REPLACED:
        make, ranks = REPLACED[name]
        strategy = make(max_replacements=1, transport="tcp")
        with RayServers(2, store_folder="/mnt/disk", num_cpus=0.5, name=name) as servers:
            dies = Dies(own, ranks, waits=len(ranks) == 1, server=servers.actors[0])
            run(own, name, strategy, counts, workers=3, failures=4, dies=dies, servers=servers, **common)
    else:
        assert name.startswith("host-lost")
        replaced = name == "host-lost-replaced"
        threading.Thread(target=end_host, args=(other_host, own, 3 if replaced else 2), daemon=True).start()
        if replaced:
            strategy = ShadowSyncStrategy(max_replacements=1, transport="tcp")
            with server_here(name) as servers:
                dies = Dies(own, [], waits=True, host=True)
                run(own, name, strategy, counts, workers=3, failures=4, dies=dies, servers=servers, **common)
            return
        workers, cpus = (2, 1) if name == "host-lost" else ((1, 2), 3)  # of four that each host has
        dies = Dies(own, [], host=True)
        run(own, name, HETStrategy(), clicks, workers=workers, cpus=cpus, failures=4, dies=dies, **common)


@contextmanager
def server_here(name):
    """A server on this host, wherever Ray puts the first ones."""
    with ExitStack() as opened:
        for number in range(8):
            servers = RayServers(1, store_folder="/mnt/disk", num_cpus=0.1, name=f"{name}-{number}")
            opened.enter_context(servers)
            if ray.util.get_node_ip_address() in servers.endpoints()[0]:
                yield servers
                return
        raise RuntimeError("Ray has put all servers on the other host.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3])
