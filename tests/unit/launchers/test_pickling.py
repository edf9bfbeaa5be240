"""What a launch sends to its workers, and what it says of what cannot travel."""

import functools
import threading

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.profilers import PyTorchProfiler
from torch import nn

from lightning_recsys.launchers.pickling import parts_of, save_job

OFFSET = 100


def travel(thing, tmp_path):
    """Written and read as a job is."""
    save_job(thing, tmp_path / "job", parts={})
    return torch.load(tmp_path / "job", weights_only=False)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + 1

    return wrapper


def make_functions():
    """Functions that no module knows by a name."""
    weight = torch.tensor([2.0])

    def default(x, y=3, *, z=4):
        return x + y + z + OFFSET

    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    default.note = "kept"
    return default, factorial, lambda x: x * weight, decorated(lambda x: x)


def test_functions_when_defined_in_a_function_then_travel_by_their_code(tmp_path):
    default, factorial, scale, plus_one = travel(make_functions(), tmp_path)
    assert (default(1), default(1, 0, z=0), default.note) == (108, 101, "kept")
    assert default.__qualname__ == "make_functions.<locals>.default"
    assert default.__module__ == __name__
    assert factorial(5) == 120
    assert scale(3).tolist() == [6.0]
    assert plus_one(6) == 7


def test_function_when_a_module_has_it_then_is_the_same_one(tmp_path):
    assert travel(decorated, tmp_path) is decorated


def test_variable_when_not_filled_yet_then_stays_so(tmp_path):
    def function():
        return later

    copied = travel(function, tmp_path)
    later = 1
    assert function() == 1
    with pytest.raises(NameError, match="later"):
        copied()


def test_parts_of_lightning_when_they_hold_local_functions_then_travel(tmp_path):
    copied, _ = travel([EMAWeightAveraging(decay=0.5), PyTorchProfiler(schedule=None)], tmp_path)
    assert copied._kwargs["avg_fn"](torch.tensor(2.0), torch.tensor(4.0), 0) == 3.0


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.num_calls = 0
        self.handle = self.weight.register_hook(self.double)

        def triple(bias):
            bias.grad.mul_(3)

        self.bias.register_post_accumulate_grad_hook(triple)

    def double(self, gradient):
        self.num_calls += 1
        return 2 * gradient


def test_parameter_when_it_has_hooks_then_they_run_where_it_travels_to(tmp_path):
    """torch itself leaves them out. A handle that travels with them removes the hook from the copy."""
    model = Hooked()
    copied = travel(model, tmp_path)
    copied(torch.ones(1, 1)).backward()
    assert (copied.num_calls, model.num_calls) == (1, 0)
    assert (copied.weight.grad.item(), copied.bias.grad.item()) == (2.0, 3.0)
    copied.handle.remove()
    copied(torch.ones(1, 1)).backward()
    assert copied.weight.grad.item() == 3.0


class Locked(pl.Callback):
    def __init__(self):
        self.kept = {"locks": [1, threading.Lock()]}


class Model(pl.LightningModule):
    def __init__(self, activation=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1), nn.Module())
        self.layers[1].activation = activation

    def forward(self, x):
        return x


def hooked(model):
    model.layers[0].weight.register_hook(functools.partial(print, threading.Lock()))
    return model


def launch(model=None, callbacks=(), loaders=None):
    """What a launch of ``fit`` names: the arguments, and parts of the trainer."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=list(callbacks))
    model = Model() if model is None else model
    model.trainer = trainer  # as while it runs
    arguments = (model, loaders)
    return (trainer, arguments), parts_of(trainer, trainer._fit_impl, arguments)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"callbacks": [pl.Callback(), Locked()]}, r"trainer\.callbacks\[1\]\.kept\['locks'\]\[1\] \(lock\)"),
        ({"model": Model(threading.Lock())}, r"model\.layers\.1\.activation \(lock\)"),
        ({"model": hooked(Model())}, r"model\.layers\.0\._parameters\['weight'\] \(Parameter\)"),
        ({"loaders": [functools.partial(print, threading.Lock())]}, r"train_dataloaders\[0\]\S* \(lock\)"),
    ],
    ids=["callback", "model", "hook", "loader"],
)
def test_argument_when_it_cannot_travel_then_is_named_with_a_remedy(tmp_path, arguments, where):
    job, parts = launch(**arguments)
    with pytest.raises(TypeError, match=rf"^{where} cannot travel to the worker processes: .*create them in `setup`"):
        save_job(job, tmp_path / "job", parts=parts)


def test_task_when_compiled_as_a_whole_then_the_remedy_is_to_compile_its_layers(tmp_path):
    model = Model()
    model._compiler_ctx = {"compiler": "dynamo"}  # as Lightning leaves it
    model.forward = threading.Lock()
    job, parts = launch(model)
    with pytest.raises(TypeError, match=r"model\.forward .* Compile its layers in `configure_model`"):
        save_job(job, tmp_path / "job", parts=parts)


def test_module_when_parametrized_then_the_remedy_is_to_do_that_in_the_workers(tmp_path):
    model = Model()
    nn.utils.parametrizations.weight_norm(model.layers[0])
    job, parts = launch(model)
    with pytest.raises(
        TypeError, match=r"(?s)^model\.layers\.0 \(ParametrizedLinear\) .* registered in `configure_model`"
    ):
        save_job(job, tmp_path / "job", parts=parts)


def test_class_when_defined_in_a_function_then_is_named(tmp_path):
    class Local(pl.Callback):
        pass

    job, parts = launch(callbacks=[Local()])
    with pytest.raises(TypeError, match=r"trainer\.callbacks\[0\].* cannot travel .* define the class in a module"):
        save_job(job, tmp_path / "job", parts=parts)


def test_folder_when_there_is_none_then_the_error_is_its_own(tmp_path):
    job, parts = launch()
    with pytest.raises(RuntimeError, match="missing does not exist"):
        save_job(job, tmp_path / "missing" / "job", parts=parts)
