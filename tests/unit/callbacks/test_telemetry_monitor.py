"""TelemetryMonitor with strategies that answer and strategies that do not."""

import csv

import pytest
import torch
from click_module import ClickModule, make_loader, make_trainer
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import SingleDeviceStrategy

from lightning_recsys.callbacks import TelemetryMonitor

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Talkative(SingleDeviceStrategy):
    """Counts the calls, and has one number and one histogram to tell."""

    def __init__(self):
        super().__init__("cpu")
        self.calls = 0

    def telemetry(self):
        self.calls += 1
        return {"sync/rounds": self.calls, "staleness": torch.arange(101.0) + self.calls}


def fit(tmp_path, **options):
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(tmp_path, logger=logger, log_every_n_steps=2, **options)
    trainer.fit(ClickModule(), make_loader(4, 4, 4, 4, 4))
    return trainer, logger


def test_strategy_with_telemetry_then_it_is_logged_at_log_steps_and_at_the_end(tmp_path):
    trainer, logger = fit(tmp_path, strategy=Talkative(), callbacks=TelemetryMonitor())
    assert trainer.strategy.calls == 3
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == {
        "sync/rounds": 3,
        "staleness/mean": 53,
        "staleness/p99": 102,
        "staleness/max": 103,
    }
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [
            (int(row["step"]), float(row["sync/rounds"]), float(row["staleness/max"])) for row in csv.DictReader(file)
        ]
    assert rows == [(1, 1, 101), (3, 2, 102), (4, 3, 103)]


def test_strategy_with_telemetry_then_it_can_be_monitored(tmp_path):
    stopping = EarlyStopping("staleness/max", mode="min", patience=1, check_on_train_epoch_end=True)
    trainer, _ = fit(tmp_path, strategy=Talkative(), callbacks=[TelemetryMonitor(), stopping], max_epochs=5)
    assert trainer.current_epoch == 2


@pytest.mark.parametrize("strategy", ["auto", "silent"])
def test_strategy_without_telemetry_then_nothing_is_logged(tmp_path, strategy):
    class Silent(SingleDeviceStrategy):
        def telemetry(self):
            return {}

    chosen = Silent("cpu") if strategy == "silent" else strategy
    trainer, logger = fit(tmp_path, strategy=chosen, callbacks=TelemetryMonitor())
    assert trainer.callback_metrics == {}
    assert not (tmp_path / "metrics.csv").exists()
    assert logger.experiment.metrics == []
