"""Metrics as functions of one batch."""

from lightning_recsys.metrics.functional.normalized_entropy import normalized_entropy

__all__ = ["normalized_entropy"]
