"""Metrics against scikit-learn, closed forms and a published value."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from lightning_recsys.metrics import Calibration, LogLoss, NormalizedEntropy, StreamingAUROC
from lightning_recsys.metrics.functional import normalized_entropy


def clicks(number: int = 20_000, *, mean: float = -4.0, spread: float = 1.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 logits of click-through rates around 2 %, and clicks drawn from them."""
    logits = mean + spread * torch.randn(number)
    return logits, (torch.rand(number) < logits.sigmoid()).float()


def updated(metric, preds, target, batch: int = 1000):
    for start in range(0, len(preds), batch):
        metric.update(preds[start : start + batch], target[start : start + batch])
    return metric


def test_normalized_entropy_on_torchrecs_example_then_it_is_torchrecs_value():
    preds, target = torch.tensor([0.2, 0.3]), torch.tensor([1.0, 0.0])
    expected = -(math.log(0.2) + math.log(0.7)) / 2 / math.log(2)
    assert expected == pytest.approx(1.4183, abs=5e-5)
    assert normalized_entropy(preds, target).item() == pytest.approx(expected, rel=1e-7)  # 0.2 is a float32
    assert updated(NormalizedEntropy(), preds, target).compute().item() == pytest.approx(expected, rel=1e-7)


def test_normalized_entropy_on_random_clicks_then_it_is_log_loss_over_the_entropy_of_the_rate():
    logits, target = clicks()
    rate = target.double().mean().item()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    expected = log_loss(target.numpy(), logits.double().sigmoid().numpy()) / entropy
    metric = updated(NormalizedEntropy(from_logits=True), logits, target)
    assert metric.compute().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("positives", [1, 30, 500, 999])
def test_normalized_entropy_when_the_base_rate_is_predicted_then_it_is_exactly_one(positives):
    target = torch.zeros(1000).index_fill(0, torch.randperm(1000)[:positives], 1.0)
    preds = torch.full((1000,), positives / 1000, dtype=torch.float64)
    assert updated(NormalizedEntropy(), preds, target, 100).compute().item() == pytest.approx(
        1, abs=1e-12
    )  # float64 rounding, amplified by 1/rate
    metric = updated(NormalizedEntropy(from_logits=True), preds.logit(), target, 100)
    assert metric.compute().item() == pytest.approx(1, abs=1e-12)  # float64 rounding, amplified by 1/rate


def test_normalized_entropy_with_weights_then_a_weight_counts_like_repeated_examples():
    logits, target = clicks(200, mean=-1.0)
    weight = torch.randint(0, 4, (200,))
    metric = NormalizedEntropy(from_logits=True)
    metric.update(logits, target, weight)
    repeated = updated(
        NormalizedEntropy(from_logits=True), logits.repeat_interleave(weight), target.repeat_interleave(weight)
    )
    assert metric.compute().item() == pytest.approx(repeated.compute().item(), rel=1e-12)
    functional = normalized_entropy(logits, target, weight=weight, from_logits=True)
    assert functional.item() == pytest.approx(repeated.compute().item(), rel=1e-12)


def test_cross_entropy_from_extreme_logits_then_it_is_the_logit_and_from_probabilities_it_is_clipped():
    logits, target = torch.tensor([100.0, -100.0, 0.0]), torch.tensor([0.0, 1.0, 1.0])
    exact = updated(LogLoss(from_logits=True), logits, target)
    assert exact.compute().item() == pytest.approx((200 + math.log(2)) / 3, rel=1e-12)
    clipped = updated(LogLoss(), logits.sigmoid(), target)
    assert clipped.compute().item() == pytest.approx((-2 * math.log(1e-12) + math.log(2)) / 3, rel=1e-4)


def test_sums_after_many_batches_then_they_are_as_exact_as_float64():
    metric = NormalizedEntropy(100_000, from_logits=True)
    preds, target = torch.zeros(10_000), torch.tensor([0.0, 1.0]).repeat(5000)
    for _ in range(200):
        metric.update(preds, target)
    assert metric.compute().item() == pytest.approx(1, abs=1e-12)
    assert metric.window().item() == pytest.approx(1, abs=1e-12)
    assert metric.weight_sum.item() == 2_000_000


