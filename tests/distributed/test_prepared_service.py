"""The shared reader: the same batches as reading for oneself, and nothing left behind whoever dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from dataclasses import replace
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from forked import run_processes
from ports import free_port
from pytorch_lightning import LightningModule, Trainer

from lightning_recsys.data import PreparedDataModule
from lightning_recsys.data.preparation.shards import GROUP_ROWS, Rows, ShardWriter, shard_schema
from lightning_recsys.data.prepared import Feature, Manifest
from lightning_recsys.data.prepared.service import Reader, receive_batches
from lightning_recsys.data.prepared.stream import StreamRequest, read_packs
from lightning_recsys.data.raw.columns import Bags
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.strategies import ForkserverDDPStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    # each rank logs rows of its own, on purpose
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """300 rows that know their numbers in six uneven shards, with a bag that grows along them."""
    root = tmp_path / "rows"
    features = {"row": Feature(1000), "tags": Feature(1000, bag=True, weighted=True)}
    shards, start = [], 0
    for i, size in enumerate((50, 1, 99, 20, 100, 30)):
        numbers = torch.arange(start, start + size).numpy()
        lengths = numbers // 10
        tags = Bags(numbers.repeat(lengths), lengths, numbers.repeat(lengths).astype("float32"))
        writer = ShardWriter(root, f"train/{i}.parquet", schema=shard_schema(("x",), features), compression="none")
        writer.write(
            Rows((numbers % 2).astype("float32"), numbers[None].astype("float32"), {"row": numbers}, {"tags": tags})
        )
        shards.append(writer.finish())
        start += size
    Manifest(("x",), features, {"train": tuple(shards), "validation": (), "test": ()}, GROUP_ROWS).save(root)
    return root


def request(rank: int = 0, world_size: int = 1, **changes) -> StreamRequest:
    options = {"split": "train", "seed": 0, "epoch": 0, "window": 64, "batch_size": 16}
    return StreamRequest(**(options | changes), rank=rank, world_size=world_size)


def contents(batches) -> list[list]:
    return [
        [
            x.dense.tolist(),
            x.labels.tolist(),
            x.sparse.values.tolist(),
            x.sparse.lengths.tolist(),
            x.sparse.weights.tolist(),
        ]
        for x in batches
    ]


def module(folder, *, batch_size: int = 16, shuffle_window: int = 64, **options) -> PreparedDataModule:
    data = PreparedDataModule(root=folder, batch_size=batch_size, shuffle_window=shuffle_window, **options)
    data.setup()
    return data


@pytest.fixture
def reader(folder):
    reader = Reader(folder)
    yield reader
    reader.close()


def test_shared_reader_when_workers_ask_at_any_pace_then_each_gets_what_it_would_read_itself(reader, folder):
    rows = module(folder).rows("train")
    found: dict[tuple[int, int], list] = {}

    def wanted(rank: int, epoch: int) -> StreamRequest:
        # Single rows fill several packs of batches, each larger than the one before.
        return request(rank, 3, epoch=epoch, window=0 if epoch else 64, batch_size=1 if epoch else 16)

    def work(rank: int, epoch: int) -> None:
        batches = []
        for batch in receive_batches(reader.address, wanted(rank, epoch), slots=2):
            batches.append(batch)
            time.sleep(0.002 * rank)
        found[rank, epoch] = contents(batches)

    for epoch in range(2):
        threads = [threading.Thread(target=work, args=(rank, epoch)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(3):
            assert found[rank, epoch] == contents(chain.from_iterable(read_packs(wanted(rank, epoch), rows)))
    # A worker that leaves early disturbs nobody.
    early = receive_batches(reader.address, request(), slots=1)
    next(early)
    early.close()
    assert contents(receive_batches(reader.address, request(), slots=1)) == contents(
        chain.from_iterable(read_packs(request(), rows))
    )


def test_shared_reader_when_a_shard_is_damaged_then_the_worker_is_told(folder):
    path = folder / "train/4.parquet"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    data = module(folder, reader="shared")
    with pytest.raises(ValueError, match=r"train/4.parquet is damaged"):
        list(data.train_dataloader())
    data.teardown()


def test_shared_reader_when_killed_then_the_worker_reads_the_same_rows_by_itself_and_says_so_once(folder, caplog):
    # A pack for each shard, in order. The fourth is smaller than the third, so it waits for the third's place.
    data = module(folder, batch_size=1, shuffle_window=0, reader="shared", prefetch_batches=1)
    alone = list(module(folder, batch_size=1, shuffle_window=0).train_dataloader())
    batches = iter(data.train_dataloader())
    received = [next(batches)]
    next(iter(data._readers.values()))._process.kill()
    with caplog.at_level("WARNING"):
        received += [*batches, *data.train_dataloader()]
    assert contents(received) == contents(alone) * 2
    (said,) = caplog.messages
    assert "the reader process (data.reader=shared) has ended" in said
    data.teardown()


def become_another_user_and_listen(address: str, listens: Connection, end: Connection) -> None:
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        listens.send(True)
        end.recv()


def become_another_user_and_ask(address: str, told: Connection) -> None:
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(address)
        told.send(asking.recv(1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_shared_reader_when_another_user_takes_its_name_or_asks_it_then_neither_is_answered(reader):
    fork = multiprocessing.get_context("fork")
    (told, tell), (wait, end) = fork.Pipe(duplex=False), fork.Pipe(duplex=False)
    address = f"\0lightning-recsys-test-{os.getpid()}"
    other = fork.Process(target=become_another_user_and_listen, args=(address, tell, wait))
    other.start()
    try:
        assert told.poll(100)
        assert told.recv()
        with pytest.raises(RuntimeError, match="has ended"):
            next(receive_batches(address, request(), slots=1))
    finally:
        end.send(None)
        other.join()
    stranger = fork.Process(target=become_another_user_and_ask, args=(reader.address, tell))
    stranger.start()
    assert told.poll(100)  # seconds: the reader starts meanwhile, and imports torch
    assert told.recv() == b""  # the reader has hung up
    stranger.join()
    assert next(receive_batches(reader.address, request(), slots=1)) is not None
    for connection in (told, tell, wait, end):
        connection.close()


def test_shared_reader_when_its_owner_has_forked_then_ends_at_once_all_the_same(folder):
    """What a data loader's workers are to the process that owns the reader: they have copies of all that is open."""
    data = module(folder, batch_size=1, reader="shared", prefetch_batches=1)
    batches = iter(data.train_dataloader())
    next(batches)
    reader = next(iter(data._readers.values()))._process
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    forked.start()
    try:
        batches.close()
        data.teardown()
        assert reader.returncode == 0  # it has ended by itself
        assert forked.is_alive()
    finally:
        forked.kill()
        forked.join()


