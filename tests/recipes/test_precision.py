"""``trainer.precision=auto``: one decision for a run and its checkpoint, said in a line."""

from datetime import timedelta

import pytest
import torch
from recipe_helpers import plain, train_here
from recipe_tools import precision
from recipe_tools.build import build_datamodule
from recipe_tools.precision import choose_precision
from torch.distributed import TCPStore

from lightning_recsys.tasks import PrecisionTimes

SMALL = (
    "data=synthetic",
    "data.train_rows=400",
    "data.val_rows=100",
    "data.test_rows=100",
    "data.batch_size=50",
    "model=lr",
    "trainer=cpu",
)
FASTER, SLOWER = PrecisionTimes(0.003, 0.001), PrecisionTimes(0.001, 0.003)


class Task:
    """All that is asked of one whose times are known."""

    def __init__(self, config):
        self.hparams = {"config": {"trainer": dict(config["trainer"])}}


@pytest.fixture
def timed(monkeypatch):
    """Times that a machine might have."""
    monkeypatch.setattr(precision, "_first_batch", lambda datamodule: None)
    return lambda times: monkeypatch.setattr(precision, "time_precisions", lambda *args, **kwargs: times)


@pytest.mark.parametrize(("times", "expected"), [(FASTER, "bf16-mixed"), (SLOWER, "32-true")])
def test_auto_when_a_run_ends_then_its_checkpoint_and_results_have_what_was_chosen(
    times, expected, composed, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(precision, "time_precisions", lambda *args, **kwargs: times)
    record = train_here(composed("train", *SMALL, "trainer.precision=auto"), tmp_path)
    assert record.details["precision"] == expected
    kept = torch.load(record.details["checkpoint"], weights_only=True)["hyper_parameters"]["config"]["trainer"]
    assert kept["precision"] == expected
    assert f"trainer.precision=auto: {expected}. The dense part" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", [["strategy=hierarchical"], ["strategy=compose", "strategy.dense=groups"]])
def test_auto_when_the_strategy_computes_in_float32_alone_then_is_that(strategy, composed, timed, capsys):
    timed(FASTER)
    config = plain(composed("train", *SMALL, *strategy, "trainer.precision=auto"))
    assert choose_precision(config, Task(config), None, sweeping=False) == {"precision": "32-true"}
    assert "32-true, the only one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("instructions", "steps", "said"), [(True, 1000, True), (True, 999, False), (False, 1000, False)]
)
def test_float32_when_bfloat16_is_faster_then_a_long_run_is_told(
    instructions, steps, said, composed, timed, monkeypatch, capsys
):
    timed(FASTER)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(precision, "_steps", lambda trainer, datamodule: steps)
    config = plain(composed("train", *SMALL))
    assert choose_precision(config, Task(config), None, sweeping=False) == {}
    assert choose_precision(config, Task(config), None, sweeping=True) == {}
    assert config["trainer"]["precision"] == "32-true"
    assert ("makes the dense part 3.0 times as fast" in capsys.readouterr().out) is said


def test_auto_when_torchrun_started_several_then_all_have_what_the_first_measured(composed, timed, monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    config = plain(composed("train", *SMALL, "trainer.precision=auto"))

    timed(FASTER)
    monkeypatch.setenv("RANK", "0")
    first = choose_precision(config, Task(config), None, sweeping=False)
    timed(SLOWER)
    monkeypatch.setenv("RANK", "1")
    config["trainer"]["precision"] = "auto"
    assert choose_precision(config, Task(config), None, sweeping=False) == first
    assert config["trainer"]["precision"] == first["precision"] == "bf16-mixed"


def test_auto_when_processes_cannot_agree_then_refused(composed, timed, monkeypatch):
    timed(FASTER)
    config = plain(composed("train", *SMALL, "trainer.precision=auto"))
    config["trainer"] |= {"strategy": "ddp", "devices": 2}
    with pytest.raises(ValueError, match=r"trainer\.strategy=ddp would each decide for themselves"):
        choose_precision(config, Task(config), None, sweeping=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    with pytest.raises(ValueError, match=r"SLURM_NTASKS=2 are processes that cannot agree"):
        choose_precision(config, Task(config), None, sweeping=False)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), 8),
        (("trainer.max_epochs=3",), 24),
        (("trainer.max_steps=5",), 5),
        (("trainer.limit_train_batches=0.5",), 4),
        (("trainer.limit_train_batches=2",), 2),
        (("trainer.max_epochs=-1",), float("inf")),
        (("trainer.fast_dev_run=true",), 0),
    ],
)
def test_steps_then_are_those_that_the_run_will_make(overrides, steps, composed):
    config = plain(composed("train", *SMALL, *overrides))
    assert precision._steps(config["trainer"], build_datamodule(config)) == steps
