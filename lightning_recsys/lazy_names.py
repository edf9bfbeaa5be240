"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562) that imports each of its names with its module.

    Args:
        package: Name of the package.
        modules: Name -> the module that has it, within the package.

    Returns:
        A function of a name; it raises ``AttributeError`` for others than these.

    >>> lazy_names("lightning_recsys", {"is_folder": "checkpoints"})("is_folder").__name__
    'is_folder'
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
