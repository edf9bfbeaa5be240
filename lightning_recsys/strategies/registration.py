"""Makes the strategies known to Lightning, now or as soon as it is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from lightning_recsys.strategies import register

LIGHTNING = "pytorch_lightning.strategies"


def register_with_lightning() -> None:
    """Register the strategies where Lightning is imported already, and otherwise behind its import."""
    if LIGHTNING in sys.modules:
        register(import_module(LIGHTNING).StrategyRegistry)  # which waits for a thread that is importing it
    else:
        sys.meta_path.insert(0, finder := _BehindImport())
        if LIGHTNING in sys.modules:  # another thread has begun to import it
            finder.leave()
            register(import_module(LIGHTNING).StrategyRegistry)


class _BehindImport(MetaPathFinder):
    """Finds Lightning's strategies as the other finders do, registers ours when they are there, and goes."""

    def leave(self) -> None:
        """Ask it no more. Other threads may be going through the list that it was in."""
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != LIGHTNING:
            return None
        sys.meta_path.remove(self)  # one of its kind, of a package that was imported twice, may ask the others as well
        try:
            found = (x.find_spec(fullname, path, target) for x in [*sys.meta_path])
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            sys.meta_path.insert(0, self)  # an import that fails is made again
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            register(module.StrategyRegistry)
            self.leave()

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]  # the loader is this import's own
        return spec
