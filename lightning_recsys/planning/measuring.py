"""The costs of a strategy's step to processors, network and memory: measured by short runs on this machine.

Each strategy trains for some seconds with one or two workers. Where it has servers, they are started as for another
machine: over TCP on the loopback interface, with keys, so that requests and encryption are part of what is measured.
Nothing of a forecast is assumed that such a run can tell.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from io import StringIO
from operator import sub
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytorch_lightning as pl

from lightning_recsys.launchers.sidecars import ServerSpec, Sidecars
from lightning_recsys.monitoring.processes import descendants, processor_seconds, resident_bytes
from lightning_recsys.parameter_server.access.keys import JobKeys
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.strategies.common.run.servers import RunServers
from lightning_recsys.strategies.hierarchical.served_groups import GROUP
from lightning_recsys.strategies.served import ServedStrategy

log = logging.getLogger(__name__)

_TCP_INFO_BYTES, _ACKED_AT = 232, 120  # of tcp_info in linux/tcp.h, and where its tcpi_bytes_acked begins (Linux 4.1)
_BUSY = """
import os, sys, numpy
a = numpy.random.rand(256, 256).astype("f"); rows = numpy.random.rand(1 << 20, 16).astype("f")
places = numpy.random.randint(0, 1 << 20, 20_000)
while os.getppid() == int(sys.argv[1]):
    for _ in range(50):
        a @ a
        rows[places].sum(0)
