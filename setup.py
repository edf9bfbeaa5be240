"""The wheel carries ``conf/`` and ``recipes/``, which lie beside the package: pyproject.toml cannot say so."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies the two folders side by side into the package, as they lie in the repository."""

    def run(self) -> None:
        """Build the package, then add the folders; an editable install finds them where they are."""
        super().run()
        if self.editable_mode:
            return
        for name in ("conf", "recipes"):
            target = Path(self.build_lib, "lightning_recsys", name)
            shutil.rmtree(target, ignore_errors=True)  # of an earlier build
            # recipe_tools and hydra_plugins are packages of their own (pyproject.toml): any process can import them
            shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__", "recipe_tools", "hydra_plugins"))


setup(cmdclass={"build_py": BuildWithRecipes})
