"""The cut model beside the whole one: random models hold, what differs is named, and so is what changes later."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import random
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowSGD
from lightning_recsys.partition.fc_split import LayerSplit
from lightning_recsys.partition.parts import split
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import TRAINER, server_name
from lightning_recsys.strategies.hierarchical.bringing import Bringing, Brought
from lightning_recsys.strategies.hierarchical.cut.comparison import hold_against_whole
from lightning_recsys.strategies.hierarchical.cut.cut_layers import CutLayers
from lightning_recsys.strategies.hierarchical.cut.watching import Watch
from lightning_recsys.strategies.hierarchical.leader import GroupServers
from lightning_recsys.strategies.hierarchical.run import NetRun
from lightning_recsys.strategies.hierarchical.servers.group_parts import GroupMemory, GroupParts

WIDTH, BATCH, NUM_SERVERS = 6, 5, 2
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
TORCHS = ["SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "Rprop"]


class RandomModel(nn.Module):
    """Some twenty operations in a random order, among them all that a trace could lose."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        field = EmbeddingBagConfig(name="f", num_embeddings=20, embedding_dim=WIDTH, feature_names=["f"])
        self.rows = EmbeddingBagCollection([field], optimizer=RowSGD(0.1))
        self.layers = nn.ModuleList(
            draw.choice(
                [
                    lambda: nn.Linear(WIDTH, WIDTH),
                    lambda: nn.BatchNorm1d(WIDTH),
                    lambda: nn.LayerNorm(WIDTH),
                    lambda: nn.Dropout(0.3),
                    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()),
                ]
            )()
            for _ in range(8)
        )
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.temperature, self.offsets = draw.uniform(0.5, 2), {"a": draw.random()}
        self.steps = [(draw.randrange(9), draw.randrange(8), draw.randrange(100)) for _ in range(20)]
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, batch, flag=None):
        values = [batch["dense"] * 1.0, self.rows(batch["sparse"]).squeeze(1), *batch["more"]]
        for kind, layer, place in self.steps:
            x, y = values[place % len(values)], values[-1]
            if kind <= 2:
                x = self.layers[layer](x)
            elif kind == 3:
                with torch.no_grad():
                    x = self.layers[layer](x) + y * self.scale
            elif kind == 4:
                x = x / self.temperature + self.offsets["a"]
            elif kind == 5:
                left, right = torch.cat([x, y], 1).chunk(2, 1)
                x = left * right.sigmoid()
            elif kind == 6:
                x = (x * self.scale).add_(y)
            elif kind == 7:
                x = x + torch.rand_like(y) + torch.arange(WIDTH)
            elif flag is None:
                x = x.view(x.shape[0], -1) - y.mean(1, keepdim=True)
            values.append(torch.tanh(x))
        return {"logits": self.top(sum(values[-4:])).squeeze(1), "last": values[-1]}


def random_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    dense, *more = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(3))
    ids = torch.randint(0, 20, (BATCH,), generator=generator)
    return {"dense": dense, "sparse": SparseFeatures(("f",), ids), "more": tuple(more)}


def cut(model, sample, optimizer, *, splits=()):
    layers = CutLayers(model, splits, optimizer)
    traced = trace(layers.model, sample)
    turns = itertools.cycle(range(NUM_SERVERS))
    devices = {
        x.name: TRAINER if x.trainer_only or not (x.owns_parameters or n % 3) else server_name(next(turns))
        for n, x in enumerate(traced.operators.operators)
    }
    plan = OperatorPlan(devices, num_servers=NUM_SERVERS)
    partitioned = split(traced, plan)
    servers = [server_name(i) for i in range(NUM_SERVERS)]
    parts = {device: GroupParts.of(partitioned.on(device), layers.optimizer) for device in servers}
    return {"layers": layers, "partitioned": partitioned, "parts": parts, "optimizer": optimizer, "plan": plan}


