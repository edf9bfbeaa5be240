"""Reads prepared rows: Parquet shards with a manifest, written by :mod:`lightning_recsys.data.preparation`."""

from lightning_recsys.data.prepared.manifest import Feature, Manifest, Shard

__all__ = ["Feature", "Manifest", "Shard"]
