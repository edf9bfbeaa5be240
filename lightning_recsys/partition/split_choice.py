"""Which fully connected layers to split, by what that does to the busiest device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx, nn

from lightning_recsys.errors import OperatorRoomError
from lightning_recsys.partition.fc_split import (
    LayerSplit,
    is_elementwise,
    num_inputs,
    num_outputs,
    output_dims,
    refusal,
    split_layers,
)
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.loads import LoadModel
from lightning_recsys.placement.machines import GroupMachines
from lightning_recsys.placement.tagging import place_operators

_LARGE = 0.05  # of the weights of all layers that could be split: what is smaller is not worth a trace
_GAIN = 0.01  # of the bottleneck's busy time: what brings less is not worth more pieces
Cost = tuple[float, float]


def choose_splits(
    model: nn.Module, sample: Sequence[Any], machines: GroupMachines, *, whole: Sequence[str] = ()
) -> list[LayerSplit]:
    """Split layers as long as that relieves the bottleneck of the greedy placement, those with the most weights first.

    Each is tried in as many pieces as there are group servers: with the layer that follows it, where what is between
    them is wider than what goes in and what comes out (co-partitioning); by output; and by input. A model that has no
    room on the servers otherwise is split until it has.

    Args:
        model: The whole model.
        sample: Arguments of one call of the model, as for :func:`~lightning_recsys.partition.tracing.trace`.
        machines: The trainers and group servers of a group.
        whole: Paths of modules to keep as one operator each, as for :func:`~lightning_recsys.partition.tracing.trace`.

    Raises:
        ValueError: the model cannot be traced.

    Reference: Huang et al. 2021, "Hierarchical Training", section 4.1.
    """
    if machines.num_servers < 2:
        return []
    graph = trace(model, sample, whole=whole).fx_graph
    layers = {node: _num_weights(model, node) for node in graph.nodes if _is_layer(model, node)}
    smallest = _LARGE * sum(layers.values())
    chosen: list[LayerSplit] = []
    cost = _cost(model, chosen, sample, machines, whole)
    for node in sorted(layers, key=layers.__getitem__, reverse=True):
        best: list[LayerSplit] = []
        for option in _options(model, node, machines.num_servers) if layers[node] >= smallest else ():
            if {split.path for split in option} & {split.path for split in chosen}:
                continue
            new = _cost(model, [*chosen, *option], sample, machines, whole)
            if new[0] < cost[0] or (new[0] == cost[0] and new[1] < (1 - _GAIN) * cost[1]):
                best, cost = option, new
        chosen += best
    return chosen


def _cost(
    model: nn.Module,
    splits: Sequence[LayerSplit],
    sample: Sequence[Any],
    machines: GroupMachines,
    whole: Sequence[str],
) -> Cost:
    """Bytes for which there is no room, and the busy time of the bottleneck."""
    graph = trace(split_layers(model, splits).model, sample, whole=whole).operators
    try:
        plan = place_operators(graph, machines)
    except OperatorRoomError as error:
        return float(error.needed), math.inf
    loads = LoadModel(graph, machines)
    return 0.0, max(loads.busy_seconds(loads.loads(plan.devices)).values())


def _num_weights(model: nn.Module, node: fx.Node) -> int:
    return sum(x.numel() for x in model.get_submodule(str(node.target)).parameters())


def _is_layer(model: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and output_dims(model.get_submodule(str(node.target))) is not None


def _options(model: nn.Module, node: fx.Node, num_pieces: int) -> Iterable[list[LayerSplit]]:
    path, following = str(node.target), _next_layer(model, node)
    by_output, by_input = LayerSplit(path, "output", num_pieces), LayerSplit(path, "input", num_pieces)
    options = [[by_output], [by_input]]
    if following is not None:
        layer, after = (model.get_submodule(x) for x in (path, following))
        if num_inputs(after) > max(num_inputs(layer), num_outputs(after)):
            options.insert(0, [by_output, LayerSplit(following, "input", num_pieces)])
    return [option for option in options if not any(refusal(model, split) for split in option)]


def _next_layer(model: nn.Module, node: fx.Node) -> str | None:
    """The layer that reads what another makes, with elementwise layers between."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if _is_layer(model, node):
            return str(node.target)
        if not is_elementwise(model, node):
            return None
    return None
