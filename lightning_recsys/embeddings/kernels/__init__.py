"""Kernels for embedding tables behind one interface, and the choice between them."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from lightning_recsys.embeddings.kernels.base import Kernel, TableLayout
from lightning_recsys.embeddings.kernels.fbgemm_kernel import FbgemmCpuKernel, FbgemmModuleKernel
from lightning_recsys.embeddings.kernels.numba_kernel import NumbaKernel
from lightning_recsys.embeddings.kernels.torch_kernel import TorchKernel
from lightning_recsys.optim import RowOptimizer

_NARROW = 64
"""Up to this width the compiled loops are no slower than FBGEMM's CPU kernels; at 128 it wins in large batches."""

KernelName = Literal["auto", "fbgemm", "numba", "torch"]


def choose_kernel(name: KernelName, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> Kernel:
    """The kernel for these tables.

    ``auto`` takes the first that can serve them: on the CPU our compiled loops up to a width of 64, where they are the
    fastest, then FBGEMM, then our loops for the rules and widths that it lacks; on a GPU FBGEMM; torch anywhere.

    Raises:
        ValueError: the name is unknown, or the kernel named cannot serve these tables; says why.
    """
    if name not in get_args(KernelName):
        raise ValueError(f"kernel must be one of {list(get_args(KernelName))}, got {name!r}.")
    fbgemm: type[Kernel] = FbgemmCpuKernel if device.type == "cpu" else FbgemmModuleKernel
    candidates: list[type[Kernel]] = [fbgemm, NumbaKernel, TorchKernel]
    if layout.embedding_dim <= _NARROW:
        candidates[:2] = NumbaKernel, fbgemm
    refusals = {}
    for candidate in candidates:
        if name in ("auto", candidate.name):
            refusals[candidate.name] = candidate.refusal(layout, optimizer, device)
            if refusals[candidate.name] is None:
                return candidate(layout, optimizer)
    raise ValueError(f"kernel={name!r} cannot serve these tables: {refusals[name]}. kernel='auto' picks one that can.")


__all__ = ["FbgemmModuleKernel", "Kernel", "KernelName", "TableLayout", "choose_kernel"]
