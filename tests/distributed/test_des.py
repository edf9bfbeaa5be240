"""DES in several processes: what it trains is what one process trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from des_runs import (
    CASES,
    SAVED,
    SHARED_OUT,
    compare_processes,
    go_on,
    state_of,
    train_all,
    train_groups,
    train_without_rows,
)
from forked import run_processes
from ports import free_port

from lightning_recsys.callbacks import NormalizedEntropyMonitor
from lightning_recsys.checkpoints import read_checkpoint, to_file
from lightning_recsys.stores import DynamicRows
from lightning_recsys.strategies import DESStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
]


@pytest.fixture(scope="module")
def alone():
    """What one process trains, by case."""
    return {name: state_of(case.fit()) for name, case in CASES.items()}


def load(path):
    return torch.load(path, weights_only=True)


def assert_same(state, expected, name=""):
    """Equal but for the order in which float32 partial results are added up.

    Each of them may be off by 2^-24 of its size, 6e-8, in every step, and so may a gradient; steps are at most ten
    times as large as gradients, which are below 0.1. 50 steps add up to 3e-6 at worst, all errors of one sign. A number
    that counts twice, or not at all, changes every step by itself.
    """
    assert state.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(
            state[key], expected[key], rtol=0, atol=3e-6, msg=lambda text, key=key: f"{name} {key}: {text}"
        )


@pytest.mark.parametrize(
    ("world", "names"),
    [(2, list(CASES)), (3, ["lr", "fm", "wide_deep", "dcn", "dcn_v2_stacked", "dlrm", "two_fields"])],
    ids=["2", "3"],
)
def test_models_when_cut_over_processes_then_train_as_in_one(alone, tmp_path, world, names):
    """Fields that do not divide evenly, empty bags, a last batch that is smaller, a process without any field."""
    run_processes(train_all, world, free_port(), str(tmp_path), names, nprocs=world)
    for rank in range(world):
        for name, state in load(tmp_path / f"{rank}.pt").items():
            assert_same(state, alone[name], name)


def test_rows_in_bfloat16_when_cut_over_processes_then_come_back_near_those_of_one():
    case = replace(CASES["fm"], arguments={**CASES["fm"].arguments, "dtype": "bfloat16"})
    cut, whole = state_of(case.fit(strategy=DESStrategy(), devices=2)), state_of(case.fit())
    start = state_of(case.task())
    assert cut.keys() == whole.keys()
    for key, value in whole.items():
        assert cut[key].dtype == value.dtype == start[key].dtype
        off, moved = ((value.float() - other[key].float()).abs().mean().item() for other in (cut, start))
        assert off <= 0.2 * moved, key  # a gradient that counts twice, or not at all, is off by all of it
    assert {value.dtype for key, value in whole.items() if key.endswith(".weight")} >= {torch.bfloat16}


def test_layers_that_are_whole_when_trained_with_dropout_and_bfloat16_then_are_the_same_bit_for_bit(tmp_path):
    run_processes(compare_processes, 2, free_port(), str(tmp_path), nprocs=2)
    first, second = (load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert {"model.deep.rest.0.running_mean", "model.deep.rest.4.weight"} <= first["shared"].keys()
    assert "model.deep.first.weight" not in first["shared"], "is cut"
    for run in ("shared", "again"):
        for name, tensor in first[run].items():
            assert torch.equal(tensor, second[run][name]), (run, name)
    assert (first["columns"], second["columns"]) == (("c0", "c2", "c4"), ("c1", "c3"))
    for seen in (first, second):
        shared_out, in_loader, in_step, alike = seen["errors"]
        assert "same batch on all processes of a group, but their loaders gave different ones: batch.de" in shared_out
        assert "gave different ones: batch.sparse['c0']. Do not" in in_loader
        assert "to look up the same ids, but a step gave them different ones: lookup[0]['c0']. Draw" in in_step
        assert alike == "none"


def test_checkpoint_when_saved_by_two_processes_then_any_number_goes_on(alone, tmp_path):
    plain = tmp_path / "plain.ckpt"
    at_20 = tmp_path / "start-step=20.ckpt"
    run_processes(go_on, 2, free_port(), str(tmp_path), {"start": None, "again": str(at_20)}, 2, nprocs=2)
    run_processes(go_on, 3, free_port(), str(tmp_path), {"more": str(at_20)}, 3, nprocs=3)
    to_file(at_20, plain)
    expected = alone["deepfm_with_adam"]
    assert_same(state_of(SAVED.fit(ckpt_path=plain)), expected)
    states = load(tmp_path / "2-1.pt") | load(tmp_path / "3-2.pt")
    for name in ("start", "again", "more"):
        assert_same(states[name], expected)
    for key, value in states["start"].items():
        assert torch.equal(states["again"][key], value), key


def test_metrics_when_two_processes_see_every_example_then_it_counts_once():
    """In the main process, too, which gets what the processes have summed."""
    cut, whole = NormalizedEntropyMonitor(), NormalizedEntropyMonitor()
    case = CASES["lr"]
    case.fit(strategy=DESStrategy(), devices=2, callbacks=[cut])
    case.fit(callbacks=[whole])
    seen, expected = cut.state_dict()["train"], whole.state_dict()["train"]
    assert seen["weight_sum"] == expected["weight_sum"] == len(case.data().rows("train"))
    torch.testing.assert_close(seen["cross_entropy_sum"], expected["cross_entropy_sum"], rtol=1e-6, atol=0)


def test_groups_when_each_has_a_third_of_a_batch_then_train_as_one_process_with_all(tmp_path):
    """What is whole is the same bit for bit, in whatever order three groups' gradients are added up."""
    run_processes(train_groups, 6, free_port(), str(tmp_path), nprocs=6)
    expected = state_of(SHARED_OUT.fit())
    ranks = [load(tmp_path / f"{rank}.pt") for rank in range(6)]
    for seen in ranks:
        assert_same(seen["state"], expected)
        assert seen["examples"] == len(SHARED_OUT.data().rows("train"))
        assert torch.equal(seen["train/ne"], ranks[0]["train/ne"])
        assert seen["groups_left"] == 1, "the default one"
        for name, tensor in seen["shared"].items():
            assert torch.equal(tensor, ranks[0]["shared"][name]), name


def test_tables_when_nobody_has_rows_at_first_then_two_processes_make_those_of_one(tmp_path):
    """Of a field with 10^12 ids, too; ids, rows and optimizer state are in the checkpoint."""
    train_without_rows(0, 1, 0, str(tmp_path))
    run_processes(train_without_rows, 2, free_port(), str(tmp_path), nprocs=2)
    for name in ("all-{}-step=20", "some-{}-step=20", "more-{}"):
        one, two = (read_checkpoint(tmp_path / f"{name.format(world)}.ckpt")["state_dict"] for world in (1, 2))
        rows = two["model.embeddings.embedding_bags.c0.weight"]
        assert (len(rows) == 50) == name.startswith("all")
        assert len(rows) < 20 * 32
        assert_same(two, one)
    never_stopped, resumed = (read_checkpoint(tmp_path / f"{name}.ckpt") for name in ("some-2-step=20", "more-2"))
    assert_same(resumed["state_dict"], never_stopped["state_dict"])


def test_dynamic_rows_when_no_table_has_use_for_them_then_refused_by_name():
    with pytest.raises(ValueError, match=r"strategy.dynamic_rows makes the rows .* the model has no such"):
        SAVED.fit(strategy=DESStrategy(dynamic_rows=DynamicRows()), devices=1)
