"""NormalizedEntropyMonitor under plain Lightning, held against normalized entropy of recorded predictions."""

import csv

import pytest
import pytorch_lightning as pl
import torch
from click_module import ClickModule, Loader, make_batch, make_loader, make_trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lightning_recsys.callbacks import NormalizedEntropyMonitor
from lightning_recsys.metrics.functional import normalized_entropy

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Recorder(ClickModule):
    """Keeps every prediction and label, by step."""

    def __init__(self):
        super().__init__()
        self.seen = {"train": [], "val": [], "test": []}

    def record(self, stage, batch):
        outputs = self.step(batch)
        self.seen[stage].append((outputs["logits"], batch.labels))
        return outputs

    def training_step(self, batch, batch_idx):
        return self.record("train", batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.record("val", batch)

    def test_step(self, batch, batch_idx):
        return self.record("test", batch)

    def entropy(self, stage, batches=slice(None)):
        logits, labels = (torch.cat(parts) for parts in zip(*self.seen[stage][batches], strict=True))
        return pytest.approx(normalized_entropy(logits, labels, from_logits=True).item(), rel=1e-12)


SIZES = (16, 16, 16, 7)


def test_fit_then_training_values_are_progressive_and_evaluation_values_are_of_the_last_evaluation(tmp_path):
    model = Recorder()
    trainer = make_trainer(tmp_path, max_epochs=3, callbacks=NormalizedEntropyMonitor(20), num_sanity_val_steps=2)
    trainer.fit(model, make_loader(*SIZES), make_loader(9, 9, 4))
    metrics = trainer.callback_metrics
    assert len(model.seen["train"]) == 12
    assert metrics["train/ne"].item() == model.entropy("train")
    assert metrics["train/window_ne"].item() == model.entropy("train", slice(-2, None))  # 16 + 7 cover 20
    assert len(model.seen["val"]) == 2 + 3 * 3
    assert metrics["val/ne"].item() == model.entropy("val", slice(-3, None))


def test_many_batches_between_log_steps_then_no_value_depends_on_when_they_are_scored(tmp_path):
    logger, model = CSVLogger(tmp_path, name="", version=""), Recorder()
    sizes = (5,) * 150 + (9_000,) * 3  # more than are collected, by number and by examples
    callback = NormalizedEntropyMonitor(12_000)
    trainer = make_trainer(tmp_path, callbacks=callback, logger=logger, log_every_n_steps=70)
    trainer.fit(model, make_loader(*sizes))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [(int(row["step"]), float(row["train/ne"])) for row in csv.DictReader(file)]
    assert rows == [(step, model.entropy("train", slice(step + 1))) for step in (69, 139, 152)]
    assert trainer.callback_metrics["train/window_ne"].item() == model.entropy("train", slice(-2, None))


def test_state_dict_between_log_steps_then_it_has_every_batch(tmp_path):
    callback, model = NormalizedEntropyMonitor(), Recorder()
    states = []

    class Saver(pl.Callback):
        def on_train_batch_end(self, *_):
            states.append(callback.state_dict()["train"]["weight_sum"].item())

    trainer = make_trainer(tmp_path, callbacks=[callback, Saver()], log_every_n_steps=100)
    trainer.fit(model, make_loader(*SIZES))
    assert states == [16, 32, 48, 55]


def test_reader_that_fills_the_same_tensors_again_then_each_batch_is_scored_as_it_was(tmp_path):
    class Reusing(Loader):
        def __iter__(self):
            held = make_batch(16)
            for batch in self.batches:
                held.dense.copy_(batch.dense)
                held.labels.copy_(batch.labels)
                yield held

    class Copying(Recorder):
        def record(self, stage, batch):
            outputs = super().record(stage, batch)
            self.seen[stage][-1] = tuple(tensor.clone() for tensor in self.seen[stage][-1])
            return outputs

    model = Copying()
    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor(), log_every_n_steps=100)
    trainer.fit(model, Reusing([make_batch(16) for _ in range(5)]))
    assert trainer.callback_metrics["train/ne"].item() == model.entropy("train")


def test_label_that_is_none_then_the_error_comes_with_the_next_value_and_says_where_to_look(tmp_path):
    batches = [make_batch(8) for _ in range(5)]
    batches[1].labels[3] = 2.0
    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor(), log_every_n_steps=4)
    with pytest.raises(ValueError, match=r"labels 0 or 1, got values from 0 to 2\. It is in one of the last 4 batches"):
        trainer.fit(ClickModule(), Loader(batches))
    assert trainer.global_step == 4


