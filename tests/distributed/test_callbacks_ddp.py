"""The callbacks on two workers: what they report is what both workers saw together."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_recsys.callbacks import (
    ExamplesPerSecond,
    NormalizedEntropyMonitor,
    TelemetryMonitor,
    examples_per_second,
)
from lightning_recsys.metrics.functional import normalized_entropy

WORLD, WINDOW = 2, 45
STEP_SECONDS = (2.0, 0.5)  # of each rank


class Examples(torch.utils.data.IterableDataset):
    """Four batches, of 6 examples on rank 0 and of 5 on rank 1, and a last one of 3."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes = [6 - seed % 2] * 3 + [3]

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        for size in self.sizes:
            x = torch.randn(size, 3, generator=self.generator)
            yield x, (torch.rand(size, generator=self.generator) < x[:, 0].sigmoid()).float()


def labels(batch):
    return batch[1]


class Recorded(pl.LightningModule):
    """Logistic regression that records what it predicts; its worker has a clock that only steps advance."""

    def __init__(self, folder):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.folder = folder
        self.seen = {"train": [], "val": []}
        self.seconds = 0.0

    def setup(self, stage):
        warnings.simplefilter("error", UserWarning)  # what Lightning advises, and the metrics say
        examples_per_second.perf_counter = lambda: self.seconds

    def step(self, stage, batch):
        logits = self.layer(batch[0]).squeeze(1)
        if not self.trainer.sanity_checking:
            self.seen[stage].append((logits.detach(), batch[1]))
        return {"loss": binary_cross_entropy_with_logits(logits, batch[1]), "logits": logits.detach()}

    def training_step(self, batch, batch_idx):
        self.seconds += STEP_SECONDS[self.global_rank]
        return self.step("train", batch)

    def validation_step(self, batch, batch_idx):
        return self.step("val", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self):
        return Examples(100 * self.current_epoch + self.global_rank)

    def val_dataloader(self):
        return Examples(1000 + self.global_rank)

    def on_fit_end(self):
        eps = next(x for x in self.trainer.callbacks if isinstance(x, ExamplesPerSecond))
        record = {
            "world_size": self.trainer.world_size,
            "seen": self.seen,
            "metrics": dict(self.trainer.callback_metrics),
            "examples": (eps.examples, eps.global_examples),
        }
        torch.save(record, f"{self.folder}/rank{self.global_rank}.pt")


def fit(folder, epochs, ckpt_path=None) -> list[dict]:
    """Train on two processes; what each of them recorded."""
    callbacks = [  # a progress bar, which reads metrics on rank 0 alone, between callbacks that communicate
        ExamplesPerSecond(warmup_steps=0),
        TQDMProgressBar(),
        NormalizedEntropyMonitor(WINDOW, labels_fn=labels),
        TelemetryMonitor(),
        EarlyStopping("train/ne", mode="min", patience=10),
        ModelCheckpoint(folder, monitor="val/ne", filename="best", save_last=True),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp_forkserver",
        devices=WORLD,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        log_every_n_steps=1,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the main process; the worker's are errors
        trainer.fit(Recorded(str(folder)), ckpt_path=ckpt_path, weights_only=True)
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
    assert [rank["world_size"] for rank in ranks] == [WORLD] * WORLD
    return ranks


def entropy(batches) -> object:
    logits, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return pytest.approx(normalized_entropy(logits, target, from_logits=True).item(), rel=1e-12)


@pytest.mark.distributed
def test_fit_and_resume_on_two_workers_then_values_are_of_all_workers_and_the_whole_run(tmp_path):
    first = fit(tmp_path, epochs=1)
    assert (tmp_path / "best.ckpt").exists()
    second = fit(tmp_path, epochs=2, ckpt_path=tmp_path / "last.ckpt")
    train = [batch for run in (first, second) for rank in run for batch in rank["seen"]["train"]]
    assert len(train) == 16
    # The window reaches over the resume: 39 examples of the second run, 6 of the first.
    newest = [batch for rank in second for batch in rank["seen"]["train"]]
    newest += [rank["seen"]["train"][-1] for rank in first]
    assert sum(len(logits) for logits, _ in newest) == WINDOW
    for rank, result in enumerate(second):
        metrics = {name: value.item() for name, value in result["metrics"].items()}
        assert metrics["train/ne"] == entropy(train)
        assert metrics["train/window_ne"] == entropy(newest)
        assert metrics["val/ne"] == entropy([batch for x in second for batch in x["seen"]["val"]])
        sizes = (3 * 6 + 3, 3 * 5 + 3)
        assert result["examples"] == (sizes[rank], sum(sizes))
        assert metrics["examples"] == sum(sizes)
        rates = [size / (4 * seconds) for size, seconds in zip(sizes, STEP_SECONDS, strict=True)]
        assert metrics["eps"] == pytest.approx(sum(rates))
        assert ("eps/rank_0" in metrics) == (rank == 0)
