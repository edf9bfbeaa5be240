"""Runs of Ray Train on a cluster of this process's own, whose workers say what they saw in files of a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {  # before Ray is imported: no processes that wait for work, no reports of use, quick answers
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # however busy the machine
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # or other tests leave a server that is started again no time
}

import pytorch_lightning as pl
import ray
import ray.train
import ray_data_runs
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.models import LogisticRegression
from lightning_recsys.optim import RowSGD
from lightning_recsys.ray import RayEnvironment, RayServers, fit
from lightning_recsys.strategies import HETStrategy
from lightning_recsys.tasks import CTRTask

OBJECT_STORE_BYTES = 100 << 20
RECIPES = Path(__file__).parents[2] / "recipes"


def own_rank():
    return ray.train.get_context().get_world_rank()


def tell(folder, **values):
    """Add a line to what this worker's rank has said."""
    with (folder / f"rank-{own_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


class Telling(pl.Callback):
    """Says how training goes; a rank may die once, in an epoch, once Ray knows the checkpoints before it."""

    def __init__(self, folder, *, dying_rank=None, dying_epoch=2):
        self.folder, self.dying_rank, self.dying_epoch = Path(folder), dying_rank, dying_epoch
        self.trained = 0

    def on_train_start(self, trainer, pl_module):
        tell(
            self.folder,
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            world_size=dist.get_world_size(),
            trainer=[trainer.world_size, trainer.num_nodes, trainer.strategy.num_processes],
            job=trainer.strategy.cluster_environment.job,
            port=os.environ["MASTER_PORT"],
            interface=os.environ["GLOO_SOCKET_IFNAME"],
            environment=type(trainer.strategy.cluster_environment) is RayEnvironment,
            replaces=bool(trainer.strategy.launched and trainer.strategy.launched.replaces),
            pid=os.getpid(),
            servers=list(trainer.strategy.servers or ()),
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.trained += 1
        died, strategy = self.folder / "died", trainer.strategy
        dies = trainer.current_epoch == self.dying_epoch and own_rank() == self.dying_rank
        while strategy.max_replacements and trainer.current_epoch == self.dying_epoch and not dies and batch_idx == 2:
            if died.exists() and '"replaces": true' in (self.folder / f"rank-{self.dying_rank}.jsonl").read_text():
                break
            time.sleep(0.05)
            for check in strategy.run_servers.checks:  # as before each step
                check()
        if dies and not died.exists():
            ray.train.get_all_reported_checkpoints()  # returns once Ray knows of all that were reported
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer, pl_module):
        total = sum(x.double().sum().item() for x in pl_module.state_dict().values())
        first = trainer.is_global_zero
        epoch, step = trainer.current_epoch, trainer.global_step
        tell(self.folder, end=epoch, step=step, total=total, first=first, trained=self.trained)


class Counting(pl.Callback):
    """Each batch of each rank adds one to a number on the first server, which is killed in the middle."""

    def __init__(self, folder, server):
        self.folder, self.server = folder, server

    def on_train_start(self, trainer, pl_module):
        stores, *_ = trainer.strategy.stores("embedding")
        name = f"counter-{trainer.current_epoch}"  # another one where workers have started again
        if trainer.is_global_zero:
            stores.create_dense_store(name, torch.zeros(1), optimizer=RowSGD())
        trainer.strategy.barrier()
        self.counter = stores.dense_store(name)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.counter.push_gradient(-torch.ones(1), lr=1.0)
        if trainer.global_step == 12 and trainer.is_global_zero:
            os.kill(ray.get(self.server.pid.remote()), signal.SIGKILL)

    def on_train_end(self, trainer, pl_module):
        self.counter.flush()
        trainer.strategy.barrier()
        pid = ray.get(self.server.pid.remote())
        endpoints = trainer.strategy.endpoints["embedding"]
        tell(self.folder, counted=self.counter.pull().item(), server_pid=pid, endpoints=endpoints)


def run(strategy, folder, *, name, epochs, servers):
    """Train for some epochs on two workers; returns Ray's result."""
    (folder / name).mkdir()
    callbacks = [Telling(folder / name, dying_rank=1, dying_epoch=1), Counting(folder / name, servers.actors[0])]

    def train(worker):
        data = SyntheticDataModule(batch_size=64, train_rows=1024, val_rows=64, test_rows=64, cardinalities=[50, 20])
        task = CTRTask(LogisticRegression(data.num_dense, data.fields))
        trainer = worker.trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        trainer.fit(task, datamodule=data, ckpt_path=worker.checkpoint)

    return fit(
        train,
        strategy=strategy,
        scaling=ScalingConfig(num_workers=2),
        servers=servers,
        run=RunConfig(name=name, storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=1)),
    )


