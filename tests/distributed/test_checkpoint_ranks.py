"""Folder checkpoints written by several processes, and by one that is killed while it writes."""

import os
import resource
import signal

import pytest
import torch
import torch.distributed as dist
from forked import run_processes
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_recsys.checkpoints import StoredTensor, folder, read_checkpoint, read_extras, read_stored, save_folder
from lightning_recsys.errors import CheckpointNotWrittenError

WORLD = 3
ROWS = torch.arange(40.0).view(20, 2)


def share(rows, *, rank=0, world_size=1):
    return StoredTensor(
        shape=rows.shape,
        dtype=rows.dtype,
        read=lambda first, count: rows[first : first + count],
        write=lambda first, values: rows[first : first + len(values)].copy_(values),
        rank=rank,
        world_size=world_size,
    )


def checkpoint(step, **position):
    return {
        "state_dict": {"dense": torch.full((3,), step), "table": share(ROWS + step, **position)},
        "global_step": step,
    }


def save_as_rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", WORLD), rank=rank, world_size=WORLD)
    assert dist.get_world_size() == WORLD
    save_folder(path, checkpoint(1, rank=rank, world_size=WORLD), extras={"replica": torch.full((2,), rank)})
    dist.destroy_process_group()


@pytest.mark.distributed
def test_checkpoint_when_three_ranks_save_then_two_and_one_can_read(tmp_path):
    path = tmp_path / "x.ckpt"
    run_processes(save_as_rank, str(path), nprocs=WORLD)
    version = path / (path / "current").read_text()
    assert len(list(version.glob("*.distcp"))) == WORLD, "every rank wrote its share"
    rows = torch.zeros_like(ROWS)
    for rank in range(2):
        read_stored(path, {"table": share(rows, rank=rank, world_size=2)})
    assert torch.equal(rows, ROWS + 1)
    assert read_checkpoint(path)["state_dict"]["dense"].tolist() == [1, 1, 1]
    assert [int(read_extras(path, rank)["replica"][0]) for rank in range(WORLD)] == [0, 1, 2]


def refused_as_rank(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    with pytest.raises(ValueError, match="is a folder, but no checkpoint"):
        save_folder(path, checkpoint(1, rank=rank, world_size=2))
    if rank == 1:  # its disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for extras in (torch.zeros(500), None):  # in a file of its own, or in its share of the tensors
        rows = torch.zeros(20 if extras is not None else 1000, 2)
        whole = {"state_dict": {"table": share(rows, rank=rank, world_size=2)}, "global_step": 1}
        with pytest.raises(CheckpointNotWrittenError, match=r"full.ckpt was not written: .*File too large.*\(rank 1\)"):
            save_folder(f"{path}.full.ckpt", whole, extras=extras)
    dist.destroy_process_group()


@pytest.mark.distributed
def test_checkpoint_when_rank_0_refuses_or_rank_1_cannot_write_then_every_rank_says_so(tmp_path):
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "thesis.tex").touch()
    run_processes(refused_as_rank, str(path), nprocs=2)
    assert list((tmp_path / "thesis.full.ckpt").iterdir()) == [], "what was begun takes no room"


def save_on_own_disk(rank: int, path: str) -> None:
    """The same path on every machine, and other disks behind it."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    assert dist.get_world_size() == 2
    folder._PATIENCE = 0.2
    match = r"not written: \d of its \d files, such as .*\(rank 0\).* still counts"
    with pytest.raises(CheckpointNotWrittenError, match=match) as raised:
        save_folder(f"{path}/disk-{rank}/x.ckpt", checkpoint(2, rank=rank, world_size=2), extras=torch.zeros(3))
    assert "Save in a folder that all machines share" in str(raised.value)
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("before", ["folder", "file"])
def test_checkpoint_when_machines_have_disks_of_their_own_then_the_previous_one_counts_and_every_rank_says_so(
    tmp_path, before
):
    path = tmp_path / "disk-0" / "x.ckpt"
    path.parent.mkdir()
    if before == "folder":
        save_folder(path, checkpoint(1))
        kept = [path / "current", path / (path / "current").read_text()]
    else:
        torch.save({"global_step": 1}, path)
        kept = [path]
    run_processes(save_on_own_disk, str(tmp_path), nprocs=2)
    if before == "folder":
        assert read_checkpoint(path)["global_step"] == 1
        assert sorted(path.iterdir()) == sorted(kept)
    else:
        assert torch.load(path)["global_step"] == 1
    assert [x.name for x in path.parent.iterdir()] == ["x.ckpt"]
    assert [x for x in (tmp_path / "disk-1").rglob("*") if not x.is_dir()] == [], "what was begun is removed there, too"


def save_and_die(_: int, path: str) -> None:
    """SIGKILL when everything is written and nothing yet counts."""
    folder._commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save_folder(path, checkpoint(2))


@pytest.mark.distributed
def test_checkpoint_when_the_process_is_killed_while_saving_then_the_previous_one_counts(tmp_path):
    path = tmp_path / "x.ckpt"
    save_folder(path, checkpoint(1))
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_processes(save_and_die, str(path), nprocs=1)
    rows = torch.zeros_like(ROWS)
    read_stored(path, {"table": share(rows)})
    assert torch.equal(rows, ROWS + 1)
    assert read_checkpoint(path)["global_step"] == 1
