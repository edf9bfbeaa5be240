"""``lightning-recsys top``: the servers and workers of a run in a terminal, a line each, redrawn every second."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lightning_recsys.monitoring import Monitored, monitored_in
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.connect import client_keys
from lightning_recsys.parameter_server.endpoints import endpoints_of

SECONDS = 1.0  # between two looks
DESCRIPTION = """\
Show how the servers and workers of a run are doing, a line each, redrawn every second; Ctrl-C ends it.

A place is one of
  http://HOST:PORT      where a server (--metrics-port) or a worker (callbacks=[default,prometheus]) tells metrics
  tcp://HOST:PORT       a server itself, asked with --keys, or ipc:///SOCKET
  FOLDER                a run's folder, where its workers and servers have written where they can be asked
"""
_FILE_WIDTH = 200
_SERVER, _WORKER = "lightning_recsys_server", "lightning_recsys_worker"
_COLUMNS = ("", "examples/s", "requests/s", "NE", "staleness", "in/s", "out/s", "memory", "queue", "")


@dataclass(frozen=True)
class Sample:
    """The numbers of a process at one moment. ``None`` stands for what it does not know.

    Args:
        seconds: When it told, by this machine's clock.
        requests: Requests that it has answered, or sent, so far.
        received: Bytes that it has received so far.
        sent: Bytes that it has sent so far.
        examples_per_second: Training examples per second of late.
        entropy: Normalized entropy of late.
        staleness: Mean staleness so far.
        memory: Bytes of memory: of a server's stores, or of a worker's process.
        queue: Bytes that wait to be read.
        note: Something else that it tells.
    """

    seconds: float
    requests: float | None = None
    received: float | None = None
    sent: float | None = None
    examples_per_second: float | None = None
    entropy: float | None = None
    staleness: float | None = None
    memory: float | None = None
    queue: float | None = None
    note: str = ""


class Watched:
    """A process that is asked again and again.

    Args:
        process: Its name, and where it is asked.
        timeout: Seconds that it has to answer.
    """

    def __init__(self, process: Monitored, *, timeout: float) -> None:
        self.process = process
        self._timeout = timeout
        self._connection: Connection | None = None
        self._last: Sample | None = None

    def look(self) -> list[str]:
        """Ask it, and make its row: one that does not answer has a row that says why."""
        try:
            sample = self._ask()
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            self.close()
            self._last = None
            why = str(getattr(error, "reason", error)) or type(error).__name__
            return [self.process.name, *[""] * 8, f"does not answer: {why}"]
        last, self._last = self._last, sample
        return [self.process.name, *_cells(sample, last), sample.note]

    def close(self) -> None:
        """Let go of the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError, RuntimeError):  # it is gone
                connection.close()

    def _ask(self) -> Sample:
        endpoint = self.process.endpoint
        if endpoint.startswith(("http://", "https://")):
            url = endpoint.rstrip("/").removesuffix("/metrics") + "/metrics"
            with urllib.request.urlopen(url, timeout=self._timeout) as answer:  # noqa: S310 - http alone
                return sample_of_metrics(answer.read().decode())
        if self._connection is None:
            keys = None if self.process.keys is None else client_keys(Path(self.process.keys))
            self._connection = Connection(endpoint, keys=keys, timeout=self._timeout, retries=0)
        status: Mapping[str, Any] = self._connection.request("status").value
        return Sample(
            time.monotonic(),
            requests=status["requests"],
            received=status["received_bytes"],
            sent=status["sent_bytes"],
            staleness=status.get("mean_staleness"),
            memory=status["used_bytes"],
            queue=status["queued_bytes"],
            note=_server_note(*(status.get(x, 0) for x in ("clients", "live_rows", "restarts", "full"))),
        )


