"""The processor's limit for a training step: its products, its rows and the copies between, each as fast as they go."""

# Shape suffixes: G matrices of a batched product, M rows, K inner, N columns; P looked-up rows, D embedding dim.

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from benchmarks.harness.bars import Bar
from benchmarks.harness.ours import Ours, make_task
from benchmarks.harness.report import Columns, Result
from benchmarks.harness.turns import Measurement, Turn, in_turns
from benchmarks.harness.workload import Workload
from benchmarks.suites.single.steps import Steps
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import EmbeddingBagCollection

Call = Callable[[], Any]

PARTS = ("products", "rows", "copies")
TRIES = 5  # of each way to compute a product, before the fastest is taken


@dataclass(frozen=True)
class Product:
    """``G`` products of ``[M, K]`` and ``[K, N]``."""

    groups: int
    rows: int
    inner: int
    columns: int

    @property
    def operations(self) -> int:
        """Floating point operations: a multiplication and an addition for each of ``G M K N``."""
        return 2 * self.groups * self.rows * self.inner * self.columns

    def fastest(self, dtype: torch.dtype) -> Call:
        """The fastest of the ways to compute it: both libraries, and every layout of the factors."""

        def seconds(call: Call) -> float:
            taken = []
            for _ in range(TRIES):
                began = time.perf_counter()
                call()
                taken.append(time.perf_counter() - began)
            return min(taken)

        return min(self._ways(dtype), key=seconds)

    def _ways(self, dtype: torch.dtype) -> list[Call]:
        left_GMK, left_GKM = (torch.randn(self.groups, *x).to(dtype) for x in self._both_ways(self.rows, self.inner))
        right_GKN, right_GNK = (
            torch.randn(self.groups, *x).to(dtype) for x in self._both_ways(self.inner, self.columns)
        )
        result_GMN = torch.empty(self.groups, self.rows, self.columns, dtype=dtype)
        lefts, rights = (left_GMK, left_GKM.mT), (right_GKN, right_GNK.mT)
        if self.groups > 1:
            return [partial(torch.bmm, left, right, out=result_GMN) for left in lefts for right in rights]
        ways: list[Call] = [
            partial(torch.mm, left[0], right[0], out=result_GMN[0]) for left in lefts for right in rights
        ]
        if dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            product = torch.ops.mkldnn._linear_pointwise
            ways.append(partial(product, left_GMK[0], right_GNK[0], None, "none", [], ""))
        return ways

    @staticmethod
    def _both_ways(first: int, second: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return (first, second), (second, first)


class _Recorder(TorchDispatchMode):
    """Records each product that runs inside, and the sizes of what passes back through a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.activations: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self._record(args[0], args[1])
        elif name in ("addmm", "baddbmm"):
            self._record(args[1], args[2])
        elif name == "_linear_pointwise":
            self._record(args[0], args[1].mT)
        elif name == "threshold_backward":
            self.activations.append(args[0].numel())
        return func(*args, **(kwargs or {}))

    def _record(self, left: Tensor, right: Tensor) -> None:
        groups = math.prod(left.shape[:-2])
        self.products.append(Product(groups, left.shape[-2], left.shape[-1], right.shape[-1]))


@dataclass(frozen=True)
class Work:
    """All that a training step of a model cannot do without.

    Args:
        products: Matrix products of the forward and the backward pass.
        widths: Embedding dimension of each looked-up row of a batch's field, for each of the model's collections.
        copied: Numbers of each tensor that is read and written once between two products: looked-up rows and the
            hidden layers' outputs on the way forward, and the gradients of both on the way back.
        ids: Of a batch's looked-up rows, ``[P]``, in one table of all fields.
        num_rows: Rows of that table.
    """

    products: tuple[Product, ...]
    widths: tuple[int, ...]
    copied: tuple[int, ...]
    ids: np.ndarray
    num_rows: int

    @classmethod
    def of_step(cls, workload: Workload, model: str, batch_size: int) -> Work:
        """Found by one step of the model itself."""
        task = make_task(workload, model)
        batch = next(iter(workload.batches(batch_size)))
        with _Recorder() as recorder:
            task.model(batch.dense, batch.sparse).sum().backward()
        collections = [x for x in task.modules() if isinstance(x, EmbeddingBagCollection)]
        widths = tuple(collection.embedding_dim for collection in collections)
        looked_up = [batch_size * len(x.feature_names) * x.embedding_dim for x in collections]
        return cls(
            tuple(recorder.products),
            widths,
            tuple(2 * (looked_up + recorder.activations)),
            _ids(workload, batch),
            sum(workload.cardinalities),
        )

    def variants(self, batch_size: int, dtype: torch.dtype) -> dict[str, Callable[[Turn], None]]:
        """The three parts, for :func:`benchmarks.harness.turns.in_turns`."""
        makers = {"products": self._multiplying, "rows": self._rows, "copies": self._copying}
        return {name: partial(_loop, make, batch_size, dtype) for name, make in makers.items()}

    def _multiplying(self, dtype: torch.dtype) -> list[Call]:
        return [product.fastest(dtype) for product in self.products]

    def _rows(self, dtype: torch.dtype) -> list[Call]:
        """Rows are float32 in both precisions."""
        calls: list[Call] = []
        for width in self.widths:
            table = np.random.default_rng(0).random((self.num_rows, width), dtype=np.float32)
            vectors_PD = np.zeros((len(self.ids), width), dtype=np.float32)
            calls += [partial(_read, table, self.ids, vectors_PD), partial(_update, table, self.ids, vectors_PD)]
        return calls

    def _copying(self, dtype: torch.dtype) -> list[Call]:
        return [partial(torch.empty(n, dtype=dtype).copy_, torch.zeros(n, dtype=dtype)) for n in self.copied]


def measure(
    root: Path, workload: Workload, models: list[str], batch_sizes: list[int], *, rounds: int, seconds: float
) -> tuple[list[Result], list[Bar]]:
    """Each model's step as a share of the processor's limit, in every precision that the processor computes in."""
    precisions = {"float32": torch.float32}
    if torch.cpu._is_avx512_bf16_supported():
        precisions["bfloat16"] = torch.bfloat16
    results: list[Result] = []
    bars: list[Bar] = []
    lines: list[list[str]] = []
    for batch_size in batch_sizes:
        for model in models:
            work = Work.of_step(workload, model, batch_size)
            for precision, dtype in precisions.items():
                name = f"{model}, B={batch_size}, {precision}"
                setting = "32-true" if dtype == torch.float32 else "bf16-mixed"
                ours = {"ours": Ours(root, precision=setting)(workload, model, batch_size)}
                measured = in_turns(work.variants(batch_size, dtype) | ours, rounds=rounds, seconds=seconds)
                share = _share(measured)
                lines.append([name, *_cells(measured, work, batch_size), f"{share:.2f}"])
                bars.append(bar := Bar(f"share of the limit, {name}", share, "at least", _goal(batch_size, dtype)))
                if bar.verdict == "FAIL":
                    steps = Steps(root, workload, model, batch_size, bfloat16=dtype != torch.float32)
                    results.append(steps.operators(f"operators, {name}"))
    header = ("step", "products, ms", "GFLOP/s", "rows, ms", "copies, ms", "their sum, ms", "ours, ms", "share")
    return [Columns("a step beside the processor's limit", header, lines), *results], bars


def _goal(batch_size: int, dtype: torch.dtype) -> float:
    float32, bfloat16 = (0.9, 0.8) if batch_size >= 1024 else (0.7, 0.6)
    return float32 if dtype == torch.float32 else bfloat16


def _share(measured: Measurement) -> float:
    """Median over the rounds of the three parts' time, divided by a step's in the same round."""
    rates = measured.rates
    each = zip(*(rates[part] for part in PARTS), rates["ours"], strict=True)
    return statistics.median(ours * sum(1 / rate for rate in parts) for *parts, ours in each)


def _cells(measured: Measurement, work: Work, batch_size: int) -> list[str]:
    products, rows, copies, ours = (1e3 * batch_size / measured.median(name) for name in (*PARTS, "ours"))
    speed = sum(product.operations for product in work.products) / products / 1e6
    milliseconds = [f"{value:.3f}" for value in (rows, copies, products + rows + copies, ours)]
    return [f"{products:.3f}", f"{speed:.0f}", *milliseconds]


def _loop(make: Callable[[torch.dtype], list[Call]], batch_size: int, dtype: torch.dtype, turn: Turn) -> None:
    calls = make(dtype)
    while True:
        for call in calls:
            call()
        turn.step_done(batch_size)


def _ids(workload: Workload, batch: Batch) -> np.ndarray:
    """Looked-up ids of a single-hot batch, moved to where their field begins in a table of all fields."""
    begins = list(accumulate(workload.cardinalities, initial=0))[:-1]
    fields = batch.sparse.values.view(len(begins), -1)
    return (fields + torch.tensor(begins)[:, None]).flatten().numpy()


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _read(table: np.ndarray, ids: np.ndarray, vectors: np.ndarray) -> None:
    for place in range(ids.size):
        for k in range(table.shape[1]):
            vectors[place, k] = table[ids[place], k]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _update(table: np.ndarray, ids: np.ndarray, vectors: np.ndarray) -> None:
    for place in range(ids.size):
        for k in range(table.shape[1]):
            table[ids[place], k] += vectors[place, k]
