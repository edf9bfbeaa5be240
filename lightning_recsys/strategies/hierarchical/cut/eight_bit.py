"""Fully connected layers whose forward pass is computed in 8 bits; the backward pass stays in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from lightning_recsys.compression import COSTS, Int8
from lightning_recsys.compression.int8 import LEVELS
from lightning_recsys.partition.parts import Part
from lightning_recsys.placement.machines import Processor
from lightning_recsys.placement.operators import Operator, OperatorGraph

FCForward = Literal["float32", "int8"]
LEAST_INPUTS = 5  # narrower layers stay in float32: their rows have no 8-bit form
MOST_INPUTS = (2**31 - 1) // LEVELS**2  # whose sum is sure to fit into 32 bits: 133,144
SPEEDUP = 3.0  # of a product in 8 bits over one in float32, by instructions such as AVX-512's VNNI

_CODEC = Int8()


class EightBitLinear(nn.Linear):
    r"""A fully connected layer whose forward pass multiplies 8-bit numbers.

    .. math:: y_{ij} = s_i\,t_j \sum_k \hat x_{ik}\,\hat w_{jk} + b_j, \qquad \hat x_{ik} = \mathrm{round}(x_{ik} / s_i)

    with ``s`` the largest size in each example's row over 127, and ``t`` that of each output's weights. Both are
    quantised anew in each pass, since the weights are trained. Sums are exact, in 32-bit integers; those of more than
    :data:`MOST_INPUTS` inputs are added up from such. Gradients are those of the float32 layer, at the inputs and
    weights as they are.

    Reference: Huang et al. 2021, "Hierarchical Training", section 5.1 (Model-B).
    """

    path = ""

    @classmethod
    def of(cls, layer: nn.Linear, *, path: str = "") -> EightBitLinear:
        """The same layer, with the same parameters; its path in the model is for messages."""
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        made._parameters = dict(layer._parameters)
        made.path = path
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Outputs, float32 ``[..., out_features]``.

        Raises:
            ValueError: an input or a weight is not finite.
        """
        try:
            rows: Tensor = _EightBitProduct.apply(input.reshape(-1, self.in_features), self.weight)  # type: ignore[no-untyped-call]
        except ValueError:
            self._check_finite(input)
            raise
        outputs = rows if self.bias is None else rows + self.bias
        return outputs.view(*input.shape[:-1], self.out_features)

    def _check_finite(self, input: Tensor) -> None:
        for what, x in (("an input", input), ("a weight", self.weight)):
            if not bool(x.isfinite().all()):
                raise ValueError(
                    f"{what} of the layer {self.path or 'Linear'} is not finite (NaN or infinity), which"
                    " strategy.fc_forward=int8 has no 8-bit form of. Training has diverged, or the batch has such"
                    " values: look at them, lower the learning rate, or use strategy.fc_forward=float32, which goes on"
                    " with them."
                )


class _EightBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if not len(x):
            return x.new_zeros(0, len(weight))
        (levels, scales), (weights, weight_scales) = _CODEC.encode(x), _CODEC.encode(weight)
        return _sums(levels, weights).float().mul_(scales.unsqueeze(1)).mul_(weight_scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wanted, trained = ctx.needs_input_grad
        return grad @ weight if wanted else None, grad.t() @ x if trained else None


def _sums(levels: Tensor, weights: Tensor) -> Tensor:
    """The exact products of rows of 8-bit numbers: int32, or int64 where 32 bits may be too few."""
    product = torch._int_mm  # torch's only such product that is not deprecated
    if levels.shape[1] <= MOST_INPUTS:
        return product(levels, weights.t())
    pieces = zip(torch.split(levels, MOST_INPUTS, 1), torch.split(weights, MOST_INPUTS, 1), strict=True)
    sums = torch.zeros(len(levels), len(weights), dtype=torch.int64)
    for some, their_weights in pieces:
        sums += product(some.contiguous(), their_weights.contiguous().t())
    return sums


def compute_in_eight_bits(part: Part) -> None:
    """Have a part's fully connected layers compute forward in 8 bits; its parameters and their names stay.

    The model that the part was cut from is not changed. Layers of other classes than ``nn.Linear``, of other dtypes
    than float32, and very narrow ones stay as they are.
    """
    assert isinstance(part.module, fx.GraphModule)
    # Modules that the part calls are its own to replace; what lies within one of them is the model's, too.
    for name in {str(node.target) for node in part.module.graph.nodes if node.op == "call_module"}:
        module = part.module.get_submodule(name)
        if type(module) is nn.Linear and module.in_features >= LEAST_INPUTS and module.weight.dtype == torch.float32:
            part.module.set_submodule(name, EightBitLinear.of(module, path=name))


def in_eight_bits(graph: OperatorGraph, processor: Processor) -> OperatorGraph:
    """A graph whose fully connected layers take the time of a forward pass in 8 bits, for planners.

    It is that of a product :data:`SPEEDUP` times as fast, and of quantising what goes in, comes out, and the weights.

    Args:
        graph: The operators.
        processor: Speeds of the machines that they are planned for.
    """
    return replace(graph, operators=tuple(_faster(operator, processor) for operator in graph.operators))


def _faster(operator: Operator, processor: Processor) -> Operator:
    if nn.Linear.__name__ not in operator.kind.split(" + ") or operator.forward_seconds is not None:
        return operator
    quantised = operator.activation_bytes + operator.weight_bytes
    product = processor.forward_seconds(replace(operator, forward_flops=operator.forward_flops / SPEEDUP))
    return replace(operator, forward_seconds=product + COSTS["int8"].encode_seconds_per_mb * quantised / 1e6)
