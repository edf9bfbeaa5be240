"""Logistic regression beside the result, against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recipe_tools import baseline
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from lightning_recsys.data import TabularDataModule


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Users with effects of their own, bags of tags, and a number that some rows lack."""
    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    user, price, effects = rng.integers(40, size=1500), rng.normal(size=1500), rng.normal(0, 1, 40)
    tags = [rng.permutation(5)[: rng.integers(4)] for _ in user]
    clicks = rng.random(1500) < 1 / (1 + np.exp(-(effects[user] + price + np.array([1.0 * (0 in x) for x in tags]))))
    lines = [
        f"u{u},{'|'.join(f't{tag}' for tag in t)},{'' if i % 7 == 0 else f'{p:.4f}'},{int(y)}"
        for i, (u, t, p, y) in enumerate(zip(user, tags, price, clicks, strict=True))
    ]
    (folder / "rows.csv").write_text("\n".join(["user,tags,price,click", *lines]))
    schema = {"files": str(folder / "rows.csv"), "label": "click", "dense": ["price"]}
    data = TabularDataModule(
        schema=schema | {"categorical": ["user"], "multi_valued": ["tags"]}, cache=folder / "cache", batch_size=100
    )
    data.setup()
    return data


def matrix(data, split):
    """The rows as scikit-learn takes them: a column for each id, counted in bags, and the numbers."""
    source = data.rows(split)
    batch = source.take(torch.arange(len(source)))
    columns = [batch.dense.numpy()]
    for name, size in data.fields.items():
        bags = batch.sparse.select((name,))
        counts = np.zeros((len(batch), size))
        np.add.at(counts, (np.repeat(np.arange(len(batch)), bags.bag_lengths()), bags.values.numpy()), 1)
        columns.append(counts)
    return np.hstack(columns), batch.labels.numpy()


def test_baseline_then_agrees_with_scikit_learn(rows):
    (x, y), (x_test, y_test) = matrix(rows, "train"), matrix(rows, "test")
    p = LogisticRegression(C=1, tol=1e-8, max_iter=1000).fit(x, y).predict_proba(x_test)[:, 1]
    found = baseline.logistic_regression(rows)
    assert found["share"] == 1
    assert found["auc"] == pytest.approx(roc_auc_score(y_test, p), abs=2e-3)  # L-BFGS stops after 30 steps
    share = np.full(len(y_test), y_test.mean())
    assert found["ne"] == pytest.approx(log_loss(y_test, p) / log_loss(y_test, share), abs=2e-3)


def test_baseline_when_rows_are_many_then_learns_from_some_of_all_parts_and_is_measured_on_all(rows, monkeypatch):
    whole = baseline.logistic_regression(rows)
    monkeypatch.setattr(baseline, "IDS", 2 * 600)
    some = baseline.logistic_regression(rows)
    assert some["share"] == 600 / 1200
    assert some["auc"] == pytest.approx(whole["auc"], abs=0.05)
    monkeypatch.setattr(baseline, "IDS", 2 * 70)  # test rows come in three parts; training rows are too few to compare
    assert baseline.logistic_regression(rows)["share"] == 70 / 1200


def test_baseline_when_there_are_no_test_rows_then_there_is_none(rows, tmp_path):
    schema = {"files": dict(rows.schema.files), "label": "click", "categorical": ["user"], "split": {"test": 0}}
    data = TabularDataModule(schema=schema, cache=tmp_path)
    data.setup()
    assert baseline.logistic_regression(data) is None
