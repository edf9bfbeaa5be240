"""Runs commands in forks of this process, which has imported what takes seconds; each has a connection of its own.

The argument names the UNIX socket where it listens. Who connects sends its three standard streams, and as JSON
``[SCRIPT, ARGUMENTS, FOLDER, ENVIRONMENT]``, and is answered with the exit status. Each byte sent meanwhile is a signal
for the command, and a connection that breaks kills it. Otherwise a fork does what ``python SCRIPT ARGUMENTS`` would do
in that folder; but its workers come from a fork server that all commands share. It ends with its standard input.

The library and the recipes are those that Python finds here: of the repository, or of a wheel in ``PYTHONPATH``.
"""

import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver

from lightning_recsys.cli import recipes_folder

sys.path.insert(0, str(recipes_folder()))

import recipe_tools.jobs.evaluation
import recipe_tools.jobs.guess
import recipe_tools.jobs.prediction
import recipe_tools.jobs.prepare_rows
import recipe_tools.jobs.training  # noqa: F401 - all of it for what it imports

import lightning_recsys.callbacks
import lightning_recsys.data
import lightning_recsys.models
import lightning_recsys.strategies.des.strategy
import lightning_recsys.strategies.het.strategy
import lightning_recsys.strategies.shadowsync.strategy
import lightning_recsys.tasks  # noqa: F401
from lightning_recsys.launchers.processes import IN_FORK_SERVER, OBJECT_STORES

NUM_STREAMS = 3

for store in OBJECT_STORES:  # which Lightning would import in each command
    with suppress(ImportError):
        import_module(store)
ours = sorted(x for x in sys.modules if x.partition(".")[0] in ("lightning_recsys", *OBJECT_STORES))
forkserver.set_forkserver_preload(["recipe_tools.jobs.training", "recipe_tools.jobs.evaluation", *ours, IN_FORK_SERVER])
forkserver.ensure_running()
import_module(IN_FORK_SERVER)  # this process is one, too


def accept(listener: socket.socket) -> list | None:
    """In the fork that is to do it, the request of a new connection with its streams; nothing in this process."""
    connection, _ = listener.accept()
    request, streams, _, _ = socket.recv_fds(connection, 2**20, NUM_STREAMS)
    pid = os.fork()
    if not pid:
        connection.close()
        return [streams, *json.loads(request)]
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(pid)
    selector.register(connection, selectors.EVENT_READ, lambda: pass_on(connection, ended))
    selector.register(ended, selectors.EVENT_READ, lambda: answer(connection, ended, pid))
    return None


def pass_on(connection: socket.socket, ended: int) -> None:
    """A signal to the command; one that cannot be caught when nobody waits for it any more."""
    number = connection.recv(1)
    signal.pidfd_send_signal(ended, number[0] if number else signal.SIGKILL)
    if not number:
        selector.unregister(connection)


def answer(connection: socket.socket, ended: int, pid: int) -> None:
    """The exit status of a command that has ended."""
    _, status = os.waitpid(pid, 0)
    selector.unregister(ended)
    os.close(ended)
    if connection in selector.get_map():
        selector.unregister(connection)
        with suppress(BrokenPipeError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    connection.close()


def serve(path: str) -> list:
    """Answer until standard input ends; returns in forks, with the request and its streams."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ, lambda: accept(listener))
        selector.register(0, selectors.EVENT_READ, sys.exit)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fd in selector.get_map() and (request := key.data()) is not None:
                    for other in [*selector.get_map().values()]:
                        other.fileobj.close() if isinstance(other.fileobj, socket.socket) else os.close(other.fd)
                    selector.close()
                    return request


selector = selectors.DefaultSelector()
streams, script, arguments, folder, environment = serve(sys.argv[1])
# The server runs as long as this process's parent does, whose child it is: only that one can ask whether it has ended.
forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
tempfile.tempdir = None  # asked for anew
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
