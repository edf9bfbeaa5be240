"""The console script ``lightning-recsys-server``: a server in a shell of its own, its keys, its status.

``python -m lightning_recsys.parameter_server.cli`` is the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_recsys.parameter_server.access.keys import JobKeys, KeyFile, add_client, remove_client
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.connect import client_keys
from lightning_recsys.parameter_server.endpoints import endpoints_of
from lightning_recsys.parameter_server.processes import serve_in_processes
from lightning_recsys.parameter_server.server import serve

DESCRIPTION = """\
Serve a folder of embedding tables and dense vectors to the workers of a training run.

The folder's files are the stores: a server that ends, or is killed, loses nothing that it has acknowledged, and goes
on where it was when it is started again on the same folder and port. Workers on the server's own machine map the files
instead of asking it. When it listens it prints one line,

    lightning-recsys-server ready: ENDPOINT

and it ends on SIGTERM or Ctrl-C, with status 0, once the requests that have arrived are answered.
"""
EPILOG = """\
examples:
  on one machine, tables in shared memory; whoever may write to the folder is let in, by its socket:
    lightning-recsys-server --folder /dev/shm/tables
    lightning-recsys-server --status ipc:///dev/shm/tables/.socket

  on one machine, at a port; clients give the token that the server leaves in its folder:
    lightning-recsys-server --folder /dev/shm/tables --bind tcp://127.0.0.1:5790
    lightning-recsys-server --status tcp://127.0.0.1:5790 --keys /dev/shm/tables/.token

  for other machines, tables on disk; make the keys once and copy the file to every machine (mode 600):
    lightning-recsys-server --make-keys job.keys
    lightning-recsys-server --folder /data/tables --bind tcp://0.0.0.0:5790 --keys job.keys

  on all cores of a machine, eight processes at eight ports; workers name them as tcp://10.0.0.7:5790-5797:
    lightning-recsys-server --folder /data/tables --bind tcp://0.0.0.0:5790 --keys job.keys --processes 8

  a client with keys of its own, and without them again; servers that run take note within a second:
    lightning-recsys-server --add-client alice --keys job.keys
    lightning-recsys-server --remove-client alice --keys job.keys

  with metrics for Prometheus, and health and readiness for Kubernetes, at http://0.0.0.0:9100:
    lightning-recsys-server --folder /data/tables --bind tcp://0.0.0.0:5790 --keys job.keys --metrics-port 9100

  how it is doing:
    lightning-recsys-server --status tcp://10.0.0.7:5790 --keys job.keys

