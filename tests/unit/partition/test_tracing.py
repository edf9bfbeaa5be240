"""Models as operators: what is one, what it costs, and what cannot be traced."""

import pickle
import re
import threading
import time
from collections import UserDict, defaultdict
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from traced_models import BATCH, MODELS, make

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowSGD
from lightning_recsys.partition.parts import split
from lightning_recsys.partition.tracer import kind_of
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.operator_plans.plan import OperatorPlan


@pytest.mark.parametrize("name", MODELS)
def test_trace_then_every_call_is_in_one_operator_and_the_model_is_unchanged(name):
    model, arguments = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    traced = trace(model, arguments)

    nodes = [node for group in traced.nodes.values() for node in group]
    assert sorted(map(str, nodes)) == sorted(str(n) for n in traced.fx_graph.nodes if n.op not in "placeholder output")
    assert list(traced.nodes) == [operator.name for operator in traced.operators.operators]
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_trace_then_weights_are_counted_once_and_lookups_stay_on_trainers(name):
    model, arguments = make(name)
    operators = trace(model, arguments).operators
    dense = sum(4 * x.numel() for x in model.parameters() if x.requires_grad)
    buffers = sum(x.numel() * x.element_size() for key, x in model.named_buffers() if "embedding_bags" not in key)
    assert sum(operator.weight_bytes for operator in operators.operators) == dense + buffers
    lookups = [x for x in operators.operators if "EmbeddingBagCollection" in x.kind]
    assert lookups
    assert all(x.trainer_only and not x.owns_parameters for x in lookups)
    assert operators.batch_size == BATCH


def test_trace_then_flops_and_bytes_are_those_of_the_formula():
    model, arguments = make("dlrm")
    graph = trace(model, arguments).operators
    # 3 -> 5 -> 4, then 6 vectors' 15 pairs and the 4 -> 6 -> 4 -> 1. The numeric features need no gradient.
    assert graph.by_name["bottom.0"].forward_flops == 2 * BATCH * 3 * 5
    assert graph.by_name["bottom.0"].backward_flops == 2 * BATCH * 3 * 5
    assert graph.by_name["top.0"].forward_flops == 2 * BATCH * 19 * 6
    assert graph.by_name["top.0"].backward_flops == 2 * 2 * BATCH * 19 * 6
    assert graph.by_name["top.0"].weight_bytes == 4 * (19 * 6 + 6)
    assert graph.by_name["top.0"].activation_bytes == 4 * BATCH * (6 + 6)
    assert graph.value_of["embeddings"].num_bytes == 4 * BATCH * 5 * 4
    assert graph.value_of["embeddings"].has_gradient
    assert not graph.value_of["dense"].has_gradient
    assert graph.results == ("squeeze",)


def test_trace_when_cross_layers_follow_each_other_then_each_counts_its_own_backward_pass():
    model, arguments = make("dcn_v2_full")
    graph = trace(model, arguments).operators
    counts = {graph.by_name[f"cross.layers.{i}"].backward_flops for i in range(3)}
    assert counts == {2 * 2 * BATCH * 23 * 23}


class Tied(nn.Module):
    """The same layer twice, with another between: neither may be elsewhere."""

    def __init__(self):
        super().__init__()
        self.shared, self.between, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.after(self.shared(self.between(self.shared(x)).relu()))


def test_trace_when_a_parameter_is_read_twice_then_all_in_between_is_one_operator():
    traced = trace(Tied(), [torch.ones(3, 4)])
    assert list(traced.nodes) == ["shared", "after"]
    assert traced.operators.by_name["shared"].kind == "Linear + relu"
    assert traced.operators.by_name["shared"].weight_bytes == 2 * 4 * 20


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(3, 1)

    def forward(self, x):
        hidden = self.one(x)
        left, right = hidden.chunk(2, 1)
        return self.two((left * right).view(x.shape[0], -1)).squeeze(1).add_(1)


def test_trace_when_shapes_and_tuples_are_handed_on_then_only_tensors_go_between_operators():
    traced = trace(Shapes(), [torch.ones(3, 4)])
    values = {value.name: value.num_bytes for value in traced.operators.values}
    assert all(values.values()), values
    assert any("chunk" in operator.kind and "getitem" in operator.kind for operator in traced.operators.operators)
    assert any("squeeze" in operator.kind and "add_" in operator.kind for operator in traced.operators.operators)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x):
        return self.scale(x) if x.sum() > 0 else x


