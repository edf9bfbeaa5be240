"""Tasks on graphs under Lightning's single-device strategy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from scipy.stats import chisquare
from sklearn.metrics import ndcg_score

from lightning_recsys.data.graph import CSRGraph, InteractionDataModule, Interactions, NodeData, NodeDataModule
from lightning_recsys.data.graph.ranking import Ranking
from lightning_recsys.models import GraphSAGE
from lightning_recsys.optim import RowAdam
from lightning_recsys.tasks import LinkPredictionTask, NodeClassificationTask


def communities(num_nodes=120, classes=3):
    """Most edges stay within a class; what a node says of its own is mostly noise."""
    random = np.random.default_rng(0)
    labels = np.arange(num_nodes) % classes
    sources = random.integers(0, num_nodes, 1200)
    near = random.integers(0, num_nodes // classes, 1200) * classes + labels[sources]
    targets = np.where(random.random(1200) < 0.9, near, random.integers(0, num_nodes, 1200))
    graph = CSRGraph.from_edge_index(np.stack([sources, targets]), num_nodes=num_nodes, undirected=True)
    dense = (np.eye(classes)[labels] + random.normal(size=(num_nodes, classes))).astype(np.float32)
    return NodeData(graph, labels, dense=dense).split(validation=0.2, test=0.2)


def tastes():
    """40 users, 30 items; users of either half take items of the same half."""
    users, items = (x.ravel() for x in np.meshgrid(np.arange(40), np.arange(30), indexing="ij"))
    chosen = (users < 20) == (items < 15)
    keep = chosen & (np.random.default_rng(0).random(len(users)) < 0.5)
    return Interactions(users[keep], items[keep], 40, 30)


def fit(task, data, epochs=12):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data)
    (metrics,) = trainer.test(task, datamodule=data, verbose=False)
    return trainer, metrics


def make_model(data, **options):
    pl.seed_everything(0, verbose=False)
    return GraphSAGE(
        data.num_dense,
        data.fields,
        num_classes=data.num_classes,
        embedding_dim=8,
        hidden=8,
        row_optimizer=RowAdam(lr=0.05),
        **options,
    )


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


@pytest.mark.parametrize("aggregator", ["mean", "max"])
def test_classes_when_neighbors_tell_them_then_are_learned(aggregator):
    data = NodeDataModule(communities(), batch_size=24, num_neighbors=[5, 5], eval_num_neighbors=[-1, -1])
    task = NodeClassificationTask(make_model(data, aggregator=aggregator), optimizer=optimizer)
    trainer, metrics = fit(task, data)
    assert metrics["test/accuracy"] > 0.8  # a third by chance
    assert metrics["test/macro_f1"] > 0.8
    probabilities = torch.cat(trainer.predict(task, datamodule=data))
    assert probabilities.sum(1).tolist() == pytest.approx([1] * 24)
    wanted = data.nodes.labels[data.nodes.splits["test"]]
    assert metrics["test/accuracy"] == pytest.approx((probabilities.argmax(1).numpy() == wanted).mean())


@pytest.mark.parametrize(("loss", "num_candidates"), [("bpr", None), ("logistic", 10)])
def test_items_when_users_are_alike_then_are_ranked_first(loss, num_candidates):
    data = InteractionDataModule(
        tastes(), batch_size=64, num_neighbors=[5, 5], num_negatives=2, num_candidates=num_candidates
    )
    task = LinkPredictionTask(make_model(data), link_loss=loss, top_k=5, optimizer=optimizer)
    before = fit(LinkPredictionTask(make_model(data), top_k=5), data, epochs=0)[1] if num_candidates is None else {}
    _, metrics = fit(task, data)
    assert metrics["test/ndcg"] > before.get("test/ndcg", 0.3) + 0.1
    assert metrics["test/recall"] > before.get("test/recall", 0.3)


def test_bpr_when_scores_are_known_then_is_the_closed_form():
    data = InteractionDataModule(tastes(), batch_size=2, num_negatives=2, num_neighbors=[1])
    batch = next(iter(data.train_dataloader()))
    task = LinkPredictionTask(make_model(data, num_layers=1))
    scores = torch.tensor([1.0, 2.0, 0.5, 2.5, -1.0, 0.0])  # of two positives, then of two negatives for each
    pairs = [(1.0, 0.5), (2.0, 2.5), (1.0, -1.0), (2.0, 0.0)]
    expected = sum(math.log(1 + math.exp(negative - positive)) for positive, negative in pairs) / 4
    assert task.loss(scores, batch).item() == pytest.approx(expected)


def test_metrics_when_scores_are_known_then_are_those_of_scikit_learn_and_the_first_rank():
    task = LinkPredictionTask(make_model(InteractionDataModule(tastes())), top_k=3)
    random = np.random.default_rng(0)
    groups, labels = np.repeat(np.arange(9), 8), np.tile([1.0, 1, 0, 0, 0, 0, 0, 0], 9)
    scores = random.permutation(len(groups)).astype(np.float32)  # no ties
    order = random.permutation(len(groups))  # users in any order, over two batches
    for part in np.split(order, [30]):
        given = [torch.from_numpy(x[part]) for x in (scores, labels, groups)]
        task.val_metrics.update(given[0], given[1].long(), indexes=given[2])
    found = task.val_metrics.compute()
    by_user = [(labels[groups == user], scores[groups == user]) for user in range(9)]
    assert found["ndcg"].item() == pytest.approx(np.mean([ndcg_score([x], [y], k=3) for x, y in by_user]))
    firsts = [1 + (y > y[x == 1].max()).sum() for x, y in by_user]
    assert found["mrr"].item() == pytest.approx(np.mean(1 / np.array(firsts)))
    assert max(firsts) > 3, "the rank of the first counts beyond top_k"


def pairs_of(taken):
    return set(zip(taken.users.tolist(), taken.items.tolist(), strict=True))


def pairs_in(batch):
    """A batch's pairs of a user and an item, of the 40 users of :func:`tastes`."""
    users, items = batch.neighborhood.n_id[batch.pairs].numpy()
    return list(zip(users.tolist(), (items - 40).tolist(), strict=True))


