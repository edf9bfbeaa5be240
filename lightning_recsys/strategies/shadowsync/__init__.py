"""ShadowSync: replicas that are kept together in the background, beside Hogwild workers and servers of rows."""

from lightning_recsys.strategies.shadowsync.replicas import Replicas
from lightning_recsys.strategies.shadowsync.strategy import ShadowSyncStrategy

__all__ = ["Replicas", "ShadowSyncStrategy"]