def sample_of_metrics(text: str) -> Sample:
    """The sample in a server's or a worker's metrics.

    Args:
        text: Prometheus text, as :class:`~lightning_recsys.monitoring.MonitoringEndpoint` answers it.

    Raises:
        ValueError: it is not such text, or is that of neither.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError:
        raise ValueError("to read its metrics: pip install 'lightning-recsys[metrics]'") from None

    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(name: str, /, **labels: str) -> float | None:
        values = [x.value for x in found if x.name == name and labels.items() <= x.labels.items()]
        return sum(values) if values else None

    now = time.monotonic()
    if total(f"{_SERVER}_requests_total") is not None:
        times = total(f"{_SERVER}_staleness_count")
        return Sample(
            now,
            requests=total(f"{_SERVER}_requests_total"),
            received=total(f"{_SERVER}_received_bytes_total"),
            sent=total(f"{_SERVER}_sent_bytes_total"),
            staleness=(total(f"{_SERVER}_staleness_sum") or 0.0) / times if times else None,
            memory=total(f"{_SERVER}_memory_bytes", kind="used"),
            queue=total(f"{_SERVER}_queued_bytes"),
            note=_server_note(
                *(total(f"{_SERVER}_{x}") or 0 for x in ("clients", "live_rows", "restarts_total", "full_total"))
            ),
        )
    if (steps := total(f"{_WORKER}_steps_total")) is None:
        raise ValueError("tells no metrics of a server or a worker: it has not begun, or is something else")

    def told(name: str, statistic: str = "value") -> float | None:
        return total(f"{_WORKER}_telemetry", name=name, statistic=statistic)

    names = sorted({x.labels["name"] for x in found if x.name == f"{_WORKER}_telemetry"})
    stale = [x for name in names if "staleness" in name and (x := told(name, "mean")) is not None]
    requests = [x for name in names if name.startswith("load/") and (x := told(name)) is not None]
    return Sample(
        now,
        requests=sum(requests) if requests else None,
        received=told("comm/received_bytes"),
        sent=told("comm/sent_bytes"),
        examples_per_second=total(f"{_WORKER}_examples_per_second"),
        entropy=total(f"{_WORKER}_normalized_entropy", over="window"),
        staleness=max(stale, default=None),
        memory=total("process_resident_memory_bytes"),
        note=f"step {steps:,.0f}",
    )


def _server_note(clients: float, rows: float, restarts: float, full: float) -> str:
    note = f"{clients:,.0f} clients, {rows:,.0f} rows" + (f", {restarts:,.0f} restarts" if restarts else "")
    return f"{note}, full: {full:,.0f} refused" if full else note


def _cells(now: Sample, last: Sample | None) -> list[str]:
    def rate(name: str, show: Callable[[float], str]) -> str:
        if last is None or (after := getattr(now, name)) is None or (before := getattr(last, name)) is None:
            return ""
        # A count that has fallen is that of a process that was started again.
        return show(max(0.0, after - before) / max(now.seconds - last.seconds, 1e-9))

    return [
        _shown(now.examples_per_second, _number),
        rate("requests", _number),
        _shown(now.entropy, "{:.4f}".format),
        _shown(now.staleness, "{:,.1f}".format),
        rate("received", _bytes),
        rate("sent", _bytes),
        _shown(now.memory, _bytes),
        _shown(now.queue, _bytes),
    ]


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _number(value: float) -> str:
    """A rate: with one digit behind the point where it is small."""
    return f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _bytes(size: float) -> str:
    """A size in units of 1,024.

    >>> _bytes(0), _bytes(1000), _bytes(3 << 20)
    ('0 B', '1000 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


class Top:
    """All processes that are watched.

    Args:
        places: Endpoints, and folders of runs.
        keys: File with the keys to servers on TCP.
        timeout: Seconds that a process has to answer.

    Raises:
        ValueError: a place is none.
        FileNotFoundError: a folder is not there.
    """

    def __init__(self, places: Iterable[str], *, keys: str | None, timeout: float) -> None:
        self._endpoints = []
        self._folders = []
        for place in places:
            if place.startswith(("http://", "https://", "tcp://", "ipc://")):
                self._endpoints += [Monitored(endpoint, endpoint, keys) for endpoint in endpoints_of(place)]
            elif "://" in place:
                raise ValueError(f"{place!r} is no place: http://, tcp://, ipc:// or a run's folder")
            else:
                self._folders.append(Path(place))
        self._timeout = timeout
        self._watched: dict[Monitored, Watched] = {}
        self._processes()  # says what is wrong with a folder
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="top")

    def look(self) -> Table:
        """Ask all at once, and make the table."""
        processes = self._processes()
        for gone in self._watched.keys() - set(processes):
            self._watched.pop(gone).close()
        watched = [self._watched.setdefault(x, Watched(x, timeout=self._timeout)) for x in processes]
        table = Table(*_COLUMNS, caption=None if watched else "nobody has said yet where to ask")
        for column in table.columns[1:-1]:
            column.justify = "right"
        for row in self._threads.map(Watched.look, watched):
            table.add_row(*map(escape, row))
        return table

    def close(self) -> None:
        """Let go of all connections."""
        self._threads.shutdown()
        for watched in self._watched.values():
            watched.close()
        self._watched.clear()

    def _processes(self) -> list[Monitored]:
        return [*self._endpoints, *(process for folder in self._folders for process in monitored_in(folder))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments of the command line; ``sys.argv`` if absent.

    Returns:
        The process's exit status: 0, or 1 with a sentence on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-recsys top", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="+", metavar="PLACE", help="an endpoint or a run's folder")
    parser.add_argument("--keys", metavar="FILE", help="key file or token for the servers at tcp://")
    parser.add_argument("--once", action="store_true", help="look twice, a second apart, print one table and end")
    parser.add_argument(
        "--timeout", type=float, default=2.0, help="seconds that a process has to answer (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        top = Top(options.places, keys=options.keys, timeout=options.timeout)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"lightning-recsys top: {error}\n")
        return 1
    try:
        console = Console()
        # In a file or a pipe there is no terminal that lines could be too long for.
        _show(top, console if console.is_terminal else Console(width=_FILE_WIDTH), once=options.once)
    except KeyboardInterrupt:
        pass
    finally:
        top.close()
    return 0


def _show(top: Top, console: Console, *, once: bool) -> None:
    table = top.look()
    if once:
        time.sleep(SECONDS)
        console.print(top.look())
        return
    with Live(table, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(SECONDS)
            live.update(top.look(), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
