"""Several processes on the same mapped files: what each writes arrives, and outlives it."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from forked import run_processes

from lightning_recsys.embeddings import EmbeddingBagConfig, SparseFeatures
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.optim import RowAdam, RowSGD
from lightning_recsys.stores import MappedStores

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

ROWS, STEPS, WORLD = 64, 200, 2
LAYOUT = TableLayout((EmbeddingBagConfig("t", ROWS, 4, ("t",), init_std=0.0),))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.001)


def meet(folder: Path, rank: int) -> None:
    """Both processes are up before either goes on: else the first would be done before the second starts."""
    (folder / f"up{rank}").touch()
    for other in range(WORLD):
        wait_for(folder / f"up{other}")


def train_own_rows(rank: int, stores_folder: str, meeting: str) -> None:
    torch.set_num_threads(1)
    stores = MappedStores(stores_folder)
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0)  # both ask for it, one makes it
    center = stores.create_dense_store("center", torch.zeros(4))
    own = SparseFeatures(("t",), torch.arange(rank, ROWS, WORLD))  # neighbours in memory belong to different processes
    meet(Path(meeting), rank)
    for step in range(STEPS):
        gradient = torch.full((own.batch_size, 1, 4), -1.0 if step % 2 else -2.0)
        if step % 3:
            store.apply_gradients(own, gradient, lr=1.0)
        else:
            store.apply_row_gradients(own.values, gradient.squeeze(1), lr=1.0)
        center.elastic_average(torch.full((4,), 8.0), alpha=0.5)
    stores.close()


def test_two_processes_when_they_train_different_rows_then_every_update_arrives(tmp_path):
    (tmp_path / "stores").mkdir()
    run_processes(train_own_rows, str(tmp_path / "stores"), str(tmp_path), nprocs=WORLD)
    assert (tmp_path / "up1").exists()
    stores = MappedStores(tmp_path / "stores")
    store = stores.embedding_store("t")
    # SGD with rate 1 on constant gradients: each row is the sum of what was pushed to it. Whole numbers, so exactly.
    assert store.rows.eq(STEPS * 1.5).all()
    assert store.step == WORLD * STEPS, "an update was not counted"
    center = stores.dense_store("center")
    assert center.version == WORLD * STEPS
    assert center.pull().tolist() == [8.0] * 4
    stores.close()


def train_until_killed(folder: str) -> None:
    torch.set_num_threads(1)
    store = MappedStores(folder).embedding_store("t")
    progress = Path(folder) / "progress"
    for step in range(1, 1_000_000):
        store.apply_row_gradients(torch.arange(ROWS), torch.full((ROWS, 4), -1.0), lr=1.0)
        if step == 50:
            progress.touch()
            while True:
                time.sleep(60)


def test_process_when_killed_then_its_updates_and_the_count_are_still_there(tmp_path):
    stores = MappedStores(tmp_path)
    store = stores.create_embedding_store("t", LAYOUT, RowSGD(1.0), seed=0)
    process = fork_server_context().Process(target=train_until_killed, args=(str(tmp_path),))
    process.start()
    assert process.pid is not None
    wait_for(tmp_path / "progress")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()
    reopened = MappedStores(tmp_path).embedding_store("t")
    assert reopened.rows.eq(50).all()
    assert reopened.step == 50
    assert store.step == 50


def create_and_report(rank: int, stores_folder: str, meeting: str) -> None:
    torch.set_num_threads(1)
    meet(Path(meeting), rank)
    layout = TableLayout((EmbeddingBagConfig("t", 20_000, 16, ("t",), init_std=0.1),))
    store = MappedStores(stores_folder).create_embedding_store("t", layout, RowAdam(), seed=rank)
    store.apply_row_gradients(torch.tensor([rank]), torch.ones(1, 16), lr=0.1)
    torch.save(store.read("weight", 2, 100), Path(meeting) / f"rank{rank}.pt")


def test_two_processes_when_they_create_one_store_then_they_share_it(tmp_path):
    (tmp_path / "stores").mkdir()
    run_processes(create_and_report, str(tmp_path / "stores"), str(tmp_path), nprocs=WORLD)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(WORLD))
    assert torch.equal(first, second)
    assert [path.name for path in (tmp_path / "stores").iterdir()] == ["t"], "the loser's attempt is gone"
    assert MappedStores(tmp_path / "stores").embedding_store("t").step == WORLD
