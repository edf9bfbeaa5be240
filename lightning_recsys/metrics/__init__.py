"""Metrics of click-through-rate models."""

from lightning_recsys.metrics.auroc import StreamingAUROC
from lightning_recsys.metrics.calibration import Calibration
from lightning_recsys.metrics.log_loss import LogLoss
from lightning_recsys.metrics.normalized_entropy import NormalizedEntropy

__all__ = ["Calibration", "LogLoss", "NormalizedEntropy", "StreamingAUROC"]