def hold(model, sample, optimizer, *, splits=(), pieces=None):
    pieces = pieces or cut(model, sample, optimizer, splits=splits)
    hold_against_whole(model, sample, **{name: x for name, x in pieces.items() if name != "plan"})


@pytest.mark.parametrize("seed", range(12))
def test_random_model_when_cut_then_it_holds_and_neither_it_nor_the_generator_changes(seed):
    model, sample = RandomModel(seed), [random_batch(seed), None]
    optimizer = (SGD, ADAM)[seed % 2](x for x in model.parameters() if x.numel())
    before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    pieces = cut(model, sample, optimizer)
    drawn = torch.get_rng_state()
    hold(model, sample, optimizer, pieces=pieces)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]
    assert all(x.grad is None for x in model.parameters())
    assert {x for x in vars(model) if not x.startswith("_tensor_constant")} == attributes
    assert all(module.training for module in model.modules())


class Counts:
    """Counts calls where nobody looks: in its class."""

    calls = 0

    def __call__(self):
        Counts.calls += 1
        return float(Counts.calls)


class Tower(nn.Module):
    """Two layers; what ``between`` makes of the first one's output goes to the second."""

    def __init__(self, between=torch.relu):
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.drop, self.top, self.between = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1), between

    def forward(self, x):
        return self.top(self.drop(self.between(self.bottom(x)))).squeeze(1)


class Scaled(nn.Module):
    """Multiplies by a number that another object counts, once it is known to be traced through."""

    def __init__(self):
        super().__init__()
        self.inner, self.count = nn.Identity(), Counts()

    def forward(self, x):
        return self.inner(x) * (1.0 if isinstance(x, torch.fx.Proxy) else self.count())


class NormClipped(torch.optim.SGD):
    """Divides by the norm of all gradients, as LAMB's trust region and clipping inside of a step do."""

    def step(self, closure=None):
        if closure is not None:
            closure()
        grads = [x.grad for group in self.param_groups for x in group["params"] if x.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([x.norm() for x in grads]))
        for grad in grads:
            grad /= norm
        return super().step()


class Lars(torch.optim.SGD):
    """Moves each parameter by a share of its own norm."""

    def step(self, closure=None):
        if closure is not None:
            closure()
        for x in (x for group in self.param_groups for x in group["params"] if x.grad is not None):
            x.grad *= x.detach().norm() / x.grad.norm().clamp(min=1e-12)
        return super().step()


class Clipped(torch.optim.SGD):
    """Clips the norm of all gradients at a threshold that gradients of the first batch stay below, or above."""

    def __init__(self, parameters, *, lr, most=math.inf, least=0.0):
        super().__init__(parameters, lr=lr)
        self.most, self.least = most, least

    def step(self, closure=None):
        if closure is not None:
            closure()
        grads = [x.grad for group in self.param_groups for x in group["params"] if x.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([x.norm() for x in grads])))
        for grad in grads:
            grad *= min(max(norm, self.least), self.most) / max(norm, 1e-30)
        return super().step()


class Hasty(torch.optim.SGD):
    """Shrinks the gradients that it has before its closure gives it new ones."""

    def step(self, closure=None):
        for x in (x for group in self.param_groups for x in group["params"] if x.grad is not None):
            x.grad /= 2
        return super().step(closure)


X = [torch.randn(8, 4, generator=torch.Generator().manual_seed(2))]


def test_model_when_something_in_it_counts_then_the_operator_behind_which_it_differs_is_named():
    model = Tower(Scaled())
    pieces = cut(model, X, SGD(model.parameters()))
    Counts.calls = 2
    with pytest.raises(ValueError, match=r"the output of top is not the same in the cut model"):
        hold(model, X, None, pieces=pieces)


