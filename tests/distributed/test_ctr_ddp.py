"""CTRTask with real models on several workers: as good as one worker that gets all their batches."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.models import DLRM, DeepFM
from lightning_recsys.optim import RowAdagrad, RowWiseAdagrad
from lightning_recsys.tasks import CTRTask

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

STEPS, BATCH = 12, 64
# Sums over two halves against sums over the whole, over twelve float32 updates. Adagrad's accumulators start above 0:
# from 0, the first update is the sign of the gradient, which rounding may flip.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class WorldSize(pl.Callback):
    """Brings the number of workers back with the metrics."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        size = float(torch.distributed.get_world_size() if trainer.world_size > 1 else 1)
        pl_module.log("world_size", size, sync_dist=True)


def run(
    folder, model_class, *, strategy: str, devices: int, **kwargs
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    pl.seed_everything(0, verbose=False)
    data = SyntheticDataModule(
        batch_size=BATCH // devices,
        train_rows=STEPS * BATCH,
        val_rows=500,
        test_rows=500,
        cardinalities=(50, 7, 300),
        multi_hot={"c2": 3},
        num_dense=2,
    )
    data.setup("fit")
    rule = RowWiseAdagrad if model_class is DLRM else RowAdagrad
    row_optimizer = rule(lr=0.05, initial_accumulator=0.1)
    model = model_class(data.num_dense, data.fields, embedding_dim=8, row_optimizer=row_optimizer)
    task = CTRTask(model, optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        callbacks=[WorldSize()],
        **kwargs,
    )
    trainer.fit(task, datamodule=data)
    assert trainer.callback_metrics["world_size"] == devices
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: value.detach().clone() for name, value in task.state_dict().items()}, metrics


@pytest.mark.parametrize("model_class", [DLRM, DeepFM])
def test_two_workers_when_fitted_then_parameters_rows_and_metrics_equal_one(tmp_path, model_class):
    expected, expected_metrics = run(tmp_path, model_class, strategy="auto", devices=1)
    actual, metrics = run(tmp_path, model_class, strategy="ddp_forkserver", devices=2)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
    for name in ("val/ne", "val/auc", "val/logloss", "val/calibration", "train/ne"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=2e-3), name


def test_two_workers_when_accumulating_in_bfloat16_then_equal_one(tmp_path):
    kwargs = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    _, metrics = run(tmp_path, DLRM, strategy="ddp_forkserver", devices=2, **kwargs)
    _, expected = run(tmp_path, DLRM, strategy="auto", devices=1, **kwargs)
    assert metrics["val/logloss"] == pytest.approx(expected["val/logloss"], rel=1e-2)  # bfloat16 has 8 bits
