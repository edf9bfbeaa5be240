"""The statistics that synthetic data promise: Zipf's law, base rate, calibration, what models can learn."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.data.generated.zipf import ZipfSampler
from lightning_recsys.data.hashing import mix64, uniform

NUM_ROWS = 200_000


def draw(cardinality: int, exponent: float, count: int) -> np.ndarray:
    sampler = ZipfSampler([cardinality], exponent=exponent)
    head, tail = (uniform(mix64(np.arange(count, dtype=np.uint64) + np.uint64(k << 40))) for k in (1, 2))
    return sampler(head[None], tail[None][: len(sampler.tailed)])[0]


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.1, 2.0])
@pytest.mark.parametrize("cardinality", [1, 3, 255, 256, 5000])
def test_zipf_when_drawn_often_then_frequencies_are_those_of_the_law(cardinality, exponent):
    count = 400_000
    ids = draw(cardinality, exponent, count)
    assert ids.min() >= 0
    assert ids.max() < cardinality
    weights = np.arange(1, cardinality + 1, dtype=np.float64) ** -exponent
    expected = count * weights / weights.sum()
    # Chi-square over groups of ids with at least 20 expected draws each; five deviations.
    group = np.minimum((np.cumsum(expected) - expected) // 20, 2000).astype(int)
    group = np.unique(group, return_inverse=True)[1]
    seen = np.bincount(group, weights=np.bincount(ids, minlength=cardinality))
    due = np.bincount(group, weights=expected)
    freedom = len(due) - 1
    assert ((seen - due) ** 2 / due).sum() <= freedom + 5 * np.sqrt(2 * freedom)


def test_zipf_when_there_are_a_billion_ids_then_orders_of_magnitude_have_their_share():
    exponent, count = 1.1, 400_000
    ids = draw(10**9, exponent, count)
    edges = 10 ** np.arange(3, 10)
    # Sums over decades, from the Euler-Maclaurin integral: exact to 1e-7 above rank 1000.
    tail = [((a + 0.5) ** -0.1 - (b + 0.5) ** -0.1) / 0.1 for a, b in pairwise(edges)]
    head = (np.arange(1, 1001, dtype=np.float64) ** -exponent).sum()
    due = np.array([head, *tail]) * count / (head + sum(tail))
    seen = np.histogram(ids, bins=[0, *edges])[0]
    assert np.abs(seen - due).max() < 5 * np.sqrt(due.max())


@pytest.fixture(scope="module")
def data() -> SyntheticDataModule:
    return SyntheticDataModule(test_rows=NUM_ROWS, multi_hot={"c3": 6, "c25": 3})


def everything(data: SyntheticDataModule, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
    """Labels and the teacher's probabilities of all rows."""
    labels = data.rows(split).take(torch.arange(NUM_ROWS)).labels.numpy()
    return labels, data.clicks.probabilities(split, np.arange(NUM_ROWS))


def test_best_normalized_entropy_when_computed_then_is_the_log_loss_of_the_teacher_over_the_entropy_of_the_rate(data):
    labels, probabilities = everything(data)
    rate = labels.mean(dtype=np.float64)
    base_entropy = log_loss([0, 1], [[1 - rate, rate]] * 2, sample_weight=[1 - rate, rate])
    assert data.best_normalized_entropy == pytest.approx(log_loss(labels, probabilities) / base_entropy, rel=1e-9)


def test_best_normalized_entropy_when_rows_are_many_then_is_the_ratio_of_entropies(data):
    """E[log loss of the true p] = E[H(p)]: the ratio follows from the probabilities alone, up to the labels' luck."""
    _, p = everything(data)
    conditional = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    rate = p.mean()
    base_entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    deviation = np.sqrt((p * (1 - p) * np.log(p / (1 - p)) ** 2).mean() / NUM_ROWS) / base_entropy
    assert data.best_normalized_entropy == pytest.approx(conditional.mean() / base_entropy, abs=5 * deviation + 2e-3)


def test_labels_when_grouped_by_the_teachers_probability_then_are_calibrated(data):
    labels, p = everything(data)
    for group in np.array_split(np.argsort(p), 20):
        deviation = np.sqrt((p[group] * (1 - p[group])).sum()) / len(group)
        assert labels[group].mean() == pytest.approx(p[group].mean(), abs=4.5 * deviation)


@pytest.mark.parametrize("base_rate", [0.01, 0.25, 0.9])
def test_base_rate_when_chosen_then_labels_have_it(base_rate):
    data = SyntheticDataModule(base_rate=base_rate)
    labels, p = everything(data)
    # The bias is fitted to 32 768 other rows, whose mean probability is off by its own deviation.
    deviation = np.sqrt(base_rate * (1 - base_rate) / NUM_ROWS) + p.std() / np.sqrt(32_768)
    assert labels.mean() == pytest.approx(base_rate, abs=5 * deviation)


def test_logits_when_signal_and_share_are_chosen_then_have_that_deviation():
    for share in (0.0, 0.4, 1.0):
        data = SyntheticDataModule(signal=2.0, interaction_share=share)
        _, p = everything(data)
        assert np.log(p / (1 - p)).std() == pytest.approx(2.0, rel=0.05)  # fitted to 32 768 other rows


def test_dense_features_when_drawn_then_are_standard_and_uncorrelated(data):
    dense = data.rows("train").take(torch.arange(NUM_ROWS)).dense.double()
    assert dense.mean(0).abs().max() < 5 / np.sqrt(NUM_ROWS)
    assert (dense.T.cov() - torch.eye(13)).abs().max() < 5 * np.sqrt(2 / NUM_ROWS)
    assert dense.abs().max() < 3.5


def one_hot_score(data: SyntheticDataModule) -> float:
    """Normalized entropy on test rows of scikit-learn's logistic regression on one-hot ids and dense values."""

    def matrix(split: str, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        batch = data.rows(split).take(torch.arange(num_rows))
        ids = batch.sparse.values.view(len(data.fields), num_rows)
        hot = [torch.nn.functional.one_hot(x, n) for x, n in zip(ids, data.fields.values(), strict=True)]
        return torch.cat([batch.dense, *hot], 1).float().numpy(), batch.labels.numpy()

    model = LogisticRegression(max_iter=200).fit(*matrix("train", 20_000))
    x, y = matrix("test", 20_000)
    rate = y.mean()
    return log_loss(y, model.predict_proba(x)) / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))


def test_interactions_when_there_are_none_then_logistic_regression_is_as_good_as_the_teacher_and_else_it_is_not():
    options = {"cardinalities": (10, 20, 30), "num_dense": 2, "test_rows": 20_000}
    linear = SyntheticDataModule(interaction_share=0.0, **options)
    assert one_hot_score(linear) == pytest.approx(linear.best_normalized_entropy, abs=0.01)
    mixed = SyntheticDataModule(interaction_share=0.5, **options)
    assert one_hot_score(mixed) > mixed.best_normalized_entropy + 0.05
