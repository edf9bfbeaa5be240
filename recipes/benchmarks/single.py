"""Suite ``single``: one process, one thread, whole training steps."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from benchmarks import dlrm_reference, floor, fuxictr_peer, plain_lightning, torchrec_peer
from benchmarks.report import Row
from benchmarks.trainer import quiet_trainer
from benchmarks.turns import Turn, in_turns
from benchmarks.workload import Workload
from pytorch_lightning.loggers import CSVLogger

from lightning_recsys.callbacks import ExamplesPerSecond, NormalizedEntropyMonitor
from lightning_recsys.models import DCN, DLRM, DeepFM, WideDeep
from lightning_recsys.optim import RowwiseAdagrad
from lightning_recsys.tasks import CTRTask

log = logging.getLogger(__name__)

MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "dlrm": partial(DLRM, bottom_hidden=(512, 256, 64), top_hidden=(512, 256)),
    "deepfm": partial(DeepFM, hidden=(400, 400, 400)),
    "wide_deep": partial(WideDeep, hidden=(400, 400)),
    "dcn": partial(DCN, num_cross_layers=3, hidden=(400, 400)),
}


def ours(work: Workload, model: str, batch_size: int) -> Callable[[Turn], None]:
    """This package as a user runs it: ``Trainer.fit`` with its reader, metrics, callbacks and a CSV logger."""

    def run(turn: Turn) -> None:
        network = MODELS[model](
            work.num_dense, work.fields, embedding_dim=work.dim, row_optimizer=RowwiseAdagrad(learning_rate=0.01)
        )
        task = CTRTask(network, optimizer=partial(torch.optim.Adagrad, lr=0.01, fused=True))
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [ExamplesPerSecond(), NormalizedEntropyMonitor()]
            trainer = quiet_trainer(turn, batch_size, callbacks=callbacks, logger=CSVLogger(folder))
            trainer.fit(task, work.loader(batch_size))

    return run


def variants(work: Workload, model: str, batch_size: int) -> dict[str, Callable[[Turn], None]]:
    """What can be measured for this model here; TorchRec and FuxiCTR only where they are installed."""
    makers = {"floor": floor.variant, "ours": ours, "lightning": plain_lightning.variant}
    if model == "dlrm":
        makers["dlrm reference"] = dlrm_reference.variant
        if torchrec_peer.is_available():
            makers["torchrec"] = torchrec_peer.variant
    if fuxictr_peer.is_available():
        makers |= {"fuxictr": fuxictr_peer.variant, "fuxictr, no reader": fuxictr_peer.preloaded}
    return {name: make(work, model, batch_size) for name, make in makers.items()}


def run(*, models: list[str], batch_sizes: list[int], rounds: int, seconds: float) -> list[Row]:
    """Measure every model at every batch size; each pair is one interleaved measurement."""
    work, rows = Workload(), []
    for name, peer in (("TorchRec", torchrec_peer), ("FuxiCTR", fuxictr_peer)):
        if not peer.is_available():
            log.info("%s is not installed, so it is left out; recipes/benchmarks says how to add it.", name)
    for model in models:
        for batch_size in batch_sizes:
            measured = in_turns(variants(work, model, batch_size), rounds=rounds, seconds=seconds)
            rows.append(Row(f"{model}, B={batch_size}", measured, base="floor"))
    return rows