"""  # what a neighbour does: products and random rows; it ends with the process that started it


@dataclass(frozen=True)
class StepCost:
    """The costs of one worker's step, as a mean over the measured steps.

    Args:
        workers: Workers that trained side by side.
        batch_size: The data's ``batch_size``.
        dense_floats: Parameters that a worker's optimizer trains: the dense part.
        waiting_seconds: Wall-clock seconds of a step for which neither worker nor servers computed: processes wake each
            other. 0 where more processes computed than there are cores, so that they waited for those.
        worker_seconds: Processor time of a worker's process, all its threads together.
        server_seconds: Processor time of all servers for one worker's step.
        sent_bytes: Bytes that a worker sent to servers.
        received_bytes: Bytes that it received from them.
        peer_bytes: Bytes that it sent to other workers; as many came from them.
        gathered: Share of ``peer_bytes`` that an all-gather of partial results sent.
        group_bytes: Of the bytes that it sent to servers, those to its own group's; about as many came back.
        requests: Answers of servers that a worker waits for, one after the other where there is one server of a kind.
        row_requests: Of these, those of a server of rows, or of the dense part beside them.
        request_worker_seconds: Processor time of a worker for a request, whatever its size: a further server of rows
            adds it ``row_requests`` times.
        request_server_seconds: That of a server.
        worker_bytes: Resident memory of a worker's process.
        server_bytes: Resident memory of all servers.
        empty_server_bytes: That of a server without anything; 0 where it was not measured.
        ahead: Share of the bytes between it and servers that travel while it computes.
    """

    workers: int
    batch_size: int
    dense_floats: int
    waiting_seconds: float
    worker_seconds: float
    server_seconds: float
    sent_bytes: float
    received_bytes: float
    peer_bytes: float
    gathered: float
    group_bytes: float
    requests: float
    row_requests: float
    request_worker_seconds: float
    request_server_seconds: float
    worker_bytes: float
    server_bytes: float
    empty_server_bytes: float = 0.0
    ahead: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """The costs as plain numbers, for a file."""
        return asdict(self)


def measure_step(
    task: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    make_strategy: Callable[..., Any],
    *,
    workers: int,
    servers: int = 0,
    warm_seconds: float = 2.0,
    seconds: float = 4.0,
) -> StepCost:
    """Train copies of a task for some seconds, and tell what a step cost.

    Args:
        task: What is trained; it stays as it is.
        datamodule: Its data, prepared and set up, with the ``batch_size`` of a worker's step.
        make_strategy: Makes the strategy; where ``servers`` are started, of ``servers``, ``key_file``, ``transport``.
        workers: Processes that train.
        servers: Servers that are started for it, as on other machines.
        warm_seconds: Seconds of training that are not counted.
        seconds: Seconds of training that are.

    Raises:
        RuntimeError: the run ended before it was measured, or this is not Linux, which counts what is asked for here.
        Exception: what the strategy or Lightning refuses the task with.
    """
    if not Path("/proc/self/stat").exists():
        raise RuntimeError("steps are measured on Linux alone, whose /proc tells processor time and memory.")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-recsys-plan-")))
        empty, given = stack.enter_context(_servers(folder, servers)) if servers else (0, {})
        free = (os.cpu_count() or 1) - workers - servers
        others = stack.enter_context(_busy_neighbours(max(0, free)))
        meter = _Meter(folder, root=os.getpid(), others=others, warm_seconds=warm_seconds, seconds=seconds)
        stack.enter_context(_quietly())
        strategy = make_strategy(**given)
        if isinstance(strategy, ServedStrategy) and not servers:
            strategy.run_servers, strategy.key_file = _ServersAsElsewhere(strategy), folder / "keys"
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=workers,
            strategy=strategy,
            callbacks=[meter],
            max_epochs=-1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(copy.deepcopy(task), datamodule=copy.deepcopy(datamodule))
        return replace(_cost_from(folder, workers, over_tcp=servers > 0, crowded=free < 0), empty_server_bytes=empty)


class _ServersAsElsewhere(RunServers):
    """Servers that the strategy starts beside its workers, reached as those of other machines: over TCP, with keys."""

    def sidecars(self, specs: Sequence[ServerSpec]) -> Sidecars:
        assert isinstance(self._strategy.key_file, Path)
        keys = JobKeys.generate()
        keys.save(self._strategy.key_file)
        return Sidecars(specs, address="127.0.0.1", keys=keys.server)


class _Meter(pl.Callback):
    """Writes down what each process had used when counting began, and when it ended; then ends the run."""

    def __init__(self, folder: Path, *, root: int, others: Sequence[int], warm_seconds: float, seconds: float) -> None:
        self.folder, self.root, self.others = folder, root, others
        self.warm_seconds, self.seconds = warm_seconds, seconds
        self._began = self._steps = 0.0
        self._ends: list[float] = []  # of the steps that count
        self._first: dict[str, Any] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.monotonic()
        self._began = self._began or now
        self._steps += 1
        if self._first is not None:
            self._ends.append(now)
        if self._first is None and now - self._began >= self.warm_seconds and self._steps >= 3:
            self._first = self._reading(trainer)
        elif self._first is not None and now - self._began >= self.warm_seconds + self.seconds:
            self._end_at(trainer.global_step + 2 * (trainer.world_size > 1), trainer)
        if (last := self._last()) is not None and trainer.global_step >= last and not trainer.should_stop:
            read = {"first": self._first, "last": self._reading(trainer)}
            (self.folder / f"read-{trainer.global_rank}.json").write_text(json.dumps(read))
            trainer.should_stop = True

    def _end_at(self, step: int, trainer: pl.Trainer) -> None:
        """All workers end with the same step, which rank 0 says before it begins the step before that.

        A worker of those in step that ended on its own would leave the others to wait.
        """
        if trainer.is_global_zero and self._last() is None:
            (self.folder / "new").write_text(str(step))
            (self.folder / "new").rename(self.folder / "last")

    def _last(self) -> int | None:
        with suppress(FileNotFoundError):
            return int((self.folder / "last").read_text())
        return None

    def _family(self) -> set[int]:
        """The run's processes: those of the process that asked, and of the fork server, where that is another's."""
        roots = [self.root] if os.getpid() == self.root else [self.root, os.getppid()]
        return set(descendants(*roots))

    def _reading(self, trainer: pl.Trainer) -> dict[str, Any]:
        over_tcp = _tcp_bytes()
        telemetry: dict[str, float] = getattr(trainer.strategy, "traffic", dict)()
        of_rows = trainer.strategy.rows.telemetry() if isinstance(trainer.strategy, ServedStrategy) else {}
        beside = getattr(getattr(trainer.strategy, "dense", None), "exchanged_bytes", 0)
        told = [telemetry.get(f"comm/{way}_bytes", beside) - beside for way in ("sent", "received")]
        assert trainer.model is not None
        return {
            "pid": os.getpid(),
            "world_size": trainer.world_size,
            "batch_size": trainer.datamodule.batch_size,  # type: ignore[attr-defined]
            "gathered": _gathered(trainer.strategy),
            "dense_floats": sum(x.numel() for x in trainer.model.parameters() if x.requires_grad),
            "step": median(map(sub, self._ends[1:], self._ends)) if len(self._ends) > 1 else 0.0,
            "steps": self._steps,
            "sent": told[0],
            "received": told[1],
            "ahead": of_rows.get("comm/ahead_bytes", 0),
            "group": _group_bytes(trainer.strategy),
            "peers": over_tcp if trainer.world_size > 1 else 0,
            "requests": sum(value for name, value in telemetry.items() if name.startswith("load/")),
            "group_requests": sum(value for name, value in telemetry.items() if name.startswith(f"load/{GROUP}")),
            "processes": {
                pid: (processor_seconds(pid), resident_bytes(pid))
                for pid in self._family()
                if pid == os.getpid() or pid not in {self.root, *self.others}
            },
        }


def _cost_from(folder: Path, workers: int, *, over_tcp: bool, crowded: bool) -> StepCost:
    files = sorted(folder.glob("read-*.json"))
    if len(files) != workers:
        raise RuntimeError(
            f"{len(files)} of {workers} workers told what their steps cost; the data may be too few for a measurement."
        )
    read = [json.loads(file.read_text()) for file in files]
    if any(each["first"] is None for each in read):
        raise RuntimeError("a worker began too late to be measured; the machine may be too busy.")
    assert all(each["first"]["world_size"] == workers for each in read)
    own = {str(each["first"]["pid"]) for each in read}

    def change(each: Mapping[str, Any], name: str) -> float:
        return float(each["last"][name] - each["first"][name])

    def used(each: Mapping[str, Any], pid: str) -> float:
        return float(each["last"]["processes"][pid][0] - each["first"]["processes"].get(pid, [0.0])[0])

    root = read[0]
    steps = [change(each, "steps") for each in read]
    servers = [pid for pid in root["last"]["processes"] if pid not in own and used(root, pid) > 0]

    def a_step(name: str) -> float:
        return mean(change(each, name) / n for each, n in zip(read, steps, strict=True))

    by_worker = [used(each, str(each["first"]["pid"])) / n for each, n in zip(read, steps, strict=True)]
    of_servers = sum(used(root, pid) for pid in servers) / (steps[0] * workers)
    seconds = root["last"]["step"]  # the median: what else the machine did for a moment does not count
    resident = [each["last"]["processes"][str(each["first"]["pid"])][1] for each in read]
    return StepCost(
        workers=workers,
        batch_size=root["first"]["batch_size"],
        dense_floats=root["first"]["dense_floats"],
        gathered=root["first"]["gathered"],
        waiting_seconds=0.0 if crowded else max(0.0, seconds - mean(by_worker) - of_servers),
        worker_seconds=mean(by_worker),
        server_seconds=of_servers,
        sent_bytes=a_step("sent"),
        received_bytes=a_step("received"),
        peer_bytes=max(0.0, a_step("peers") - over_tcp * a_step("sent")),
        group_bytes=a_step("group"),
        requests=a_step("requests"),
        row_requests=a_step("requests") - a_step("group_requests"),
        request_worker_seconds=0.0,
        request_server_seconds=0.0,
        ahead=min(1.0, a_step("ahead") / max(1.0, a_step("sent") + a_step("received"))),
        worker_bytes=mean(resident),
        server_bytes=sum(root["last"]["processes"][pid][1] for pid in servers),
    )


@contextmanager
def _servers(folder: Path, number: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Servers with keys on the loopback interface: the memory of one, and what a strategy is given to find them.

    They end with this process, however that ends.
    """
    keys, path = JobKeys.generate(), folder / "keys"
    keys.save(path)
    specs = [ServerSpec("measured", index) for index in range(number)]
    with Sidecars(specs, address="127.0.0.1", keys=keys.server) as servers:
        empty = sum(map(resident_bytes, servers.pids)) // number
        endpoints = list(servers.endpoints["measured"])
        yield empty, {"servers": endpoints, "key_file": str(path), "transport": "tcp"}


