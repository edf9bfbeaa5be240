"""Workers of an asynchronous strategy do not wait for each other between batches, and still end together."""

import os
import signal
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.trainer.states import TrainerFn
from served_strategy import Model, make_trainer
from torchmetrics import MeanMetric

from lightning_recsys.strategies import RecsysStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


class Free(RecsysStrategy):
    asynchronous = True
    wraps_model = False


class LockStep(RecsysStrategy):
    """As above, but for Lightning's broadcast at every batch."""

    wraps_model = False


class Held(Model):
    """Rank 1 is held in its first step until rank 0 has taken all of its own, or for so many seconds."""

    def __init__(self, folder, seconds):
        super().__init__()
        self.folder, self.seconds = Path(folder), seconds

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 0:
            (self.folder / f"step-{batch_idx}").touch()
        elif batch_idx == 0:
            self.wait_for_rank_0()
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self.log("start", 1.0 + self.trainer.global_rank, sync_dist=True)

    def on_before_optimizer_step(self, optimizer):
        self.log("before_step", 1.0, sync_dist=True, reduce_fx="sum")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("end", 1.0 + self.trainer.global_rank, sync_dist=True, on_step=True, on_epoch=True)

    def wait_for_rank_0(self):
        while not (self.folder / "step-0").exists():
            time.sleep(0.01)
        deadline = time.monotonic() + self.seconds
        while not (self.folder / "step-3").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        (self.folder / "seen").write_text(str(len(list(self.folder.glob("step-*")))))


class Logging(pl.Callback):
    """Logs through the model, as callbacks do."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("callback", 1.0 + trainer.global_rank, sync_dist=True)

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("epoch", 1.0 + trainer.global_rank, sync_dist=True)


def steps_of_rank_0_while_rank_1_is_held(strategy, folder, *, seconds):
    trainer = make_trainer(strategy=strategy, callbacks=[Logging()])
    trainer.fit(Held(folder, seconds))
    assert trainer.callback_metrics["world_size"] == 2
    return int((folder / "seen").read_text()), {name: float(x) for name, x in trainer.callback_metrics.items()}


def test_worker_when_another_is_held_in_its_first_step_then_finishes_all_of_its_own(tmp_path):
    """Values that hooks of a step log with ``sync_dist=True`` do not hold it, either; those of an epoch are of both."""
    steps, logged = steps_of_rank_0_while_rank_1_is_held(Free(), tmp_path, seconds=90)
    assert steps == 4
    assert {name: logged[name] for name in ("start", "before_step", "end_step", "callback")} == {
        "start": 1.0,
        "before_step": 1.0,
        "end_step": 1.0,
        "callback": 1.0,
    }
    assert (logged["end_epoch"], logged["epoch"]) == (1.5, 1.5)


def test_worker_when_lightning_broadcasts_at_every_batch_then_cannot_run_ahead(tmp_path):
    steps, _ = steps_of_rank_0_while_rank_1_is_held(LockStep(), tmp_path, seconds=2)
    assert steps == 1


class Judged(Model):
    """Each rank logs values of its own, by which it would keep other checkpoints than the other rank."""

    def training_step(self, batch, batch_idx):
        self.log("own", [(4.0, 3.0, 2.0, 1.0), (3.0, 4.0, 2.0, 1.5)][self.trainer.global_rank][batch_idx])
        return super().training_step(batch, batch_idx)


def test_checkpoints_when_ranks_have_logged_other_values_then_those_of_rank_0_decide(tmp_path):
    saving = ModelCheckpoint(tmp_path, monitor="own", filename="kept", every_n_train_steps=1, save_top_k=2)
    trainer = make_trainer(strategy=Free(), callbacks=[saving], enable_checkpointing=True)
    trainer.fit(Judged())
    assert trainer.callback_metrics["world_size"] == 2
    assert {Path(path).name: score.item() for path, score in saving.best_k_models.items()} == {
        "kept.ckpt": 2.0,
        "kept-v1.ckpt": 1.0,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept-v1.ckpt", "kept.ckpt"]


class Recording(Model):
    """Rank 0 notes which functions of Lightning are replaced."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def note(self, name):
        replaced = {"_broadcast_sigterm_tensor": self.trainer.fit_loop.epoch_loop}
        replaced |= {"_sigterm_notifier_fn": self.trainer._signal_connector}
        found = [method for method, owner in replaced.items() if method in vars(owner)]
        (self.folder / f"{name}-{self.trainer.global_rank}").write_text(" ".join(found))

    def on_train_start(self):
        self.note("in-fit")

    def on_fit_end(self):
        self.note("after-fit")

    def on_validation_start(self):
        self.note("in-validate")

    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return self.train_dataloader()


