"""``lightning-recsys-checkpoint``: folder checkpoints to single files, and back."""

from __future__ import annotations

import argparse
import sys
from pickle import UnpicklingError

from lightning_recsys.checkpoints.single_file import to_file, to_folder


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-recsys-checkpoint",
        description="Turn a checkpoint folder, as the distributed strategies write it, into the single file that "
        "Trainer(strategy='auto') and torch.load read, or a single file into a folder.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source, target in (("to-file", "folder", "file"), ("to-folder", "file", "folder")):
        command = commands.add_parser(name, help=f"read a {source}, write a {target}")
        command.add_argument("source", metavar=source.upper(), help=f"the checkpoint {source} to read")
        command.add_argument("target", metavar=target.upper(), help=f"the {target} to write, replaced as a whole")
        command.add_argument(
            "--trusted",
            action="store_true",
            help="load arbitrary Python objects: only for checkpoints of your own, as loading them runs their code",
        )
    given = parser.parse_args(arguments)
    convert = to_file if given.command == "to-file" else to_folder
    try:
        convert(given.source, given.target, weights_only=not given.trusted)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except UnpicklingError as error:
        print(
            f"{parser.prog}: {given.source} holds more than tensors and plain containers; --trusted loads it if it is"
            f" yours. ({str(error).splitlines()[0]})",
            file=sys.stderr,
        )
        return 1
    return 0