def recipe(folder):
    """``recipes/train.py`` in the same cluster; rank 0 is killed in its second epoch, and another one replaces it."""
    (folder / "recipe").mkdir()
    tells = (
        f"+callbacks.tells={{_target_: ray_script.Telling, folder: {folder / 'recipe'}, dying_rank: 0, dying_epoch: 1}}"
    )
    return subprocess.Popen(
        [
            *(sys.executable, RECIPES / "train.py", "launcher=ray", "launcher.address=auto", "launcher.max_failures=1"),
            *(
                "strategy=shadowsync",
                "strategy.max_replacements=1",
                "model=lr",
                "trainer=cpu",
                "trainer.max_epochs=3",
                "logger=none",
                tells,
            ),
            *("data.train_rows=1024", "data.val_rows=64", "data.test_rows=64", "data.batch_size=64"),
            *("launcher.num_servers=1", f"launcher.store_folder={folder / 'recipe-stores'}"),
            f"hydra.run.dir={folder / 'output'}",
        ],
        stdout=(folder / "recipe.log").open("w"),
        stderr=subprocess.STDOUT,
    )


class Dying(pl.Callback):
    """The process of one job dies at its first step, once."""

    def __init__(self, mark, job):
        self.mark, self.dies = Path(mark), job == 1

    def on_train_start(self, trainer, pl_module):
        if self.dies and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def sweep(folder):
    """Two jobs that are alike and one that cannot be trained, as tasks of the cluster; its status and output."""
    mark, job = folder / "sweep-died", "${hydra:job.num}"
    done = subprocess.run(
        [
            *(sys.executable, RECIPES / "train.py", "-m", "strategy=single", "model=lr", "trainer=cpu", "logger=none"),
            *("data.train_rows=1024", "data.val_rows=64", "data.test_rows=64", "data.batch_size=64,64,0"),
            *("hydra/launcher=ray", "hydra.launcher.address=auto", "hydra.launcher.max_retries=1"),
            *(f"+callbacks.dies={{_target_: ray_script.Dying, mark: {mark}, job: '{job}'}}",),
            f"hydra.sweep.dir={folder / 'sweep'}",
        ],
        capture_output=True,
        text=True,
    )
    return {"status": done.returncode, "output": done.stdout + done.stderr, "died": mark.exists()}


def main(folder):
    context = ray.init(
        num_cpus=6,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder / "ray"),
    )
    os.environ["RAY_ADDRESS"] = context.address_info["address"]
    recipes = recipe(folder)
    with RayServers(2, store_folder=folder / "stores", num_cpus=0.5) as servers:
        endpoints, pid = servers.endpoints(), ray.get(servers.actors[0].pid.remote())
        refused = ""
        try:
            with RayServers(1, store_folder=folder / "stores", num_cpus=0.5):
                pass
        except RuntimeError as error:
            refused = str(error)
        result = run(HETStrategy(transport="tcp"), folder, name="het", epochs=2, servers=servers)
    het = {
        "metrics": result.metrics,
        "checkpoints": [checkpoint.path for checkpoint, _ in result.best_checkpoints],
        "last": result.checkpoint.path,
        "endpoints": endpoints,
        "server_pid": pid,
        "refused": refused,
    }
    recipes.wait()
    swept = sweep(folder)
    (folder / "data").mkdir()
    from_data = ray_data_runs.main(folder / "data")
    (folder / "results.json").write_text(json.dumps({"het": het, "data": from_data, "sweep": swept}))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
