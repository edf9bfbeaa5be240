"""A file system that others fill up ends no server: what has no room is refused with the bytes that it lacks."""

import os
import re
import subprocess
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from server_processes import run_server

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.errors import RequestRefusedError
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.models import DeepFM
from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import connect
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.journal import Journal
from lightning_recsys.parameter_server.messages.wire import Limits, Request, Status, decode_reply, encode_request
from lightning_recsys.partition.parts import split
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.machines import GroupMachines
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.stores import DynamicRows, MappedStores
from lightning_recsys.stores.folders.room import free_bytes
from lightning_recsys.strategies import AsyncParameterServerStrategy
from lightning_recsys.strategies.hierarchical.servers.group_parts import GroupParts
from lightning_recsys.strategies.hierarchical.servers.group_server import GroupRequests
from lightning_recsys.tasks import CTRTask

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

MIB = 1 << 20
ROW_BYTES = 64 * 4 + 4  # 64 weights and a clock
PUSHED = 2000  # rows of a push, whose undo record is below a mebibyte


def table(num_rows):
    return TableLayout((EmbeddingBagConfig("t", num_rows, 64, ("x",), init_std=0.0),))


@pytest.fixture
def memory(tmp_path):
    """A folder of 24 MiB of memory."""
    folder = tmp_path / "memory"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={24 * MIB},mode=700", "lightning_recsys", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system of a test's own needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # which waits for nothing that is mapped


def fill(path):
    """Another tenant, who takes all that is left."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def train(store, first, stop):
    """A step of -1 for each of these rows, in several pushes."""
    for start in range(first, stop, PUSHED):
        rows = torch.arange(start, min(start + PUSHED, stop))
        store.apply_row_gradients(rows, torch.ones(rows.numel(), 64), lr=1.0)
    store.flush()


@contextmanager
def served(folder):
    context = fork_server_context()
    here, there = context.Pipe()
    process = context.Process(target=run_server, args=(folder, None, there))
    process.start()
    there.close()
    try:
        assert here.poll(60), "the server did not start"
        yield process, here.recv()
    finally:
        process.terminate()
        process.join()
        here.close()


def missing(message):
    """Bytes that a refusal names: needed, there and missing."""
    found = re.search(r"needs ([0-9,]+) bytes in .*, and ([0-9,]+) are there: ([0-9,]+) are missing", message)
    assert found is not None, message
    return [int(number.replace(",", "")) for number in found.groups()]


def test_server_when_others_fill_its_memory_then_rows_that_exist_train_on_and_new_ones_are_refused(memory):
    num_rows = 4 * MIB // ROW_BYTES
    with served(memory / "stores") as (process, endpoint):
        stores = connect(endpoint, transport="tcp")
        fixed = stores.create_embedding_store("fixed", table(num_rows), RowSGD(), seed=0)
        growing = stores.create_embedding_store("growing", table(10**9), RowSGD(), seed=0, dynamic=DynamicRows())
        train(growing, 0, PUSHED)
        fill(memory / "tenant")
        train(fixed, 0, num_rows)  # not one of these pages was written to before
        assert stores.status()["full"] == 0
        with pytest.raises(RequestRefusedError) as refused:
            stores.create_embedding_store("late", table(num_rows), RowSGD(), seed=0)
        needed, there, lacking = missing(str(refused.value))
        assert needed == num_rows * ROW_BYTES + 8  # and the count of updates
        assert 0 <= there < MIB
        assert lacking == needed - there
        # Rows are made in pieces of four mebibytes; the first one is there.
        one_piece = 4 * MIB // (ROW_BYTES + 8)
        with pytest.raises(RequestRefusedError, match="no room for more rows") as refused:
            train(growing, PUSHED, one_piece + 2 * PUSHED)
        assert missing(str(refused.value))[0] == one_piece * (ROW_BYTES + 8)
        status = stores.status()
        assert status["full"] == status["refused"] >= 2
        rows_before = growing.num_live
        assert rows_before <= one_piece
        assert growing.lookup(torch.arange(PUSHED)).eq(-1).all()
        assert fixed.lookup(torch.arange(num_rows)).eq(-1).all()
        (memory / "tenant").unlink()
        train(growing, 10**6, 10**6 + PUSHED)
        assert growing.num_live == rows_before + PUSHED
        assert process.is_alive()
        stores.close()


def a_layer():
    """The parts of a group server, which has a layer of two megabytes, and the layer as an operator."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500))
    traced = trace(model, [torch.ones(2, 1000)])
    devices = {op.name: "server0" if op.owns_parameters else "trainer" for op in traced.operators.operators}
    optimizer = torch.optim.Adagrad(model.parameters())
    parts = GroupParts.of(split(traced, OperatorPlan(devices)).on("server0"), optimizer)
    return parts, next(op for op in traced.operators.operators if op.owns_parameters)


