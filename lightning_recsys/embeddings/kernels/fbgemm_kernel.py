"""FBGEMM's table-batched embeddings: SGD, Adagrad and rowwise Adagrad for widths that are a multiple of 4."""

from __future__ import annotations

import functools
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_recsys.embeddings.kernels.base import Kernel, TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures
from lightning_recsys.optim import RowAdagrad, RowOptimizer, RowSGD, RowWiseAdagrad

_SUM_POOLING = 0  # PoolingMode.SUM; its module is not imported for the CPU ops
_FLOAT32 = 0  # SparseType.FP32


@functools.cache
def load_fbgemm() -> str | None:
    """Load FBGEMM's operators, once; returns why that is not possible, or ``None``."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return "the package fbgemm_gpu is not installed"
    try:
        with without_chatter():
            importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError) as error:  # a build for another torch fails while its library loads
        return f"fbgemm_gpu does not load with torch {torch.__version__}: {error}"
    return None


@contextmanager
def without_chatter() -> Iterator[None]:
    """Around FBGEMM: its import logs each library and warns of deprecations, its constructor logs pages of settings."""
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logging.disable(disabled)


def _common_refusal(layout: TableLayout, optimizer: RowOptimizer) -> str | None:
    if type(optimizer) not in (RowSGD, RowAdagrad, RowWiseAdagrad):
        return f"it has no fused {type(optimizer).__name__}, only RowSGD, RowAdagrad and RowWiseAdagrad"
    if layout.dtype != torch.float32:
        return "it trains rows of bfloat16 on a GPU only, and with a random rounding that replicas do not share"
    if optimizer.weight_decay:
        return "its fused rules add no weight decay to the gradient"
    if layout.embedding_dim % 4:
        return f"it needs an embedding_dim that is a multiple of 4, got {layout.embedding_dim}"
    return load_fbgemm()


class FbgemmCpuKernel(Kernel):
    """FBGEMM on the CPU, called below its ``nn.Module``.

    The module spends 0.13 ms of Python per step and owns its weights; the operators under it take ours. (One thread,
    26 fields, D=16: 0.15 ms instead of 0.28 ms a step at B=128, 0.90 ms instead of 1.25 ms at B=2048.)
    """

    name: ClassVar[str] = "fbgemm"

    def __init__(self, layout: TableLayout, optimizer: RowOptimizer) -> None:
        super().__init__(layout, optimizer)
        dim, starts = layout.embedding_dim, layout.feature_starts
        self._row_starts = torch.tensor([*starts, layout.num_rows])
        self._weight_starts = torch.tensor(starts) * dim
        self._columns = torch.arange(len(starts) + 1, dtype=torch.int32) * dim
        self._placements = torch.zeros(len(starts), dtype=torch.int32)  # read by the GPU operators only
        self._bag_offsets = torch.empty(0, dtype=torch.int64)

    @classmethod
    def refusal(cls, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> str | None:  # noqa: D102
        if device.type != "cpu":
            return f"these are its CPU operators, and the rows are on {device}"
        return _common_refusal(layout, optimizer)

    def _offsets(self, sparse: SparseFeatures) -> Tensor:
        if not sparse.is_single_hot:
            return sparse.bag_offsets()
        if self._bag_offsets.numel() != sparse.values.numel() + 1:  # one batch size is in use for long stretches
            self._bag_offsets = torch.arange(sparse.values.numel() + 1)
        return self._bag_offsets

    def lookup(self, rows: Tensor, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        if not sparse.batch_size:
            return rows.new_zeros(0, len(sparse.keys), rows.shape[1])
        pooled: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            rows.view(-1),
            self._weight_starts,
            self._columns,
            len(sparse.keys) * rows.shape[1],
            self._row_starts,
            sparse.values,
            self._offsets(sparse),
            _SUM_POOLING,
            sparse.weights,
            _FLOAT32,
        )
        return pooled.view(sparse.batch_size, len(sparse.keys), rows.shape[1])

    def apply_gradients(  # noqa: D102 - inherited
        self,
        rows: Tensor,
        state: dict[str, Tensor],
        sparse: SparseFeatures,
        grad_BFD: Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        if not sparse.values.numel():
            return
        common = (
            grad_BFD.flatten(1),
            rows.view(-1),
            self._placements,
            self._weight_starts,
            self._columns,
            rows.shape[1],
            self._row_starts,
            self.layout.num_rows.bit_length(),
            sparse.values,
            self._offsets(sparse),
            _SUM_POOLING,
            sparse.weights,
            False,  # stochastic rounding
        )
        rate = torch.tensor(lr)
        match self.optimizer:
            case RowSGD():
                torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(*common, rate)
            case RowWiseAdagrad(eps=eps):
                torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
                    *common, state["sum"], self._placements, self._row_starts, rate, eps
                )
            case RowAdagrad(eps=eps):
                torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_cpu(
                    *common, state["sum"].view(-1), self._placements, self._weight_starts, rate, eps
                )


class FbgemmModuleKernel(Kernel):
    """FBGEMM through its public ``nn.Module``, whose weights are pointed at ours: the way to its GPU operators.

    It also runs on the CPU, where :class:`FbgemmCpuKernel` is faster: there the tests can reach it.
    """

    name: ClassVar[str] = "fbgemm"

    def __init__(self, layout: TableLayout, optimizer: RowOptimizer) -> None:
        super().__init__(layout, optimizer)
        self._module: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_module": None}

    @classmethod
    def refusal(cls, layout: TableLayout, optimizer: RowOptimizer, device: torch.device) -> str | None:  # noqa: D102
        if reason := _common_refusal(layout, optimizer):
            return reason
        if device.type == "cuda" and not torch._C._dispatch_has_kernel_for_dispatch_key(
            "fbgemm::split_embedding_codegen_forward_unweighted_cuda", "CUDA"
        ):
            return "the installed fbgemm_gpu has no CUDA operators (extra 'cuda' has)"
        return None

    def _bound(self, rows: Tensor, state: dict[str, Tensor]) -> Any:
        """The module, made at first use, with its weights and momentum pointed at the given tensors."""
        if self._module is None or self._module.current_device != rows.device:
            self._module = self._make(rows.device)
        side = "host" if rows.device.type == "cpu" else "dev"
        getattr(self._module, f"weights_{side}").data = rows.view(-1)
        if "sum" in state:
            getattr(self._module, f"momentum1_{side}").data = state["sum"].view(-1)
        return self._module

    @without_chatter()
    def _make(self, device: torch.device) -> Any:
        ops: ModuleType = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        on_cpu = device.type == "cpu"
        location = ops.EmbeddingLocation.HOST if on_cpu else ops.EmbeddingLocation.DEVICE
        compute = ops.ComputeDevice.CPU if on_cpu else ops.ComputeDevice.CUDA
        rule = {RowSGD: "EXACT_SGD", RowAdagrad: "EXACT_ADAGRAD", RowWiseAdagrad: "EXACT_ROWWISE_ADAGRAD"}
        tables = self.layout.tables
        return ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(table.num_embeddings, table.embedding_dim, location, compute) for table in tables],
            feature_table_map=[i for i, table in enumerate(tables) for _ in table.feature_names],
            optimizer=getattr(ops.OptimType, rule[type(self.optimizer)]),
            learning_rate=self.optimizer.lr,
            eps=getattr(self.optimizer, "eps", 0.0),
            pooling_mode=ops.PoolingMode.SUM,
            stochastic_rounding=False,
            device=device,
        )

    def lookup(self, rows: Tensor, sparse: SparseFeatures) -> Tensor:  # noqa: D102 - inherited
        with torch.no_grad():
            return self._forward(self._bound(rows, {}), sparse)

    def apply_gradients(  # noqa: D102 - inherited
        self,
        rows: Tensor,
        state: dict[str, Tensor],
        sparse: SparseFeatures,
        grad_BFD: Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        if not sparse.values.numel():
            return
        module = self._bound(rows, state)
        module.set_learning_rate(lr)
        with torch.enable_grad():  # its update is its backward, and that needs its forward
            torch.autograd.backward(self._forward(module, sparse), grad_BFD)

    def _forward(self, module: Any, sparse: SparseFeatures) -> Tensor:
        pooled: Tensor = module(sparse.values, sparse.bag_offsets(), per_sample_weights=sparse.weights)
        return pooled.view(-1, len(sparse.keys), self.layout.embedding_dim)
