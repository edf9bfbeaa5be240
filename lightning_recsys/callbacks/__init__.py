"""Callbacks that tell how a run learns and how fast it is."""

from lightning_recsys.callbacks._callback import LeanCallback
from lightning_recsys.callbacks.examples_per_second import ExamplesPerSecond
from lightning_recsys.callbacks.normalized_entropy_monitor import NormalizedEntropyMonitor
from lightning_recsys.callbacks.staleness_monitor import Histogram, StalenessMonitor

__all__ = ["ExamplesPerSecond", "Histogram", "LeanCallback", "NormalizedEntropyMonitor", "StalenessMonitor"]
