"""Parts of a model in a group server's hands: pickled, mapped, trained, restored; and what cannot be trained so."""

import copy
import logging
import stat
from functools import partial
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler, LambdaCallback, StochasticWeightAveraging
from pytorch_lightning.plugins.precision import MixedPrecision, Precision
from torch import nn

from lightning_recsys.optim import swap
from lightning_recsys.parameter_server.handler import RequestHandler, Unfinished
from lightning_recsys.parameter_server.messages.wire import Limits, Request, decode_reply, encode_request
from lightning_recsys.parameter_server.parts.remote_parts import TokenLostError
from lightning_recsys.parameter_server.parts.trained_part import TrainedPart
from lightning_recsys.partition.parts import Part, split
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.strategies import HierarchicalStrategy
from lightning_recsys.strategies.hierarchical.cut.remote_forward import CutForward, Net
from lightning_recsys.strategies.hierarchical.cut.sample_call import forward_replaced
from lightning_recsys.strategies.hierarchical.groups import Groups
from lightning_recsys.strategies.hierarchical.refusals import (
    cut_module,
    refuse_hooked,
    refuse_optimizers,
    refuse_parametrized,
    refuse_switched,
    refuse_trainer,
    refuse_without_forward,
    switches,
)
from lightning_recsys.strategies.hierarchical.servers.group_parts import (
    CHANGED,
    FILE,
    MEMORY,
    Change,
    GroupMemory,
    GroupParts,
)
from lightning_recsys.strategies.hierarchical.servers.group_server import GroupRequests
from lightning_recsys.strategies.replicas.replica import Replica

CLIENT = bytes(range(1, 17))
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.norm, self.top = nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x):
        return self.top(self.norm(self.bottom(x)).relu()).squeeze(1)


def group_parts(model, optimizer):
    traced = trace(model, [X])
    devices = {op.name: "server0" if op.owns_parameters else "trainer" for op in traced.operators.operators}
    return GroupParts.of(split(traced, OperatorPlan(devices)).on("server0"), optimizer)


@pytest.fixture
def served(tmp_path):
    model = Model()
    parts = group_parts(model, torch.optim.Adam(model.parameters(), lr=0.1))
    parts.save(tmp_path)
    handler = RequestHandler(tmp_path, offer=GroupRequests)
    yield SimpleNamespace(model=model, parts=parts, handler=handler, folder=tmp_path)
    handler.close()


def ask(handler, operation, *arrays, **arguments):
    request = Request(operation, 1, CLIENT, 0, "", arguments, list(arrays))
    reply = handler.handle([bytearray(frame) for frame in encode_request(request)])
    if isinstance(reply, Unfinished):
        reply.future.exception(20)
        reply = handler.finish(reply)
    return decode_reply([bytearray(frame) for frame in reply], Limits())


def train(handler, name, inputs, times=1):
    for _ in range(times):
        tensors = [["f4", list(x.shape)] for x in inputs]
        arguments = {"part": name, "keep": True, "wanted": [True] * len(inputs), "tensors": tensors}
        reply = ask(handler, "forward", *(x.reshape(-1) for x in inputs), **arguments)
        grads = [x.cos() for x in reply.arrays]
        tensors = reply.value["tensors"]
        arguments = {"token": reply.value["token"], "settings": [{}], "tensors": tensors}
        assert ask(handler, "backward", *grads, **arguments).status == "ok"


def model_of(served, handler):
    """What the server has, in a model."""
    layout = GroupMemory(served.parts)
    size = ask(handler, "load_parts").value if not handler._offer.operators.parts else layout.num_bytes
    return layout, layout.views(ask(handler, "read_memory", start=0, stop=size).arrays[0])


def test_server_when_it_loads_parts_then_has_their_numbers_and_an_own_state_for_each_parameter(served):
    _, views = model_of(served, served.handler)
    assert torch.equal(views["replica"], Replica(served.parts.parameters.items()).values())
    assert torch.equal(views["buffer.norm.running_var"], torch.ones(5))
    assert sorted(x for x in views if x.startswith("state.top")) == [
        f"state.top.{parameter}.{name}"
        for parameter in ("bias", "weight")
        for name in ("exp_avg", "exp_avg_sq", "step")
    ]
    copied = Model()
    with torch.no_grad():
        for x in copied.parameters():
            x.zero_()
    other = group_parts(copied, torch.optim.Adam(copied.parameters()))
    GroupMemory(other).replica.assign(views["replica"])
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), served.model.parameters(), strict=True))
    assert stat.S_IMODE((served.folder / FILE).stat().st_mode) == 0o600


