"""The fork server launcher: what reaches the workers, what comes back, and what is left when things go wrong."""

import errno
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import LightningEnvironment
from ports import free_port
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_recsys.callbacks import PredictionWriter
from lightning_recsys.data import TabularDataModule
from lightning_recsys.launchers import ForkserverLauncher
from lightning_recsys.launchers.loopback import join_store, keep_store
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.models import LogisticRegression
from lightning_recsys.strategies import ForkserverDDPStrategy
from lightning_recsys.tasks import CTRTask

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    # two ranks on few examples, on purpose
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]

FEATURES = torch.linspace(-1, 1, 96).view(32, 3).sin()


class Batches:
    """The 32 examples in batches that are dealt out to the ranks in turn, as this package's data modules do it."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self):
        rank, world_size = 0, 1
        if torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return iter(FEATURES.split(self.batch_size)[rank::world_size])


class Regression(pl.LightningModule):
    """Least squares on 32 examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.constant_(self.layer.weight, 0.1)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return batch[:, 0]

    def loss(self, features):
        return nn.functional.mse_loss(self.layer(features), features.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return Batches(4)

    val_dataloader = train_dataloader


def make_trainer(tmp_path, **arguments):
    arguments = {"logger": False, "enable_checkpointing": False, "max_epochs": 1, "devices": 2, **arguments}
    return pl.Trainer(
        accelerator="cpu",
        strategy=arguments.pop("strategy", "ddp_forkserver"),
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )


def launch(function, *args, devices=2):
    """Run a bare function in workers, return rank 0's value."""
    trainer = make_trainer(None, devices=devices)
    return trainer.strategy.launcher.launch(function, *args)


# --- What reaches the workers ----------------------------------------------------------------------------------------


def describe_worker():
    return {
        "variable": os.environ.get("SET_AFTER_THE_SERVER_STARTED"),
        "local_rank": os.environ["LOCAL_RANK"],
        "threads": torch.get_num_threads(),
        "denormal": (torch.tensor([1e-39]) * 1).item(),
        "random": torch.rand(1).item(),
        "level": logging.getLogger("some.logger").level,
        "filters": warnings.filters[0],
        "cwd": Path.cwd(),
        "argv": sys.argv,
        "pid": os.getpid(),
        "start_method": multiprocessing.get_start_method(),
    }


def test_worker_when_started_then_has_the_state_of_the_main_process(monkeypatch):
    launch(describe_worker)  # the fork server runs from here on at the latest
    monkeypatch.setenv("SET_AFTER_THE_SERVER_STARTED", "yes")
    logging.getLogger("some.logger").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="a filter of this test")
    torch.manual_seed(17)
    worker = launch(describe_worker)
    assert worker["variable"] == "yes"
    assert worker["local_rank"] == "0"
    assert worker["threads"] == 1
    assert worker["denormal"] == 0.0
    assert worker["random"] == torch.rand(1).item()
    assert worker["level"] == logging.ERROR
    assert worker["filters"] == warnings.filters[0]
    assert worker["cwd"] == Path.cwd()
    assert worker["argv"] == sys.argv
    assert worker["pid"] != os.getpid()
    assert worker["start_method"] == multiprocessing.get_start_method()  # what this launcher uses is its own business


def describe_start():
    has_types = "numba" not in sys.modules or "numba.np.arrayobj" in sys.modules  # those of arrays, among others
    late = ["omegaconf"]
    if "lightning_recsys.strategies.served" in sys.modules:
        late.append("lightning_recsys.parameter_server.server")
    return gc.get_freeze_count(), has_types, [name for name in late if name not in sys.modules]


def test_worker_when_started_then_the_fork_server_has_done_what_all_would_do_first():
    frozen, has_types, lacking = launch(describe_start)
    assert frozen > 100_000  # torch and Lightning alone are more objects than that
    assert has_types
    assert lacking == []


def test_environment_when_launched_then_is_untouched_in_the_main_process():
    before = dict(os.environ)
    launch(describe_worker)
    assert dict(os.environ) == before


