"""Prepare data: ``python recipes/prepare.py data=... raw=... out=...``; ``--help`` for what there is to choose.

``prepare.py schema`` guesses a schema, ``prepare.py cache`` shows what ``data=tabular`` keeps.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from recipe_tools.overrides import CONFIG_DIR, explained_overrides


@hydra.main(version_base="1.3", config_path="../conf/prepare", config_name="schema")
def schema(cfg: DictConfig) -> None:
    """Guess what the columns of a file mean, and write it down as a schema to correct."""
    from recipe_tools.jobs.guess import run  # once there is something to do: torch and pyarrow take seconds

    run(cfg)


@hydra.main(version_base="1.3", config_path="../conf/prepare", config_name="rows")
def rows(cfg: DictConfig) -> None:
    """Turn raw text into Parquet shards to train from."""
    from recipe_tools.jobs.prepare_rows import run

    run(cfg)


def main() -> None:
    if sys.argv[1:2] == ["cache"]:
        from recipe_tools.row_cache import show_cache

        show_cache(sys.argv[2:])
        return
    name = "schema" if sys.argv[1:2] == ["schema"] else "rows"
    if name == "schema":
        del sys.argv[1]
    with explained_overrides(name, config_dir=CONFIG_DIR / "prepare"):
        (schema if name == "schema" else rows)()


if __name__ == "__main__":
    main()
