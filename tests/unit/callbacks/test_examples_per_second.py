"""ExamplesPerSecond on a clock that the test advances: loading takes 1 s, a step 3 s, and the rest takes long."""

import csv

import pytest
import torch
from click_module import ClickModule, Loader, make_batch, make_loader, make_trainer
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from lightning_recsys.callbacks import ExamplesPerSecond
from lightning_recsys.callbacks import examples_per_second as module

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

LOADING, STEP, VALIDATION, SAVING, EPOCH_END = 1.0, 3.0, 100.0, 1000.0, 10_000.0


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


class TimedModule(ClickModule):
    def __init__(self, clock, step_seconds=(STEP,)):
        super().__init__()
        self.clock, self.step_seconds = clock, step_seconds

    def training_step(self, batch, batch_idx):
        self.clock.now += self.step_seconds[min(self.trainer.fit_loop.total_batch_idx, len(self.step_seconds) - 1)]
        return self.step(batch)

    def validation_step(self, batch, batch_idx):
        self.clock.now += VALIDATION
        return self.step(batch)

    def on_save_checkpoint(self, checkpoint):
        self.clock.now += SAVING

    def on_train_epoch_end(self):
        self.clock.now += EPOCH_END


class TimedLoader(Loader):
    def __init__(self, clock, *sizes):
        super().__init__([make_batch(size) for size in sizes])
        self.clock = clock

    def __iter__(self):
        for batch in self.batches:
            self.clock.now += LOADING
            yield batch


def fit(tmp_path, clock, callback, *, sizes=(8, 8, 8, 4), step_seconds=(STEP,), val=None, **options):
    trainer = make_trainer(tmp_path, callbacks=[callback, *options.pop("callbacks", [])], **options)
    trainer.fit(TimedModule(clock, step_seconds), TimedLoader(clock, *sizes), val)
    return trainer


def test_fit_then_the_rate_is_examples_over_training_seconds_and_counts_every_example(tmp_path, clock):
    callback = ExamplesPerSecond(warmup_steps=0)
    trainer = fit(tmp_path, clock, callback, max_epochs=2)
    assert trainer.callback_metrics["eps"].item() == pytest.approx(56 / (8 * (LOADING + STEP)))
    assert trainer.callback_metrics["examples"].item() == 56
    assert (callback.examples, callback.global_examples) == (56, 56)
    assert trainer.progress_bar_metrics["eps"] == pytest.approx(56 / 32)


def test_warm_up_then_its_steps_do_not_count_but_its_examples_do(tmp_path, clock):
    callback = ExamplesPerSecond(warmup_steps=2)
    trainer = fit(tmp_path, clock, callback, step_seconds=(500.0, 300.0, STEP))
    assert trainer.callback_metrics["eps"].item() == pytest.approx(12 / (2 * (LOADING + STEP)))
    assert callback.examples == 28
    later = fit(tmp_path, clock, callback, step_seconds=(500.0, 300.0, STEP))  # a second fit warms up again
    assert later.callback_metrics["eps"] == trainer.callback_metrics["eps"]
    assert callback.examples == 28


def test_fit_shorter_than_the_warm_up_then_its_rate_is_the_warm_ups(tmp_path, clock):
    trainer = fit(tmp_path, clock, ExamplesPerSecond(warmup_steps=4))
    assert trainer.callback_metrics["eps"].item() == pytest.approx(28 / 16)


@pytest.mark.parametrize(
    ("interval", "saves", "loads"),
    [(1.0, False, 8), (0.25, False, 2), (1.0, True, 2)],
    ids=["validation per epoch", "validation per step", "checkpoint per step"],
)
def test_validation_and_checkpoints_then_their_time_does_not_count(tmp_path, clock, interval, saves, loads):
    checkpoint = ModelCheckpoint(tmp_path, monitor=None, every_n_train_steps=1, save_top_k=-1)
    trainer = fit(
        tmp_path,
        clock,
        ExamplesPerSecond(warmup_steps=0),
        val=make_loader(8, 8),
        val_check_interval=interval,
        max_epochs=2,
        enable_checkpointing=saves,
        callbacks=[checkpoint] if saves else [],
    )
    assert clock.now >= 4 * VALIDATION + (8 * SAVING if saves else 0)
    # Waiting for the batch after a validation or a checkpoint is left out with it.
    assert trainer.callback_metrics["eps"].item() == pytest.approx(56 / (8 * STEP + loads * LOADING))


