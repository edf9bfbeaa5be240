"""Construction and registration of strategies; what they do is in tests/conformance."""

import pickle

import pytest
import pytorch_lightning as pl
from pytorch_lightning.strategies import StrategyRegistry

from lightning_recsys.launchers import ForkserverLauncher
from lightning_recsys.strategies import ForkserverDDPStrategy


def test_name_when_registered_then_the_trainer_finds_it():
    assert isinstance(StrategyRegistry.get("ddp_forkserver"), ForkserverDDPStrategy)
    trainer = pl.Trainer(accelerator="cpu", devices=3, strategy="ddp_forkserver", logger=False)
    assert isinstance(trainer.strategy.launcher, ForkserverLauncher)
    assert trainer.strategy.num_processes == 3


def test_registration_when_repeated_then_is_no_error():
    before = set(StrategyRegistry)
    ForkserverDDPStrategy.register_strategies(StrategyRegistry)
    assert set(StrategyRegistry) == before
    assert isinstance(StrategyRegistry.get("ddp_forkserver"), ForkserverDDPStrategy)


def test_threads_when_chosen_then_reach_the_launcher():
    strategy = ForkserverDDPStrategy(num_threads=2)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    assert trainer.strategy.launcher.num_threads == 2


def test_start_method_when_given_then_refused():
    with pytest.raises(TypeError, match="start_method"):
        ForkserverDDPStrategy(start_method="popen")


def test_strategy_when_pickled_then_keeps_its_settings():
    strategy = pickle.loads(pickle.dumps(ForkserverDDPStrategy(num_threads=2, find_unused_parameters=True)))
    assert strategy.num_threads == 2
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}


def test_device_mean_when_the_run_is_not_distributed_then_is_the_value_itself():
    assert ForkserverDDPStrategy().reduce(3, reduce_op="mean") == 3