def test_environment_when_an_outer_launcher_owns_the_processes_then_none_are_launched(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert make_trainer(None).strategy.launcher is None


class Memory(pl.LightningModule):
    """A table, a view of it, and a tensor that no module knows about."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.view = self.table.data[2:]
        self.counter = torch.zeros(1)


def write_to_memory(model):
    rank = int(os.environ["LOCAL_RANK"])
    shared = [tensor.is_shared() for tensor in (model.table, model.view, model.counter)]
    for _ in range(1000):
        model.counter += 1
    model.view += 1 + rank
    return shared, model.counter.item(), model.table.tolist()


def test_tensors_when_sent_to_workers_then_each_has_its_own_and_views_stay_views():
    model = Memory()
    shared, counter, table = launch(write_to_memory, model)
    assert shared == [False, False, False]
    assert counter == 1000.0
    assert table == [0.0, 0.0, 1.0, 1.0]
    assert model.table.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert not model.table.is_shared()


class Seeded(Regression):
    def on_train_start(self):
        self.layer.bias.data.fill_(torch.rand(1).item())
        self.log("drawn", self.layer.bias.item(), sync_dist=True)


def test_seed_when_set_in_the_main_process_then_decides_the_run(tmp_path):
    drawn = []
    for seed in (1, 2, 1):
        pl.seed_everything(seed, verbose=False)
        trainer = make_trainer(tmp_path, max_steps=1)
        trainer.fit(Seeded())
        drawn.append(trainer.callback_metrics["drawn"].item())
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]


# --- What comes back -------------------------------------------------------------------------------------------------


def test_trainer_when_fitted_then_is_as_after_a_run_in_the_main_process(tmp_path):
    trainers, models = {}, {}
    for strategy, devices in (("ddp_forkserver", 2), ("auto", 1)):
        folder = tmp_path / strategy
        callbacks = [ModelCheckpoint(folder / "checkpoints", monitor="val/loss"), EarlyStopping("val/loss", patience=5)]
        trainer = make_trainer(
            folder,
            devices=devices,
            strategy=strategy,
            max_epochs=3,
            enable_checkpointing=True,
            callbacks=callbacks,
            logger=CSVLogger(folder),
            log_every_n_steps=1,
        )
        models[strategy] = Regression()
        trainer.fit(models[strategy], Batches(8 // devices), Batches(4))
        trainers[strategy] = trainer
    ours, reference = trainers["ddp_forkserver"], trainers["auto"]
    assert ours.state == reference.state
    assert (ours.current_epoch, ours.global_step) == (reference.current_epoch, reference.global_step) == (3, 12)
    assert ours.callback_metrics.keys() == reference.callback_metrics.keys()
    for name in ("callback_metrics", "logged_metrics"):
        torch.testing.assert_close(getattr(ours, name)["val/loss"], getattr(reference, name)["val/loss"])
    for mine, other in zip(models["ddp_forkserver"].parameters(), models["auto"].parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert Path(ours.checkpoint_callback.best_model_path).is_file()
    assert ours.checkpoint_callback.best_k_models.keys() == {ours.checkpoint_callback.best_model_path}
    for callback, score in (("checkpoint_callback", "best_model_score"), ("early_stopping_callback", "best_score")):
        torch.testing.assert_close(*(getattr(getattr(x, callback), score) for x in (ours, reference)))
    assert Path(ours.logger.log_dir, "metrics.csv").is_file()
    assert len(list(Path(ours.logger.root_dir).iterdir())) == 1


@pytest.mark.parametrize("strategy", ["auto", "ddp_forkserver"])
def test_fit_when_called_twice_on_one_trainer_then_goes_on(tmp_path, strategy):
    trainer = make_trainer(tmp_path, strategy=strategy, devices=1)
    model = Regression()
    trainer.fit(model)
    first = model.layer.weight.clone()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    assert (trainer.current_epoch, trainer.global_step) == (2, 16)
    assert not torch.equal(model.layer.weight, first)


def test_checkpoint_when_tested_then_its_weights_come_back(tmp_path):
    callback = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(tmp_path, callbacks=callback, enable_checkpointing=True, max_epochs=2)
    model = Regression()
    trainer.fit(model)
    last = model.layer.weight.clone()
    trainer.validate(model, ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["state_dict"]["layer.weight"]
    assert trainer.ckpt_path == tmp_path / "epoch=0.ckpt"
    assert torch.equal(model.layer.weight, saved)
    assert not torch.equal(model.layer.weight, last)


def test_weights_when_trained_in_float64_then_come_back_so(tmp_path):
    model = Regression()
    model.register_buffer("count", torch.ones(1, dtype=torch.int64))
    parameters = list(model.parameters())
    make_trainer(tmp_path, precision="64-true").fit(model)
    assert all(own is same for own, same in zip(model.parameters(), parameters, strict=True))
    assert {x.dtype for x in parameters} == {torch.float64}
    assert any(not torch.equal(x.float().double(), x) for x in parameters), "rounded"
    assert model.count.dtype == torch.int64


class Growing(Regression):
    def configure_model(self):
        self.late = nn.Linear(3, 1)


def test_layers_when_built_in_the_workers_only_then_their_loss_is_announced(tmp_path):
    with pytest.warns(UserWarning, match=r"has tensors that the model of the main process lacks.*late\.weight"):
        make_trainer(tmp_path, strategy=ForkserverDDPStrategy(find_unused_parameters=True)).fit(Growing())


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_predictions_when_batches_are_dealt_in_turn_then_come_back_in_the_order_of_the_data(tmp_path, num_loaders):
    loaders = Batches(5) if num_loaders == 1 else [Batches(5), Batches(5)]
    model = Regression() if num_loaders == 1 else ManyLoaders()
    predictions = make_trainer(tmp_path).predict(model, loaders)
    for per_loader in [predictions] if num_loaders == 1 else predictions:
        assert [len(batch) for batch in per_loader] == [5, 5, 5, 5, 5, 5, 2]
        assert torch.equal(torch.cat(per_loader), FEATURES[:, 0])


class ManyLoaders(Regression):
    def predict_step(self, batch, batch_idx, dataloader_idx):
        return batch[:, 0]


def test_predictions_when_not_wanted_then_none_come_back(tmp_path):
    assert make_trainer(tmp_path).predict(Regression(), Batches(4), return_predictions=False) is None


@pytest.mark.parametrize("told_apart", [True, False])
def test_predictions_when_a_worker_writes_them_then_the_rows_travel_there_and_their_number_comes_back(
    tmp_path, told_apart
):
    """As where rows that were made in training are loaded by the run's own strategy."""
    data = TabularDataModule.from_frame(
        pa.table({"click": [0, 1] * 10, "user": [f"u{row}" for row in range(20)]}),
        schema={"label": "click", "categorical": ["user"]},
        predict=pa.table({"user": [f"u{row}" for row in range(17)]}),
        cache=tmp_path / "cache",
        batch_size=5,
    )
    data.setup("fit")
    task = CTRTask(LogisticRegression(data.num_dense, data.fields))
    writer = PredictionWriter(tmp_path / "out.parquet", data.predicted_rows("user") if told_apart else None)
    trainer = make_trainer(tmp_path, devices=1, callbacks=[writer])
    trainer.predict(task, datamodule=data, return_predictions=False)
    assert writer.num_rows == 17
    rows = pq.read_table(tmp_path / "out.parquet")["row"].to_pylist()
    assert rows == ([f"u{row}" for row in range(17)] if told_apart else list(range(1, 18)))


# --- Errors ----------------------------------------------------------------------------------------------------------


class Custom(Exception):
    """Cannot be pickled: its arguments are not those of its constructor."""

    def __init__(self, number, name):
        super().__init__(f"{number} {name}")


class Failing(Regression):
    """Does something bad on one rank at one step."""

    def __init__(self, how, *, rank=1, step=2):
        super().__init__()
        self.how, self.rank, self.step = how, rank, step

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == self.rank and batch_idx == self.step:
            self.fail()
        return super().training_step(batch, batch_idx)

    def fail(self):
        if self.how == "raise":
            raise KeyError("a feature")
        if self.how == "custom":
            raise Custom(1, "one")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            os._exit(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_error_when_raised_in_a_worker_then_arrives_as_itself_with_its_traceback(tmp_path, rank):
    with pytest.raises(KeyError, match="a feature") as raised:
        make_trainer(tmp_path).fit(Failing("raise", rank=rank))
    assert f"Raised in worker {rank}:" in raised.value.__notes__[0]
    assert 'raise KeyError("a feature")' in raised.value.__notes__[0]


def test_error_when_it_cannot_be_pickled_then_arrives_as_a_runtime_error_that_names_it(tmp_path):
    with pytest.raises(RuntimeError, match="Custom: 1 one"):
        make_trainer(tmp_path).fit(Failing("custom"))


@pytest.mark.parametrize(
    ("how", "message"),
    [("kill", "Worker 1 was ended by SIGKILL .* memory"), ("exit", "Worker 1 ended with exit code 0 before")],
)
def test_worker_when_it_dies_without_a_word_then_is_named_as_the_cause(tmp_path, how, message):
    with pytest.raises(ProcessExitedException, match=message):
        make_trainer(tmp_path).fit(Failing(how))


class DiesUnnoticed(Failing):
    """Stops the fork server, who would tell how it died, and kills itself."""

    def __init__(self, stopped):
        super().__init__("kill")
        self.stopped = stopped

    def fail(self):
        os.kill(os.getppid(), signal.SIGSTOP)
        self.stopped.touch()
        super().fail()


def test_worker_when_it_dies_and_the_fork_server_has_no_turn_to_tell_then_is_named_as_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_recsys.launchers.workers.SETTLE_SECONDS", 0.1)
    stopped, failed = tmp_path / "stopped", threading.Event()

    def go_on():
        while not stopped.exists() and not failed.is_set():
            time.sleep(0.01)
        failed.wait(3.0)  # long after rank 0 has found that its connection is closed, and said so
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGCONT)

    with ThreadPoolExecutor() as threads:
        going_on = threads.submit(go_on)
        try:
            with pytest.raises(ProcessExitedException, match=r"Worker 1 was ended by SIGKILL .* memory"):
                make_trainer(tmp_path).fit(DiesUnnoticed(stopped))
        finally:
            failed.set()
        going_on.result()


def sleep_but_for_one(seconds):
    if os.environ["LOCAL_RANK"] == "1":
        raise ValueError("one")
    time.sleep(seconds)


def interrupt_yourself():
    os.kill(os.getpid(), signal.SIGINT)  # as a terminal does with all processes of a group
    return "went on"


def test_ctrl_c_when_the_main_process_ignores_it_then_so_do_the_workers_and_are_ended_otherwise():
    """What a script's shell starts with ``&`` ignores it: the run is not to end with the script's foreground."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert launch(interrupt_yourself) == "went on"
        with pytest.raises(ValueError, match="one"):
            launch(sleep_but_for_one, 1000)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt):
        launch(interrupt_yourself)


def test_error_when_another_worker_hangs_then_that_one_is_ended():
    with pytest.raises(ValueError, match="one"):
        launch(sleep_but_for_one, 1000)  # longer than this file's timeout


def test_run_when_it_fails_then_no_checkpoint_of_the_main_process_replaces_a_trained_one(tmp_path):
    callbacks = [OnExceptionCheckpoint(tmp_path), ModelCheckpoint(tmp_path, filename="kept", save_on_exception=True)]
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True, max_epochs=2)
    model = Failing("raise", step=1000)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*(no last checkpoint|was called without a model)")  # no matter
        trainer.fit(model)
    (tmp_path / "on_exception.ckpt").write_bytes(kept := (tmp_path / "kept.ckpt").read_bytes())
    model.step = 1
    trainer.fit_loop.max_epochs = 3
    with pytest.warns(UserWarning, match="was not written") as warned, pytest.raises(KeyError):
        trainer.fit(model, ckpt_path=tmp_path / "kept.ckpt")
    for name in ("on_exception", "kept"):
        assert any(f"{name}.ckpt was not written: the run failed in its workers" in str(x.message) for x in warned)
    assert (tmp_path / "on_exception.ckpt").read_bytes() == kept
    assert (tmp_path / "kept.ckpt").read_bytes() == kept


def test_logger_when_the_run_fails_then_has_written_what_was_logged(tmp_path):
    with pytest.raises(KeyError):
        make_trainer(tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=1).fit(Failing("raise", rank=0))
    assert "train/loss" in Path(tmp_path, "lightning_logs/version_0/metrics.csv").read_text()


def test_trainer_when_a_run_failed_then_the_next_one_works(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(KeyError):
        trainer.fit(Failing("raise"))
    trainer.fit(Regression())
    assert trainer.global_step == 4


def test_model_when_it_cannot_be_pickled_then_the_error_names_the_part_and_what_to_do(tmp_path):
    model = Regression()
    model.opened = (tmp_path / "file").open("w")
    with pytest.raises(TypeError, match=r"model\.opened \(TextIOWrapper\) cannot travel .*create them in `setup`"):
        make_trainer(tmp_path).fit(model)
    model.opened.close()


def test_class_when_defined_in_a_notebook_then_the_error_says_what_to_do(tmp_path, monkeypatch):
    class Cell(Regression):
        __qualname__ = "Cell"

    Cell.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "Cell", Cell, raising=False)
    with pytest.raises(AttributeError, match="Cell") as raised:
        make_trainer(tmp_path).fit(Cell())
    assert "move them to a module" in str(raised.value.__notes__)


class Uneven:
    """As many batches as ranks that come after."""

    def __iter__(self):
        return iter(FEATURES.split(4)[: len(self)])

    def __len__(self):
        return 2 + torch.distributed.get_rank()


def test_training_data_when_uneven_over_the_ranks_then_refused_instead_of_waiting_for_ever(tmp_path):
    with pytest.raises(ValueError, match=r"same number of training batches.* got \[2, 3\].*limit_train_batches=2"):
        make_trainer(tmp_path, limit_val_batches=0).fit(Regression(), Uneven())
    trainer = make_trainer(tmp_path, limit_val_batches=0, limit_train_batches=2)
    trainer.fit(Regression(), Uneven())
    assert trainer.global_step == 2


class UnevenMetric(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("mean", batch.mean(), sync_dist=True, batch_size=len(batch))


class UnevenBatches:
    def __iter__(self):
        return iter([torch.ones(3 + torch.distributed.get_rank(), 3)])


def test_mean_over_ranks_when_counts_differ_then_is_not_inflated(tmp_path):
    (metrics,) = make_trainer(tmp_path).validate(UnevenMetric(), UnevenBatches(), verbose=False)
    assert metrics["mean"] == pytest.approx(1.0)


class Recorder(Callback):
    """Keeps state that Lightning would lose."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, *_):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


def test_callback_when_it_has_a_state_then_it_comes_back(tmp_path):
    recorder = Recorder()
    make_trainer(tmp_path, callbacks=recorder).fit(Regression())
    assert recorder.steps == 4


def test_store_of_a_launch_then_is_the_main_process_s_and_gone_with_the_launch():
    strategy = ForkserverDDPStrategy()
    strategy.cluster_environment = environment = LightningEnvironment()
    with ForkserverLauncher(strategy)._store_kept():
        port = environment.main_port
        with pytest.raises(OSError, match=rf"meet at 127.0.0.1:{port} \(MASTER_PORT, where it is set\): Address"):
            keep_store(port)
        first, second = (join_store(port, timeout=timedelta(seconds=20)) for _ in range(2))
        first.set("key", "value")
        assert second.get("key") == b"value"
        del first, second
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def forked(work) -> int:
    """The exit code of a fork of this process that does something: 0 where it returned."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def close_all_and_fork():
    """As a process does that has nothing to do with the one that it was forked from."""
    os.closerange(3, 256)
    pipes = [os.pipe() for _ in range(32)]

    def use() -> None:
        for begin, end in pipes:
            os.write(end, b"x")
            os.read(begin, 1)

    if forked(use):
        raise RuntimeError("a pipe was closed")


def keep_store_and_fork():
    store = keep_store(free_port())
    code = forked(close_all_and_fork)
    del store
    sys.exit(code)


def test_store_of_a_launch_when_its_process_forks_then_no_descriptor_of_others_is_closed():
    process = fork_server_context().Process(target=keep_store_and_fork)
    process.start()
    process.join(60)
    assert process.exitcode == 0
