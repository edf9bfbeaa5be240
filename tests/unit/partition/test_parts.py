"""A model in parts computes what the whole one does, wherever its operators are."""

from __future__ import annotations

import copy
import itertools
import pickle
import re

import pytest
import torch
from traced_models import MODELS, make, step

from lightning_recsys.partition.parts import Part, split
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import TRAINER, server_name


def plan_of(traced, num_servers):
    """Operators with parameters in turns on the servers, some of the others on the last server, too."""
    turns = itertools.cycle(range(num_servers))
    devices = {}
    for number, operator in enumerate(traced.operators.operators):
        if operator.owns_parameters:
            devices[operator.name] = server_name(next(turns))
        else:
            devices[operator.name] = TRAINER if operator.trainer_only or number % 3 else server_name(num_servers - 1)
    return OperatorPlan(devices, num_servers)


class Server:
    """Computes parts as another process would: from a pickled copy, with tensors in and out and no common graph."""

    def __init__(self, parts):
        self.modules = {part.name: pickle.loads(pickle.dumps(part.module)) for part in parts}

    def __call__(self, part, inputs):
        outputs = Remote.apply(self.modules[part.name], torch.zeros(0, requires_grad=True), *inputs)
        assert len(outputs) == len(part.outputs)
        return lambda: outputs


class Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, _, *inputs):
        needs = ctx.needs_input_grad[2:]
        ctx.inputs = [x.detach().clone().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        with torch.enable_grad():
            ctx.outputs = module(*ctx.inputs)
        return tuple(x.detach().clone() for x in ctx.outputs)

    @staticmethod
    def backward(ctx, *grads):
        torch.autograd.backward(ctx.outputs, grads)
        return None, None, *(x.grad for x in ctx.inputs)


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_parts_when_computed_then_logits_gradients_and_rows_are_those_of_the_model(name, num_servers):
    whole, arguments = make(name)
    model = copy.deepcopy(whole)
    traced = trace(model, arguments)
    parts = split(traced, plan_of(traced, num_servers))

    torch.testing.assert_close(step(model, arguments, forward=parts), step(whole, arguments), rtol=0, atol=0)
    for (key, one), two in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=0, msg=key)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_parts_when_pickled_and_apart_then_gradients_are_those_of_the_model(name):
    whole, arguments = make(name)
    model = copy.deepcopy(whole)
    traced = trace(model, arguments)
    parts = split(traced, plan_of(traced, 2))
    remote = [part for part in parts.parts if part.device != TRAINER]
    server = Server(remote)
    parts.runners = dict.fromkeys(("server0", "server1"), server)

    torch.testing.assert_close(step(model, arguments, forward=parts), step(whole, arguments))
    gradients = {
        key: parameter.grad for part in remote for key, parameter in server.modules[part.name].named_parameters()
    }
    expected = {key: x.grad for key, x in whole.named_parameters() if x.requires_grad}
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(gradients[key], gradient, msg=key)
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in whole.state_dict().items():
        if "embedding_bags" in key:
            torch.testing.assert_close(model.state_dict()[key], value, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_parts_then_each_reads_only_what_lower_levels_make(name):
    model, arguments = make(name)
    traced = trace(model, arguments)
    parts = split(traced, plan_of(traced, 2))

    level_of = {"dense": -1, "sparse": -1}
    for part in sorted(parts.parts, key=lambda part: part.level):
        assert all(level_of[name] < part.level for name in part.inputs)
        level_of.update(dict.fromkeys(part.outputs, part.level))
    assert len({part.name for part in parts.parts}) == len(parts.parts)


def test_parts_when_one_server_has_all_parameters_of_a_tower_then_it_is_asked_once():
    model, arguments = make("wide_deep")
    traced = trace(model, arguments)
    devices = {x.name: "server0" if x.owns_parameters else TRAINER for x in traced.operators.operators}
    parts = split(traced, OperatorPlan(devices))

    (part,) = parts.on("server0")
    assert set(part.inputs) == {"dense", "embeddings", "sum_1"}
    assert set(part.outputs) == {"addmv", "deep_rest_3"}


def test_parts_when_training_then_dropout_and_running_values_follow_the_model():
    model, arguments = make("dcn")
    traced = trace(model, arguments)
    parts = split(traced, plan_of(traced, 1))
    before = model.deep.rest[0].running_mean.clone()

    model.eval()
    parts(*arguments)
    torch.testing.assert_close(model.deep.rest[0].running_mean, before, rtol=0, atol=0)
    model.train()
    parts(*arguments)
    assert not torch.equal(model.deep.rest[0].running_mean, before)


def test_parts_when_set_as_forward_then_the_model_is_computed_by_them():
    model, arguments = make("wide_deep")
    traced = trace(model, arguments)
    parts = split(traced, plan_of(traced, 1))
    asked = []

    def runner(part: Part, inputs):
        asked.append(part.name)
        return lambda: part.module(*inputs)

    parts.runners["server0"] = runner
    expected = model(*arguments)
    model.forward = parts
    torch.testing.assert_close(model(sparse=arguments[1], dense=arguments[0]), expected)
    assert asked
    del model.forward
    assert list(model.state_dict()) == list(make("wide_deep")[0].state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": "server0"}, "'embeddings' (EmbeddingBagCollection) is on server0, but has to be on trainers"),
        ({"deep.first": "trainer"}, "'deep.first' (FieldwiseLinear + ReLU) owns parameters and is on trainers"),
        ({"deep.first": "server1"}, "'deep.first' is on server1, but a group has 1 group servers"),
        ({"deep.first": "gpu"}, "devices are 'trainer' and 'server0'"),
        ({"deep.frist": "server0"}, "no ['deep.frist']"),
        ({"deep.first": None}, "no device for ['deep.first']"),
    ],
)
def test_split_when_the_plan_is_wrong_then_says_what_is(change, message):
    model, arguments = make("wide_deep")
    traced = trace(model, arguments)
    devices = {x.name: "server0" if x.owns_parameters else TRAINER for x in traced.operators.operators} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        split(traced, OperatorPlan({name: device for name, device in devices.items() if device is not None}))