def test_model_when_a_part_trains_what_the_whole_one_does_not_then_the_parameter_is_named():
    model = Tower()
    pieces = cut(model, X, SGD(model.parameters()))
    model.forward = lambda x: model.top(model.drop(model.between(model.bottom(x).detach()))).squeeze(1)
    with pytest.raises(
        ValueError, match=r"the gradient of bottom.weight is not the same .* .* none in the whole model"
    ):
        hold(model, X, None, pieces=pieces)


@pytest.mark.parametrize(
    ("rule", "splits", "fits"),
    [
        (SGD, {}, True),
        (ADAM, {"bottom": "output", "top": "input"}, True),
        (partial(torch.optim.Adagrad, lr=0.1), {"bottom": "output"}, True),
        (partial(torch.optim.Adam, lr=0.0), {}, True),
        (partial(Lars, lr=0.1), {}, True),
        (partial(NormClipped, lr=0.1), {}, False),
        (partial(NormClipped, lr=0.0), {}, False),
        (partial(Lars, lr=0.1), {"bottom": "output"}, False),
        (partial(Clipped, lr=0.1, most=1e3), {}, False),
        (partial(Clipped, lr=0.1, least=1e-2), {}, False),
        (partial(Hasty, lr=0.1), {}, False),
    ],
)
def test_optimizer_when_its_step_couples_what_lies_apart_then_refused_by_name(rule, splits, fits):
    model = Tower()
    optimizer = rule(model.parameters())
    apart = [LayerSplit(path, by, NUM_SERVERS) for path, by in splits.items()]
    if fits:
        hold(model, X, optimizer, splits=apart)
        return
    with pytest.raises(ValueError, match=rf"{type(optimizer).__name__} moves \w+\.\w+ otherwise .* Use"):
        hold(model, X, optimizer, splits=apart)


class Keeps(torch.optim.Optimizer):
    """Plain descent that keeps something of itself in one of several places."""

    def __init__(self, parameters, *, where):
        super().__init__(parameters, {"lr": 0.1, "seen": 0})
        self.where, self.steps = where, 0

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            closure()
        self.steps += self.where == "attribute"
        for group in self.param_groups:
            group["seen"] += self.where == "group"
            for x in (x for x in group["params"] if x.grad is not None):
                state = self.state[x]
                if not state:
                    state.update(step=torch.zeros(()), number=0, mean=torch.zeros_like(x))
                state["step"] += 1
                state["number"] += self.where == "number"
                if self.where == "rebound":
                    state["mean"] = state["mean"] * 0.9 + x.grad
                elif self.where == "late" and state["step"] > 2:
                    state["extra"] = torch.zeros_like(x)
                x -= group["lr"] * x.grad


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("nowhere", None),
        ("attribute", "its attribute steps"),
        ("group", "seen of a parameter group"),
        ("number", r"state\['number'\] of bottom.bias"),
        ("rebound", r"state\['mean'\] of bottom.bias"),
        ("late", r"state\['extra'\] of bottom.bias"),
    ],
)
def test_optimizer_when_a_step_keeps_what_servers_would_lose_then_refused_by_name(where, what):
    model = Tower()
    optimizer = Keeps(model.parameters(), where=where)
    if what is None:
        hold(model, X, optimizer)
        return
    with pytest.raises(ValueError, match=f"a step of Keeps changes {what}, and group servers keep"):
        hold(model, X, optimizer)


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("options", ["foreach", "fused", None])
def test_optimizer_when_it_is_one_of_torchs_own_then_it_holds(name, options):
    rule, model = getattr(torch.optim, name), Tower()
    if options is None or options in inspect.signature(rule).parameters:
        hold(model, X, rule(model.parameters(), lr=0.01, **({options: True} if options else {})))


