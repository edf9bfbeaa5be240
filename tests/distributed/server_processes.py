"""The processes of the kill tests: servers, some of which end themselves, and clients that push ones."""

from __future__ import annotations

import dataclasses
import os
import signal
from contextlib import contextmanager
from functools import partialmethod
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.parameter_server import connect, serve
from lightning_recsys.parameter_server.journal import Journal
from lightning_recsys.stores.dense_store import MappedDenseStore
from lightning_recsys.stores.dynamic.hash_store import HashEmbeddingStore
from lightning_recsys.stores.dynamic.key_index import KeyIndex
from lightning_recsys.stores.embedding_store import MappedEmbeddingStore

ROWS, DIM = 300, 8
TOUCHED = 12  # rows of one push


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_server(folder: Path, bind: str | None, ready: Pipe) -> None:
    serve(folder, bind=bind, ready=ready.send)


class Processes:
    """Processes of a fork server; all of them end with the test."""

    def __init__(self):
        self._context = fork_server_context()
        self.started = []

    def start(self, target, *args):
        """The process, and our end of the pipe whose other end it gets for the argument ``Processes``."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=[theirs if arg is Processes else arg for arg in args])
        process.start()
        theirs.close()
        self.started.append((process, ours))
        return process, ours

    def serve(self, folder, bind=None, target=run_server, more=()):
        process, pipe = self.start(target, folder, bind, Processes, *more)
        assert pipe.poll(120), "the server did not start"
        return process, pipe.recv()

    def end(self):
        for process, pipe in self.started:
            process.kill()
            process.join()
            pipe.close()


@contextmanager
def processes():
    pool = Processes()
    try:
        yield pool
    finally:
        pool.end()


class Trap:
    """Kills its process at one point of one push.

    Args:
        where: The point.
        at_push: The push, counted from 1.
    """

    def __init__(self, where: str, at_push: int) -> None:
        self.where, self.left = where, at_push

    def record(self, real, journal, undo):
        self.left -= 1
        self.spring("before the undo record")
        real(journal, undo)

    def mark(self, real, journal, *args):
        self.spring("before the mark")
        real(journal, *args)
        self.spring("after the mark")

    def train(self, real, store, rows, grads, **options):
        if self.is_at("half applied"):
            real(store, rows[: len(rows) // 2], grads[: len(rows) // 2], **options)
            die()
        return real(store, rows, grads, **options)

    def push(self, real, store, request):
        if self.is_at("half applied"):
            half = len(request.push_rows) // 2
            updates = {name: amounts[:half] for name, amounts in request.updates.items()}
            rows, clocks = request.push_rows[:half], request.push_clocks[:half]
            real(store, dataclasses.replace(request, push_rows=rows, push_clocks=clocks, updates=updates))
            die()
        return real(store, request)

    def publish(self, real, index, *rows):
        self.spring("rows made, and not yet named")
        real(index, *rows)

    def average(self, real, store, local, *, alpha):
        if self.is_at("half applied"):
            store.values[: store.size // 2].lerp_(local[: store.size // 2], alpha)
            die()
        return real(store, local, alpha=alpha)

    def is_at(self, where: str) -> bool:
        return self.left == 0 and self.where == where

    def spring(self, where: str) -> None:
        if self.is_at(where):
            die()


def run_server_that_dies(folder: Path, bind: str | None, ready: Pipe, where: str, at_push: int) -> None:
    trap = Trap(where, at_push)
    Journal._record = partialmethod(trap_call, trap.record, Journal._record)
    Journal._mark = partialmethod(trap_call, trap.mark, Journal._mark)
    MappedEmbeddingStore.apply_row_gradients = partialmethod(
        trap_call, trap.train, MappedEmbeddingStore.apply_row_gradients
    )
    HashEmbeddingStore.apply_row_gradients = partialmethod(
        trap_call, trap.train, HashEmbeddingStore.apply_row_gradients
    )
    KeyIndex.publish = partialmethod(trap_call, trap.publish, KeyIndex.publish)
    MappedEmbeddingStore.push_updates = partialmethod(trap_call, trap.push, MappedEmbeddingStore.push_updates)
    MappedDenseStore.elastic_average = partialmethod(trap_call, trap.average, MappedDenseStore.elastic_average)
    serve(folder, bind=bind, ready=ready.send)


def trap_call(owner, trapped, real, *args, **kwargs):
    return trapped(real, owner, *args, **kwargs)


def push_ones(endpoint: str, seed: int, pooled: bool, orders: Pipe) -> None:
    """Push updates that add 1 to random rows until told to stop; tells how many rows were acknowledged."""
    torch.manual_seed(seed)
    stores = connect(endpoint, transport="tcp", timeout=30, retries=10)
    store = stores.embedding_store("ones")
    pushes = 0
    orders.send("started")
    while not orders.poll():
        for _ in range(20):
            if pooled:
                ids = SparseFeatures(("x", "y"), torch.randint(0, ROWS, (TOUCHED,)))
                store.apply_gradients(ids, -torch.ones(TOUCHED // 2, 2, DIM), lr=1.0)
            else:
                rows = torch.randperm(ROWS)[:TOUCHED]
                store.apply_row_gradients(rows, -torch.ones(TOUCHED, DIM), lr=1.0)
            pushes += 1
        if pushes % 200 == 0:
            store.flush()
    store.flush()
    orders.send({"rows": pushes * TOUCHED, "pushes": pushes, "reconnects": stores.connection.traffic.reconnects})
    stores.close()
