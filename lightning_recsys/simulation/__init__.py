"""Clusters of any size in virtual time, on one core: real gradients, and the rules that strategies run."""

from lightning_recsys.simulation.cluster import Synchronization, VirtualCluster
from lightning_recsys.simulation.examples import batches, count_batches, evaluate
from lightning_recsys.simulation.groups import Group, Leg
from lightning_recsys.simulation.het import HETCluster
from lightning_recsys.simulation.machines import Constant, Duration, Exponential, Normal, Servers, Workers
from lightning_recsys.simulation.planned import LargeModel, planned_group
from lightning_recsys.simulation.results import Histogram, Results

__all__ = [
    "Constant",
    "Duration",
    "Exponential",
    "Group",
    "HETCluster",
    "Histogram",
    "LargeModel",
    "Leg",
    "Normal",
    "Results",
    "Servers",
    "Synchronization",
    "VirtualCluster",
    "Workers",
    "batches",
    "count_batches",
    "evaluate",
    "planned_group",
]
