"""A traced model in parts, each on one device, with tensors between them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, fx, nn

from lightning_recsys.partition.tracing import TracedModel
from lightning_recsys.placement.operator_plans.plan import OperatorPlan, levels


@dataclass(frozen=True, eq=False)
class Part:
    """Operators that are computed in one go on one device.

    Args:
        name: ``<device>.<level>``, unique in its model.
        device: ``trainer``, ``server0``, ``server1``, ...
        level: Parts of one level do not need each other's results; each needs some of a level below.
        module: ``forward(*inputs) -> outputs``, both tuples; it has the model's own submodules, under the names that
            they have there, so that names of parameters are those of the model. Can be pickled.
        inputs: Names of the values that it takes, in the order of its arguments.
        outputs: Names of the values that it returns, in their order; tensors, all of them.
    """

    name: str
    device: str
    level: int
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Runner = Callable[[Part, tuple[Any, ...]], Callable[[], tuple[Tensor, ...]]]
"""Has a part computed: takes the part and its inputs, returns what waits for its outputs and returns them."""


def run_here(part: Part, inputs: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Compute a part in this process, at once."""
    outputs: tuple[Tensor, ...] = part.module(*inputs)
    return lambda: outputs


class PartitionedModel:
    """A model that is computed in parts: call it as the model itself.

    Parts of one level do not need each other: those of group servers are begun first, then the trainer computes its
    own, and then it waits for the others.

    It shares the model's modules, and so its parameters and its mode of training or evaluation. It is no module: state
    dicts stay those of the model. To have the model computed in parts wherever it is called,
    ``model.forward = partitioned`` until ``del model.forward``.

    Args:
        parts: The parts in the order of their levels, with the trainer's last in each level.
        signature: Signature of the model's ``forward``, by which arguments are matched.
        arguments: The values that its arguments are, in their order.
        results: What it returns: a node of the traced model, or a container of such.

    Attributes:
        runners: What computes the parts of a device; :func:`run_here` where none is given.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        signature: inspect.Signature,
        arguments: Sequence[str],
        results: Any,
    ) -> None:
        self.parts = tuple(parts)
        self.runners: dict[str, Runner] = {}
        self._signature = signature
        self._arguments = tuple(arguments)
        self._results = results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for these arguments."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values: dict[str, Any] = dict(zip(self._arguments, bound.arguments.values(), strict=True))
        for _, level in groupby(self.parts, key=lambda part: part.level):
            begun = [(part, self._begin(part, values)) for part in level]
            for part, answer in begun:
                values.update(zip(part.outputs, answer(), strict=True))
        return fx.map_arg(self._results, lambda node: values[node.name])

    def with_runners(self, runners: Mapping[str, Runner]) -> PartitionedModel:
        """The same parts, of which other runners compute those of some devices."""
        other = copy.copy(self)
        other.runners = dict(runners)
        return other

    def _begin(self, part: Part, values: Mapping[str, Any]) -> Callable[[], tuple[Tensor, ...]]:
        return self.runners.get(part.device, run_here)(part, tuple(values[name] for name in part.inputs))

    def on(self, device: str) -> tuple[Part, ...]:
        """The parts of a device, in their order."""
        return tuple(part for part in self.parts if part.device == device)


def split(traced: TracedModel, plan: OperatorPlan) -> PartitionedModel:
    """Cut a model by a plan into as few parts as its operators' order allows, with one device each.

    A part has the operators of one device and one of the plan's levels
    (:func:`~lightning_recsys.placement.operator_plans.plan.levels`).

    Args:
        traced: The model.
        plan: A device for each of its operators.

    Raises:
        ValueError: the plan is not one of this model.
    """
    plan.check(traced.operators)
    level_of = levels(traced.operators, plan.devices)
    groups: dict[tuple[int, str], list[str]] = {}
    for operator in traced.operators.operators:
        groups.setdefault((level_of[operator.name], plan.devices[operator.name]), []).append(operator.name)
    signature = inspect.signature(partial(type(traced.model).forward, traced.model))  # which fx has traced
    nodes = (node for node in traced.fx_graph.nodes if node.op == "placeholder")
    placeholders = {str(node.target).lstrip("*"): node.name for node in nodes}  # keywords come before *args there
    ordered = sorted(groups.items())  # group servers come before the trainer
    return PartitionedModel(
        [_make_part(traced, names, device=device, level=level) for (level, device), names in ordered],
        signature=signature,
        arguments=[placeholders[name] for name in signature.parameters],
        results=traced.fx_graph.output_node().args[0],
    )


def _make_part(traced: TracedModel, names: Sequence[str], *, device: str, level: int) -> Part:
    chosen = {node for name in names for node in traced.nodes[name]}
    nodes = [node for node in traced.fx_graph.nodes if node in chosen]
    inputs = tuple(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in chosen))
    outputs = [node for node in nodes if any(user not in chosen for user in node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Part(
        f"{device}.{level}",
        device,
        level,
        fx.GraphModule(traced.model, graph, class_name="Part"),
        tuple(node.name for node in inputs),
        tuple(node.name for node in outputs),
    )