def leave(memory, num_bytes):
    """Another tenant, who takes all but so many bytes."""
    (memory / "tenant").write_bytes(bytes(free_bytes(memory) - num_bytes))


def test_group_server_when_it_has_the_room_that_a_plan_counts_then_its_parts_are_loaded(memory):
    folder = memory / "group"
    folder.mkdir(mode=0o700)
    parts, layer = a_layer()
    leave(memory, GroupMachines(1).state_bytes(layer) + MIB // 4)  # headers, and blocks that are not full
    parts.save(folder)
    requests = GroupRequests(folder, Limits(), lambda: None)
    requests._load(Request("load_parts", 1, bytes(16)))
    requests.close()


def test_parts_when_there_is_no_room_for_their_file_then_refused_and_nothing_is_left(memory):
    folder = memory / "group"
    folder.mkdir(mode=0o700)
    parts, _ = a_layer()
    leave(memory, MIB)
    with pytest.raises(OSError, match="the file parts of a group server needs") as refused:
        parts.save(folder)
    needed, there, _ = missing(str(refused.value))
    assert there <= MIB
    assert list(folder.iterdir()) == []
    (memory / "tenant").unlink()
    parts.save(folder)
    assert needed == (folder / "parts").stat().st_size


def test_journal_when_there_is_no_room_for_it_then_refused_with_its_bytes(memory):
    folder = memory / "stores"
    folder.mkdir(mode=0o700)
    fill(memory / "tenant")
    with pytest.raises(OSError, match="a journal of 1024 clients needs") as refused:
        Journal(folder)
    assert missing(str(refused.value))[0] == 1025 * 64
    (memory / "tenant").unlink()
    Journal(folder).close()


def test_store_when_its_files_lack_pages_and_others_took_the_rest_then_it_is_refused_instead_of_ending_the_process(
    memory,
):
    stores = MappedStores(memory)
    stores.create_embedding_store("t", table(4 * MIB // ROW_BYTES), RowSGD(), seed=0)
    stores.close()
    weight = memory / "t" / "weight"
    size = weight.stat().st_size
    os.truncate(weight, 0)  # as an earlier version made it, or a copy without zeros
    os.truncate(weight, size)
    fill(memory / "tenant")
    pid = os.fork()
    if not pid:
        try:
            MappedStores(memory).embedding_store("t").write("weight", 0, torch.ones(size // 256, 64))
        except OSError as error:
            os._exit(missing(str(error))[0] != size)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    (memory / "tenant").unlink()
    MappedStores(memory).embedding_store("t").write("weight", 0, torch.ones(size // 256, 64))


# --- Workers that meet ------------------------------------------------------------------------------------------------


def ask(handler, operation, *arrays, **arguments):
    request = Request(operation, 1, bytes(range(16)), 0, "", {"run": "run1", "size": 2, **arguments}, list(arrays))
    reply = decode_reply(
        [bytearray(x) for x in handler.handle([bytearray(x) for x in encode_request(request)])], Limits()
    )
    if reply.status != Status.OK:
        raise OSError(reply.value)
    return [x.tolist() for x in reply.arrays]


def meet(handler, number, num_bytes):
    """What both workers hear of a meeting to which each brings as many bytes."""
    common = {"number": number, "kind": "gather all", "may_miss": True, "combine": "all"}
    brought = [torch.full((num_bytes,), rank, dtype=torch.uint8) for rank in range(2)]
    for rank in range(2):
        ask(handler, "meet", brought[rank], rank=rank, **common)
    return [ask(handler, "meet", rank=rank, **common)[1] for rank in range(2)]


def test_meetings_and_leases_when_others_fill_the_memory_of_a_run_then_they_go_on_and_a_successor_has_them(memory):
    folder = memory / "stores"
    folder.mkdir(mode=0o700)
    handler, lease = RequestHandler(folder), {"rank": 0, "number": 1, "shard": 1000, "lease": 2}
    assert meet(handler, 1, 100) == [[0] * 100 + [1] * 100] * 2
    fill(memory / "tenant")
    for number in range(100):
        assert ask(handler, "take_share", latest=number, **lease) == [[1, 1 + number, 0, 2 * number, 2 * number + 2]]
        ask(handler, "finish_share", rank=0, number=1, lease=1 + number)
    for number in range(2, 10):
        assert meet(handler, number, 100) == [[0] * 100 + [1] * 100] * 2
    handler.close()
    handler = RequestHandler(folder)  # as after a kill
    assert meet(handler, 9, 100) == [[0] * 100 + [1] * 100] * 2
    assert ask(handler, "take_share", latest=100, **lease) == [[1, 101, 0, 200, 202]]
    # What is larger than any meeting before is in the server's own memory alone; its successor knows of the meeting.
    assert meet(handler, 10, MIB) == [[0] * MIB + [1] * MIB] * 2
    handler.close()
    handler = RequestHandler(folder)
    with pytest.raises(OSError, match="what came of meeting 10 of workers was lost with the server before"):
        meet(handler, 10, MIB)
    assert meet(handler, 11, 100) == [[0] * 100 + [1] * 100] * 2
    handler.close()


def test_run_of_workers_when_it_begins_without_room_then_refused_with_the_bytes_and_begins_once_there_is_some(memory):
    folder = memory / "stores"
    folder.mkdir(mode=0o700)
    handler = RequestHandler(folder)
    fill(memory / "tenant")
    with pytest.raises(OSError, match="what workers bring to their meetings needs") as refused:
        meet(handler, 1, 100)
    assert missing(str(refused.value))[0] == 1 << 16
    (memory / "tenant").unlink()
    assert meet(handler, 1, 100) == [[0] * 100 + [1] * 100] * 2
    handler.close()


class Fills(Callback):
    """Another tenant, who comes behind the third step."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx == 2:
            fill(self.path)


def test_run_when_others_fill_the_memory_of_its_servers_then_it_trains_and_validates_to_its_end(memory):
    """Its metrics meet for the first time when all is taken, with more than was set aside."""
    task = CTRTask(
        DeepFM(2, {"c0": 2000, "c1": 20}, embedding_dim=4, hidden=(4,)), optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    data = SyntheticDataModule(
        num_dense=2, cardinalities=(2000, 20), train_rows=640, val_rows=64, test_rows=64, batch_size=16
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AsyncParameterServerStrategy(store_folder=memory),
        max_epochs=1,
        logger=False,
        callbacks=[Fills(memory / "tenant")],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(task, data)
    assert trainer.callback_metrics["val/logloss"] > 0
    assert (memory / "tenant").stat().st_size > 8 * MIB


def test_group_server_when_there_is_room_for_its_parts_alone_then_refuses_them_and_its_successor_starts(memory):
    """Its parts take 4 MB, in the file that brings them and in its memory, and so do the records that undo updates."""
    folder = memory / "group"
    folder.mkdir(mode=0o700)
    parts, _ = a_layer()
    parts.save(folder)
    left = 6 * MIB
    (memory / "tenant").write_bytes(bytes(free_bytes(memory) - left))
    files = {path.name for path in folder.iterdir()}
    load = Request("load_parts", 1, bytes(16))
    requests = GroupRequests(folder, Limits(), lambda: None)
    with pytest.raises(OSError, match="undo records of a model's parts needs") as refused:
        requests._load(load)
    assert missing(str(refused.value))[0] >= 2 * 4 * 500 * 1001
    requests.close()
    assert {path.name for path in folder.iterdir()} == files
    assert free_bytes(memory) >= left - MIB // 4
    successor = GroupRequests(folder, Limits(), lambda: None)
    (memory / "tenant").unlink()
    successor._load(load)
    (part,) = successor.operators.parts.values()
    graph = part.forward([torch.ones(1, 1000)], wanted=[False], keep=True)
    part.backward(graph, [torch.ones(1, 500)], [{}])
    assert int(part.version) == 1
    successor.close()