def test_broadcast_when_the_run_ends_then_is_lightnings_again(tmp_path):
    trainer = make_trainer(strategy=Free(), limit_val_batches=0)
    trainer.fit(Recording(tmp_path))
    for rank in range(2):
        assert (tmp_path / f"in-fit-{rank}").read_text() == "_broadcast_sigterm_tensor _sigterm_notifier_fn"
        assert (tmp_path / f"after-fit-{rank}").read_text() == ""
    make_trainer(strategy=Free(), limit_val_batches=1).validate(Recording(tmp_path), verbose=False)
    assert (tmp_path / "in-validate-0").read_text() == ""


def test_lightning_when_its_broadcast_has_another_name_then_the_run_is_refused(monkeypatch):
    monkeypatch.delattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
    trainer = make_trainer(strategy=Free())
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.connect(Model())
    with pytest.raises(RuntimeError, match=r"has no _TrainingEpochLoop\._broadcast_sigterm_tensor"):
        trainer.strategy.setup(trainer)  # in this process, where the name is gone


def test_batch_norm_over_workers_when_they_run_free_then_refused():
    with pytest.raises(ValueError, match=r"trainer\.sync_batchnorm=True makes every worker wait"):
        make_trainer(strategy=Free(), sync_batchnorm=True).fit(Model())


class Measured(Model):
    def __init__(self):
        super().__init__()
        self.error = MeanMetric(dist_sync_on_step=True)


def test_metric_when_it_reduces_in_every_step_then_refused_by_its_name():
    trainer = make_trainer(strategy=Free())
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.connect(Measured())
    with pytest.raises(ValueError, match=r"error has dist_sync_on_step=True, which makes every worker wait"):
        trainer.strategy.setup(trainer)


class Drawn(Model):
    """Every rank starts from weights and a buffer of its own, and trains on examples of its own."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)
        self.register_buffer("buffer", torch.zeros(1))

    def configure_model(self):
        torch.manual_seed(self.trainer.global_rank)
        torch.nn.init.normal_(self.layer.weight)
        self.buffer += self.trainer.global_rank + 1

    def on_train_start(self):
        self.save("start")
        assert type(self.trainer.strategy.model) is Drawn

    def training_step(self, batch, batch_idx):
        return super().training_step(batch * (self.trainer.global_rank + 1), batch_idx)

    def on_train_epoch_end(self):
        self.save("end")

    def save(self, name):
        torch.save([self.layer.weight.detach(), self.buffer], self.folder / f"{name}-{self.trainer.global_rank}.pt")


def test_parameters_when_the_model_is_not_wrapped_then_start_as_rank_0s_and_go_their_own_way(tmp_path):
    make_trainer(strategy=Free()).fit(Drawn(tmp_path))
    (start_0, buffer_0), (start_1, buffer_1) = (torch.load(tmp_path / f"start-{rank}.pt") for rank in range(2))
    assert torch.equal(start_0, start_1)
    assert buffer_0 == buffer_1 == 1
    for rank, gradient in enumerate((1.0, 2.0)):  # four steps of SGD with a rate of 0.1
        end, _ = torch.load(tmp_path / f"end-{rank}.pt")
        torch.testing.assert_close(end, start_0 - 4 * 0.1 * gradient)


def terminate_myself(model):
    """SIGTERM reaches this worker alone, as from a cluster that takes its machine away."""
    os.kill(os.getpid(), signal.SIGTERM)


def break_after_sigterm(model):
    """As where a server, or another rank, has heard the signal first."""
    os.kill(os.getpid(), signal.SIGTERM)
    raise ConnectionError("nobody answers")


def test_worker_when_something_breaks_after_sigterm_then_the_run_ends_by_the_signal():
    with pytest.raises(pl.utilities.exceptions.SIGTERMException) as caught:
        make_trainer(strategy=Free()).fit(Model(break_after_sigterm))
    assert "ConnectionError: nobody answers" in caught.value.__notes__[0]


def test_worker_when_it_alone_gets_sigterm_then_the_run_ends_instead_of_hanging():
    with pytest.raises(pl.utilities.exceptions.SIGTERMException):
        make_trainer(strategy=Free()).fit(Model(terminate_myself))
