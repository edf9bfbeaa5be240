"""Measured times of a traced model's operators, instead of estimates by counted operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.partition.sampling import in_mode, run_alone, run_sample
from lightning_recsys.partition.tracing import TracedModel, tensors_of
from lightning_recsys.placement.operators import Operator, OperatorGraph


def time_operators(
    traced: TracedModel,
    sample: Sequence[Any],
    *,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    repeats: int = 5,
) -> OperatorGraph:
    """Measure each operator's forward pass, and its backward pass with the update of its parameters.

    Operators run one after the other in evaluation mode, each with its inputs from a pass through the whole model. The
    times are processor times of the calling thread, so that other processes on the machine count little; have torch
    use one thread. Lookups are not placed and have no times. The model is not changed.

    Args:
        traced: The model.
        sample: Arguments of one call, of a batch of the usual size.
        make_optimizer: The optimizer of the training; it gets copies of each operator's parameters.
        repeats: Runs of each operator, after one to warm up; the shortest counts.

    Returns:
        The model's operators, with ``forward_seconds`` and ``backward_seconds``.

    Raises:
        ValueError: ``repeats`` is below 1, or the sample has no tensor whose first dimension is the batch.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    sampled = run_sample(traced.model, traced.fx_graph, sample)
    operators = []
    for operator in traced.operators.operators:
        if not operator.forward_flops:
            operators.append(operator)
            continue
        group = traced.nodes[operator.name]
        tensors = tensors_of(traced.model, group)
        parameters = [x for x in tensors.values() if isinstance(x, nn.Parameter) and x.requires_grad]
        copies = [nn.Parameter(x.detach().clone()) for x in parameters]
        optimizer = make_optimizer(copies) if copies else None
        forward, backward = [], []
        for _ in range(repeats + 1):
            with in_mode(traced.model, training=False), torch.enable_grad():
                began = time.thread_time()
                outputs, inputs = run_alone(traced.model, group, sampled)
                forward.append(time.thread_time() - began)
            backward.append(_backward(outputs, [*inputs, *parameters], parameters, copies, optimizer))
        operators.append(_with_times(operator, min(forward[1:]), min(backward[1:])))
    return replace(traced.operators, operators=tuple(operators))


def _with_times(operator: Operator, forward: float, backward: float) -> Operator:
    return replace(operator, forward_seconds=forward, backward_seconds=backward)


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
