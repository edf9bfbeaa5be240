"""conf/callbacks: every choice builds, and the default set works together."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from click_module import ClickModule, make_loader, make_trainer
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from pytorch_lightning.profilers import Profiler

import lightning_recsys.callbacks

CONF = Path(lightning_recsys.callbacks.__file__).parents[2] / "conf"
FILES = sorted(path.stem for path in (CONF / "callbacks").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _recipes_can_be_imported(monkeypatch):
    """Some entries are the recipes' own; the recipes find them beside themselves."""
    monkeypatch.syspath_prepend(str(CONF.parent / "recipes"))


def compose_config(folder, *overrides, callbacks="default"):
    """Group ``callbacks`` alone, with overrides as train.py takes them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        goals = "+monitor.metric=val/ne", "+monitor.mode=min"  # conf/train.yaml's
        return compose(None, overrides=[f"+paths.output_dir={folder}", f"+callbacks={callbacks}", *goals, *overrides])


def build(node) -> list[Callback]:
    return [instantiate(entry, _convert_="all") for entry in node.values()]


@pytest.mark.parametrize("file", FILES)
def test_every_file_then_each_entry_builds_a_callback_under_its_own_name(tmp_path, file):
    node = compose_config(tmp_path, callbacks=file).get("callbacks", {})
    assert all(isinstance(callback, Callback) for callback in build(node))
    if file not in ("default", "none"):
        assert list(node) == [file]


@pytest.mark.parametrize("name", ["examples_per_second", "normalized_entropy_monitor", "telemetry_monitor"])
def test_own_callbacks_then_the_files_hold_the_constructors_defaults(tmp_path, name):
    node = compose_config(tmp_path).callbacks[name]
    parameters = inspect.signature(get_class(node["_target_"])).parameters
    given = {key: value for key, value in node.items() if key != "_target_"}
    assert given == {key: parameters[key].default for key in given}
    assert all(name in given or parameter.default is None for name, parameter in parameters.items())


def test_default_then_its_callbacks_work_together(tmp_path):
    config = compose_config(tmp_path)
    callbacks = build(config.callbacks)
    trainer = make_trainer(
        tmp_path, max_epochs=2, callbacks=callbacks, enable_checkpointing=True, enable_progress_bar=True
    )
    trainer.fit(ClickModule(), make_loader(*[8] * 12), make_loader(8))
    assert {"eps", "train/ne", "train/window_ne", "val/ne"} <= trainer.callback_metrics.keys()
    assert {"eps", "train/ne", "val/ne"} <= trainer.progress_bar_metrics.keys()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    checkpoint = next(callback for callback in callbacks if isinstance(callback, ModelCheckpoint))
    assert checkpoint.best_model_path == str(tmp_path / "checkpoints" / "best.ckpt")


@pytest.mark.parametrize(
    ("choice", "enabled", "expected"),
    [("rich", True, RichProgressBar), ("tqdm", True, TQDMProgressBar), ("none", False, None)],
)
def test_progress_bar_choice_then_it_is_the_one_bar_of_the_trainer(tmp_path, choice, enabled, expected):
    config = compose_config(tmp_path, f"callbacks/progress_bar={choice}")
    options = {"enable_progress_bar": True, **config.get("trainer", {})}
    trainer = make_trainer(tmp_path, callbacks=build(config.callbacks), enable_checkpointing=True, **options)
    assert options["enable_progress_bar"] is enabled
    assert isinstance(trainer.progress_bar_callback, expected or type(None))


def test_early_stopping_beside_the_default_then_both_are_there(tmp_path):
    callbacks = build(compose_config(tmp_path, callbacks="[default,early_stopping]").callbacks)
    assert sum(isinstance(callback, EarlyStopping) for callback in callbacks) == 1
    assert sum(isinstance(callback, ModelCheckpoint) for callback in callbacks) == 1


class Calls(Profiler):
    """Notes every call that Lightning profiles."""

    def __init__(self):
        super().__init__()
        self.names = []

    def start(self, action_name):
        self.names.append(action_name)

    def stop(self, action_name):
        pass


def test_training_step_then_lightning_calls_those_hooks_only_that_do_something(tmp_path):
    callbacks = build(compose_config(tmp_path).callbacks)
    calls = Calls()
    trainer = make_trainer(
        tmp_path, callbacks=callbacks, profiler=calls, enable_checkpointing=True, enable_progress_bar=True
    )
    trainer.fit(ClickModule(), make_loader(8, 8, 8), make_loader(8))
    in_steps = {
        re.sub(r"\[Callback\](\w+).*(\.\w+)", r"\1\2", name)
        for name in calls.names
        if name.startswith("[Callback]") and calls.names.count(name) == 3
    }
    assert sorted(in_steps) == [
        "ExamplesPerSecond.on_train_batch_end",
        "NormalizedEntropyMonitor.on_train_batch_end",
        "ProgressBar.on_train_batch_end",
    ]


def test_checkpoints_within_an_epoch_when_asked_for_then_are_written(tmp_path):
    kind = get_class(compose_config(tmp_path).callbacks.model_checkpoint["_target_"])
    every_step = kind(tmp_path / "steps", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(tmp_path, callbacks=[every_step], enable_checkpointing=True)
    trainer.fit(ClickModule(), make_loader(8, 8), make_loader(8))
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == [
        "epoch=0-step=1.ckpt",
        "epoch=0-step=2.ckpt",
    ]


class WorseEachTime(ClickModule):
    """Its first validation stays the best."""

    def __init__(self):
        super().__init__()
        self.validations = 0

    def on_validation_epoch_end(self):
        self.validations += 1
        self.log("val/ne", float(self.validations))


LAST = {
    "each epoch is validated": ({}, [5, 10, 15]),
    "every other epoch is validated": ({"check_val_every_n_epoch": 2}, [5, 10, 15]),
    "epochs are validated in their middle": ({"val_check_interval": 3}, [3, 5, 8, 10, 13, 15]),
    "there is nothing to validate": ({"limit_val_batches": 0}, [5, 10, 15]),
    "checkpoints are every other epoch's": ({"every_n_epochs": 2}, [10]),
}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty", "ignore:.*could not find the monitored key")
@pytest.mark.parametrize(("options", "expected"), LAST.values(), ids=LAST)
def test_last_checkpoint_when_the_first_validation_stays_the_best_then_is_of_the_last_epoch_all_the_same(
    tmp_path, options, expected
):
    """After a crash it is what the run goes on from."""
    options = dict(options)
    every = [f"+callbacks.model_checkpoint.every_n_epochs={options.pop('every_n_epochs', 1)}"]
    node = compose_config(tmp_path, *every, callbacks="model_checkpoint").callbacks.model_checkpoint
    callback, steps = instantiate(node), []
    write = callback._save_checkpoint

    def noted(trainer, path):
        write(trainer, path)
        if Path(path).name == "last.ckpt":
            steps.append(torch.load(path, weights_only=False)["global_step"])

    callback._save_checkpoint = noted
    loader, epochs = make_loader(*[8] * 5), 3
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 0, **options}
    trainer = make_trainer(tmp_path, max_epochs=epochs, callbacks=[callback], **options)
    trainer.fit(WorseEachTime(), loader, make_loader(8))
    assert steps == expected
    if callback.best_model_path and len(steps) > 1:
        assert torch.load(callback.best_model_path, weights_only=False)["global_step"] < steps[-1]
    resumed = make_trainer(tmp_path, max_epochs=epochs + 1, callbacks=[instantiate(node)], **options)
    resumed.fit(WorseEachTime(), loader, make_loader(8), ckpt_path="last")
    assert resumed.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")
    assert resumed.global_step == 5 * (epochs + 1)


def test_last_checkpoint_when_lightnings_own_watches_a_metric_then_is_as_old_as_the_best_and_a_second_callback_keeps_it(
    tmp_path,
):
    """As docs/checkpoints.md has it."""
    beside_best = ModelCheckpoint(tmp_path / "best", monitor="val/ne", save_last=True)
    last = ModelCheckpoint(tmp_path / "last", filename="last", enable_version_counter=False)
    loaders = make_loader(*[8] * 5), make_loader(8)
    trainer = make_trainer(tmp_path, max_epochs=3, callbacks=[beside_best, last], enable_checkpointing=True)
    trainer.fit(WorseEachTime(), *loaders)
    steps = {x: torch.load(tmp_path / x / "last.ckpt", weights_only=False)["global_step"] for x in ("best", "last")}
    assert steps == {"best": 5, "last": 15}
    assert [path.name for path in (tmp_path / "last").iterdir()] == ["last.ckpt"]


def test_last_checkpoint_when_asked_for_as_a_link_then_is_refused(tmp_path):
    node = compose_config(
        tmp_path, "callbacks.model_checkpoint.save_last=link", callbacks="model_checkpoint"
    ).callbacks.model_checkpoint
    with pytest.raises(Exception, match=r"model_checkpoint.save_last must be true or false, got 'link'"):
        instantiate(node)