def test_pairs_when_made_to_train_then_negatives_are_not_of_training_and_those_held_out_are_among_them():
    data = InteractionDataModule(tastes(), batch_size=16, num_negatives=3, num_neighbors=[2])
    of_train, negatives = pairs_of(data.parts["train"]), []
    loader, seen = data.train_dataloader(), 0
    for _ in range(4):
        for batch in loader:
            drawn = pairs_in(batch)
            assert len(drawn) == 4 * batch.size
            assert batch.labels.tolist() == [1.0] * batch.size + [0.0] * 3 * batch.size
            assert of_train.issuperset(drawn[: batch.size])
            negatives += drawn[batch.size :]
            seen += batch.size
    assert seen == 4 * len(of_train)
    assert not of_train.intersection(negatives)
    # What is held out is drawn as often as any other pair that training does not know.
    held_out = pairs_of(data.parts["validation"]) | pairs_of(data.parts["test"])
    expected = 0.0
    for user, _ in of_train:
        free = 30 - sum(u == user for u, _ in of_train)
        expected += 12 * sum(u == user for u, _ in held_out) / free
    assert sum(pair in held_out for pair in negatives) == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_pairs_when_a_batch_is_spread_over_two_ranks_then_are_those_of_one_rank():
    data = InteractionDataModule(tastes(), batch_size=16, num_negatives=3, num_neighbors=[2])
    rows, order = data.rows("train"), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    whole, *halves = (pairs_in(rows.take(x, key=5)) for x in (order, order[:20], order[20:]))
    parts = [np.array(pairs).reshape(4, -1, 2) for pairs in halves]
    assert np.concatenate(parts, 1).reshape(-1, 2).tolist() == [list(pair) for pair in whole]
    assert pairs_in(rows.take(order, key=6)) != whole