class Remembers(nn.Module):
    """Has no modules in it, so that it is one call of a trace, and keeps something of its pass in training."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls, self.past = how, 0, []
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.calls += self.how == "calls"
            if self.how == "past":
                self.past.append(len(x))
            if self.how == "mean":
                self.mean = self.mean * 0.9 + x.detach().mean(0)
            elif self.how == "in place":
                self.mean.mul_(0.9).add_(x.detach().mean(0))
        return torch.relu(x)


@pytest.mark.parametrize("how", ["calls", "past", "mean", "in place"])
def test_module_when_its_pass_writes_an_attribute_then_refused_by_name(how):
    model = Tower(Remembers(how))
    if how == "in place":
        hold(model, X, SGD(model.parameters()))
        return
    with pytest.raises(ValueError, match=rf"the forward pass changes between.{how}, which a part on a group server"):
        hold(model, X, SGD(model.parameters()))


class Tied(nn.Module):
    """The layer that is called first has the weight of one that is registered before it, and changes its input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.late, self.early, self.top = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.early.weight = self.late.weight

    def forward(self, x):
        return self.top(torch.tanh(self.late(torch.tanh(self.early(x.add_(1.0)))))).squeeze(1)


@pytest.mark.parametrize("first", [1.0, float("nan")])
def test_model_when_it_shares_weights_and_changes_its_input_then_it_holds_and_the_input_stays(first):
    model, x = Tied(), X[0].clone()
    x[0, 0] = first
    hold(model, [x], SGD(model.parameters()))
    expected = X[0].clone()
    expected[0, 0] = first
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


def test_model_when_rounding_moves_a_sum_across_zero_before_a_relu_then_it_holds():
    model = Wide()
    x = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
    x[0] = 0.0  # whose first sum is the bias, -5e-8: one ulp of 1 is twice that
    pieces = cut(model, [x], SGD(model.parameters()))
    model.forward = lambda x: model.top(torch.relu(model.bottom(x) + 1e-7)).squeeze(1)
    hold(model, [x], None, pieces=pieces)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.top = nn.Linear(4, 64), nn.Linear(64, 1)
        nn.init.constant_(self.bottom.bias, 0.1)
        with torch.no_grad():
            self.bottom.bias[0] = -5e-8

    def forward(self, x):
        return self.top(torch.relu(self.bottom(x))).squeeze(1)


# --- What changes in the midst of training ---------------------------------------------------------------------------


class Memory:
    """A group server that does nothing but read its memory."""

    limits = SimpleNamespace(message_bytes=64)

    def __init__(self, memory):
        self.memory = memory

    def request(self, operation, *, arguments):
        assert operation == "read_memory"
        return SimpleNamespace(arrays=[self.memory[arguments["start"] : arguments["stop"]].clone()])


def test_buffer_when_a_callback_changes_it_before_weights_are_shown_then_it_stays_and_the_next_look_tells():
    model = Tower(nn.BatchNorm1d(6))
    pieces = cut(model, X, SGD(model.parameters()))
    parts = {device: own for device, own in pieces["parts"].items() if own.buffers}
    memories = {device: torch.zeros(GroupMemory(own).num_bytes, dtype=torch.uint8) for device, own in parts.items()}
    run = NetRun.__new__(NetRun)
    servers = GroupServers({x: Memory(memories[x]) for x in parts}, parts, pieces["layers"])
    run._brought, run.leads, run._shows = SimpleNamespace(servers=servers), True, False
    buffers = [name for own in parts.values() for name in own.buffers]
    run._watch = Watch(model, (), buffers=buffers, trained=set(model.parameters()))
    run._watch.look({})
    model.between.running_mean.fill_(3.0)
    run.show()
    assert torch.equal(model.between.running_mean, torch.full((6,), 3.0))
    assert torch.equal(model.between.running_var, torch.zeros(6))  # as the server has it
    assert run._watch.look({}) == {"between.running_mean"}


def test_model_when_the_training_step_calls_it_under_autocast_then_refused():
    run = NetRun.__new__(NetRun)
    run._cut = Tower()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"calls the model under torch\.autocast"),
    ):
        run._forward(*X)


