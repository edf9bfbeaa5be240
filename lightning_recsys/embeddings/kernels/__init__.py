"""Kernels for embedding tables behind one interface, and the choice between them."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from lightning_recsys.embeddings.kernels.base import Kernel, TableLayout
from lightning_recsys.embeddings.kernels.fbgemm_kernel import FbgemmCpuKernel, FbgemmModuleKernel
from lightning_recsys.embeddings.kernels.numba_kernel import NumbaKernel
from lightning_recsys.embeddings.kernels.torch_kernel import TorchKernel
from lightning_recsys.optim import RowOptimizer

KernelName = Literal["auto", "fbgemm", "numba", "torch"]


def choose_kernel(name: KernelName, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> Kernel:
    """The kernel for these tables.

    ``auto`` takes the first that can serve them: FBGEMM, then our compiled loops on the CPU, then torch. FBGEMM pads
    nothing here: on widths that it refuses (first-order weights of width 1 among them) the compiled loops are as fast
    as FBGEMM on the padded width, without its extra memory.

    Raises:
        ValueError: the name is unknown, or the kernel named cannot serve these tables; says why.
    """
    if name not in get_args(KernelName):
        raise ValueError(f"kernel must be one of {list(get_args(KernelName))}, got {name!r}.")
    fbgemm: type[Kernel] = FbgemmCpuKernel if device.type == "cpu" else FbgemmModuleKernel
    refusals = {}
    for candidate in (fbgemm, NumbaKernel, TorchKernel):
        if name in ("auto", candidate.name):
            refusals[candidate.name] = candidate.refusal(layout, optimizer, device)
            if refusals[candidate.name] is None:
                return candidate(layout, optimizer)
    raise ValueError(f"kernel={name!r} cannot serve these tables: {refusals[name]}. kernel='auto' picks one that can.")


__all__ = ["FbgemmModuleKernel", "Kernel", "KernelName", "TableLayout", "choose_kernel"]