def test_checkpoint_within_a_step_then_that_step_is_counted_but_not_timed(tmp_path, clock):
    class SavesOnce(TimedModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.trainer.save_checkpoint(tmp_path / "within.ckpt")
            return super().training_step(batch, batch_idx)

    callback = ExamplesPerSecond(warmup_steps=0)
    trainer = make_trainer(tmp_path, callbacks=callback)
    trainer.fit(SavesOnce(clock), TimedLoader(clock, 8, 8, 4))
    assert trainer.callback_metrics["eps"].item() == pytest.approx(12 / (2 * (LOADING + STEP)))
    assert callback.examples == 20


def test_log_steps_then_the_progress_bar_shows_the_rate_at_once(tmp_path, clock):
    shown = []

    class Spy(Callback):
        def on_train_batch_end(self, trainer, *_):
            shown.append(trainer.progress_bar_metrics.get("eps"))

    fit(tmp_path, clock, ExamplesPerSecond(warmup_steps=0), callbacks=[Spy()], log_every_n_steps=2)
    assert shown == [None, 2.0, 2.0, 28 / 16]


def test_log_steps_then_the_window_rate_is_logged(tmp_path, clock):
    logger = CSVLogger(tmp_path, name="", version="")
    callback = ExamplesPerSecond(2, warmup_steps=0)
    fit(tmp_path, clock, callback, step_seconds=(4.0, 2.0, 1.0, 3.0), logger=logger, sizes=(8, 8, 8, 4))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        steps, rates = zip(*((int(r["step"]), float(r["eps"])) for r in csv.DictReader(file)), strict=True)
    assert steps == (0, 1, 2, 3, 3)
    assert rates == pytest.approx((8 / 5, 16 / (5 + 3), 16 / (3 + 2), 12 / (2 + 4), 28 / 14))


def test_accumulation_then_only_optimizer_steps_are_logged(tmp_path, clock):
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = fit(
        tmp_path, clock, ExamplesPerSecond(warmup_steps=0), logger=logger, accumulate_grad_batches=2, sizes=(8,) * 4
    )
    with open(f"{logger.log_dir}/metrics.csv") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [0, 1, 1]
    assert trainer.callback_metrics["examples"].item() == 32


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"log_every_n_steps": 0}, {"max_steps": 2}])
def test_short_runs_then_a_rate_is_there_at_the_end(tmp_path, clock, options):
    trainer = fit(tmp_path, clock, ExamplesPerSecond(), **options)
    assert trainer.callback_metrics["eps"] > 0


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (make_batch(6), 6),
        (torch.zeros(5, 2), 5),
        ((torch.zeros(7, 3), torch.zeros(7)), 7),
        ({"x": torch.zeros(4, 3)}, 4),
    ],
    ids=["Batch", "tensor", "tuple", "dict"],
)
def test_batch_size_then_it_is_the_number_of_examples(batch, size):
    assert ExamplesPerSecond().batch_size_fn(batch) == size


def test_batch_size_fn_then_it_is_used(tmp_path, clock):
    callback = ExamplesPerSecond(batch_size_fn=lambda batch: 2 * len(batch))
    fit(tmp_path, clock, callback)
    assert callback.examples == 56


def test_constructor_when_an_argument_is_out_of_range_then_it_raises():
    with pytest.raises(ValueError, match="window_size must be at least 1 step, got 0"):
        ExamplesPerSecond(0)
    with pytest.raises(ValueError, match="warmup_steps must not be negative, got -1"):
        ExamplesPerSecond(warmup_steps=-1)
