"""Kernels for embedding tables behind one interface, and the choice between them."""

from __future__ import annotations

import functools
import logging
from typing import Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_recsys.embeddings.kernels.base import Kernel, TableLayout
from lightning_recsys.embeddings.kernels.fbgemm_kernel import FbgemmCpuKernel, FbgemmModuleKernel
from lightning_recsys.embeddings.kernels.numba_kernel import NumbaKernel
from lightning_recsys.embeddings.kernels.torch_kernel import TorchKernel
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.optim.compiled import COMPILED_RULES

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

_NARROW = 64
"""Up to this width the compiled loops are no slower than FBGEMM's CPU kernels; at 128 it wins in large batches."""

KernelName = Literal["auto", "fbgemm", "numba", "torch"]


def choose_kernel(name: KernelName, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> Kernel:
    """The kernel for these tables.

    ``auto`` takes the first that can serve them: on the CPU our compiled loops up to a width of 64, where they are the
    fastest, then FBGEMM, then our loops for the rules and widths that it lacks; on a GPU FBGEMM; torch anywhere, and
    for rules that are not this package's own, which a log line says once.

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
                if name == "auto" and type(optimizer) not in COMPILED_RULES:
                    _say_rule_is_own(type(optimizer))
                return candidate(layout, optimizer)
    raise ValueError(f"kernel={name!r} cannot serve these tables: {refusals[name]}. kernel='auto' picks one that can.")


@functools.cache  # once for each rule
def _say_rule_is_own(rule: type[RowOptimizer]) -> None:
    if getattr(rank_zero_only, "rank", 0):  # which Lightning sets; in a program without it there is one that speaks
        return
    log.info(
        "%s is no rule of lightning_recsys.optim, so its own update_ trains the rows, in torch. The package's rules are"
        " compiled, which takes a fraction of the time.",
        rule.__name__,
    )


__all__ = ["FbgemmModuleKernel", "Kernel", "KernelName", "TableLayout", "choose_kernel"]
