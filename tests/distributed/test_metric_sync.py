"""Metrics over two gloo processes: their value is that of one process on all examples."""

import pytest
import torch
import torch.distributed as dist
from forked import run_processes

from lightning_recsys.metrics import Calibration, LogLoss, NormalizedEntropy, StreamingAUROC

WORLD, STEPS, WINDOW = 2, 12, 64


def make() -> dict:
    return {
        "ne": NormalizedEntropy(WINDOW, from_logits=True),
        "auc": StreamingAUROC(from_logits=True),
        "rare": StreamingAUROC(from_logits=True),  # whose blocks differ between the processes
        "log_loss": LogLoss(from_logits=True),
        "calibration": Calibration(from_logits=True),
    }


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks differ in batch size, 5 and 6; logits are rounded, so that ties occur across processes."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    logits = torch.randn(5 + rank, generator=generator).round(decimals=1)
    return logits, (torch.rand(5 + rank, generator=generator) < logits.sigmoid()).float()


def measure_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    metrics = make()
    for step in range(STEPS):
        for name, metric in metrics.items():
            logits, labels = batch(step, rank)
            metric.update(logits * 20 - 40 * rank if name == "rare" else logits, labels)
    local = metrics["ne"].lifetime()
    values = {name: metric.compute() for name, metric in metrics.items()}
    with metrics["ne"].sync_context():
        values["window"] = metrics["ne"].window()
        values["state"] = dict(metrics["ne"].state_dict())
    with metrics["auc"].sync_context():
        values["error_bound"] = metrics["auc"].error_bound()
    assert metrics["ne"].lifetime() == local  # each process goes on with its own sums
    torch.save({"world": dist.get_world_size(), **values}, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_metrics_on_two_processes_then_they_equal_one_process_on_the_concatenation(tmp_path):
    run_processes(measure_rank, str(tmp_path), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
    alone = make()
    for step in range(STEPS):
        joined = [torch.cat(parts) for parts in zip(*(batch(step, rank) for rank in range(WORLD)), strict=True)]
        shifts = torch.cat([torch.full((5 + rank,), 40.0 * rank) for rank in range(WORLD)])
        for name, metric in alone.items():
            metric.update(joined[0] * 20 - shifts if name == "rare" else joined[0], joined[1])
    expected = {name: metric.compute() for name, metric in alone.items()}
    expected["window"] = alone["ne"].window()
    expected["error_bound"] = alone["auc"].error_bound()
    assert expected["window"] != expected["ne"]  # 132 examples, the window holds half
    for values in ranks:
        assert values["world"] == WORLD
        for name, value in expected.items():  # float64 sums in another order
            assert values[name].item() == pytest.approx(value.item(), rel=1e-13), name

    resumed = NormalizedEntropy(WINDOW, from_logits=True)
    resumed.load_state_dict(ranks[0]["state"])
    assert resumed.lifetime().item() == pytest.approx(expected["ne"].item(), rel=1e-13)
    assert resumed.window().item() == pytest.approx(expected["window"].item(), rel=1e-13)