def test_server_when_killed_and_started_again_then_goes_on_where_it_was_and_says_what_is_lost(served, caplog):
    model_of(served, served.handler)
    train(served.handler, "server0.0", [X], times=3)
    _, views = model_of(served, served.handler)
    before = {name: x.clone() for name, x in views.items()}
    assert before["version.server0.0"] == 3
    assert before["state.bottom.weight.step"] == 3
    assert before["buffer.norm.num_batches_tracked"] == 3
    assert not torch.equal(before["replica"], Replica(served.parts.parameters.items()).values())
    served.handler.journal.close()  # as after SIGKILL: nothing else is said to it
    with caplog.at_level(logging.WARNING):
        again = RequestHandler(served.folder, offer=GroupRequests)
    assert "Batches whose backward passes" in caplog.text
    assert "'server0.0': 3" in caplog.text
    _, after = model_of(served, again)
    assert all(torch.equal(after[name], before[name]) for name in before)
    train(again, "server0.0", [X])
    assert model_of(served, again)[1]["state.bottom.weight.step"] == 4
    again.close()


def test_server_when_it_has_loaded_its_parts_then_their_numbers_lie_in_one_file_only(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5000), nn.ReLU(), nn.Linear(5000, 1))
    group_parts(model, torch.optim.Adam(model.parameters(), lr=0.1)).save(tmp_path)
    numbers = 3 * sum(x.nbytes for x in model.parameters())  # with Adam's two
    assert (tmp_path / FILE).stat().st_size > numbers
    handler = RequestHandler(tmp_path, offer=GroupRequests)
    assert ask(handler, "load_parts").value >= numbers
    assert (tmp_path / FILE).stat().st_size < 40_000
    assert (tmp_path / MEMORY).stat().st_size < numbers + 10_000
    train(handler, "server0.0", [X])
    trained = ask(handler, "read_memory", start=0, stop=numbers // 3).arrays[0]
    handler.journal.close()  # as after SIGKILL
    again = RequestHandler(tmp_path, offer=GroupRequests)
    assert torch.equal(ask(again, "read_memory", start=0, stop=numbers // 3).arrays[0], trained)
    weight = again._offer.operators.parts["server0.0"]._module.get_parameter("0.weight")
    assert weight.untyped_storage().data_ptr() == again._offer._memory.untyped_storage().data_ptr()
    assert not torch.equal(weight, model[0].weight)
    again.close()


def test_parts_when_something_cannot_be_pickled_then_refused_by_what_it_is(tmp_path):
    model = Model()
    optimizer = Decaying(model.parameters(), factor=0.5)
    optimizer.rule = lambda x: x
    with pytest.raises(TypeError, match=r"this cannot be written: .*lambda.* such as can be imported"):
        group_parts(model, optimizer).save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_server_when_the_same_is_trained_by_torch_then_equal(served):
    model_of(served, served.handler)
    train(served.handler, "server0.0", [X], times=4)
    twin = Model().train()
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        out = twin.norm(twin.bottom(X))
        out.backward(out.detach().cos())
        optimizer.step()
    layout, views = model_of(served, served.handler)
    layout.replica.assign(views["replica"])
    # The server's threads take denormal numbers as zero, and its parameters lie elsewhere in their cache lines.
    torch.testing.assert_close(served.model.bottom.weight, twin.bottom.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(served.model.norm.bias, twin.norm.bias, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(views["buffer.norm.running_mean"], twin.norm.running_mean, rtol=1e-6, atol=1e-7)


class Tempered(Model):
    def __init__(self):
        super().__init__()
        self.temperature, self.drop = 1.0, nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        return self.top(self.drop(self.norm(self.bottom(x))) * self.temperature + self.shift * self.frozen).squeeze(1)


def test_server_when_what_a_part_reads_changes_then_computes_so_with_its_own_numbers_after_a_restart_too(tmp_path):
    def parts_of(model):
        traced = trace(model, [X])
        return split(traced, OperatorPlan(dict.fromkeys(traced.operators.by_name, "server0"))).on("server0")

    def answer(handler):
        arguments = {"part": "server0.0", "keep": False, "wanted": [False], "tensors": [["f4", [6, 4]]]}
        (y,) = ask(handler, "forward", X.reshape(-1), **arguments).arrays
        return y

    def bring(handler, number, by, **buffers):
        modules = {part.name: part.module for part in parts_of(model)}
        trained = {x for x in model.parameters() if x.requires_grad}
        Change.of(number, modules, buffers=set(buffers), trained=trained).save(tmp_path / f"{CHANGED}-{by}")
        reply = ask(handler, "change_parts", number=number, by=by)
        assert reply.status == "ok", reply.value

    model = Tempered()
    GroupParts.of(parts_of(model), torch.optim.SGD(model.parameters(), lr=0.1)).save(tmp_path)
    handler = RequestHandler(tmp_path, offer=GroupRequests)
    ask(handler, "load_parts")
    train(handler, "server0.0", [X])
    trained = copy.deepcopy(handler._offer.operators.parts["server0.0"]._module).eval()
    normed = trained.drop(trained.norm(trained.bottom(X)))
    for module in handler._offer.operators.parts["server0.0"]._module.modules():
        module.eval()
    torch.testing.assert_close(answer(handler), trained.top(normed).squeeze(1))

    model.eval()
    model.temperature, model.drop.p = 3.0, 0.25
    model.shift.fill_(3.5)
    model.frozen.data.fill_(2.0)  # and stays so through the second change, which writes another file
    bring(handler, 1, by=11, shift=True)
    expected = trained.top(normed * 3 + 7).squeeze(1)
    torch.testing.assert_close(answer(handler), expected)
    assert handler._offer.operators.parts["server0.0"]._module.drop.p == 0.25
    model.temperature = 2.0  # what a slower net brings under the same number is that of before
    bring(handler, 1, by=12)
    torch.testing.assert_close(answer(handler), expected)
    assert sorted(x.name for x in tmp_path.iterdir() if x.name.startswith(CHANGED)) == [CHANGED]

    model.shift.fill_(100.0)  # of a buffer that is not named the server keeps its own numbers
    bring(handler, 2, by=12)
    train(handler, "server0.0", [X])
    last = answer(handler)
    assert not torch.allclose(last, trained.top(normed * 2 + 7).squeeze(1))  # the same parameters are trained on
    handler.journal.close()  # as after SIGKILL
    again = RequestHandler(tmp_path, offer=GroupRequests)
    torch.testing.assert_close(answer(again), last)
    again.close()


def test_server_when_a_module_is_in_evaluation_mode_then_it_stays_so(tmp_path):
    model = Model()
    model.norm.eval()
    group_parts(model, torch.optim.SGD(model.parameters(), lr=0.1)).save(tmp_path)
    handler = RequestHandler(tmp_path, offer=GroupRequests)
    ask(handler, "load_parts")
    train(handler, "server0.0", [X])
    (norm,) = (x for x in handler._offer.operators.parts["server0.0"]._module.modules() if type(x) is nn.BatchNorm1d)
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_mean, torch.zeros(5))
    handler.close()


@pytest.mark.parametrize("other", [1, 2])
def test_server_when_parts_have_a_seed_then_draws_by_it(tmp_path, other):
    drawn = []
    for seed in (1, other):
        folder = tmp_path / str(len(drawn))
        folder.mkdir()
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
        traced = trace(model, [X])
        devices = dict.fromkeys(traced.operators.by_name, "server0")
        parts = GroupParts.of(split(traced, OperatorPlan(devices)).on("server0"), torch.optim.SGD(model.parameters()))
        parts.seed = seed
        parts.save(folder)
        handler = RequestHandler(folder, offer=GroupRequests)
        ask(handler, "load_parts")
        arguments = {"part": "server0.0", "keep": False, "wanted": [False], "tensors": [["f4", [6, 4]]]}
        (y,) = ask(handler, "forward", X.reshape(-1), **arguments).arrays
        drawn.append(y == 0)
        handler.close()
    assert torch.equal(*drawn) is (other == 1)


def test_switches_when_a_module_is_frozen_in_the_midst_of_training_then_refused_by_name():
    model = Model()
    before = switches(model)
    refuse_switched(before, model)
    model.norm.eval()
    with pytest.raises(ValueError, match=r"norm.training became False in the midst of training"):
        refuse_switched(before, model)
    model.norm.train()
    model.top.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"top.bias.requires_grad became False"):
        refuse_switched(before, model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameter_when_it_has_hooks_then_refused_by_name(register):
    model = Model()
    refuse_hooked(model)
    getattr(model.top.bias, register)(print)
    with pytest.raises(ValueError, match=r"top.bias has hooks .* would not run"):
        refuse_hooked(model)


def test_module_when_parametrized_then_refused_by_name():
    model = Model()
    refuse_parametrized(model)
    nn.utils.parametrizations.weight_norm(model.top)
    with pytest.raises(ValueError, match=r"top \(ParametrizedLinear\) has parametrizations \(weight\)"):
        refuse_parametrized(model)
    nn.utils.parametrize.remove_parametrizations(model.top, "weight")
    refuse_parametrized(model)


def test_server_when_nothing_was_written_or_asked_for_wrongly_then_says_so(tmp_path):
    handler = RequestHandler(tmp_path, offer=GroupRequests)
    assert "has written parts" in ask(handler, "load_parts").value
    assert ask(handler, "read_memory", start=0, stop=8).status == "refused"
    assert "nothing to synchronise" in ask(handler, "begin_sync").value
    assert ask(handler, "end_sync").status == "ok"
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    assert "is a link" in ask(handler, "load_parts").value
    handler.close()


def test_optimizer_when_it_has_no_state_before_its_first_step_then_refused_by_name():
    model = Model()
    with pytest.raises(TypeError, match="strategy=hierarchical needs the state of SGD"):
        group_parts(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5))


class Decaying(torch.optim.SGD):
    """Multiplies its gradients by a number that it keeps as an attribute, and counts its steps there."""

    def __init__(self, parameters, *, factor):
        super().__init__(parameters, lr=0.1)
        self.factor, self.num_steps = factor, 0

    def step(self, closure=None):
        self.num_steps += 1
        for x in (x for group in self.param_groups for x in group["params"] if x.grad is not None):
            x.grad *= self.factor
        return super().step(closure)


def test_optimizer_when_it_has_attributes_of_its_own_then_servers_train_with_them(tmp_path):
    model, twin = Model(), Model()
    with_schedule = Decaying(model.parameters(), factor=0.5)
    with_schedule.zero_grad = lambda *_: None  # as embedding collections replace it
    torch.optim.lr_scheduler.StepLR(with_schedule, 1)
    group_parts(model, with_schedule).save(tmp_path)
    handler = RequestHandler(tmp_path, offer=GroupRequests)
    ask(handler, "load_parts")
    train(handler, "server0.0", [X], times=2)
    optimizer = Decaying(twin.parameters(), factor=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        out = twin.norm(twin.bottom(X))
        out.backward(out.detach().cos())
        optimizer.step()
    bottom = handler._offer.operators.parts["server0.0"]._module.get_parameter("bottom.weight")
    torch.testing.assert_close(bottom, twin.bottom.weight, rtol=1e-6, atol=1e-7)
    assert handler._offer.operators.parts["server0.0"]._optimizer.num_steps == 2
    handler.close()


def test_groups_when_over_nodes_then_servers_are_where_their_group_begins():
    groups = Groups(num_groups=2, trainers_per_group=2, nets_per_trainer=3, servers_per_group=2, num_nodes=2)
    assert (groups.world_size, groups.ranks_per_node, groups.leaders) == (12, 6, (0, 6))
    assert [groups.node_of(group) for group in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="no multiple of the 2 nodes"):
        Groups(num_groups=1, trainers_per_group=3, nets_per_trainer=2, servers_per_group=1, num_nodes=2)
    with pytest.raises(ValueError, match=r"strategy.servers_per_group must be at least 1, got 0"):
        HierarchicalStrategy(servers_per_group=0)
    with pytest.raises(ValueError, match=r"strategy.servers=.* Leave strategy.servers out"):
        HierarchicalStrategy(servers=["tcp://10.0.0.1:5790"])


def test_cut_forward_when_the_module_is_copied_then_the_copy_computes_by_itself():
    model = Model().eval()
    model.forward = CutForward(model, lambda x: "elsewhere")
    assert model(X) == "elsewhere"
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.top.bias += 1
    del model.forward
    assert torch.allclose(copied(X), model(X) + 1)


class Forgets:
    """A server's connection that computes, and has forgotten every second forward pass."""

    def __init__(self, part):
        self.part, self.graphs = part, {}

    def forward(self, name, inputs, *, wanted, keep):
        token = len(self.graphs) + 1
        self.graphs[token] = self.part.forward([x.clone() for x in inputs], wanted=wanted, keep=keep)
        return lambda: (token, [x.detach() for x in self.graphs[token].outputs])

    def backward(self, name, token, grads, *, settings):
        def answer():
            if token % 2 == 0:
                raise TokenLostError("ipc:///nowhere", name)
            return self.part.backward(self.graphs[token], grads, settings)

        return answer


def test_net_when_a_server_has_forgotten_a_batch_then_goes_on_without_its_gradients_and_counts_it(caplog):
    own, there = Model(), Model()
    parts = group_parts(there, torch.optim.SGD(there.parameters(), lr=0.1))
    part = parts.parts["server0.0"]
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    net = Net({"server0": Forgets(TrainedPart(part.module, part.optimizer))}, optimizer, {"server0.0": [0]})
    asked = Part("server0.0", "server0", 0, part.module, ("x",), ("y",))
    before = there.bottom.weight.detach().clone()
    (y,) = net.run(asked, (X,))()  # no input wants a gradient, and the part is trained all the same
    y.square().sum().backward()
    after = there.bottom.weight.detach().clone()
    assert not torch.equal(before, after)
    x = X.clone().requires_grad_()
    with caplog.at_level(logging.WARNING):
        net.run(asked, (x,))()[0].sum().backward()
    assert x.grad is None
    assert (net.lost, len(net.staleness)) == (1, 1)
    assert "A batch is lost" in caplog.text
    assert torch.equal(there.bottom.weight, after)
    with torch.no_grad():
        assert not net.run(asked, (X,))()[0].requires_grad


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.top = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.top(self.left(x).relu() + self.right(x).tanh()).squeeze(1)


class Notes(Forgets):
    """A server's connection that computes, and notes when it is asked and when it is waited for."""

    def __init__(self, parts, notes):
        super().__init__(None)
        self.parts, self.notes = parts, notes

    def forward(self, name, inputs, **options):
        self.part = self.parts[name]
        return self.note(f"{name} forward", super().forward(name, inputs, **options))

    def backward(self, name, token, grads, *, settings):
        self.part = self.parts[name]
        return self.note(f"{name} backward", lambda: self.part.backward(self.graphs[token], grads, settings))

    def note(self, what, answer):
        self.notes.append(f"{what} asked")

        def answered():
            self.notes.append(f"{what} awaited")
            return answer()

        return answered


def test_net_when_parts_do_not_need_each_other_then_all_are_asked_before_one_is_waited_for():
    whole, cut = TwoTowers(), TwoTowers()
    traced = trace(cut, [X])
    model = split(
        traced,
        OperatorPlan(
            {"left": "server0", "right": "server1", "top": "server0"}
            | {x.name: "trainer" for x in traced.operators.operators if not x.owns_parameters},
            num_servers=2,
        ),
    )
    names = [part.name for part in model.parts if part.device != "trainer"]
    assert names == ["server0.0", "server1.0", "server0.2"]
    notes = []
    optimizer = torch.optim.SGD(cut.parameters(), lr=0.1)
    devices = ("server0", "server1")
    servers = {
        device: Notes(
            {x.name: TrainedPart(x.module, torch.optim.SGD(x.module.parameters(), lr=0.1)) for x in model.on(device)},
            notes,
        )
        for device in devices
    }
    model.runners = dict.fromkeys(devices, Net(servers, optimizer, {name: [0] for name in names}).run)
    x, expected = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(x).sum().backward()
    whole(expected).sum().backward()
    asked = [note for note in notes if note.endswith("asked")]
    assert len(asked) == 6
    assert notes[:4] == [f"{part} forward {what}" for what in ("asked", "awaited") for part in names[:2]]
    assert {*notes[-4:-2]} == {f"{part} backward asked" for part in names[:2]}
    assert {*notes[-2:]} == {f"{part} backward awaited" for part in names[:2]}
    torch.testing.assert_close(x.grad, expected.grad)
    for trained, before in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(trained, before - 0.1 * before.grad)


class Task(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.scale = Model(), nn.Parameter(torch.ones(1))


def trainer_of(task, callbacks=(), **settings):
    found = {"gradient_clip_val": None, "accumulate_grad_batches": 1, **settings}
    return SimpleNamespace(lightning_module=task, callbacks=list(callbacks), **found)


class TwoBatches(GradientAccumulationScheduler):
    def __init__(self):
        super().__init__({0: 2})


class Manual(Task):
    automatic_optimization = False


class Clipping(Task):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        """Clips by a rule of its own."""


class LoggingNorm(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        """Logs the gradients' norm."""


@pytest.mark.parametrize(
    ("trainer", "precision", "reason"),
    [
        (trainer_of(Manual()), Precision(), "automatic_optimization=False"),
        (trainer_of(Task(), gradient_clip_val=1.0), Precision(), r"trainer.gradient_clip_val=1.0"),
        (trainer_of(Task(), accumulate_grad_batches=4), Precision(), "accumulate_grad_batches=4"),
        (
            trainer_of(Task(), [TwoBatches()]),
            Precision(),
            r"^the callback TwoBatches \(scheduling=\{0: 2\}\) accumulates",
        ),
        (trainer_of(Task()), MixedPrecision("bf16-mixed", "cpu"), "trainer.precision=bf16-mixed"),
        (trainer_of(Task(), [StochasticWeightAveraging(1e-2)]), Precision(), "StochasticWeightAveraging averages"),
        (trainer_of(Clipping()), Precision(), r"^Clipping.configure_gradient_clipping looks at gradients"),
        (trainer_of(Task(), [LoggingNorm()]), Precision(), r"^LoggingNorm.on_before_optimizer_step looks at"),
        (
            trainer_of(Task(), [LambdaCallback(on_after_backward=print)]),
            Precision(),
            r"^LambdaCallback.on_after_backward looks at",
        ),
    ],
)
def test_setting_when_it_needs_gradients_before_the_update_then_refused_by_name(trainer, precision, reason):
    with pytest.raises(ValueError, match=reason):
        refuse_trainer(trainer, precision)


class Autoencoder(pl.LightningModule):
    """Lightning's quick start: its step calls two modules, and there is no forward."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.metric = nn.Linear(4, 2), nn.Linear(2, 4), nn.Identity()


def test_module_when_it_has_no_forward_then_refused_by_what_it_lacks():
    task = Autoencoder()
    with pytest.raises(ValueError, match=r"Autoencoder has no forward: .* calls encoder and decoder by itself"):
        refuse_without_forward(task, cut_module(task, None))
    refuse_without_forward(task, task.encoder)


def test_module_when_its_forward_was_set_on_the_object_then_refused_by_name():
    """The forward of its class is what would be traced."""
    task = Autoencoder()
    task.forward = task.encoder.forward
    task.encoder.forward = task.encoder.forward  # its own, as Lightning leaves it
    refuse_without_forward(task, task.encoder)
    for cut in (task, task.decoder):
        cut.forward = task.encoder.forward
        with pytest.raises(ValueError, match=r"this \w+ has another one, Linear.forward, which was set on the object"):
            refuse_without_forward(task, cut)


def test_optimizers_when_servers_cannot_share_them_then_refused_by_name():
    task = Task()
    own = torch.optim.SGD(task.model.parameters(), lr=0.1)
    refuse_optimizers(task, [own], cut=None)
    with pytest.raises(ValueError, match="configure_optimizers gives 2"):
        refuse_optimizers(task, [own, own], cut=None)
    with pytest.raises(ValueError, match="scale is outside"):
        refuse_optimizers(task, [torch.optim.SGD(task.parameters(), lr=0.1)], cut=None)
    refuse_optimizers(task, [torch.optim.SGD(task.parameters(), lr=0.1)], cut="")
    swapped = swap(task.model.parameters(), partial(torch.optim.Adagrad, lr=0.1), period=10, discount=0.5)
    with pytest.raises(TypeError, match="hooks before the steps of Adagrad"):
        refuse_optimizers(task, [swapped], cut=None)
    with pytest.raises(ValueError, match=r"strategy.module='tower': the task has no such module; it has \['model'\]"):
        cut_module(task, "tower")
    assert cut_module(task, None) is task.model
    assert cut_module(task, "") is task
    assert cut_module(task, "model.top") is task.model.top


@pytest.mark.parametrize("own", [None, torch.neg])
def test_forward_when_it_was_replaced_then_the_module_has_its_own_again_or_that_of_its_class(own):
    module, x = nn.Identity(), torch.ones(1)
    if own is not None:
        module.forward = own
    with forward_replaced(module, torch.zeros_like):
        assert module(x) == 0
    assert module(x) == (1 if own is None else -1)
    assert ("forward" in vars(module)) is (own is not None)