class Mode(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.scale(x), 0.5, self.training)


class Gated(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.below, self.gate, self.above = nn.Linear(4, 4), nn.Sequential(inner), nn.Linear(4, 1)

    def forward(self, x):
        return self.above(self.gate(self.below(x)))


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Branches(), "gate.0 (Branches) cannot be traced, so its operators cannot be placed: symbolically traced"),
        (Mode(), "gate.0 (Mode) cannot be traced, so its operators cannot be placed: training and evaluation compute"),
    ],
)
def test_trace_when_a_module_decides_by_values_then_names_it_and_it_can_be_kept_whole(inner, message):
    model = Gated(inner)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        trace(model, [torch.ones(3, 4)])
    assert "whole=['gate.0']" in str(caught.value)

    traced = trace(model, [torch.ones(3, 4)], whole=["gate.0"])
    assert list(traced.nodes) == ["below", "gate.0", "above"]


@pytest.mark.parametrize(
    ("arguments", "whole", "message"),
    [
        ([torch.ones(0, 4)], [], "at least one example"),
        ([torch.ones(3, 4)], ["tower"], "no modules ['tower']"),
    ],
)
def test_trace_when_asked_for_what_is_not_there_then_says_so(arguments, whole, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trace(Tied(), arguments, whole=whole)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        field = EmbeddingBagConfig(name="f", num_embeddings=9, embedding_dim=4, feature_names=["f"])
        self.rows, self.top = EmbeddingBagCollection([field], optimizer=RowSGD(0.1)), nn.Linear(4, 1)

    def forward(self, sparse):
        return self.top(self.rows(sparse).sum(1))


def test_trace_when_there_are_sparse_features_alone_then_examples_are_counted_by_their_bags():
    sparse = SparseFeatures(("f",), torch.tensor([3, 1, 2]), lengths=torch.tensor([2, 0, 1, 0]))
    graph = trace(Sums(), [sparse]).operators
    assert graph.batch_size == 4
    assert graph.by_name["top"].forward_flops == 2 * 4 * 4


def test_trace_when_done_then_modules_are_called_as_before():
    original = nn.Module.__call__
    model, arguments = make("wide_deep")
    threads = [threading.Thread(target=trace, args=(model, arguments)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert nn.Module.__call__ is original
    assert isinstance(model(*arguments), torch.Tensor)


class Distilled(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.teacher, self.student, self.context = nn.Linear(4, 1), nn.Linear(4, 1), context
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        with self.context():
            taught = self.teacher(x) * self.scale
        return (self.student(x) * self.scale + taught).squeeze(1)


def without_gradients():
    return torch.autograd.set_grad_enabled(False)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, without_gradients])
def test_trace_when_gradients_are_switched_off_then_none_goes_there_once_it_is_pickled_either(context):
    x = torch.randn(3, 4, requires_grad=True)
    traced = trace(model := Distilled(context), [x])
    parts = split(traced, OperatorPlan(dict.fromkeys(traced.nodes, "server0")))
    module = pickle.loads(pickle.dumps(parts.parts[0].module))
    (output,) = module(x)
    output.sum().backward()
    assert torch.equal(output, model(x))
    assert module.teacher.weight.grad is None
    # d/dx of scale * (student(x) + teacher(x)), of which the second has none; and so for the scale
    torch.testing.assert_close(x.grad, (2 * model.student.weight).expand(3, 4))
    torch.testing.assert_close(module.scale.grad, model.student(x).sum())


class Autocast(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.t()


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.rand(4)


class Clock(nn.Module):
    def forward(self, x):
        return x * time.perf_counter()


class Writes(nn.Module):
    def forward(self, x):
        self.last = x.relu()
        return self.last


class Constants(nn.Module):
    def forward(self, x):
        return x * torch.arange(4)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Autocast, r"gate.0 \(Autocast\) .* uses torch.autocast, .* Leave torch.autocast out"),
        (Draws, r"gate.0 \(Draws\) .* two passes .* different numbers"),
        (Clock, r"gate.0 \(Clock\) .* two passes .* different numbers"),
        (Writes, r"gate.0 \(Writes\) .* its forward changes last"),
    ],
)
def test_trace_when_a_module_does_what_a_graph_would_not_do_again_then_refused_by_name(inner, message):
    model = Gated(inner())
    model.gate[0].child = nn.Identity()  # a module without any is called whole
    with pytest.raises(ValueError, match=message):
        trace(model, [torch.ones(3, 4)])
    assert "last" not in vars(model.gate[0])


