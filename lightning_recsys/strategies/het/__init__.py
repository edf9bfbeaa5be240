"""HET: rows on servers, the busy ones cached in each worker."""

from lightning_recsys.strategies.het.strategy import HETStrategy

__all__ = ["HETStrategy"]
