"""The dense part on servers trains as torch's optimizers train it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from mapped_servers import mapped_servers
from pytorch_lightning.plugins.precision import MixedPrecision, Precision
from torch import nn

from lightning_recsys.optim.swap import swap
from lightning_recsys.strategies.async_ps.pushed_parameters import (
    STORE,
    PushedParameters,
    ServedStep,
    refuse_gradient_scaler,
)
from lightning_recsys.sync import StalenessNormalization

RULES = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, eps=1e-7, initial_accumulator_value=0.2, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.95), eps=1e-6, fused=True),
    "sgd_decayed": partial(torch.optim.SGD, lr=0.1, weight_decay=0.2),
    "adagrad_decayed": partial(torch.optim.Adagrad, lr=0.1, eps=1e-7, weight_decay=0.2),
    "adam_decayed": partial(torch.optim.Adam, lr=0.01, weight_decay=0.2),
}
SWAPPED = {
    f"{name}_swap": partial(swap, inner=RULES[name], period=3, discount=0.5) for name in ("adagrad", "adam_decayed")
} | {"adam_by_day": partial(swap, inner=RULES["adam"], day=5, discount=0.5)}
RULES |= SWAPPED

IDENTITY = StalenessNormalization("identity")


@pytest.fixture
def servers(tmp_path):
    with mapped_servers(tmp_path, 2) as opened:
        yield opened


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1))


def two_groups(model: nn.Module, make):
    return make([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}, {"params": []}])


def closure(model: nn.Module, optimizer, rows):
    optimizer.zero_grad()
    loss = (model(rows) - 1).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("rule", RULES)
def test_dense_part_when_served_then_trains_as_with_torchs_optimizer(servers, rule):
    models = [make_model(), make_model()]
    expected, served = (two_groups(model, RULES[rule]) for model in models)
    steps = []
    served.register_step_post_hook(lambda *_: steps.append(1))
    dense = PushedParameters([served], len(servers))
    dense.create(servers, IDENTITY)
    schedules = [torch.optim.lr_scheduler.StepLR(x, 3, gamma=0.5) for x in (expected, served)]
    stand_in = ServedStep(served, dense)
    for _ in range(8):
        rows = torch.randn(6, 30)
        losses = [x.step(partial(closure, m, x, rows)) for m, x in zip(models, (expected, stand_in), strict=True)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        for schedule in schedules:
            schedule.step()
    assert len(steps) == 8, "what waits for the optimizer's step has it"
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    dense.pull_state(served)
    saved, kept = served.state_dict(), expected.state_dict()
    assert saved["param_groups"] == kept["param_groups"]
    for index, state in kept["state"].items():
        for name, value in state.items():
            if value is not None:  # SGD without momentum says so
                torch.testing.assert_close(saved["state"][index][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", SWAPPED)
def test_swap_when_parameters_rest_and_the_run_is_resumed_then_equals_torchs_optimizer_with_its_hook(servers, rule):
    """Each step trains a part of the parameters; some lie on a server that is not pushed to at every step."""
    models, random = [make_model(), make_model()], torch.Generator().manual_seed(1)
    expected, served = (RULES[rule](model.parameters()) for model in models)
    dense = PushedParameters([served], len(servers))
    dense.create(servers, IDENTITY)
    for step in range(20):
        if step == 9:  # another run goes on, with an optimizer that was saved and loaded
            dense.pull_state(served)
            kept, saved = dense.kept(), copy.deepcopy(served.state_dict())
            served = RULES[rule](models[1].parameters())
            served.load_state_dict(saved)
            dense = PushedParameters([served], len(servers))
            dense.create(servers, IDENTITY, kept)
            dense.pull()
        trained = torch.rand(4, generator=random) < 0.3
        trained[torch.randint(4, (), generator=random)] = True
        grads = [torch.randn(x.shape, generator=random) for x in models[0].parameters()]
        for model in models:
            for parameter, grad, does in zip(model.parameters(), grads, trained, strict=True):
                parameter.grad = grad.clone() if does else None
        expected.step()
        dense.step(served, lambda: None)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    dense.pull_state(served)
    torch.testing.assert_close(served.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


def test_swap_when_two_workers_push_then_the_period_ends_by_the_pushes_of_both(servers):
    models = [make_model(), make_model()]
    optimizers = [RULES["adagrad_swap"](model.parameters()) for model in models]
    parts = [PushedParameters([optimizer], len(servers)) for optimizer in optimizers]
    parts[0].create(servers, IDENTITY)
    parts[1].open(servers)
    for worker in (0, 1, 1, 0, 0):
        for parameter in models[worker].parameters():
            parameter.grad = torch.ones_like(parameter)
        parts[worker].step(optimizers[worker], lambda: None)
    parts[0].pull_state(optimizers[0])
    found = [float(optimizers[0].state[x]["sum"].mean()) for x in models[0].parameters()]
    assert found == pytest.approx([(0.2 + 2) / 2 + 3] * 4)  # the third push is the second worker's
    assert optimizers[0].param_groups[0]["swap_step"] == 5


def test_swap_when_two_optimizers_train_then_each_counts_its_own_steps(servers):
    models = [make_model(), make_model()]
    expected, served = ([RULES["adagrad_swap"](x.parameters()) for x in (model[0], model[2])] for model in models)
    dense = PushedParameters(served, len(servers))
    dense.create(servers, IDENTITY)
    for step in range(8):
        for part in (0, 1) if step % 2 else (1,):  # the second makes twice as many steps
            for model in models:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5 + step)
            expected[part].step()
            dense.step(served[part], lambda: None)
    for optimizer, told in zip(served, (4, 8), strict=True):
        dense.pull_state(optimizer)
        assert optimizer.param_groups[0]["swap_step"] == told
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_dense_part_when_it_starts_from_a_trained_optimizer_then_goes_on_from_its_state(servers, rule):
    model = make_model()
    optimizer = RULES[rule](model.parameters())
    rows = torch.randn(6, 30)
    for _ in range(3):
        optimizer.step(partial(closure, model, optimizer, rows))
    twin = copy.deepcopy(model)
    served = RULES[rule](twin.parameters())
    served.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    dense = PushedParameters([served], len(servers))
    dense.create(servers, IDENTITY)
    for _ in range(3):
        optimizer.step(partial(closure, model, optimizer, rows))
        dense.step(served, partial(closure, twin, served, rows))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_adam_when_a_parameter_never_had_a_gradient_then_the_others_keep_their_state(servers):
    model = make_model()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = RULES["adam"](model.parameters())
    rows = torch.randn(6, 30)
    for _ in range(3):
        optimizer.step(partial(closure, model, optimizer, rows))
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    dense = PushedParameters([optimizer])
    dense.create(servers, IDENTITY)
    dense.pull_state(optimizer)
    kept = optimizer.state_dict()["state"]
    assert 0 not in expected, "the unused one, which comes first, has no state yet"
    for index, state in expected.items():
        for name, value in state.items():
            torch.testing.assert_close(kept[index][name], value)


def test_two_workers_when_they_push_then_both_have_every_update(servers):
    models = [make_model(), make_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    parts = [PushedParameters([optimizer]) for optimizer in optimizers]
    parts[0].create(servers, IDENTITY)
    parts[1].open(servers)
    before = nn.utils.parameters_to_vector(models[0].parameters()).detach().clone()
    for part, model, optimizer in zip(parts, models, optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        part.step(optimizer, lambda: None)
    parts[0].pull()
    for model in models:
        torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()), before - 0.2)


def test_store_when_an_earlier_run_left_one_then_replaced(servers):
    servers[0].create_dense_store(f"{STORE}-0", torch.ones(3))
    model = make_model()
    dense = PushedParameters([torch.optim.SGD(model.parameters(), lr=0.1)])
    dense.create(servers, IDENTITY)
    assert servers[0].dense_store(f"{STORE}-0").parts == (600, 20, 20, 1)


def test_parameter_when_frozen_or_without_gradient_then_stays_as_it_is(servers):
    model = make_model()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    dense = PushedParameters([optimizer := torch.optim.SGD(model.parameters(), lr=0.1)])
    dense.create(servers, IDENTITY)
    model[2].bias.grad = torch.ones(1)
    dense.step(optimizer, lambda: None)
    assert torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[2].weight, before[2].weight)
    torch.testing.assert_close(model[2].bias, before[2].bias - 0.1)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), r"SGD\(lr=0.1, momentum=0.9\)"),
        (partial(torch.optim.Adam, lr=0.1, amsgrad=True), r"Adam\(lr=0.1, amsgrad=True\)"),
        (partial(torch.optim.Adam, lr=0.1, decoupled_weight_decay=True), r"Adam\(lr=0.1, decoupled_weight_decay=True"),
        (partial(torch.optim.RMSprop, lr=0.1), r"RMSprop\(lr=0.1\)"),
    ],
)
def test_optimizer_when_servers_have_no_such_rule_then_refused_by_name(make, name):
    with pytest.raises(
        TypeError, match=f"strategy=async_ps trains the dense part where it is stored.* got {name}.*Choose one of these"
    ):
        PushedParameters([make(make_model().parameters())])


def test_optimizer_when_a_hook_wants_to_change_its_state_then_refused_by_name():
    optimizer = swap(make_model().parameters(), partial(torch.optim.Adagrad, lr=0.1), period=3, discount=0.5)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(TypeError, match=r"hooks before the steps of Adagrad \(.*\) would find.*SWAP's own is taken"):
        PushedParameters([optimizer])


def test_parameters_when_dealt_over_servers_then_each_is_whole_and_the_loads_are_alike(servers):
    model = make_model()
    dense = PushedParameters([torch.optim.SGD(model.parameters(), lr=0.1)], 2)
    dense.create(servers, IDENTITY)
    parts = [server.dense_store(f"{STORE}-{number}").parts for number, server in enumerate(servers)]
    assert parts == [(600,), (20, 20, 1)]
    dense.pull()
    for one, other in zip(make_model().parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_versions_when_workers_push_in_turns_then_are_counted_by_parameter_and_kept(servers):
    """One worker pulls, the other pushes three times, the first pushes: its gradient is four updates old."""
    models = [make_model(), make_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    parts = [PushedParameters([optimizer]) for optimizer in optimizers]
    parts[0].create(servers, StalenessNormalization("linear"))
    parts[1].open(servers)
    for part in parts:
        part.pull()
    before = models[0][2].bias.item()

    def step(worker: int, gradient: float, *, trains_first: bool = True) -> None:
        for layer in (models[worker][0], models[worker][2]) if trains_first else (models[worker][2],):
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
        parts[worker].step(optimizers[worker], lambda: None)

    for number in range(3):
        step(1, 1.0, trains_first=number != 1)
    step(0, 8.0)
    assert models[0][2].bias.item() == pytest.approx(before - 3 * 1.0 - 8.0 / 4)
    assert [x.version for x in parts[0].kept()] == [
        3,
        3,
        4,
        4,
    ]  # weight and bias of the first layer, then of the second
    assert parts[0].observed.counts == {3: 2, 4: 2}
    assert parts[1].observed.counts == {1: 2 + 4 + 4}
    again = PushedParameters([optimizers[0]])
    again.create(servers, IDENTITY, parts[0].kept())
    assert [x.version for x in again.kept()] == [3, 3, 4, 4]


def test_changes_when_the_run_goes_on_then_stale_gradients_count_as_they_would_have(servers):
    """Equation 5 weighs staleness by how far a parameter moved last, which a run that begins has not seen."""
    by_change = StalenessNormalization("linear", sensitivity=2.0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dense = PushedParameters([optimizer])
    dense.create(servers, by_change)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    dense.step(optimizer, lambda: None)
    kept = dense.kept()
    assert [x.change for x in kept] == pytest.approx([3.0] * 4)
    again = PushedParameters([optimizer])
    again.create(servers, by_change, kept)
    assert again.kept() == kept


@pytest.mark.parametrize("momentum", [True, False])
def test_schedule_when_it_moves_betas_then_refused_by_name_and_without_them_trains_as_torch_does(servers, momentum):
    models = [make_model(), make_model()]
    expected, served = (RULES["adam"](model.parameters()) for model in models)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(x, max_lr=0.1, total_steps=6, cycle_momentum=momentum)
        for x in (expected, served)
    ]
    dense = PushedParameters([served], len(servers))
    dense.create(servers, IDENTITY)
    rows = torch.randn(6, 30)

    def step() -> None:
        expected.step(partial(closure, models[0], expected, rows))
        dense.step(served, partial(closure, models[1], served, rows))
        for schedule in schedules:
            schedule.step()

    step()
    if momentum:
        with pytest.raises(ValueError, match=r"Group 0 of Adam had RowAdam\(.*and has RowAdam.*cycle_momentum=False"):
            step()
        return
    for _ in range(4):
        step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_optimizer_when_it_loads_a_state_in_the_midst_then_pushes_have_its_new_learning_rate(servers):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = PushedParameters([optimizer])
    dense.create(servers, IDENTITY)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.5
    before = model[2].bias.item()
    model[2].bias.grad = torch.ones(1)
    dense.step(optimizer, lambda: None)
    assert model[2].bias.item() == pytest.approx(before - 0.5)


def test_parameter_when_in_two_optimizers_then_refused_by_name():
    model = make_model()
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (model, model[2])]
    names = {parameter: name for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=r"2\.weight is in optimizer 0 of .* again in optimizer 1"):
        PushedParameters(optimizers, names=names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameter_when_not_float32_then_refused_by_name(dtype):
    model = make_model()
    model[2].to(dtype)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with pytest.raises(TypeError, match=rf"in float32, and 2\.weight is {dtype}\. Use trainer\.precision=32-true"):
        PushedParameters([torch.optim.SGD(model.parameters(), lr=0.1)], names=names)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradient_when_of_a_parameter_on_no_server_then_refused_by_name_with_several_workers(servers, frozen):
    for num_workers in (1, 2):
        model = make_model()
        model.register_parameter("late", nn.Parameter(torch.ones(3), requires_grad=not frozen))
        optimizer = torch.optim.SGD(model.parameters() if frozen else model[0].parameters(), lr=0.1)
        names = {parameter: name for name, parameter in model.named_parameters()}
        dense = PushedParameters([optimizer], num_workers=num_workers, names=names)
        dense.create(servers, IDENTITY)
        if frozen:
            model.late.requires_grad_(True)
        else:
            optimizer.add_param_group({"params": [model.late]})
        model.late.grad = torch.ones(3)
        if num_workers == 1:
            dense.step(optimizer, lambda: None)
            assert model.late.tolist() == pytest.approx([0.9] * 3)
            assert len(dense.kept()) == (4 if frozen else 2)  # of a checkpoint: what is on servers
            continue
        with pytest.raises(ValueError, match=r"late has a gradient, and is on no server"):
            dense.step(optimizer, lambda: None)


def test_sparse_gradient_when_pushed_then_trains_as_torchs_does(servers):
    torch.manual_seed(0)
    models = [nn.Embedding(5, 3), nn.Embedding(5, 3, sparse=True)]
    models[1].load_state_dict(models[0].state_dict())
    expected, served = (torch.optim.Adagrad(model.parameters(), lr=0.1) for model in models)
    dense = PushedParameters([served])
    dense.create(servers, IDENTITY)
    for ids in ([1, 1, 4], [4, 0, 1]):
        for model, optimizer in zip(models, (expected, partial(dense.step, served)), strict=True):
            model.zero_grad()
            model(torch.tensor(ids)).square().sum().backward()
            assert model.weight.grad.is_sparse == model.sparse
            optimizer.step() if optimizer is expected else optimizer(lambda: None)
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_pull_when_gradients_are_accumulated_then_they_keep_the_version_that_they_were_computed_at(servers):
    models = [make_model(), make_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    parts = [PushedParameters([optimizer]) for optimizer in optimizers]
    parts[0].create(servers, IDENTITY)
    parts[1].open(servers)
    for part in parts:
        part.pull()
    models[0][2].bias.grad = torch.ones(1)  # of the first of two micro-batches
    for parameter in models[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    parts[1].step(optimizers[1], lambda: None)
    parts[0].pull()  # validation, or a checkpoint
    for parameter in models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    parts[0].step(optimizers[0], lambda: None)
    assert parts[0].observed.counts == {1: 3, 2: 1}


def test_precision_when_it_scales_gradients_then_refused_by_name():
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"trainer\.precision=16-mixed.*bf16-mixed"):
        refuse_gradient_scaler(scaled)
    for precision in (Precision(), MixedPrecision("bf16-mixed", "cpu")):
        refuse_gradient_scaler(precision)
