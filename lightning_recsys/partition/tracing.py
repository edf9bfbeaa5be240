"""From a model to its operators, by ``torch.fx``."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.partition.fc_split import co_partition
from lightning_recsys.partition.grouping import group_nodes, module_of, tensors_of
from lightning_recsys.partition.lookups import is_lookup
from lightning_recsys.partition.sampling import Sampled, count_flops, in_mode, run_sample
from lightning_recsys.partition.tracer import (
    LooksIntoArgumentError,
    LostByTracingError,
    Recorded,
    Tracer,
    give_constants,
)
from lightning_recsys.placement.operators import Operator, OperatorGraph, Value

# fx patches nn.Module.__call__ and __getattr__ of the whole process while it traces.
_ONE_AT_A_TIME = threading.Lock()
_CHANGE = (
    "Decisions there may depend on settings, not on tensors or on the mode: use torch's functions (torch.where, and "
    "nn.Dropout instead of F.dropout), fixed sizes from __init__ and no loops over tensors."
)
_NOT_ITS_INPUT = (
    "two passes with the same arguments are made of different numbers, such as those of a random generator or a clock,"
    " and a traced model would keep the first ones. Draw with functions of a tensor, such as torch.rand_like."
)
_MAKES_FEATURES = "it makes SparseFeatures, which look at what their tensors hold."
_TAKE_FEATURES = "Make them in the training step, and call the model with them."


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A model's graph of torch calls, and the same as operators.

    Args:
        model: The model itself; its parameters are not copied.
        fx_graph: Its calls, modules without submodules as one each.
        operators: What is placed, with costs of the sample batch.
        nodes: For each operator its calls, in their order.
        reads: What the calls were made of besides their arguments: paths of modules, and names of their attributes.
    """

    model: nn.Module
    fx_graph: fx.Graph
    operators: OperatorGraph
    nodes: Mapping[str, tuple[fx.Node, ...]]
    reads: frozenset[tuple[str, str]]


def trace(model: nn.Module, sample: Sequence[Any], *, whole: Sequence[str] = ()) -> TracedModel:
    """Write down what a model computes, operator by operator.

    A module without submodules is one operator, and so is one of torch's own layers; other modules are traced through.
    Calls that cannot be on different devices make up one operator: those that read the same parameter, those that
    change a tensor in place, and those that hand on what is no tensor, such as a shape.

    Call it where no other thread runs a module: ``torch.fx`` patches ``nn.Module`` for the whole process meanwhile.

    Args:
        model: Its ``forward`` takes tensors, or what embedding collections take.
        sample: Arguments of one call, of a batch of the usual size: costs are those of this batch. The model is run
            once, in evaluation mode, and not changed.
        whole: Paths of modules to keep as one operator each, though they have submodules.

    Raises:
        ValueError: the model cannot be traced; names the module and says what to change.
    """
    unknown = [path for path in whole if path not in dict(model.named_modules())]
    if unknown:
        raise ValueError(f"the model has no modules {unknown} to keep whole.")
    recorded = _trace(model, whole, sample)
    _check_mode(model, recorded, whole, sample)
    fx_graph = recorded.graph
    co_partition(model, fx_graph)
    sampled = run_sample(model, fx_graph, sample)
    nodes = group_nodes(model, fx_graph, tensors=sampled.tensors)
    return TracedModel(model, fx_graph, _operator_graph(model, fx_graph, nodes, sampled), nodes, recorded.reads)


def check_traceable(model: nn.Module) -> None:
    """Refuse a model that cannot be traced, whatever it is called with; :func:`trace` may find more.

    Without a sample nobody knows which arguments are dicts, tuples or ``None``, so a model that looks into one is not
    refused here.

    Raises:
        ValueError: names the module and says what to change.
    """
    try:
        recorded = _trace(model, (), None)
    except ValueError as error:
        if isinstance(error.__cause__, LooksIntoArgumentError):
            return
        raise
    _check_mode(model, recorded, (), None)


def _trace(model: nn.Module, whole: Sequence[str], sample: Sequence[Any] | None) -> Recorded:
    tracer = Tracer(whole, sample)
    try:
        with _ONE_AT_A_TIME:
            return tracer.record(model)
    except Exception as error:
        path, module = tracer.failed or ("", model)
        makes = _in_sparse_features(error)
        reason, change = (_MAKES_FEATURES, _TAKE_FEATURES) if makes else (str(error), _CHANGE)
        if isinstance(error, LostByTracingError):
            reason, change = str(error), error.change
        raise ValueError(_refusal(path, module, reason, change)) from error


