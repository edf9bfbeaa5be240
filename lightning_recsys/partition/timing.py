"""Measured times of a traced model's operators, instead of estimates by counted operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from lightning_recsys.partition.grouping import tensors_of
from lightning_recsys.partition.sampling import Sampled, in_mode, run_alone, run_sample
from lightning_recsys.partition.tracing import TracedModel
from lightning_recsys.placement.operators import OperatorGraph


def time_operators(
    traced: TracedModel,
    sample: Sequence[Any],
    *,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    repeats: int = 5,
) -> OperatorGraph:
    """Measure each operator's forward pass, and its backward pass with the update of its parameters.

    Operators run one after the other in evaluation mode, each with its inputs from a pass through the whole model. To
    run one alone costs something of its own (an interpreter, a backward pass and an update for each operator), which
    is most of the time of small ones. So all of them are also run at once, with one backward pass and one update, as
    devices do it with theirs; that time is what is dealt out to the operators, in proportion to their own.

    The times are processor times of the calling thread, so that other processes on the machine count little; have torch
    use one thread. Lookups are not placed and have no times. The model is not changed.

    Args:
        traced: The model.
        sample: Arguments of one call, of a batch of the usual size.
        make_optimizer: The optimizer of the training; it gets copies of each operator's parameters.
        repeats: Runs of each operator, and of all at once, after one to warm up; the shortest counts.

    Returns:
        The model's operators, with ``forward_seconds`` and ``backward_seconds``.

    Raises:
        ValueError: ``repeats`` is below 1, or the sample has no tensor whose first dimension is the batch.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    sampled = run_sample(traced.model, traced.fx_graph, sample)
    computing = {x.name: traced.nodes[x.name] for x in traced.operators.operators if x.forward_flops}
    if not computing:
        return traced.operators
    times = {name: _time(traced, nodes, sampled, make_optimizer, repeats) for name, nodes in computing.items()}
    order = {node: place for place, node in enumerate(traced.fx_graph.nodes)}
    everything = sorted((node for nodes in computing.values() for node in nodes), key=order.__getitem__)
    whole = _time(traced, everything, sampled, make_optimizer, repeats, last_output_only=True)
    forward, backward = (whole[i] / (sum(own[i] for own in times.values()) or 1.0) for i in (0, 1))
    operators = tuple(
        replace(x, forward_seconds=forward * times[x.name][0], backward_seconds=backward * times[x.name][1])
        if x.name in times
        else x
        for x in traced.operators.operators
    )
    return replace(traced.operators, operators=operators)


def _time(
    traced: TracedModel,
    nodes: Sequence[fx.Node],
    sampled: Sampled,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    repeats: int,
    *,
    last_output_only: bool = False,
) -> tuple[float, float]:
    """Seconds of the forward pass of some calls, and of their backward pass with the update of their parameters."""
    parameters = [
        x for x in tensors_of(traced.model, nodes).values() if isinstance(x, nn.Parameter) and x.requires_grad
    ]
    copies = [nn.Parameter(x.detach().clone()) for x in parameters]
    optimizer = make_optimizer(copies) if copies else None
    forward, backward = [], []
    for _ in range(repeats + 1):
        with in_mode(traced.model, training=False), torch.enable_grad():
            began = time.thread_time()
            outputs, inputs = run_alone(traced.model, nodes, sampled)
            forward.append(time.thread_time() - began)
        wanted = outputs[-1:] if last_output_only else outputs
        backward.append(_backward(wanted, [*inputs, *parameters], parameters, copies, optimizer))
    return min(forward[1:]), min(backward[1:])


def _backward(
    outputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    copies: Sequence[nn.Parameter],
    optimizer: Optimizer | None,
) -> float:
    if not outputs or not wanted:
        return 0.0
    ones = [torch.ones_like(x) for x in outputs]
    began = time.thread_time()
    grads = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    if optimizer is not None:
        for copy, grad in zip(copies, grads[len(grads) - len(parameters) :], strict=True):
            copy.grad = grad
        optimizer.step()
    return time.thread_time() - began