def test_logits_of_another_shape_then_the_error_comes_at_once(tmp_path):
    class Column(ClickModule):
        def training_step(self, batch, batch_idx):
            outputs = self.step(batch)
            return outputs | {"logits": outputs["logits"].unsqueeze(1)}

    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor(), log_every_n_steps=100)
    with pytest.raises(ValueError, match=r"same shape, got \(8, 1\) and \(8,\)"):
        trainer.fit(Column(), make_loader(8, 8))
    assert trainer.global_step == 1


def test_first_step_then_its_prediction_was_made_before_it_was_trained_on(tmp_path):
    model = Recorder()
    batch = make_batch(64)
    before = model.step(batch)["logits"]
    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor())
    trainer.fit(model, Loader([batch]))
    expected = normalized_entropy(before, batch.labels, from_logits=True)
    assert trainer.callback_metrics["train/ne"] == expected
    assert normalized_entropy(model.step(batch)["logits"], batch.labels, from_logits=True) < expected


def test_validate_and_test_then_the_value_is_returned(tmp_path):
    model = Recorder()
    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor())
    assert trainer.validate(model, make_loader(8, 5), verbose=False) == [{"val/ne": model.entropy("val")}]
    assert trainer.test(model, make_loader(8, 6), verbose=False) == [{"test/ne": model.entropy("test")}]
    trainer.validate(model, [make_loader(4, 4), make_loader(5)], verbose=False)
    assert trainer.callback_metrics["val/ne"].item() == model.entropy("val", slice(2, None))  # both loaders together


def test_sanity_check_then_it_logs_nothing(tmp_path):
    class Spy(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.metrics = dict(trainer.callback_metrics)

    spy = Spy()
    trainer = make_trainer(tmp_path, callbacks=[NormalizedEntropyMonitor(), spy], num_sanity_val_steps=-1)
    trainer.fit(ClickModule(), make_loader(8), make_loader(8))
    assert spy.metrics == {}


def test_fit_with_accumulation_then_every_batch_counts_and_only_steps_are_logged(tmp_path):
    model = Recorder()
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(
        tmp_path, callbacks=NormalizedEntropyMonitor(), logger=logger, accumulate_grad_batches=2, log_every_n_steps=1
    )
    trainer.fit(model, make_loader(*SIZES, 5))
    assert trainer.callback_metrics["train/ne"].item() == model.entropy("train")
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [(int(row["step"]), float(row["train/ne"])) for row in csv.DictReader(file)]
    assert rows == [
        (0, model.entropy("train", slice(2))),
        (1, model.entropy("train", slice(4))),
        (2, model.entropy("train")),
        (2, model.entropy("train")),  # the end of the epoch
    ]


def test_fit_with_tensorboard_then_it_gets_the_values(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = Recorder()
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor(), logger=logger, log_every_n_steps=2)
    trainer.fit(model, make_loader(*SIZES), make_loader(9))
    logger.experiment.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"train/ne", "train/window_ne", "val/ne"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("train/ne")] == [1, 3, 3]
    assert events.Scalars("val/ne")[-1].value == pytest.approx(trainer.callback_metrics["val/ne"].item(), rel=1e-6)


