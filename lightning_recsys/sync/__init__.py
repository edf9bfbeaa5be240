"""Rules that keep replicas of a dense model, and copies of a row, together: decisions only, no I/O, no thread."""

from lightning_recsys.sync.algorithm import Exchange, SyncAlgorithm
from lightning_recsys.sync.bmuf import BMUF
from lightning_recsys.sync.clocks import ClockName, ClockRule
from lightning_recsys.sync.easgd import EASGD
from lightning_recsys.sync.model_averaging import ModelAveraging
from lightning_recsys.sync.registry import algorithm_names, make_algorithm, register_algorithm

__all__ = [
    "BMUF",
    "EASGD",
    "ClockName",
    "ClockRule",
    "Exchange",
    "ModelAveraging",
    "SyncAlgorithm",
    "algorithm_names",
    "make_algorithm",
    "register_algorithm",
]
