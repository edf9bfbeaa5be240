"""Metrics as functions of one batch, and what calibrates logits."""

from lightning_recsys.metrics.functional.normalized_entropy import normalized_entropy
from lightning_recsys.metrics.functional.platt_scaling import platt_scaling

__all__ = ["normalized_entropy", "platt_scaling"]
