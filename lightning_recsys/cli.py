"""``lightning-recsys``: the recipes and the tools of this package, as commands."""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from lightning_recsys.__about__ import __version__

STDOUT = 1  # its file descriptor
RECIPES = {
    "train": "train a model, test it, close with a table",
    "evaluate": "metrics of a checkpoint",
    "predict": "predictions of a checkpoint for rows without labels, to a file",
    "export": "publish the model of a checkpoint, for serve",
    "serve": "answer requests by a published model, and follow new versions",
    "prepare": "guess the schema of your own data, or turn large logs into shards",
    "new": "write a small project of your own: a model, configurations, a test",
    "results": "keep the results of a run, or redo kept ones and compare",
    "benchmark": "measure speed",
    "plan": "which strategy, on which machines, and what it will give",
    "simulate": "train as a cluster would, in virtual time",
}
TOOLS = {
    "server": ("lightning_recsys.parameter_server.cli", "serve embedding rows and dense parameters to other machines"),
    "top": ("lightning_recsys.top", "watch the servers and workers of a run, a line each"),
    "machine": ("lightning_recsys.planning.this_machine", "measure this machine, for plan"),
    "versions": (
        "lightning_recsys.serving.cli",
        "list what is published in a folder, and go back to an earlier version",
    ),
    "groups": ("lightning_recsys.strategies.hierarchical.cli", "drain a group of Hierarchical Training, and back"),
    "checkpoint": ("lightning_recsys.checkpoints.cli", "turn folder checkpoints into single files, and back"),
}


def recipes_folder() -> Path:
    """Where the recipes are: in the package where it was installed from a wheel, beside it in the repository."""
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names with the others.

    A recipe runs as ``python recipes/NAME.py`` would, and finds modules in the current folder besides: a model of your
    own is named by its module. Its exit status is that of the process.

    Args:
        arguments: Arguments of the command line; ``sys.argv`` if absent.

    Returns:
        The exit status.
    """
    open_what_is_closed()
    try:
        try:
            return run_command(*((sys.argv[1:] if arguments is None else arguments) or ["--help"]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not nobody_reads():
            raise
        return 128 + signal.SIGPIPE


def open_what_is_closed() -> None:
    """Open the standard streams that this process was started without, as by ``>&-``, at what holds nothing.

    Else writing to them fails, and the next file or socket that is opened has their descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has ended, as in ``lightning-recsys train --help | head``.

    What is left to write is thrown away then, so that the interpreter does not complain of it when it ends.
    """
    output = select.poll()
    output.register(STDOUT, 0)  # which asks for errors alone
    if not output.poll(0):
        return False
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), STDOUT)
    return True


def run_command(name: str, *others: str) -> int:
    """Run one command; returns its exit status."""
    if name in RECIPES:
        run_recipe(name, list(others))
        return 0
    if name in TOOLS:
        tool: Callable[[list[str]], int] = import_module(TOOLS[name][0]).main
        return tool(list(others))
    if name == "--version":
        sys.stdout.write(f"lightning-recsys {__version__}\n")
        return 0
    known = name in ("-h", "--help")
    (sys.stdout if known else sys.stderr).write(usage() if known else f"there is no command {name!r}.\n{usage()}")
    return 0 if known else 2


def run_recipe(name: str, arguments: list[str]) -> None:
    """Become ``python recipes/NAME.py ARGUMENTS``, also for the processes that it starts.

    The recipe's messages name commands, as this one, and not its files.
    """
    path = recipes_folder() / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    sys.path.append(os.getcwd())  # last, so that no file there stands in front of a library
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), {"STARTED_AS_COMMAND": True}, run_name="__main__")


def usage() -> str:
    """All commands, a line each."""
    commands = {**RECIPES, **{name: about for name, (_, about) in TOOLS.items()}}
    lines = "".join(f"  {name:<11} {about}\n" for name, about in commands.items())
    return f"usage: lightning-recsys COMMAND [ARGUMENTS]; lightning-recsys COMMAND --help says more\n\n{lines}"


if __name__ == "__main__":
    sys.exit(main())
