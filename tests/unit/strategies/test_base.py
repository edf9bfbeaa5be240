"""Construction and refusals of strategies; what they do when they run is in tests/conformance and tests/distributed."""

import gc
import os
import pickle
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn

from lightning_recsys.checkpoints import FolderCheckpointIO
from lightning_recsys.errors import RequestRefusedError, ServerUnreachableError
from lightning_recsys.launchers import ServerSpec
from lightning_recsys.strategies import ForkserverDDPStrategy, RecsysStrategy
from lightning_recsys.strategies.common.own_values import OwnValues
from lightning_recsys.strategies.common.refusals import refuse_without_shape


class Served(RecsysStrategy):
    """With servers of one kind."""

    strategy_name = "served_for_this_test"
    asynchronous = True
    wraps_model = False

    def server_specs(self):
        return [ServerSpec("embedding", index) for index in range(2)]


def connected(strategy, **arguments):
    """The strategy of a trainer that has a model."""
    arguments = {"logger": False, "enable_checkpointing": False, "devices": 2, **arguments}
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, **arguments)
    model = BoringModel()
    model.trainer = trainer
    trainer.strategy.connect(model)
    return trainer.strategy


def from_lightning_pytorch(base):
    """A class whose base has the other name: that package is not installed here."""
    return type("Other", (type("Base", (base,), {"__module__": "lightning.pytorch.callbacks.callback"}),), {})()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_restarts": -1}, "max_restarts must be at least 0, got -1"),
        ({"transport": "udp"}, "transport must be one of auto, tcp, got 'udp'"),
        ({"servers": []}, r"strategy\.servers must be a list of endpoints .*, got \[\]"),
        ({"servers": "tcp://10.0.0.7:5790"}, r"must be a list of endpoints .*, got 'tcp://10\.0\.0\.7:5790'"),
        ({"servers": ["tcp://10.0.0.7:5790", "10.0.0.8:5790"]}, r"got \['tcp://.*', '10\.0\.0\.8:5790'\]"),
        ({"key_file": "job.keys"}, r"strategy\.key_file=job\.keys is for strategy\.servers, of which there are none"),
    ],
)
def test_argument_when_out_of_range_then_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Served(**arguments)


def test_arguments_of_ddp_when_the_model_is_not_wrapped_then_refused():
    with pytest.raises(
        TypeError, match=r"Served does not use DistributedDataParallel.*\['static_graph', 'ddp_comm_hook'"
    ):
        Served(static_graph=True, ddp_comm_hook=print)


def test_plugin_when_it_comes_from_lightning_pytorch_then_refused():
    with pytest.raises(TypeError, match=r"Other is built on lightning\.pytorch.* Import it from pytorch_lightning"):
        Served(checkpoint_io=from_lightning_pytorch(object))


def test_callback_when_it_comes_from_lightning_pytorch_then_refused():
    strategy = connected(Served(), callbacks=from_lightning_pytorch(pl.Callback))
    with pytest.raises(TypeError, match=r"Other is built on lightning\.pytorch"):
        strategy.setup_environment()


def test_servers_when_the_strategy_uses_none_then_refused():
    strategy = connected(ForkserverDDPStrategy(servers=["tcp://127.0.0.1:1"]))
    with pytest.raises(ValueError, match=r"strategy\.servers=\['tcp://127.0.0.1:1'\]: Forkserver.* Leave"):
        strategy.setup_environment()


def test_compression_when_the_strategy_has_no_servers_or_it_is_not_for_rows_then_refused():
    strategy = connected(ForkserverDDPStrategy(compression="bf16"))
    with pytest.raises(ValueError, match=r"strategy\.compression=bf16: ForkserverDDPStrategy sends no rows to servers"):
        strategy.setup_environment()
    with pytest.raises(ValueError, match=r"strategy\.compression=topk is for gradients only, and rows were"):
        Served(compression="topk")


TORCHRUN = {"TORCHELASTIC_RUN_ID": "a job", "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0}
SLURM = {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": 3, "WORLD_SIZE": 3}, "LOCAL_WORLD_SIZE=3, WORLD_SIZE=3"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 2}, "LOCAL_WORLD_SIZE=1, WORLD_SIZE=2"),  # on two nodes
        (
            SLURM | {"SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": 1, "SLURM_NTASKS": 2},
            "SLURM_NNODES=2, SLURM_NTASKS_PER_NODE=1, SLURM_NTASKS=2",
        ),
    ],
)
def test_processes_when_not_as_the_trainer_was_told_then_refused_by_the_variables(monkeypatch, variables, told):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    strategy = connected(Served())
    with pytest.raises(ValueError, match=rf"trainer.num_nodes=1 and trainer.devices=2, but {told}. Set both to what"):
        strategy.setup_environment()


@pytest.mark.parametrize("name", ["ddp_forkserver", "shadowsync", "async_ps", "het", "des"])
@pytest.mark.parametrize(
    "make", [partial(nn.LazyLinear, 2), partial(nn.LazyBatchNorm1d, affine=False)], ids=["parameter", "buffer"]
)
def test_module_when_it_has_seen_no_batch_then_refused_by_name(name, make):
    trainer = connected(name).lightning_module.trainer
    trainer.lightning_module.late = make()
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ValueError, match=r"^late\.\w+ has no shape before Lazy\w+ has seen a batch, .* one batch"):
        trainer.strategy.setup(trainer)
    trainer.lightning_module.late(torch.randn(4, 3))
    refuse_without_shape(trainer.lightning_module)


