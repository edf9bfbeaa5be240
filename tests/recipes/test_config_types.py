from __future__ import annotations

import pytest
import yaml
from omegaconf import OmegaConf
from recipe_helpers import plain
from recipe_tools.build import build
from recipe_tools.config_types import check_complete, check_types


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=abc", r"^data\.batch_size must be int, got 'abc' \(str\)\.$"),
        ("data.batch_size=1.5", r"^data\.batch_size must be int, got 1\.5 \(float\)\.$"),
        ("data.batch_size=null", r"^data\.batch_size must be int, got None \(NoneType\)\.$"),
        ("data.drop_last=1", r"^data\.drop_last must be bool, got 1 \(int\)\.$"),
        ("optim.dense.lr=fast", r"^optim\.dense\.lr must be float, got 'fast' \(str\)\.$"),
        ("optim.rows.lr=[1]", r"^optim\.rows\.lr must be float, got \[1\] \(list\)\.$"),
        ("trainer.max_epochs=one", r"^trainer\.max_epochs must be int or null, got 'one' \(str\)\.$"),
        ("callbacks.model_checkpoint.save_top_k=all", r"^callbacks\.model_checkpoint\.save_top_k must be int"),
        ("strategy.num_threads=two", r"^strategy\.num_threads must be int, got 'two' \(str\)\.$"),
    ],
)
def test_value_of_the_wrong_type_is_named_by_its_place(override, message, composed):
    config = plain(composed("train", "strategy=ddp", override))
    with pytest.raises(TypeError, match=message):
        check_types(config)


@pytest.mark.parametrize(
    ("composition", "message"),
    [
        (["train", "data=prepared"], r"^data\.root has no default: add data\.root=\.\.\. to the command line\.$"),
        (["train", "data=tabular"], r"^data\.schema has no default"),
        (["rows"], r"^out and raw have no default: add out=\.\.\. raw=\.\.\. to the command line\.$"),
    ],
)
def test_value_that_was_not_given_is_named(composition, message, composed):
    with pytest.raises(ValueError, match=message):
        check_complete(composed(*composition, folder="conf/prepare" if composition == ["rows"] else "conf"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.dense.lr=1"],
        ["trainer.precision=bf16-mixed"],
        ["trainer.devices=auto"],
        ["trainer.limit_val_batches=0.5"],
        ["data.multi_hot={c3: 10}"],
        ["strategy=hierarchical", "strategy.operator_placement.machines={server_cores: 8}"],
    ],
    ids=lambda overrides: overrides[-1],
)
def test_value_of_a_right_type_passes(overrides, composed):
    key, _, value = overrides[-1].partition("=")
    config = composed("train", *overrides)
    check_types(plain(config))
    assert OmegaConf.select(config, key) == yaml.safe_load(value)


def test_lists_are_looked_into_and_unknown_annotations_are_not():
    check_types({"any": [{"_target_": "builtins.dict", "a": "b"}]})
    with pytest.raises(TypeError, match=r"^any\.1\.num_threads must be int"):
        check_types({"any": [0, {"_target_": "lightning_recsys.runtime.configure_worker", "num_threads": "x"}]})


def raise_from_another(value: int) -> None:
    try:
        raise KeyError("the first")
    except KeyError as error:
        raise ValueError(f"the second, {value}") from error


def test_build_raises_what_a_class_raises_with_its_cause():
    with pytest.raises(ValueError, match="the second, 3") as caught:
        build({"_target_": f"{__name__}.raise_from_another", "value": 3})
    assert repr(caught.value.__cause__) == "KeyError('the first')"
    assert caught.value.__notes__ == [f"Raised while building {__name__}.raise_from_another from its config."]
