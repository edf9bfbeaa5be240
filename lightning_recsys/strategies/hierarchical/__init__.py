"""Hierarchical Training: groups of trainers with one dense replica, cut over group servers that compute it."""

from lightning_recsys.strategies.hierarchical.planning import OperatorPlacement
from lightning_recsys.strategies.hierarchical.served_groups import ServedGroups
from lightning_recsys.strategies.hierarchical.strategy import HierarchicalStrategy

__all__ = ["HierarchicalStrategy", "OperatorPlacement", "ServedGroups"]