def test_candidates_when_users_are_spread_over_ranks_or_batches_then_are_the_same():
    data = InteractionDataModule(tastes(), batch_size=16, num_candidates=5, num_neighbors=[2])
    rows = data.rows("test")
    whole = pairs_in(rows.take(torch.arange(len(rows)), key=1))
    spread = [pair for i in range(0, len(rows), 7) for pair in pairs_in(rows.take(torch.arange(len(rows))[i : i + 7]))]
    assert sorted(spread) == sorted(whole)


@pytest.mark.parametrize("num_candidates", [8, 100])
def test_candidates_when_drawn_then_none_comes_twice_and_all_are_there_where_they_are_few(num_candidates):
    taken = tastes()
    data = InteractionDataModule(taken, batch_size=7, num_neighbors=[2], num_candidates=num_candidates)
    known, of_test = pairs_of(taken), pairs_of(data.parts["test"])
    for batch in data.test_dataloader():
        pairs = pairs_in(batch)
        assert len(pairs) == len(set(pairs))
        for user in set(batch.groups.tolist()):
            others = {pair for pair in pairs if pair[0] == user} - of_test
            assert not others & known
            assert len(others) == min(num_candidates, 30 - sum(u == user for u, _ in known))


def test_items_when_drawn_then_all_that_a_user_has_not_taken_come_equally_often():
    ranking = Ranking(np.array([1, 1, 1, 2, 2, 2, 1]), np.array([0, 3, 4, 0, 1, 2, 3]), 4, 7, seed=3)
    users = np.repeat([1, 3], 3000)
    drawn = ranking.negatives(users, np.arange(6000), 2, key=1)
    counts = [np.bincount(drawn[users == user].ravel(), minlength=7) for user in (1, 3)]
    assert np.flatnonzero(counts[0]).tolist() == [1, 2, 5, 6]
    assert chisquare(counts[0][[1, 2, 5, 6]]).pvalue > 1e-3
    assert chisquare(counts[1]).pvalue > 1e-3
    some = [replace(ranking, seed=seed).candidates(np.array([2]), 2)[1] for seed in range(3000)]
    assert chisquare(np.bincount(np.concatenate(some), minlength=7)[3:]).pvalue > 1e-3


def test_items_when_a_user_has_taken_all_then_training_gets_any_and_evaluation_none():
    ranking = Ranking(np.array([0, 0, 1]), np.array([0, 1, 1]), 2, 2, seed=0)
    drawn = ranking.negatives(np.repeat([0, 1], 50), np.arange(100), 1, key=0)
    assert set(drawn[:50].ravel().tolist()) == {0, 1}
    assert set(drawn[50:].ravel().tolist()) == {0}
    users, items = ranking.candidates(np.array([0, 1]), 5)
    assert (users.tolist(), items.tolist()) == ([1], [0])


def test_interactions_when_a_pair_comes_twice_then_is_in_one_split():
    taken = tastes()
    twice = Interactions(np.tile(taken.users, 2), np.tile(taken.items, 2), 40, 30)
    parts = InteractionDataModule(twice, num_neighbors=[2]).parts
    assert sum(len(part.users) for part in parts.values()) == len(taken.users)
    assert not pairs_of(parts["train"]) & pairs_of(parts["test"])


def test_candidates_when_all_are_ranked_then_those_of_other_splits_are_left_out_and_those_held_out_are_in():
    taken = tastes()
    data = InteractionDataModule(taken, batch_size=7, num_neighbors=[2])
    of_test, pairs, labels = pairs_of(data.parts["test"]), [], []
    for batch in data.test_dataloader():
        assert [user for user, _ in pairs_in(batch)] == batch.groups.tolist()
        pairs += pairs_in(batch)
        labels += batch.labels.tolist()
    every = {(int(user), item) for user in data.rows("test").users for item in range(30)}
    assert set(pairs) == (every - pairs_of(taken)) | of_test
    assert {pair for pair, label in zip(pairs, labels, strict=True) if label} == of_test
    assert len(pairs) == len(set(pairs))


def test_graph_when_interactions_are_held_out_then_has_none_of_them():
    data = InteractionDataModule(tastes(), num_neighbors=[2])
    assert data.nodes.graph.num_edges == 2 * len(data.parts["train"].users)
    assert data.fields == {"node": 70}