class Wild(nn.Module):
    """Computes something else than its trace says, once it is wild."""

    def __init__(self):
        super().__init__()
        self.inner, self.wild = nn.ReLU(), False

    def forward(self, x):
        return self.inner(x) * (2.0 if self.wild and not isinstance(x, torch.fx.Proxy) else 1.0)


def follow(model, pieces, change, changed):
    """What a net of rank 0 does behind a change of its model."""
    bringing = Bringing.__new__(Bringing)
    server = SimpleNamespace(request=lambda operation: SimpleNamespace(value={"folder": tempfile.gettempdir()}))
    groups = SimpleNamespace(node_of=lambda group: 1)  # another machine's servers
    strategy = SimpleNamespace(is_global_zero=True, node_rank=0)
    dense = SimpleNamespace(strategy=strategy, fc_forward="float32", groups=groups, group_connections=lambda: [server])
    vars(bringing).update(_model=model, _optimizer=pieces["optimizer"], _dense=dense, _group=0, num_changes=0)
    servers = GroupServers({}, pieces["parts"], pieces["layers"])
    runners = {server_name(i): lambda part, inputs: lambda: part.module(*inputs) for i in range(NUM_SERVERS)}
    partitioned = pieces["partitioned"].with_runners(runners)
    brought = Brought(partitioned, None, servers, None, pieces["plan"], pieces["layers"], frozenset())
    change(model)
    return bringing.follow(brought, X, changed).partitioned


def test_model_when_its_parts_would_differ_behind_a_change_then_ended_by_the_name_of_both():
    model = Tower(Wild())
    pieces = cut(model, X, SGD(model.parameters()))
    with pytest.raises(
        ValueError, match=r"between.wild was changed in the midst .* it is now: the output of top is not the same"
    ):
        follow(model, pieces, lambda m: setattr(m.between, "wild", True), {"between.wild"})


class Nested(nn.Module):
    """A tower with a tower, of which one layer may be in pieces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.gain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 1)
        self.body[2].requires_grad_(False)

    def forward(self, x):
        return self.gain(self.body(x)).squeeze(1)


@pytest.mark.parametrize("splits", [{}, {"body.0": "output"}])
def test_model_when_a_module_is_replaced_and_a_frozen_layer_written_then_followed_with_layers_in_pieces_too(splits):
    model = Nested()
    optimizer = SGD(x for x in model.parameters() if x.requires_grad)
    pieces = cut(model, X, optimizer, splits=[LayerSplit(path, by, NUM_SERVERS) for path, by in splits.items()])

    def change(model):
        model.body[1] = nn.Hardtanh(-0.1, 0.1)
        model.body[2].weight.data.fill_(0.5)

    expected = model(X[0])
    torch.testing.assert_close(pieces["partitioned"](X[0]), expected)
    followed = follow(model, pieces, change, {"body.1", "body.2.weight"})
    assert not torch.allclose(model(X[0]), expected)
    torch.testing.assert_close(followed(X[0]), model(X[0]))


Body = type("Body", (nn.Sequential,), {})


@pytest.mark.parametrize(
    ("change", "changed", "reason"),
    [
        (lambda m: setattr(m, "body", Body(*m.body)), "body", "body has a layer in pieces, and is a Body now"),
        (lambda m: None, "body.0.factor", r"it is of a layer in pieces \(body.0.factor\)"),
    ],
)
def test_model_when_what_changes_is_in_pieces_or_around_them_then_ended_by_name(change, changed, reason):
    model = Nested()
    pieces = cut(model, X, SGD(model.parameters()), splits=[LayerSplit("body.0", "output", NUM_SERVERS)])
    with pytest.raises(ValueError, match=f"{changed} was changed in the midst of training, .*: {reason}"):
        follow(model, pieces, change, {changed})
    assert ("body.0", "factor") in pieces["layers"].whole_reads({("body.0.pieces.1", "factor")})