def test_kind_when_there_is_none_then_the_error_names_those_that_are():
    strategy = Served()
    strategy.endpoints = {"embedding": ["tcp://127.0.0.1:1"]}
    with pytest.raises(KeyError, match=r"Served has no servers of kind 'sync'; it has \['embedding'\]"):
        strategy.stores("sync")


def test_strategy_when_registered_then_the_trainer_finds_it_by_name():
    Served.register_strategies(StrategyRegistry)
    try:
        assert isinstance(connected("served_for_this_test"), Served)
    finally:
        StrategyRegistry.remove("served_for_this_test")


def test_strategy_when_pickled_then_keeps_what_workers_need():
    strategy = Served(servers=["tcp://127.0.0.1:1"], transport="tcp")
    strategy.endpoints = {"embedding": ["tcp://127.0.0.1:2"]}
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy.servers, copy.transport, copy.endpoints) == (("tcp://127.0.0.1:1",), "tcp", strategy.endpoints)


@pytest.mark.parametrize("strategy", ["ddp_forkserver", ForkserverDDPStrategy()], ids=["name", "object"])
def test_plugin_for_checkpoints_when_the_trainer_is_given_one_then_taken_and_folders_are_read_within_it(strategy):
    plugin = AsyncCheckpointIO()
    arguments = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=strategy, plugins=[plugin], **arguments)
    assert trainer.strategy.checkpoint_io is plugin
    assert type(plugin.checkpoint_io) is FolderCheckpointIO
    chosen = pl.Trainer(strategy=ForkserverDDPStrategy(), plugins=[own := TorchCheckpointIO()], **arguments)
    assert chosen.strategy.checkpoint_io is own
    assert type(ForkserverDDPStrategy().checkpoint_io) is FolderCheckpointIO


def of_a_run(strategy):
    checkpoints, servers = strategy.checkpoints, strategy.run_servers
    return strategy._shares_buffers, strategy._frozen, checkpoints.rows_wait, servers.connected


def test_strategy_when_a_run_is_over_or_it_is_pickled_then_has_nothing_of_the_run():
    strategy = connected(Served())
    fresh = of_a_run(strategy)
    strategy._shares_buffers, strategy._frozen = True, [("x", torch.zeros(1))]
    strategy.checkpoints._rows_to_load = Path("last.ckpt")
    assert of_a_run(pickle.loads(pickle.dumps(strategy))) == fresh
    strategy.teardown()
    assert of_a_run(strategy) == fresh


def test_checkpoint_when_the_main_process_saves_before_or_without_steps_then_there_is_no_warning_of_lost_optimizers():
    strategy = connected(Served())
    strategy._configure_launcher()
    strategy.checkpoints.warn_of_lost_optimizers(
        {"optimizer_states": [], "global_step": 0}, "a.ckpt"
    )  # warnings are errors
    with pytest.warns(UserWarning, match=r"a\.ckpt has no state of optimizers and schedulers"):
        strategy.checkpoints.warn_of_lost_optimizers({"optimizer_states": [], "global_step": 3}, "a.ckpt")


def test_teardown_when_nothing_was_set_up_then_does_nothing_any_number_of_times():
    strategy = connected(Served())
    gc.collect()  # no file of an earlier test is closed meanwhile
    before = os.listdir("/proc/self/fd"), threading.enumerate()
    for _ in range(2):
        strategy.teardown()
        assert strategy.changes is None
        assert strategy.averages is None
    assert (os.listdir("/proc/self/fd"), threading.enumerate()) == before


@pytest.mark.parametrize(
    "error", [RequestRefusedError("ipc://x", "push", "why"), ServerUnreachableError("ipc://x", "push", 1, 1.0)]
)
def test_stores_when_they_fail_to_close_after_a_failed_run_then_its_own_error_stays(error, monkeypatch):
    class Failing:
        def close(self):
            closed.append(self)
            raise error

    closed = []
    for succeeded in (False, True):
        strategy = connected(Served())
        strategy.run_servers.connected = {"embedding": [Failing(), Failing()]}
        monkeypatch.setattr(Served, "succeeded", succeeded)
        with pytest.raises(type(error)) if succeeded else nullcontext():
            strategy.run_servers.disconnect()
    assert len(closed) == 4


def test_telemetry_when_there_is_none_then_empty():
    assert Served().telemetry() == {}


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end"])
def test_value_when_logged_in_a_step_of_free_workers_then_is_the_workers_own(hook, monkeypatch, caplog):
    reduced = []

    def reduce_over_two_ranks(strategy, tensor, *arguments):
        reduced.append(tensor.item())
        return tensor * 2

    monkeypatch.setattr(pl.strategies.DDPStrategy, "reduce", reduce_over_two_ranks)
    strategy, results = Served(), _ResultCollection(training=True)
    own = OwnValues(strategy)
    options = {"on_step": True, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True, "batch_size": 1}
    for _ in range(2):
        own.log(results.log, hook, "loss", torch.tensor(3.0), sync_dist_fn=strategy.reduce, **options)
        assert results.metrics(on_step=True)["callback"] == {"loss": 3.0, "loss_step": 3.0}
    assert reduced == []
    assert results.metrics(on_step=False)["callback"]["loss_epoch"] == 12.0
    assert reduced == [6.0]
    assert caplog.text.count("workers run free") == 1
