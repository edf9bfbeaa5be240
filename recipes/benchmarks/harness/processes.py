"""How benchmarks start Python in another process, with the recipes on its path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2]


def python(*arguments: str) -> list[str]:
    """This interpreter."""
    return [sys.executable, *arguments]


def environment() -> dict[str, str]:
    """This process's own variables, and the recipes first in ``PYTHONPATH``."""
    search = os.pathsep.join([str(RECIPES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": search}
