"""Rows replicated over ranks: two processes equal one that sees both batches."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forked import run_processes

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowAdagrad, RowAdam

KEYS, WORLD, STEPS = ("a", "b"), 2, 4


def make(dtype: str) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    first = EmbeddingBagConfig("a", 9, 4, ("a",), "mean", 0.5, dtype=dtype)
    return EmbeddingBagCollection(
        [first, EmbeddingBagConfig("b", 5, 4, ("b",), init_std=0.5, dtype=dtype)], optimizer=RowAdagrad(lr=0.1)
    )


def batch(step: int, rank: int) -> SparseFeatures:
    """Ranks differ in batch size (2 and 3); steps cycle through single-hot, bags, and bags with one rank weighted."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    size, kind = 2 + rank, step % 3
    lengths = torch.randint(0, 3, (2 * size,), generator=generator) if kind else torch.ones(2 * size).long()
    total = int(lengths.sum())
    values = torch.randint(0, 5, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) if kind == 2 and rank == 1 else None
    return SparseFeatures(KEYS, values, lengths=lengths if kind else None, weights=weights)


def loss(collection: EmbeddingBagCollection, sparse: SparseFeatures) -> torch.Tensor:
    return (collection(sparse) - 1).square().sum()


def train_rank(rank: int, folder: str, dtype: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    collection = make(dtype)
    for step in range(STEPS):
        loss(collection, batch(step, rank)).backward()
    torch.save({"world": dist.get_world_size(), "state": collection.state_dict()}, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_on_two_ranks_then_replicas_are_bit_equal_and_equal_one_process(tmp_path, dtype):
    run_processes(train_rank, str(tmp_path), dtype, nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
    assert [rank["world"] for rank in ranks] == [WORLD, WORLD]
    alone = make(dtype)
    for step in range(STEPS):
        joined = SparseFeatures.cat([alone.resolve(batch(step, rank)) for rank in range(WORLD)])
        # The mean over ranks of a loss that sums over examples is the sum over all examples, halved. Bags are resolved
        # before they are joined, so that the means are already in the weights; the backend takes resolved features.
        pooled, ticket = alone.embedding_bags.lookup(joined)
        alone.embedding_bags.apply_gradients([ticket], 2 * (pooled - 1) / WORLD, lr=0.1)
    for key, value in alone.state_dict().items():
        assert torch.equal(ranks[0]["state"][key], ranks[1]["state"][key]), key
        # Gradients are summed in another order, which may round a number of bfloat16 to its other neighbour.
        rtol = 2**-7 if value.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(ranks[0]["state"][key], value, rtol=rtol, atol=1e-6)


USED = {0: (0, 1), 1: (0,), 2: (), 3: (1,)}  # the ranks whose batch needs the tables, by step


def make_with_memory() -> EmbeddingBagCollection:
    """Its rule counts updates."""
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig("a", 9, 4, ("a",), init_std=0.5), EmbeddingBagConfig("b", 5, 4, ("b",), init_std=0.5)]
    return EmbeddingBagCollection(tables, optimizer=RowAdam(lr=0.1))


def train_what_is_needed(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store, patience = dist.FileStore(f"{folder}/store", WORLD), timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
    collection = make_with_memory()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    collection.attach_to(optimizer)
    for step, ranks in USED.items():
        if rank in ranks:
            loss(collection, batch(step, rank)).backward()
        optimizer.step()
    torch.save(collection.state_dict(), f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_update_when_the_batches_of_some_ranks_do_not_need_the_tables_then_is_that_of_the_others(tmp_path):
    run_processes(train_what_is_needed, str(tmp_path), nprocs=WORLD)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD))
    alone = make_with_memory()
    for step, ranks in USED.items():
        if ranks:
            pooled, ticket = alone.embedding_bags.lookup(SparseFeatures.cat([batch(step, rank) for rank in ranks]))
            alone.embedding_bags.apply_gradients([ticket], 2 * (pooled - 1) / WORLD, lr=0.1)
    for key, value in alone.state_dict().items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-6, atol=1e-6)