def own_a_reader(folder: Path, told: Connection) -> None:
    data = module(folder, reader="shared")
    batches = iter(data.train_dataloader())
    next(batches)
    told.send(next(iter(data._readers.values()))._process.pid)
    time.sleep(100)


def test_shared_reader_when_its_owner_dies_then_ends_too(folder):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    owner = fork_server_context().Process(target=own_a_reader, args=(folder, sender))
    owner.start()
    with receiver, sender:
        try:
            reader = psutil.Process(receiver.recv())
            maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in (owner.pid, reader.pid)]
            owner.kill()
            owner.join()
        finally:
            owner.kill()
    assert owner.exitcode == -signal.SIGKILL
    shared = [line for lines in maps for line in lines if "/memfd:lightning-recsys" in line or "/dev/shm/" in line]
    assert shared
    assert all(line.endswith("(deleted)") for line in shared)  # memory without a name, which cannot be left behind
    _, alive = psutil.wait_procs([reader], timeout=100)
    assert not alive


class Teller(LightningModule):
    """Trains nothing; tells what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.told: dict = {"rows": []}

    def on_train_start(self) -> None:
        data = self.trainer.datamodule
        self.told |= {
            "world_size": self.trainer.world_size,
            "node": self.trainer.node_rank,
            "address": next(iter(data._addresses.values())),
            "reader": next(iter(data._readers.values()))._process.pid,
        }

    def training_step(self, batch, batch_idx):
        self.told["rows"] += batch.sparse.values[: len(batch)].tolist()
        return self.layer(batch.dense).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_on_a_node(rank: int, port: str, folder: Path, out: Path) -> None:
    """What a launcher of clusters would start on the node of this number."""
    place = {
        "RANK": rank,
        "GROUP_RANK": rank,
        "NODE_RANK": rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 1,
    }
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **{key: str(x) for key, x in place.items()}})
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=1, **off)
    model = Teller()
    trainer.fit(model, datamodule=PreparedDataModule(root=folder, batch_size=16, reader="shared"))
    torch.distributed.destroy_process_group()
    (out / f"node-{rank}").write_text(json.dumps(model.told))


@pytest.mark.timeout(240)
def test_shared_reader_when_workers_are_on_two_nodes_then_each_node_has_its_own(folder, tmp_path):
    """Two processes on this host that believe to be on two machines, as a launcher of clusters would start them."""
    run_processes(train_on_a_node, str(free_port()), folder, tmp_path, nprocs=2)
    told = [json.loads((tmp_path / f"node-{rank}").read_text()) for rank in range(2)]
    assert [(x["world_size"], x["node"]) for x in told] == [(2, 0), (2, 1)]
    assert len({x["address"] for x in told}) == len({x["reader"] for x in told}) == 2
    assert sorted(row for x in told for row in x["rows"]) == list(range(300))
    assert [len(x["rows"]) for x in told] == [150, 150]
    assert not any(psutil.pid_exists(x["reader"]) for x in told)


def compare_rows(rank: int, place: str, folders: list[Path], out: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    data = PreparedDataModule(root=folders[rank], batch_size=16)
    data.trainer = SimpleNamespace(local_rank=0, node_rank=rank, world_size=2, global_rank=rank)
    try:
        data._source("train", None)
    except ValueError as error:
        (out / f"told-{rank}").write_text(str(error))
    else:
        (out / f"told-{rank}").write_text(f"equal on {torch.distributed.get_world_size()}")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("missing", [0, 1])
def test_ranks_when_their_machines_have_prepared_different_rows_then_refused_and_named(folder, tmp_path, missing):
    whole = Manifest.load(folder)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shards = whole.splits["train"]
    replace(whole, splits={**whole.splits, "train": shards[: len(shards) - missing]}).save(other)
    run_processes(compare_rows, f"file://{tmp_path}/meeting", [folder, other], tmp_path, nprocs=2)
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    if not missing:
        assert told == ["equal on 2"] * 2
        return
    assert told[0] == told[1]
    assert f"different rows of 'train' (their number, features or order): rank 0: 300 rows in {folder} (" in told[0]
    assert f"; rank 1: 270 rows in {other} (" in told[0]


class Recorder(LightningModule):
    """Trains nothing; writes down the rows that each rank sees in each epoch."""

    def __init__(self, folder: Path, *, stop_after: int | None = None) -> None:
        super().__init__()
        self.folder, self.stop_after = folder, stop_after
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        rows = batch.sparse.values[: len(batch)].tolist()
        with (self.folder / f"{self.current_epoch}-{self.global_rank}-{self.trainer.world_size}").open("a") as file:
            file.writelines(f"{row}\n" for row in rows)
        return self.layer(batch.dense).mean()

    def validation_step(self, batch, batch_idx):
        """There are no rows for it; without the method Lightning warns."""

    def on_train_batch_end(self, *_):
        if self.global_step == self.stop_after:
            self.trainer.save_checkpoint(self.folder / "stopped.ckpt")
            self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(folder, out, *, workers: int, stop_after=None, ckpt_path=None, reader="local", epochs=2) -> None:
    strategy = ForkserverDDPStrategy() if workers > 1 else "auto"
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=strategy,
        max_epochs=epochs,
        limit_val_batches=0,
        use_distributed_sampler=False,
        **quiet,
    )
    data = PreparedDataModule(root=folder, batch_size=16, shuffle_window=64, reader=reader)
    trainer.fit(Recorder(out, stop_after=stop_after), datamodule=data, ckpt_path=ckpt_path)
    assert trainer.world_size == workers


def rows_seen(out: Path, epoch: int) -> dict[str, list[int]]:
    return {path.name: [int(x) for x in path.read_text().split()] for path in out.glob(f"{epoch}-*")}


def order_of(folder, epoch: int) -> list[int]:
    loader = module(folder).train_dataloader()
    loader.set_epoch(epoch)
    return [row for batch in loader for row in batch.sparse.values[: len(batch)].tolist()]


@pytest.mark.parametrize("reader", ["local", "shared"])
def test_training_when_two_workers_share_rows_then_each_row_is_seen_once(folder, tmp_path, reader):
    fit(folder, tmp_path, workers=2, reader=reader)
    for epoch in range(2):
        seen = rows_seen(tmp_path, epoch)
        assert sorted(seen) == [f"{epoch}-0-2", f"{epoch}-1-2"]
        assert abs(len(seen[f"{epoch}-0-2"]) - len(seen[f"{epoch}-1-2"])) <= 1
        assert sorted(row for rows in seen.values() for row in rows) == list(range(300))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1)])
def test_training_when_resumed_inside_an_epoch_by_other_workers_then_no_row_is_lost_or_seen_twice(
    folder, tmp_path, before, after
):
    fit(folder, tmp_path, workers=before, stop_after=5)
    served = 5 * 16 * before
    first = [row for rows in rows_seen(tmp_path, 0).values() for row in rows]
    assert sorted(first) == sorted(order_of(folder, 0)[:served])
    fit(folder, tmp_path, workers=after, ckpt_path=tmp_path / "stopped.ckpt")
    for epoch in range(2):
        seen = [row for rows in rows_seen(tmp_path, epoch).values() for row in rows]
        assert sorted(seen) == list(range(300))
