"""Strategies with settings, for the table in test_strategies.py; one of each class by YAML, as LightningCLI has it."""

import warnings

import yaml
from pytorch_lightning.cli import LightningArgumentParser
from pytorch_lightning.strategies import Strategy

from lightning_recsys.strategies import (
    CachedRows,
    ComposedStrategy,
    Free,
    HETStrategy,
    HierarchicalStrategy,
    RecsysStrategy,
    Replicas,
    compose,
)
from lightning_recsys.strategies.shadowsync.strategy import ShadowSyncStrategy


def by_yaml(text: str) -> Strategy:
    """What ``trainer.strategy`` of a LightningCLI's config file becomes; every default of every base is handed over."""
    parser = LightningArgumentParser()
    parser.add_argument("--strategy", type=Strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a method's name, by which Lightning's CLI calls jsonargparse as well
        return parser.instantiate_classes(parser.parse_object({"strategy": yaml.safe_load(text)})).strategy


def ddp_by_yaml() -> Strategy:
    """One that is handed on to DistributedDataParallel is among the settings."""
    return by_yaml("""
        class_path: lightning_recsys.strategies.ForkserverDDPStrategy
        init_args: {gradient_as_bucket_view: true, num_threads: 1, timeout: "0:20:00"}
    """)


def des_by_yaml() -> Strategy:
    """Fields are placed by their costs."""
    return by_yaml("""
        class_path: lightning_recsys.strategies.DESStrategy
        init_args: {field_placement: balanced, whole: []}
    """)


def async_ps_by_yaml() -> Strategy:
    """Each worker's push counts less, the more updates of others it has not seen."""
    return by_yaml("""
        class_path: lightning_recsys.strategies.AsyncParameterServerStrategy
        init_args: {normalization: relative, num_embedding_servers: 2, transport: auto}
    """)


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


def shadowsync_foreground() -> Strategy:
    """A round between every two steps, while the worker waits."""
    return by_yaml("""
        class_path: lightning_recsys.strategies.ShadowSyncStrategy
        init_args: {table_placement: size, algorithm: easgd, rounds: foreground, gap: 2, alpha: 0.5}
    """)


def shadowsync_ma() -> ShadowSyncStrategy:
    """Model averaging beside training."""
    return ShadowSyncStrategy(table_placement="size", algorithm="ma")


def shadowsync_bmuf() -> ShadowSyncStrategy:
    """Block-wise model updates in the foreground."""
    return ShadowSyncStrategy(table_placement="size", algorithm="bmuf", rounds="foreground", gap=2)


def het_by_messages() -> Strategy:
    """In step, with rows behind sockets, although the servers are on this machine."""
    return by_yaml("""
        class_path: lightning_recsys.strategies.HETStrategy
        init_args: {staleness: 0, transport: tcp, cache_fraction: 0.5, bucket_cap_mb: 5}
    """)


def het_without_staleness() -> HETStrategy:
    """As exact as it gets: every update of a step is seen in the next."""
    return HETStrategy(staleness=0)


def shadowsync_cached() -> RecsysStrategy:
    """Replicas that are kept together in the background, over caches of rows."""
    return ComposedStrategy(dense=Replicas(), rows=CachedRows(table_placement="size"), pace=Free())


def async_ps_cached() -> RecsysStrategy:
    """Stale gradients of the dense part count for less; rows are trained in caches."""
    return compose(dense="servers", rows=CachedRows(staleness=2, table_placement="size"))


def hierarchical_cached() -> RecsysStrategy:
    """Two nets of a group, each with a cache of rows."""
    return compose(dense="groups", rows="cached", nets_per_trainer=2, servers_per_group=2)


def ddp_free() -> Strategy:
    """DDP's dense part over rows that each worker trains on its own."""
    return by_yaml("""
        class_path: lightning_recsys.strategies.FreeRowsDDPStrategy
        init_args: {num_embedding_servers: 2, transport: tcp}
    """)


def hierarchical_nets() -> HierarchicalStrategy:
    """One group of one trainer with two nets, its replica cut over two servers."""
    return HierarchicalStrategy(nets_per_trainer=2, servers_per_group=2)


def hierarchical_groups() -> Strategy:
    """Two groups of one trainer, whose servers average among themselves."""
    return by_yaml("""
        class_path: lightning_recsys.strategies.HierarchicalStrategy
        init_args:
          {num_groups: 2, algorithm: bmuf, block_momentum: 0.5, compression: {activations: bf16}, fc_splits: none}
    """)
