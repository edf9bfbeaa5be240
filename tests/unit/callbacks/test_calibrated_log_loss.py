"""Log loss after Platt scaling, against scikit-learn's logistic regression and by hand."""

import pytest
import pytorch_lightning as pl
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_recsys.callbacks import CalibratedLogLoss
from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.metrics.functional import platt_scaling
from lightning_recsys.models import LogisticRegression as LinearModel
from lightning_recsys.tasks import CTRTask

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def test_numbers_when_rows_are_many_then_are_scikit_learns_without_regularisation():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, generator=generator)
    clicks = (torch.rand(20_000, generator=generator) < (0.4 * logits - 1.5).sigmoid()).float()
    a, b = platt_scaling(logits, clicks)
    model = LogisticRegression(C=1e9).fit(logits.numpy()[:, None], clicks.numpy())
    assert a == pytest.approx(model.coef_.item(), abs=2e-3)  # smoothed targets are another 1 / 20 000 away
    assert b == pytest.approx(model.intercept_.item(), abs=2e-3)
    assert (a, b) == pytest.approx((0.4, -1.5), abs=0.05)


@pytest.mark.parametrize("labels", [[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
def test_numbers_when_logits_tell_all_labels_apart_or_one_class_is_missing_then_are_finite(labels):
    a, b = platt_scaling(torch.tensor([-2.0, -1.0, 1.0, 2.0]), torch.tensor(labels))
    assert abs(a) < 100
    assert abs(b) < 100


def test_rows_when_there_are_none_then_refused():
    with pytest.raises(ValueError, match="at least one row"):
        platt_scaling(torch.empty(0), torch.empty(0))


class Shouting(LinearModel):
    """Its logits are three times too large, and two too high."""

    def forward(self, dense, sparse):
        return 3 * super().forward(dense, sparse) + 2


def test_log_loss_when_validated_and_tested_then_is_that_of_the_scaled_logits():
    torch.manual_seed(0)
    data = SyntheticDataModule(train_rows=4_000, val_rows=4_000, test_rows=4_000, batch_size=500)
    task = CTRTask(Shouting(data.num_dense, data.fields))
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(max_epochs=1, enable_checkpointing=False, **options).fit(task, datamodule=data)
    trainer = pl.Trainer(callbacks=[CalibratedLogLoss()], devices=1, **options)
    with pytest.raises(RuntimeError, match=r"call trainer\.validate before test"):
        trainer.test(task, datamodule=data, verbose=False)
    trainer.validate(task, datamodule=data, verbose=False)
    (found,) = trainer.test(task, datamodule=data, verbose=False)

    def logits_of(loader):
        with torch.no_grad():
            batches = [(task(batch), batch.labels) for batch in loader]
        return [torch.cat(values).double() for values in zip(*batches, strict=True)]

    a, b = platt_scaling(*logits_of(data.val_dataloader()))
    logits, labels = logits_of(data.test_dataloader())
    assert found["test/calibrated_logloss"] == pytest.approx(
        binary_cross_entropy_with_logits(a * logits + b, labels).item(), abs=1e-9
    )
    assert found["test/calibrated_logloss"] < found["test/logloss"]
