"""Suite graph at the smallest size, and what its parts are made of."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.harness.jobs.hosts import NoLinkError
from benchmarks.harness.turns import Measurement
from benchmarks.peers.torch_sparse import make_sampler
from benchmarks.suites.graph import link
from benchmarks.suites.graph.building import measure as building
from benchmarks.suites.graph.cache import NodeTrace, misses
from benchmarks.suites.graph.sampling import measure, power_law_graph, row_slices, starving
from benchmarks.suites.het.link import Crossed, Told
from scipy.sparse import csr_array

from lightning_recsys.data.graph import NodeData

SMALL = {"num_nodes": 2000, "num_edges": 20_000}


def test_graph_when_drawn_then_has_hubs_and_about_the_edges_asked_for():
    graph = power_law_graph(**SMALL)
    assert graph.num_edges == pytest.approx(20_000, rel=0.1)
    assert graph.degrees().max() > 20 * np.median(graph.degrees())
    as_neighbor = np.bincount(graph.indices, minlength=2000)
    assert np.array_equal(as_neighbor, graph.degrees())


def test_building_when_measured_then_has_time_and_memory_of_a_process_of_its_own():
    (columns,), bars = building(num_nodes=2000, num_edges=20_000, seconds=4.0, times_as_large=2.05)
    assert columns.details["graph"] == pytest.approx(8 * 2001 + 4 * 40_000, rel=0.05)
    assert [bar.limit for bar in bars] == [4.0, 2.05]
    assert 0 < bars[0].value < columns.details["wall"] + 0.1


def test_row_slices_when_all_are_wanted_then_are_all_edges_of_a_hop():
    graph = power_law_graph(**SMALL)
    matrix = csr_array((np.ones(graph.num_edges), graph.indices, graph.indptr), shape=(2000, 2000))
    random = np.random.default_rng(0)
    degrees = graph.degrees()[:50]
    assert row_slices(matrix, np.arange(50), [10**6], random) == degrees.sum()
    assert row_slices(matrix, np.arange(50), [3], random) == np.minimum(degrees, 3).sum()


def test_sampling_when_measured_then_has_a_row_and_a_bar_for_each_fan_out():
    (row, other), bars = measure(
        **SMALL, fan_outs=[[3, 2], [4]], batch_size=32, rounds=1, seconds=0.05, at_least=5.0, torch_sparse=None
    )
    assert row.base == other.base == "SciPy"
    assert [bar.limit for bar in bars] == [5.0, 5.0]
    assert all(bar.value > 0 for bar in bars)


def test_trace_when_made_then_seeds_come_again_in_the_second_epoch():
    trace = NodeTrace(power_law_graph(**SMALL), [2, 2], seeds=10, steps=20)
    halves = trace.sampled[:10], trace.sampled[10:]
    first, second = ({node for batch in half for node in batch.sparse.values[:10].tolist()} for half in halves)
    assert first == second
    assert len(first) == 100


@pytest.mark.distributed
def test_misses_when_the_cache_is_larger_then_are_fewer():
    (table,), _ = misses(
        **SMALL, num_neighbors=[3, 2], batch_size=16, steps=30, skip=10, fractions=[0.02, 0.5], policies=["lfu"]
    )
    small, large = (float(row[1]) for row in table.rows)
    assert 0 <= large < small <= 1


def test_starving_when_measured_then_batches_alone_are_counted_beside_training():
    (row,), (bar,) = starving(**SMALL, num_neighbors=[3, 2], batch_size=32, dim=4, rounds=1, seconds=0.05, at_least=2.0)
    assert row.base == "training"
    assert bar.value == row.measured.ratio("batches alone", "training") > 0


def test_sampler_when_the_source_is_not_there_then_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no source of torch-sparse: there is no .*neighbor_sample\.cpp"):
        make_sampler(power_law_graph(**SMALL), source=str(tmp_path))


@pytest.fixture
def quality():
    pytest.importorskip("torch_geometric.nn")
    return importlib.import_module("benchmarks.suites.graph.quality")


def test_folds_when_made_then_no_node_is_in_two_test_sets_or_tested_after_validation(quality):
    nodes = NodeData(power_law_graph(**SMALL), np.arange(2000) % 3)
    folds = [fold.splits for fold in quality.folds(nodes, 3)]
    tested = np.concatenate([fold["test"] for fold in folds])
    assert len(tested) == len(np.unique(tested)) == 1200
    for fold in folds:
        assert np.array_equal(fold["validation"], folds[0]["validation"])
        assert np.array_equal(np.sort(np.concatenate(list(fold.values()))), np.arange(2000))
    assert not np.intersect1d(tested, folds[0]["validation"]).size


def test_settings_when_chosen_then_have_the_lowest_validation_loss_one_after_the_other(quality):
    losses = {(1, 1): 3.0, (2, 1): 2.0, (3, 1): 2.5, (2, 2): 4.0, (2, 3): 1.0, (1, 3): 0.0}
    trained = []

    def train(seed, setting):
        trained.append((seed, *setting.values()))
        return SimpleNamespace(loss=losses[tuple(setting.values())] + seed)

    setting, trainings = quality.choose({"a": [1, 2, 3], "b": [1, 2, 3]}, train, range(2))
    assert setting == {"a": 2, "b": 3}
    assert [training.loss for training in trainings] == [1.0, 2.0]
    assert len(trained) == len(set(trained)) == 10  # no setting twice, and not all pairs


def test_networks_when_they_begin_alike_then_train_alike_from_rows_of_nodes(quality):
    graph = power_law_graph(num_nodes=60, num_edges=300)
    nodes = quality.folds(NodeData(graph, np.random.default_rng(0).integers(0, 3, 60)), 1)[0]
    module = quality._module(nodes, {"features": False}, {"num_neighbors": [-1, -1], "batch_size": 12})
    setting = {"rows": ["adagrad", 0.05], "lr": 0.01, "weight_decay": 0.0, "dropout": 0.0}
    (ours, our_rules), (pyg, their_rules) = (quality._network(module, x, setting, 8) for x in ("GraphSAGE", "PyG"))
    state = ours.state_dict()
    rows = state.pop("node_embeddings.embedding_bags.node.weight").clone()
    pyg.load_state_dict({name: x for name, x in state.items() if "embeddings" not in name} | {"rows.weight": rows})
    losses = []
    for net, rules in ((ours, our_rules), (pyg, their_rules)):
        losses.append([])
        for batch in module.train_dataloader():
            scores = net(batch.dense, batch.nodes, batch.sparse, batch.neighborhood.blocks)
            loss = torch.nn.functional.cross_entropy(scores, batch.labels)
            for rule in rules:
                rule.zero_grad()
            loss.backward()
            for rule in rules:
                rule.step()
            losses[-1].append(loss.item())
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    learned = ours.state_dict()["node_embeddings.embedding_bags.node.weight"]
    assert (learned - rows).abs().max() > 0.05  # beyond one update
    # Adagrad's first update has the sign of a gradient alone, which rounding decides where it is nearly 0.
    assert ((learned - pyg.rows.weight).abs() > 1e-4).float().mean() < 0.02


@pytest.mark.slow
def test_quality_when_measured_then_both_learn(data_root, quality):
    options = {"num_neighbors": [5, 5], "batch_size": 512, "epochs": 2, "patience": 1, "chosen_by": 1}
    grid = {"rows": [["adagrad", 0.02], ["adam", 0.01]], "lr": [0.01], "weight_decay": [0.0005], "dropout": [0.0]}
    (table,), bars = quality.measure(data={"cora": options}, grid=grid, seeds=1, hidden=8, root=str(data_root))
    assert [row[:3] for row in table.rows] == [
        ["cora", inputs, layers] for inputs in ("rows of nodes", "words") for layers in ("GraphSAGE", "PyG")
    ]
    assert len(bars) == 2


def test_link_when_there_can_be_no_namespaces_then_its_bars_are_not_measured(monkeypatch):
    def refused(*_, **__):
        raise NoLinkError("no root")

    monkeypatch.setattr(link, "measure_variants", refused)
    (_,), bars = link.measure(
        rate="125mbit", exponents=[1.05, 0.7], at_least=[4.36, 1.5], staleness=100, rounds=1, seconds=1.0, warm_steps=1
    )
    assert [bar.verdict for bar in bars] == ["not measured"] * 2


def test_link_when_measured_then_holds_epochs_and_bytes_against_bars(monkeypatch):
    measured = {"125mbit": Measurement({"hybrid": [10.0, 20.0], "het": [30.0, 50.0]})}
    told = {
        "hybrid": Told(Crossed(10, 101e6, 100e6), {}),
        "het": Told(Crossed(30, 33e6, 30e6), {"cache/miss_rate": 0.2}),
    }
    monkeypatch.setattr(link, "measure_variants", lambda *_, **__: (measured, told))
    workload = {"num_neighbors": [10, 5], "batch_size": 128, "dim": 128}
    (_, table), bars = link.measure(
        rate="125mbit", exponents=[0.7], at_least=[3.0], staleness=100, rounds=2, seconds=1.0, warm_steps=1, **workload
    )
    assert [(round(bar.value, 6), bar.verdict) for bar in bars] == [(2.75, "FAIL"), (1.0, "pass"), (10.0, "FAIL")]
    assert [row[-1] for row in table.rows] == ["100.0%", "20.0%"]
