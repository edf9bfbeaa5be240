"""What a cut model was made of, looked at in the midst of training: whatever changes is seen, or refused by name."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_recsys.strategies.hierarchical.cut.watching import Watch


class Tower(nn.Module):
    """Two layers, a dropout, and what is given between them."""

    def __init__(self, between=None):
        super().__init__()
        self.bottom, self.drop, self.top, self.between = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1), between


class Slots:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 1.0


class Scale:
    """An object that is called."""

    def __init__(self):
        self.rate = 1.0

    def __call__(self, x):
        return x * self.rate

    def also(self, x):
        return x * self.rate


def in_cycle():
    one = SimpleNamespace(rate=1.0)
    one.other = SimpleNamespace(one=one)
    return one


SETTINGS = {
    "number": (lambda: 1.0, lambda m: setattr(m, "setting", 2.0)),
    "bool": (lambda: 1, lambda m: setattr(m, "setting", True)),
    "taken_away": (lambda: 1.0, lambda m: delattr(m, "setting")),
    "array": (lambda: np.ones(2), lambda m: m.setting.__setitem__(0, 2.0)),
    "large_array": (lambda: np.zeros(200_000), lambda m: m.setting.__setitem__(150_000, 2.0)),
    "array_scalar": (lambda: np.float32(1), lambda m: setattr(m, "setting", np.float32(2))),
    "slots": (Slots, lambda m: setattr(m.setting, "rate", 2.0)),
    "deep": (
        lambda: SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c={"d": [1.0]}))),
        lambda m: m.setting.a.b.c["d"].append(2.0),
    ),
    "cycle": (in_cycle, lambda m: setattr(m.setting, "rate", 2.0)),
    "partial": (lambda: partial(torch.add, alpha=1), lambda m: m.setting.keywords.update(alpha=2)),
    "callable": (Scale, lambda m: setattr(m.setting, "rate", 2.0)),
    "method": (lambda: Scale().also, lambda m: setattr(m.setting.__self__, "rate", 2.0)),
    "function": (lambda: lambda x: x, lambda m: setattr(m, "setting", lambda x: x)),
    "tensor": (lambda: [torch.zeros(3)], lambda m: m.setting[0].data.fill_(2.0)),
    "rows_change_places": (lambda: torch.arange(2e6).view(-1, 1000), lambda m: m.setting.data.copy_(m.setting.flip(0))),
}


def watch(model, *reads, buffers=()):
    trained = {x for x in model.parameters() if x.requires_grad}
    watching = Watch(model, [("", name) for name in reads], buffers=buffers, trained=trained)
    assert watching.look({}) == set()
    return watching


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_when_changed_in_whatever_depth_then_seen_once(name):
    make, change = SETTINGS[name]
    model = Tower()
    model.setting = make()
    watching = watch(model, "setting")
    assert watching.look({}) == set()
    change(model)
    assert watching.look({}) == {"setting"}
    assert watching.look({}) == set()


def test_setting_when_another_object_lies_where_the_last_one_was_then_seen():
    model = Tower()
    model.setting = [lambda x: x]
    watching, seen = watch(model, "setting"), []
    for _ in range(20):
        model.setting.clear()
        model.setting.append(lambda x: x)
        seen.append(watching.look({}))
    assert seen == [{"setting"}] * 20


@pytest.mark.parametrize("value", [threading.Lock(), ["x" * 2**21], SimpleNamespace(items=(x for x in "ab"))])
def test_setting_when_nobody_could_see_it_change_then_refused_by_name(value):
    model = Tower()
    model.setting = value
    with pytest.raises(
        ValueError, match=r"reads setting \(.*\), and a change of it in the midst of training could not"
    ):
        watch(model, "setting")


def test_modules_when_replaced_or_taken_away_then_seen():
    model = Tower(nn.Sequential(nn.Tanh(), nn.ReLU()))
    watching = watch(model)
    model.drop = nn.Dropout(0.5)
    assert watching.look({}) == {"drop"}
    model.between[1] = nn.ReLU()
    assert watching.look({}) == {"between.1"}
    del model.between[1]
    assert watching.look({}) == {"between.1"}
    model.drop = None
    assert watching.look({}) == {"drop"}


def test_tensors_when_written_by_data_then_seen_where_no_server_trains_them():
    model = Tower(nn.Linear(6, 6).requires_grad_(False))
    model.register_buffer("table", torch.zeros(300_000))
    model.register_buffer("own", torch.zeros(2))
    watching = watch(model, buffers=["table"])
    model.table.data[299_999] = 1.0
    assert watching.look({}) == {"table"}
    model.between.weight.data.mul_(0.5)
    assert watching.look({}) == {"between.weight"}
    model.top.weight.data.mul_(0.5)  # which the servers have others of
    model.own.fill_(1.0)  # with which this process computes itself
    assert watching.look({}) == set()
    model.top.weight = nn.Parameter(torch.zeros(1, 6))
    model.own = torch.zeros(2)
    assert watching.look({}) == {"top.weight", "own"}
