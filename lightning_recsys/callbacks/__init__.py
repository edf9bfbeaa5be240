"""Callbacks that tell how a run learns and how fast it is."""

from lightning_recsys.callbacks._callback import LeanCallback
from lightning_recsys.callbacks.calibrated_log_loss import CalibratedLogLoss
from lightning_recsys.callbacks.examples_per_second import ExamplesPerSecond
from lightning_recsys.callbacks.normalized_entropy_monitor import NormalizedEntropyMonitor
from lightning_recsys.callbacks.prediction_writer import PredictionWriter
from lightning_recsys.callbacks.prometheus_metrics import PrometheusMetrics
from lightning_recsys.callbacks.telemetry_monitor import Histogram, TelemetryMonitor

__all__ = [
    "CalibratedLogLoss",
    "ExamplesPerSecond",
    "Histogram",
    "LeanCallback",
    "NormalizedEntropyMonitor",
    "PredictionWriter",
    "PrometheusMetrics",
    "TelemetryMonitor",
]