def test_checkpoint_and_early_stopping_then_they_can_monitor(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/ne", mode="min")
    stopping = EarlyStopping("train/ne", mode="max", patience=1)  # it falls, so this stops after the second epoch
    trainer = make_trainer(
        tmp_path,
        max_epochs=5,
        enable_checkpointing=True,
        callbacks=[NormalizedEntropyMonitor(), checkpoint, stopping],
    )
    trainer.fit(ClickModule(), make_loader(*SIZES), make_loader(50))
    assert trainer.current_epoch == 2
    assert checkpoint.best_model_score == trainer.callback_metrics["val/ne"]


def test_resume_then_it_goes_on_as_if_it_had_not_stopped(tmp_path):
    train, val = make_loader(*SIZES), make_loader(20)
    start = ClickModule().state_dict()

    def fit(epochs, ckpt_path=None):
        model = Recorder()
        model.load_state_dict(start)
        checkpoint = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
        trainer = make_trainer(
            tmp_path, max_epochs=epochs, enable_checkpointing=True, callbacks=[NormalizedEntropyMonitor(45), checkpoint]
        )
        trainer.fit(model, train, val, ckpt_path=ckpt_path, weights_only=True)
        return {name: value.item() for name, value in trainer.callback_metrics.items()}

    whole = fit(2)
    (tmp_path / "last.ckpt").unlink()
    fit(1)
    resumed = fit(2, tmp_path / "last.ckpt")
    assert resumed == pytest.approx(whole, rel=1e-12)


def test_checkpoint_then_its_state_is_weights_only_safe(tmp_path):
    callback = NormalizedEntropyMonitor()
    trainer = make_trainer(tmp_path, callbacks=callback)
    trainer.fit(ClickModule(), make_loader(8))
    torch.save(callback.state_dict(), tmp_path / "state.pt")
    other = NormalizedEntropyMonitor()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    torch.testing.assert_close(other.state_dict(), callback.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("steps", [1, True])
def test_fast_dev_run_then_nothing_fails_and_values_are_there(tmp_path, steps):
    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor(), fast_dev_run=steps, log_every_n_steps=50)
    trainer.fit(ClickModule(), make_loader(8), make_loader(8))
    assert {"train/ne", "train/window_ne", "val/ne"} <= trainer.callback_metrics.keys()


def test_manual_optimization_then_it_works_the_same(tmp_path):
    class Manual(Recorder):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            outputs = self.record("train", batch)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(outputs["loss"])
            optimizer.step()
            return outputs

    model = Manual()
    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor())
    trainer.fit(model, make_loader(*SIZES))
    assert trainer.callback_metrics["train/ne"].item() == model.entropy("train")


def test_labels_fn_then_any_batch_works(tmp_path):
    class Pairs(ClickModule):
        def training_step(self, batch, batch_idx):
            logits = self.layer(batch["x"]).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["y"])
            return {"loss": loss, "logits": logits.detach()}

    loader = Loader([{"x": torch.randn(8, 3), "y": torch.arange(8) % 2.0}])
    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor(labels_fn=lambda batch: batch["y"]))
    trainer.fit(Pairs(), loader)
    assert trainer.callback_metrics["train/ne"].isfinite()
    with pytest.raises(TypeError, match=r"reads batch\.labels, but a dict has no such tensor.*labels_fn"):
        make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor()).fit(Pairs(), loader)


def test_step_without_logits_then_the_error_says_what_to_return(tmp_path):
    class LossOnly(ClickModule):
        def training_step(self, batch, batch_idx):
            return self.step(batch)["loss"]

        def validation_step(self, batch, batch_idx):
            return None

    trainer = make_trainer(tmp_path, callbacks=NormalizedEntropyMonitor())
    with pytest.raises(TypeError, match=r"LossOnly\.training_step returned a dict with \['loss'\]\. Return \{'loss'"):
        trainer.fit(LossOnly(), make_loader(8))
    with pytest.raises(TypeError, match=r"LossOnly\.validation_step returned a NoneType\. Return"):
        trainer.validate(LossOnly(), make_loader(8))


def count(caught) -> int:
    """Warnings about one class; Lightning's own, which ``pytest.warns`` catches too, do not count."""
    return sum("both classes" in str(warning.message) for warning in caught)


def test_validation_on_one_class_then_nan_with_one_warning_over_all_epochs(tmp_path):
    batch = make_batch(8)
    batch.labels.zero_()
    trainer = make_trainer(tmp_path, max_epochs=3, callbacks=NormalizedEntropyMonitor())
    with pytest.warns(UserWarning, match="labels of both classes, got 0 positive of 8") as caught:
        trainer.fit(ClickModule(), make_loader(8), Loader([batch]))
    assert count(caught) == 1
    assert trainer.callback_metrics["val/ne"].isnan()


def test_training_on_one_class_so_far_then_steps_stay_silent_and_the_epoch_warns(tmp_path):
    batch = make_batch(8)
    batch.labels.zero_()
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=NormalizedEntropyMonitor())
    trainer.fit(ClickModule(), Loader([batch, make_batch(8)]))
    assert trainer.callback_metrics["train/ne"].isfinite()
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=NormalizedEntropyMonitor())
    with pytest.warns(UserWarning, match="labels of both classes") as caught:
        trainer.fit(ClickModule(), Loader([batch, batch]))
    assert count(caught) == 1


def test_bfloat16_training_then_sums_stay_float64(tmp_path):
    callback = NormalizedEntropyMonitor()
    trainer = make_trainer(tmp_path, callbacks=callback, precision="bf16-mixed")
    trainer.fit(ClickModule(), make_loader(*SIZES), make_loader(8))
    assert {x.dtype for x in callback.state_dict()["train"].values()} == {torch.float64}
    assert trainer.callback_metrics["val/ne"].isfinite()
