"""Rules of replicas, of copies of rows and of stale gradients: decisions only, no I/O, no thread."""

from lightning_recsys.sync.algorithm import SyncAlgorithm, Topology
from lightning_recsys.sync.bmuf import BMUF
from lightning_recsys.sync.clocks import ClockName, ClockRule
from lightning_recsys.sync.easgd import EASGD
from lightning_recsys.sync.generations import Decision, Report, decide
from lightning_recsys.sync.model_averaging import ModelAveraging
from lightning_recsys.sync.pacing import RoundSchedule, ShadowPace
from lightning_recsys.sync.registry import algorithm_names, make_algorithm, register_algorithm
from lightning_recsys.sync.rounds import ReplicaRounds
from lightning_recsys.sync.staleness import STALENESS_RULES, StalenessNormalization, StalenessRule

__all__ = [
    "BMUF",
    "EASGD",
    "STALENESS_RULES",
    "ClockName",
    "ClockRule",
    "Decision",
    "ModelAveraging",
    "ReplicaRounds",
    "Report",
    "RoundSchedule",
    "ShadowPace",
    "StalenessNormalization",
    "StalenessRule",
    "SyncAlgorithm",
    "Topology",
    "algorithm_names",
    "decide",
    "make_algorithm",
    "register_algorithm",
]
