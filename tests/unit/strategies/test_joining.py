"""The state that the first worker leaves for those that take the places of dead workers, and when it leaves none."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightning_recsys.launchers import Launched
from lightning_recsys.strategies.common.workers import joining
from lightning_recsys.strategies.common.workers.joining import STATE, Joining, leave_state


class Group:
    def alone(self):
        return nullcontext()


@pytest.fixture
def strategy(tmp_path, monkeypatch):
    """A strategy between two steps; its loop has a position of this worker's own."""
    monkeypatch.setattr(joining, "MeetingGroup", Group)
    monkeypatch.setattr(joining, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=Group())))
    monkeypatch.setattr(joining, "_call_callbacks_state_dict", lambda trainer: trainer.states)
    monkeypatch.setattr(joining, "_told", set())
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(completed=3))),
        state_dict=lambda: {"state_dict": {"combined_loader": "mine"}, "epoch_progress": "of all"},
    )
    task = torch.nn.Linear(2, 1)
    task.trainer = SimpleNamespace(fit_loop=loop, lr_scheduler_configs=[], states={"c": 1})
    part = SimpleNamespace(agreed=lambda: {"plan": 7})
    return SimpleNamespace(
        task=task,
        dealer=SimpleNamespace(number=4),
        averages=None,
        launched=Launched("run", tmp_path, replaces=False),
        optimizers=[torch.optim.SGD(task.parameters(), lr=0.5)],
        dense=part,
        rows=part,
    )


def test_state_when_left_between_two_steps_then_has_all_but_the_position_of_this_worker(strategy, tmp_path):
    assert leave_state(strategy) == 4
    assert [x.name for x in tmp_path.iterdir()] == [STATE]
    state = torch.load(tmp_path / STATE, weights_only=False)
    assert torch.equal(state.weights["weight"], strategy.task.weight)
    assert state.optimizers[0]["param_groups"][0]["lr"] == 0.5
    assert state.progress == {"state_dict": {}, "epoch_progress": "of all"}
    assert (state.callbacks, state.parts) == ({"c": 1}, {"SimpleNamespace": {"plan": 7}})


def without_room(*_):
    raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("dealer", None, "the shares of its epochs are fixed"),
        ("averages", object(), "a callback averages weights"),
        (
            "optimizers",
            [SimpleNamespace(state_dict=lambda: lambda: None)],
            "could not be written (AttributeError: Can't",
        ),
        ("save", without_room, "could not be written (RuntimeError: PytorchStreamWriter failed"),
    ],
)
def test_state_when_a_run_cannot_have_another_worker_then_it_says_why_once_and_trains_on(
    strategy, tmp_path, monkeypatch, caplog, name, value, why
):
    if name == "save":
        monkeypatch.setattr(joining.torch, "save", value)
    else:
        setattr(strategy, name, value)
    with caplog.at_level("WARNING"):
        assert not leave_state(strategy)
        assert not leave_state(strategy)
    (said,) = caplog.messages
    assert said.startswith("No process can take the place of a worker that died in this run: ")
    assert why in said
    assert list(tmp_path.iterdir()) == []


def test_state_when_the_epoch_has_just_begun_then_is_not_left_yet_and_nothing_is_said(strategy, tmp_path, caplog):
    strategy.task.trainer.fit_loop.epoch_loop.batch_progress.current.completed = 0
    assert not leave_state(strategy)
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == []


class Connector:
    def resume_start(self, path):
        return f"from {path}"


class Place(SimpleNamespace):
    """A place where the state of the run lies ready."""

    def connect(self, cancelled):
        return self

    def request(self, operation, *, arguments):
        return SimpleNamespace(value=[3, 1])


def test_process_when_its_run_is_over_then_it_loads_checkpoints_as_others_do(strategy, tmp_path):
    strategy.run_servers = SimpleNamespace(is_asked_to_end=lambda: False)
    strategy.global_rank = 1
    trainer = strategy.task.trainer
    trainer.num_sanity_val_steps, trainer._checkpoint_connector = 2, Connector()
    leave_state(strategy)
    joins = Joining(strategy, Place(run="run", size=3), tmp_path)
    joins.end()  # before it has begun
    joins.wait()
    assert trainer._checkpoint_connector.resume_start("last.ckpt") is None
    assert trainer.num_sanity_val_steps == 0
    joins.end()
    joins.end()
    assert trainer._checkpoint_connector.resume_start("last.ckpt") == "from last.ckpt"
    assert trainer.num_sanity_val_steps == 2