def test_interactions_when_read_then_names_become_numbers_and_pairs_count_once(tmp_path):
    (tmp_path / "a.csv").write_text("who,what\nzoe,9\nann,7\nzoe,7\nzoe,9\n")
    taken = Interactions.read(tmp_path / "a.csv", user="who", item="what").distinct()
    assert (taken.users.tolist(), taken.items.tolist(), taken.num_users, taken.num_items) == (
        [0, 1, 1],
        [0, 0, 1],
        2,
        2,
    )
    with pytest.raises(ValueError, match=r"a\.csv has no column 'item'\. It has who, what"):
        Interactions.read(tmp_path / "a.csv", user="who", item="item")
    (tmp_path / "b.csv").write_text("who,what\n1,9\n,7\n")
    with pytest.raises(ValueError, match=r"b\.csv, row 2, column 'who': the value is missing"):
        Interactions.read(tmp_path / "b.csv", user="who", item="what")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([str(12345678901234567000 + i) for i in range(5)], [0, 1, 2, 3, 4]),  # beyond 64 bits with a sign
        (["007", "7", "07", "7.0"], [0, 2, 1, 2]),
        (["10", "9", "-1", "0"], [3, 2, 0, 1]),
        (["1.5", "1.50", "x", "NA"], [0, 1, 3, 2]),
    ],
    ids=["long", "zeros", "numbers", "words"],
)
def test_interactions_when_ids_are_any_words_then_each_is_a_user_of_its_own(tmp_path, words, expected):
    path = tmp_path / "a.csv"
    path.write_text("what,who\n" + "".join(f"{i},{word}\n" for i, word in enumerate(words)))
    taken = Interactions.read(path, user="who", item="what")
    assert taken.num_users == len(set(expected))
    assert dict(zip(taken.items.tolist(), taken.users.tolist(), strict=True)) == dict(enumerate(expected))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("who,what\nann,1\n,2\nbob,3\n", "row 2, column 'who': the value is missing"),
        ("who,what\nann,1\nbob\n", r"row 2 \(line 3\): 2 columns expected, got 1: 'bob'"),
        ("who,what,who\nann,1,2\n", "the first line names column 'who' more than once"),
        ('who,what\nann,1\n"bob,2\ncid,3\n', r"row 2 \(line 3\) has a quote that is never closed"),
        ("", "is empty"),
    ],
    ids=["empty", "ragged", "twice", "quote", "nothing"],
)
def test_interactions_when_a_file_is_damaged_then_it_and_the_fault_are_named(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"a\.csv.*{message}"):
        Interactions.read(path, user="who", item="what")


def test_interactions_when_ids_are_narrow_then_pairs_are_told_apart_in_the_order_in_which_they_came():
    users, items = np.array([99_999, 7, 99_999, 7], np.int32), np.array([59_999, 3, 59_998, 3], np.int32)
    found = Interactions(users, items, 100_000, 60_000).distinct()  # 6e9 pairs do not fit into 32 bits
    assert (found.users.tolist(), found.items.tolist()) == ([99_999, 7, 99_999], [59_999, 3, 59_998])


def test_interactions_when_bad_then_say_what_is_wrong():
    with pytest.raises(ValueError, match="items must be from 0 to 2, got 0 to 3"):
        Interactions(np.array([0, 1]), np.array([0, 3]), 2, 3)
    with pytest.raises(ValueError, match=r"data\.split must leave something for training"):
        InteractionDataModule(tastes(), split={"validation": 0.9, "test": 0.1}).setup()
    with pytest.raises(ValueError, match=r"data\.num_negatives must be at least 1"):
        InteractionDataModule(tastes(), num_negatives=0)


def test_tasks_when_arguments_are_wrong_then_say_which():
    data = InteractionDataModule(tastes())
    with pytest.raises(ValueError, match="needs a model with num_classes"):
        NodeClassificationTask(make_model(data))
    with pytest.raises(ValueError, match=r"task\.link_loss must be bpr or logistic"):
        LinkPredictionTask(make_model(data), link_loss="hinge")