class ReadsContainers(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.limit, self.config = ("a", "b"), 3, {"rate": 0.5}
        self.top, self.constants = nn.Linear(4, 1), Constants()
        self.constants.child = nn.Identity()

    def forward(self, batch, *more, mask=None, mode="sum"):
        x = sum(batch[name] for name in self.names if name in batch) * self.config["rate"]
        for y in more:
            x = x + y
        if mask is not None:
            x = x * mask
        return {"logits": self.top(self.constants(x)).squeeze(1), mode: x}


def test_trace_when_arguments_are_containers_then_looked_into_and_what_is_read_is_told():
    a, b, c = torch.randn(3, 3, 4).unbind()
    model, batch = ReadsContainers(), {"a": a, "b": b, "unused": c}
    traced = trace(model, [batch, (c,), None, "sum"])
    parts = split(
        traced,
        OperatorPlan({x.name: "server0" if x.owns_parameters else "trainer" for x in traced.operators.operators}),
    )
    for key, expected in model(batch, c).items():
        assert torch.equal(parts(batch, c)[key], expected)
    assert {("", "names"), ("", "config"), ("top", "in_features")} <= traced.reads
    assert not {("", "limit"), ("", "top"), ("", "forward"), ("top", "weight")} & traced.reads
    assert traced.operators.batch_size == 3
    assert trace(model, [batch, (c,), None, "sum"]).operators == traced.operators


class ByTrainer(pl.LightningModule):
    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(4, 1), read

    def forward(self, x):
        return self.layer(x) * self.read(self)


@pytest.mark.parametrize(
    ("read", "names"),
    [
        (lambda task: task.trainer.current_epoch, {"trainer.current_epoch"}),
        (lambda task: task.global_step, {"trainer.global_step"}),
        (lambda task: 1.0, set()),
    ],
)
def test_trace_when_a_forward_reads_the_trainer_then_the_names_are_told(read, names):
    task = ByTrainer(read)
    task._trainer = SimpleNamespace(current_epoch=2, global_step=7, max_epochs=3)
    reads = trace(task, [torch.ones(3, 4)]).reads
    assert {name for path, name in reads if name.startswith("trainer.")} == names
    assert type(task._trainer) is SimpleNamespace


class SumsItems(nn.Module):
    def __init__(self, part="items"):
        super().__init__()
        self.layer, self.part = nn.Linear(4, 1), part

    def forward(self, batch):
        found = getattr(batch, self.part)() if self.part else batch
        return self.layer(sum(x[1] if self.part == "items" else batch[x] for x in found))


class OwnMapping(UserDict):
    """A mapping that a forward may ask for more than its items."""


def test_trace_when_a_forward_goes_over_a_defaultdict_then_it_is_taken_as_any_dict_is():
    model, batch = SumsItems(), defaultdict(list, a=torch.randn(3, 4), b=torch.randn(3, 4))
    traced = trace(model, [batch])
    parts = split(traced, OperatorPlan({x: "server0" if x == "layer" else "trainer" for x in traced.nodes}))
    assert torch.equal(parts(batch), model(batch))
    assert kind_of(batch) == kind_of(defaultdict(None, batch)) != kind_of(defaultdict(None, a=batch["a"]))


@pytest.mark.parametrize("part", ["items", "keys", ""])
def test_trace_when_a_forward_goes_over_another_mapping_then_its_type_is_named(part):
    batch = OwnMapping(a=torch.randn(3, 4), b=torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"items of an argument of the type OwnMapping, .* Call the model with a dict"):
        trace(SumsItems(part), [batch])
