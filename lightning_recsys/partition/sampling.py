"""One pass over a traced model with a sample batch: sizes and floating-point operations of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.embeddings.sparse_features import find
from lightning_recsys.partition.lookups import is_lookup, trains_rows
from lightning_recsys.partition.tracer import named_arguments


@dataclass(frozen=True, eq=False)
class Sampled:
    """The calls that a sample batch made.

    Args:
        values: The result of each call, and the arguments.
        batch_size: Number of examples in the batch.
    """

    values: Mapping[fx.Node, Any]
    batch_size: int

    @cached_property
    def tensors(self) -> dict[fx.Node, Tensor]:
        """The results that are tensors; they know whether they have gradients."""
        return {node: value for node, value in self.values.items() if isinstance(value, Tensor)}


def run_sample(model: nn.Module, graph: fx.Graph, sample: Sequence[Any]) -> Sampled:
    """Run a traced model once, in evaluation mode, without a trace on its parameters, rows and running values.

    Raises:
        ValueError: the sample has no tensor whose first dimension is the batch.
    """
    batch_size = _batch_size(sample)
    if not batch_size:
        raise ValueError(
            "placement needs a sample batch of at least one example, with a tensor or SparseFeatures in its arguments;"
            f" got {[type(x).__name__ for x in sample]}."
        )
    runner = _Runner(model, garbage_collect_values=False, graph=graph)
    runner.sample = named_arguments(model, tree_map_only(Tensor, _copied, list(sample)))
    with in_mode(model, training=False), torch.enable_grad():
        runner.run()
    return Sampled({node: value for node, value in runner.env.items() if node.op != "output"}, batch_size)


def _batch_size(sample: Sequence[Any]) -> int:
    """Examples of a batch: those of its sparse features, or the first dimension of the first tensor."""
    sparse = (x.batch_size for x in find(list(sample), SparseFeatures))
    dense = (len(x) for x in find(list(sample), Tensor) if x.dim())
    return next((size for size in (*sparse, *dense) if size), 0)


def count_flops(
    model: nn.Module, group: Sequence[fx.Node], sampled: Sampled, parameters: Sequence[Tensor]
) -> tuple[float, float]:
    """Floating-point operations of an operator, forward and backward, by torch's counter.

    That knows matrix products only; everything else counts as one operation for each number of the result.

    Args:
        model: The model that the calls are of.
        group: The calls that make up the operator.
        sampled: The values that these calls read in the sample batch.
        parameters: The parameters of the operator.
    """
    with in_mode(model, training=False), torch.enable_grad(), _counter() as counter:
        made, read = _run_alone(model, group, sampled)
    forward = max(counter.get_total_flops(), sum(x.numel() for x in made))
    outputs = [x for x in made if x.requires_grad]
    wanted = [x for x in [*read, *parameters] if x.requires_grad and x.is_leaf]
    if not outputs or not wanted:
        return float(forward), 0.0
    with _counter() as counter:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(x) for x in outputs], allow_unused=True)
    return float(forward), float(max(counter.get_total_flops(), sum(x.numel() for x in outputs)))


def run_alone(model: nn.Module, group: Sequence[fx.Node], sampled: Sampled) -> tuple[list[Tensor], list[Tensor]]:
    """Run one operator with its inputs from the sample batch, cut off from what made them.

    Args:
        model: The model, in the mode that is wanted.
        group: The calls that make up the operator.
        sampled: The values that these calls read in the sample batch.

    Returns:
        What it makes that has a gradient, and its inputs that get one.
    """
    made, read = _run_alone(model, group, sampled)
    inputs = {id(x): x for x in read if x.requires_grad and x.is_leaf and not isinstance(x, nn.Parameter)}
    return [x for x in made if x.requires_grad], list(inputs.values())


def _run_alone(model: nn.Module, group: Sequence[fx.Node], sampled: Sampled) -> tuple[list[Tensor], list[Tensor]]:
    """All tensors that an operator makes, and all that its calls read."""
    runner = _Runner(model, garbage_collect_values=False, graph=group[0].graph)
    runner.env = {node: _cut_off(value) for node, value in sampled.values.items() if node not in group}
    for node in group:
        runner.env[node] = runner.run_node(node)
    made = [x for node in group if node.op != "get_attr" and isinstance(x := runner.env[node], Tensor)]
    read = [x for node in group for x in map(runner.env.get, node.all_input_nodes) if isinstance(x, Tensor)]
    return made, read


def _cut_off(value: Any) -> Any:
    """The same tensor, where the backward pass of one operator ends."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _copied(x: Tensor) -> Tensor:
    """The same numbers, which a forward may change in place."""
    return x.detach().clone().requires_grad_(x.requires_grad)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode for a while; then every module has its own back."""
    modes = {module: module.training for module in model.modules()}  # parents first
    try:
        model.train(training)
        yield
    finally:
        for module, mode in modes.items():
            module.train(mode)


class _Runner(fx.Interpreter):
    sample: Mapping[str, Any] = {}

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.sample[target.lstrip("*")]

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if not is_lookup(module):
            return super().call_module(target, args, kwargs)
        with torch.no_grad():  # a lookup that no gradient follows
            result = module(*args, **kwargs)
        return result.requires_grad_() if isinstance(result, Tensor) and trains_rows(module) else result


def _counter() -> FlopCounterMode:
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    known = {} if onednn is None else {onednn: _onednn_flops}
    return FlopCounterMode(display=False, custom_mapping=known)


def _onednn_flops(input_shape: torch.Size, weight_shape: torch.Size, *_: Any, **__: Any) -> int:
    """The operations of a linear layer for ``input [B, I]`` and ``weight [O, I]``."""
    return 2 * input_shape[0] * input_shape[1] * weight_shape[0]
