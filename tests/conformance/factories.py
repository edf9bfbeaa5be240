"""Strategies with settings, for the table in test_strategies.py."""

from lightning_recsys.strategies import HETStrategy, HierarchicalStrategy, RecsysStrategy
from lightning_recsys.strategies.shadowsync.strategy import ShadowSyncStrategy


class FreeStrategy(RecsysStrategy):
    """The base with nothing on top: replicas that never meet. One worker of it is as good as any."""

    asynchronous = True
    wraps_model = False


def free_workers() -> FreeStrategy:
    return FreeStrategy()


def shadowsync_trainers() -> ShadowSyncStrategy:
    """As many trainers of one worker as there are devices."""
    return ShadowSyncStrategy(table_placement="size")


def shadowsync_workers() -> ShadowSyncStrategy:
    """Two workers for each trainer."""
    return ShadowSyncStrategy(table_placement="size", workers_per_trainer=2)


def shadowsync_foreground() -> ShadowSyncStrategy:
    """A round between every two steps, while the worker waits."""
    return ShadowSyncStrategy(table_placement="size", rounds="foreground", gap=2)


def shadowsync_ma() -> ShadowSyncStrategy:
    """Model averaging beside training."""
    return ShadowSyncStrategy(table_placement="size", algorithm="ma")


def shadowsync_bmuf() -> ShadowSyncStrategy:
    """Block-wise model updates in the foreground."""
    return ShadowSyncStrategy(table_placement="size", algorithm="bmuf", rounds="foreground", gap=2)


def het_by_messages() -> HETStrategy:
    """In step, with rows behind sockets, although the servers are on this machine."""
    return HETStrategy(staleness=0, transport="tcp")


def het_without_staleness() -> HETStrategy:
    """As exact as it gets: every update of a step is seen in the next."""
    return HETStrategy(staleness=0)


def hierarchical_nets() -> HierarchicalStrategy:
    """One group of one trainer with two nets, its replica cut over two servers."""
    return HierarchicalStrategy(nets_per_trainer=2, servers_per_group=2)


def hierarchical_groups() -> HierarchicalStrategy:
    """Two groups of one trainer, whose servers average among themselves."""
    return HierarchicalStrategy(num_groups=2, algorithm="bmuf", block_momentum=0.5)
