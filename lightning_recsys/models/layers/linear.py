"""Matrix products of the dense part, by the library that is fastest on this processor."""

# Shape suffixes: B batch, I inputs, O outputs.

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Below this many multiplications, oneDNN's 20 microseconds of set-up cost more than its kernels save.
_WORTH_ONEDNN = 1 << 20


@functools.cache
def prefers_onednn() -> bool:
    """Whether float32 products should go to oneDNN instead of MKL, which torch uses for them on x86.

    MKL keeps its AVX-512 kernels for Intel's processors: on an AMD EPYC (Zen 5), one thread, it reached 97 GFLOP/s on
    the layers of a CTR model, and oneDNN 215. On Intel's own MKL is left alone.
    """
    return (
        llvmlite.binding.get_host_cpu_name().startswith("znver")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def affine(input_BI: Tensor, weight_IO: Tensor, addend: Tensor | None = None) -> Tensor:
    r"""Matrix product plus addend, :math:`x W + a`.

    Args:
        input_BI: ``x``, ``[B, I]``.
        weight_IO: ``W``, ``[I, O]``, any strides.
        addend: ``a``, a bias ``[O]`` or a matrix ``[B, O]``.

    Returns:
        ``[B, O]``: as ``torch.addmm``, also under autocast, to the rounding of another order of summation.
    """
    plain = input_BI.device.type != "cpu" or torch.is_autocast_enabled("cpu") or input_BI.dtype != torch.float32
    # A graph that is exported runs on other processors, and with batches of any size; Inductor, which chooses a library
    # itself, ends in an assertion at oneDNN's operator with a weight that is a view.
    if plain or torch.compiler.is_compiling() or not _is_worth_onednn(input_BI, weight_IO):
        return input_BI @ weight_IO if addend is None else torch.addmm(addend, input_BI, weight_IO)
    result: Tensor = _OneDNNAffine.apply(input_BI, weight_IO, addend)  # type: ignore[no-untyped-call]
    return result


def _is_worth_onednn(input_BI: Tensor, weight_IO: Tensor) -> bool:
    return input_BI.shape[0] * weight_IO.numel() >= _WORTH_ONEDNN and prefers_onednn()


class Linear(nn.Linear):
    """``torch.nn.Linear`` for matrices, through :func:`affine`. Weights start Glorot normal, biases at 0."""

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 2 / (in + out)); set the bias to 0."""
        nn.init.xavier_normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, out_features]``."""
        return affine(input, self.weight.t(), self.bias)


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return result


def _weight_gradient(input_BI: Tensor, grad_BO: Tensor, *, like: Tensor) -> Tensor:
    """Their product ``[I, O]``, with the strides of a weight: oneDNN copies a left factor that is transposed."""
    (batch_size, num_in), num_out = input_BI.shape, grad_BO.shape[1]
    if not like.is_contiguous():
        return _product(grad_BO.t(), input_BI).t()
    if batch_size * num_out + num_in * num_out < batch_size * num_in:
        return _product(grad_BO.t(), input_BI).t().contiguous()
    return _product(input_BI.t(), grad_BO)


class _OneDNNAffine(torch.autograd.Function):
    """:func:`affine` with oneDNN for the product and for both of its gradients."""

    @staticmethod
    def forward(ctx: Any, input_BI: Tensor, weight_IO: Tensor, addend: Tensor | None) -> Tensor:
        ctx.save_for_backward(input_BI, weight_IO)
        ctx.addend_is_bias = addend is not None and addend.dim() == 1
        if addend is None or ctx.addend_is_bias:
            return _product(input_BI, weight_IO, addend)
        return _product(input_BI, weight_IO).add_(addend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input_BI, weight_IO = ctx.saved_tensors
        needs_input, needs_weight, needs_addend = ctx.needs_input_grad
        grad_addend = grad_BO.sum(0) if ctx.addend_is_bias else grad_BO
        return (
            _product(grad_BO, weight_IO.t()) if needs_input else None,
            _weight_gradient(input_BI, grad_BO, like=weight_IO) if needs_weight else None,
            grad_addend if needs_addend else None,
        )
