"""conf/callbacks: every choice builds, and the default set works together."""

import inspect
import re
from pathlib import Path

import pytest
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
        return compose(None, overrides=[f"+paths.output_dir={folder}", f"+callbacks={callbacks}", *overrides])


def build(node) -> list[Callback]:
    return [instantiate(entry, _convert_="all") for entry in node.values()]


@pytest.mark.parametrize("file", FILES)
def test_every_file_then_each_entry_builds_a_callback_under_its_own_name(tmp_path, file):
    node = compose_config(tmp_path, callbacks=file).get("callbacks", {})
    assert all(isinstance(callback, Callback) for callback in build(node))
    if file not in ("default", "none"):
        assert list(node) == [file]


@pytest.mark.parametrize("name", ["examples_per_second", "normalized_entropy_monitor", "staleness_monitor"])
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