In Python: lightning_recsys.parameter_server.connect("tcp://10.0.0.7:5790", keys="job.keys").
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script.

    Args:
        arguments: Arguments of the command line; ``sys.argv`` if absent.

    Returns:
        The process's exit status: 0, or 1 with a sentence on stderr.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.make_keys:
            JobKeys.generate().save(options.make_keys)
            sys.stdout.write(f"{options.make_keys}: keys of one job. Whoever can read this file is let in.\n")
        elif options.add_client or options.remove_client:
            _change_clients(parser, options)
        elif options.status:
            _show_status(options.status, keys=options.keys, timeout=options.timeout, as_json=options.json)
        elif options.folder:
            logging.basicConfig(format="%(levelname)s: %(message)s")
            _serve(options)
        else:
            parser.error(
                "one of --folder, --status, --make-keys, --add-client and --remove-client is needed; see --help"
            )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        sys.stderr.write(f"lightning-recsys-server: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-recsys-server",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--folder", type=Path, help="serve the stores of this folder, which is made if it is not there")
    task.add_argument("--status", metavar="ENDPOINT", help="ask the server, or the range of servers, how it is doing")
    task.add_argument("--make-keys", metavar="FILE", type=Path, help="write new keys to a new file and end")
    task.add_argument(
        "--add-client",
        metavar="NAME",
        help="let in a client with keys of its own, written to NAME.keys beside the file of --keys, and end",
    )
    task.add_argument("--remove-client", metavar="NAME", help="let it in no more, cut its connections, and end")
    parser.add_argument(
        "--bind",
        metavar="ENDPOINT",
        help="where to listen: tcp://HOST:PORT (port 0 takes a free one) or ipc:///SOCKET. Other hosts than this "
        "machine's loopback need --keys; on loopback clients need FOLDER/.token (default: ipc://FOLDER/.socket)",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        type=Path,
        help="key file of the job, to serve, ask for status and change its clients; a client's own, or a token, to ask",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads for arithmetic (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="serve by N processes, each with a part of the rows and a port of its own, the first that of --bind; one "
        "that ends is started again (default: by this process alone)",
    )
    parser.add_argument(
        "--max-clients",
        type=int,
        default=1024,
        help="connections of worker processes, those lost within the last ten minutes included (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="tell metrics to Prometheus at http://HOST:PORT/metrics, and /health and /ready beside it, where HOST is "
        "that of --bind, or loopback; port 0 takes a free one. Whoever reaches it may read (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print the status as JSON")
    parser.add_argument(
        "--timeout", type=float, default=5.0, help="seconds to wait for the status (default: %(default)s)"
    )
    return parser


def _serve(options: argparse.Namespace) -> None:
    given = {
        "ready": _say_ready,
        "num_threads": options.threads,
        "max_clients": options.max_clients,
        "metrics_port": options.metrics_port,
        "monitored": _say_monitored,
    }
    if options.processes is None:
        serve(options.folder, bind=options.bind, keys=KeyFile(options.keys) if options.keys else None, **given)
    else:
        bind = options.bind or "none"
        serve_in_processes(options.folder, processes=options.processes, bind=bind, keys=options.keys, **given)


def _change_clients(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.keys is None:
        parser.error("--add-client and --remove-client need --keys, the key file of the servers")
    if options.add_client:
        own = add_client(options.keys, options.add_client)
        sys.stdout.write(
            f"{own}: keys of {options.add_client} alone, for --keys, strategy.key_file and connect(keys=)\n"
        )
    else:
        remove_client(options.keys, options.remove_client)
        sys.stdout.write(f"{options.remove_client} is let in no more by servers with {options.keys}\n")


def _say_ready(endpoint: str) -> None:
    sys.stdout.write(f"lightning-recsys-server ready: {endpoint}\n")
    sys.stdout.flush()


def _say_monitored(url: str) -> None:
    sys.stdout.write(f"lightning-recsys-server metrics: {url}/metrics\n")
    sys.stdout.flush()


def _show_status(endpoint: str, *, keys: Path | None, timeout: float, as_json: bool) -> None:
    of_servers = [_ask(x, keys=keys, timeout=timeout) for x in endpoints_of(endpoint)]
    if as_json:
        sys.stdout.write("".join(json.dumps(status) + "\n" for status in of_servers))
        return
    table = Table("", endpoint, show_header=True)
    for name, value in _together(of_servers).items():
        shown = f"{value:,.0f} s" if name == "uptime" else f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(name, shown)
    Console().print(table)


def _ask(endpoint: str, *, keys: Path | None, timeout: float) -> dict[str, Any]:
    connection = Connection(endpoint, keys=client_keys(keys), timeout=timeout, retries=0)
    try:
        status: dict[str, Any] = connection.request("status").value
        return status
    finally:
        connection.close()


def _together(of_servers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The status of several servers as one: numbers are summed, but for those that are no parts of a whole."""
    first, *others = of_servers
    if not others:
        return first
    together: dict[str, Any] = {"servers": len(of_servers)}
    for name in first:
        values = [status[name] for status in of_servers if name in status]
        if name in ("uptime", "free_bytes"):
            together[name] = min(values)
        elif isinstance(values[0], int):
            together[name] = sum(values)
        elif name == "mean_staleness":
            together[name] = max(values)
        elif name != "folder":
            together[name] = ", ".join(dict.fromkeys(map(str, values)))
    return together


if __name__ == "__main__":
    sys.exit(main())
