"""How the dense part is timed in both precisions: on the task as it is, which nothing happens to."""

import copy

import pytest
import torch
from torch import nn

from lightning_recsys.data import Batch
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models import DeepFM, LogisticRegression
from lightning_recsys.tasks import CTRTask, PrecisionTimes, time_precisions

FIELDS, NUM_DENSE, BATCH_SIZE = {"user": 50, "movie": 30}, 3, 16


def a_batch() -> Batch:
    ids = torch.cat([torch.randint(0, rows, (BATCH_SIZE,)) for rows in FIELDS.values()])
    return Batch(torch.randn(BATCH_SIZE, NUM_DENSE), SparseFeatures(tuple(FIELDS), ids), torch.ones(BATCH_SIZE))


class Watched(nn.Module):
    """A layer that knows in which precision it made its products."""

    def __init__(self, seen):
        super().__init__()
        self.layer, self.seen = nn.Linear(NUM_DENSE, 1), seen

    def forward(self, dense, sparse):
        product = self.layer(dense)
        self.seen.append((product.dtype, self.training, product.requires_grad))
        return product.squeeze(1)


def test_times_when_taken_then_both_precisions_have_come_in_turns_in_training_mode():
    seen = []
    task = CTRTask(Watched(seen)).eval()
    times = time_precisions(task, a_batch(), seconds=0)
    assert seen == [(torch.float32, True, True), (torch.bfloat16, True, True)] * 4
    assert times.float32 > 0
    assert times.bfloat16 > 0
    assert not task.training
    assert not task.model.layer.training


def test_task_when_timed_then_is_as_it_was():
    model = DeepFM(NUM_DENSE, FIELDS, embedding_dim=4, hidden=(8,), normalization="batch", dropout=0.5)
    task, batch = CTRTask(model), a_batch()
    task.configure_optimizers()
    before, generator = copy.deepcopy(task.state_dict()), torch.get_rng_state()
    assert any("running_mean" in name for name in before)
    time_precisions(task, batch, seconds=0)
    after = task.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in task.parameters())
    assert "forward" not in vars(model.embeddings)


def test_rows_when_they_are_elsewhere_then_times_are_taken_without_them():
    model = DeepFM(NUM_DENSE, {"user": 10**12}, embedding_dim=4, hidden=(8,), device="meta")
    batch = Batch(torch.randn(2, NUM_DENSE), SparseFeatures(("user",), torch.tensor([5, 10**11])), torch.ones(2))
    assert time_precisions(CTRTask(model), batch, seconds=0).gain > 0
    with pytest.raises(Exception, match=r"meta|rows"):
        model(batch.dense, batch.sparse)


def test_model_when_it_has_no_products_then_is_timed_too():
    assert time_precisions(CTRTask(LogisticRegression(NUM_DENSE, FIELDS)), a_batch(), seconds=0).gain > 0


@pytest.mark.parametrize(("gain", "precision"), [(0.5, "32-true"), (1.19, "32-true"), (1.2, "bf16-mixed")])
def test_precision_when_it_gains_a_fifth_then_is_bfloat16(gain, precision):
    times = PrecisionTimes(float32=gain, bfloat16=1.0)
    assert (times.gain, times.precision) == (gain, precision)