def _in_sparse_features(error: Exception) -> bool:
    """Whether it was raised while a ``SparseFeatures`` was made."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(isinstance(x.get("self"), SparseFeatures) or x.get("cls") is SparseFeatures for x in frames)


def _refusal(path: str, module: nn.Module, reason: str, change: str = _CHANGE) -> str:
    where = f"{path} ({type(module).__name__})" if path else f"the model itself ({type(module).__name__})"
    has_lookup = any(map(is_lookup, module.modules()))
    keep = "" if has_lookup or not path else f" Or keep the module whole, on one device: whole=[{path!r}]."
    return f"{where} cannot be traced, so its operators cannot be placed: {reason} {change}{keep}"


def _check_mode(model: nn.Module, recorded: Recorded, whole: Sequence[str], sample: Sequence[Any] | None) -> None:
    """Refuse a forward that another pass, or one in the other mode, makes otherwise: the graph would keep the first."""
    again = _trace(model, whole, sample)
    with in_mode(model, training=not model.training):
        other = _trace(model, whole, sample)
    give_constants(model, recorded.constants)
    for second, reason in ((again, _NOT_ITS_INPUT), (other, "training and evaluation compute different things.")):
        for one, two in zip_longest(recorded.graph.nodes, second.graph.nodes):
            if one is None or two is None or not _same_call(one, two, recorded, second):
                path = module_of(one or two)
                raise ValueError(_refusal(path, model.get_submodule(path), reason))


def _same_call(one: fx.Node, two: fx.Node, first: Recorded, second: Recorded) -> bool:
    if one.op == two.op == "get_attr" and one.target in first.constants and two.target in second.constants:
        return torch.equal(first.constants[str(one.target)], second.constants[str(two.target)])
    return one.format_node() == two.format_node()


def _operator_graph(
    model: nn.Module, fx_graph: fx.Graph, nodes: Mapping[str, tuple[fx.Node, ...]], sampled: Sampled
) -> OperatorGraph:
    operator_of = {node: name for name, group in nodes.items() for node in group}
    placeholders = [node for node in fx_graph.nodes if node.op == "placeholder"]
    returned = list(fx_graph.output_node().all_input_nodes)
    crossing = [
        node
        for node in fx_graph.nodes
        if node.op != "output"
        and (node in returned or any(operator_of.get(user) != operator_of.get(node) for user in node.users))
    ]
    values = [
        Value(
            node.name,
            num_bytes(sampled.tensors[node]) if node in sampled.tensors else 0,
            operator_of.get(node),
            node in sampled.tensors and sampled.tensors[node].requires_grad,
        )
        for node in crossing
    ]
    no_tensors = {node for node in [*placeholders, *returned] if node not in sampled.tensors}
    operators = tuple(
        _operator(model, name, group, sampled, no_tensors=no_tensors, operator_of=operator_of)
        for name, group in nodes.items()
    )
    names = {value.name for value in values}
    results = tuple(node.name for node in returned if node.name in names)
    return OperatorGraph(operators, tuple(values), results, sampled.batch_size)


def _operator(
    model: nn.Module,
    name: str,
    group: Sequence[fx.Node],
    sampled: Sampled,
    *,
    no_tensors: set[fx.Node],
    operator_of: Mapping[fx.Node, str],
) -> Operator:
    modules = [model.get_submodule(str(node.target)) for node in group if node.op == "call_module"]
    looks_up = any(map(is_lookup, modules))
    inputs = dict.fromkeys(x for node in group for x in node.all_input_nodes if operator_of.get(x) != name)
    tensors = {} if looks_up else tensors_of(model, group)
    forward, backward = (0.0, 0.0) if looks_up else count_flops(model, group, sampled, list(tensors.values()))
    made = [sampled.tensors[node] for node in group if node.op != "get_attr" and node in sampled.tensors]
    return Operator(
        name,
        " + ".join(dict.fromkeys(_kind(model, node) for node in group if node.op != "get_attr")),
        tuple(node.name for node in inputs),
        forward_flops=forward,
        backward_flops=backward,
        weight_bytes=sum(map(num_bytes, tensors.values())),
        activation_bytes=sum(map(num_bytes, made)),
        num_calls=sum(node.op != "get_attr" for node in group),
        owns_parameters=any(isinstance(tensor, nn.Parameter) for tensor in tensors.values()),
        trainer_only=looks_up or any(node in no_tensors for node in [*group, *inputs]),
    )


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def _kind(model: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))).__name__
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
