"""TorchRec's DLRM with fused rowwise Adagrad, unsharded, in a plain loop over ready batches.

TorchRec cannot be a dependency (it pins an old torchmetrics and FBGEMM's CUDA build). Beside this package's
environment: ``pip install --no-deps torchrec==1.8.0`` and ``pip install iopath tensordict pyre-extensions``.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from benchmarks.harness.turns import Turn
from benchmarks.harness.workload import Workload

from lightning_recsys.embeddings.kernels.fbgemm_kernel import without_chatter


def is_available() -> bool:
    """Whether TorchRec is installed."""
    return importlib.util.find_spec("torchrec") is not None


def variant(work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
    """TorchRec as a variant of :func:`benchmarks.harness.turns.in_turns`; it has DLRM only."""
    assert model == "dlrm"
    with without_chatter(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.models.dlrm import DLRM
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim import RowWiseAdagrad

    def run(turn: Turn) -> None:
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=work.dim, num_embeddings=rows, feature_names=[name])
            for name, rows in work.fields.items()
        ]
        with without_chatter():
            collection = FusedEmbeddingBagCollection(
                tables=tables, optimizer_type=RowWiseAdagrad, optimizer_kwargs={"lr": 0.01}, device=torch.device("cpu")
            )
        network = DLRM(collection, work.num_dense, [512, 256, 64, work.dim], [512, 256, 1])
        rows = {id(parameter) for parameter in collection.parameters()}
        dense = [parameter for parameter in network.parameters() if id(parameter) not in rows]
        optimizer = torch.optim.Adagrad(dense, lr=0.01, fused=True)
        lengths = torch.ones(work.num_fields * batch_size, dtype=torch.int32)
        for batch in cycle(work.batches(batch_size)):
            features = KeyedJaggedTensor(list(work.fields), batch.sparse.values, lengths=lengths)
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(network(batch.dense, features).squeeze(1), batch.labels).backward()
            optimizer.step()
            turn.step_done(batch_size)

    return run
