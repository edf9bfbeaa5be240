"""Reads prepared rows: Parquet shards with a manifest, written by :mod:`lightning_recsys.data.preparation`."""

from typing import TYPE_CHECKING

from lightning_recsys.data.prepared.manifest import Feature, Manifest, Shard

if TYPE_CHECKING:
    from lightning_recsys.data.prepared.module import PreparedDataModule


if not TYPE_CHECKING:  # which would make a type checker believe in every name

    def __getattr__(name: str) -> object:
        if name != "PreparedDataModule":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # When first asked for: it brings Lightning, which the process that reads for all workers does without.
        from lightning_recsys.data.prepared.module import PreparedDataModule

        return PreparedDataModule


__all__ = ["Feature", "Manifest", "PreparedDataModule", "Shard"]