@contextmanager
def _busy_neighbours(number: int) -> Iterator[list[int]]:
    """So many processes that compute and read memory; their ids."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _BUSY, str(os.getpid())]
    busy = [subprocess.Popen(command, env=environment) for _ in range(number)]  # noqa: S603 - our own
    try:
        yield [each.pid for each in busy]
    finally:
        for each in busy:
            each.kill()
        for each in busy:
            each.wait()


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what Lightning says of a run that nobody asked for."""
    told = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_recsys", "lightning.pytorch")]
    before = [each.level for each in told]
    try:
        for each in told:
            each.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(told, before, strict=True):
            each.setLevel(level)


def _gathered(strategy: Any) -> float:
    sends = [(each.operation, each.floats) for each in getattr(strategy, "sends", {}).values()]
    every = sum(floats for _, floats in sends)
    return sum(floats for operation, floats in sends if operation == "all-gather") / every if every else 0.0


def _group_bytes(strategy: Any) -> int:
    servers = strategy.run_servers.connected if isinstance(strategy, ServedStrategy) else {}
    return sum(x.connection.traffic.sent_bytes for x in servers.get(GROUP, ()) if isinstance(x, RemoteStores))


def _tcp_bytes() -> int:
    """The bytes that this process's open TCP connections have sent."""
    sent = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                    told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    if len(told) >= _ACKED_AT + 8:
                        sent += int.from_bytes(told[_ACKED_AT : _ACKED_AT + 8], sys.byteorder)
    return sent