def test_log_loss_on_random_clicks_then_it_is_scikit_learns():
    logits, target = clicks()
    expected = log_loss(target.numpy(), logits.double().sigmoid().numpy())
    assert updated(LogLoss(from_logits=True), logits, target).compute().item() == pytest.approx(expected, rel=1e-12)
    value = updated(LogLoss(), logits.sigmoid(), target).compute().item()
    assert value == pytest.approx(expected, rel=1e-6)  # the probabilities are float32


def test_calibration_on_random_clicks_then_it_is_the_ratio_of_means():
    logits, target = clicks()
    expected = logits.double().sigmoid().numpy().mean() / target.numpy().astype(np.float64).mean()
    assert updated(Calibration(from_logits=True), logits, target).compute().item() == pytest.approx(expected, rel=1e-12)
    assert updated(Calibration(), logits.sigmoid(), target).compute().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "spread"),
    [(-4.0, 1.2), (-9.0, 1.0), (0.0, 1.0), (3.0, 2.0), (-4.0, 0.05), (-15.0, 3.0)],
    ids=["2 % rate", "1e-4 rate", "balanced", "mostly clicks", "hardly any signal", "beyond the bins"],
)
@pytest.mark.parametrize("from_logits", [True, False])
def test_auc_on_random_scores_then_it_is_scikit_learns_within_the_error_bound(mean, spread, from_logits):
    logits, _ = clicks(mean=mean, spread=spread)
    target = (torch.rand(len(logits)) < (0.7 * (logits - mean) / spread - 2).sigmoid()).float()
    preds = logits if from_logits else logits.sigmoid()
    metric = updated(StreamingAUROC(from_logits=from_logits), preds, target)
    error = abs(metric.compute().item() - roc_auc_score(target.numpy(), preds.numpy()))
    bound = metric.error_bound().item()
    assert error <= bound + 1e-12  # rounding of scikit-learn's sum
    if mean > -15 and spread >= 1:
        assert bound < 2e-4  # what docs/metrics.md promises for a usual spread


@pytest.mark.parametrize("mean", [0.0, -3.0, -18.0, -30.0])
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("rate", [0.2, 0.002])
def test_auc_when_logits_are_far_from_zero_then_it_is_scikit_learns_within_1e_4(mean, spread, rate):
    score = torch.randn(20_000)
    logits, target = mean + spread * score, torch.zeros(20_000)
    target[(score + torch.randn(20_000)).topk(round(20_000 * rate)).indices] = 1
    exact = roc_auc_score(target.numpy(), logits.numpy())
    assert updated(StreamingAUROC(from_logits=True), logits, target).compute().item() == pytest.approx(exact, abs=1e-4)


def test_auc_with_few_bins_then_the_error_bound_still_holds_and_is_not_idle():
    logits, target = clicks(mean=-2.0)
    metric = updated(StreamingAUROC(8, from_logits=True), logits, target)
    error = abs(metric.compute().item() - roc_auc_score(target.numpy(), logits.numpy()))
    assert 1e-3 < error <= metric.error_bound().item()


def test_auc_with_ties_then_they_count_half():
    preds = torch.randint(1, 12, (5000,)) / 400  # eleven distinct rates from 0.25 % to 2.75 %
    target = (torch.rand(5000) < 20 * preds).float()
    metric = updated(StreamingAUROC(), preds, target)
    assert metric.compute().item() == pytest.approx(roc_auc_score(target.numpy(), preds.numpy()), abs=1e-12)


def test_auc_of_a_constant_and_of_a_perfect_predictor_then_one_half_and_one():
    _, target = clicks(2000, mean=-2.0)
    assert updated(StreamingAUROC(), torch.full_like(target, 0.02), target).compute().item() == 0.5
    assert updated(StreamingAUROC(), 0.001 + 0.001 * target, target).compute().item() == 1
    assert updated(StreamingAUROC(), 0.002 - 0.001 * target, target).compute().item() == 0
    assert updated(StreamingAUROC(), target, target).compute().item() == 1  # probabilities 0 and 1
