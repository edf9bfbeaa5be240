"""Write a small project of your own: ``python recipes/new.py my_project``."""

from __future__ import annotations

import argparse
import keyword
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from recipe_tools.command import command

TEMPLATE = Path(__file__).parent / "project"
PLACEHOLDER = "my_project"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=command("new"),
        description="Writes a small project: a model and a LightningModule of your own, configurations that extend "
        "those of lightning_recsys, a test and a README.",
    )
    parser.add_argument("folder", type=Path, help="the folder to make; its name becomes that of the Python package")
    folder = parser.parse_args().folder
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        parser.error(
            f"{name!r} cannot name a Python package: lower-case letters, digits and underscores, a letter first."
        )
    if folder.exists():
        parser.error(f"{folder} exists.")
    if name in sys.stdlib_module_names or name in ("tests", "conf", "train") or find_spec(name) is not None:
        parser.error(f"{name!r} is the name of another module. Choose one that is not taken, such as my_{name}.")
    written = write_project(folder)
    sys.stdout.write(f"Wrote {folder}: {', '.join(written)}.\nNext:\n  cd {shlex.quote(str(folder))}\n")
    sys.stdout.write(f"  lightning-recsys train --config-dir=conf --config-name={name}\n")


def write_project(folder: Path) -> list[str]:
    """Copy the template under the folder's name; returns the files."""
    written = []
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            place = source.relative_to(TEMPLATE).as_posix().replace(PLACEHOLDER, folder.name)
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text(encoding="utf-8").replace(PLACEHOLDER, folder.name), encoding="utf-8")
            written.append(place)
    return written


if __name__ == "__main__":
    main()
