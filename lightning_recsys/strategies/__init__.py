"""Lightning strategies: how the processes of a run divide the work."""

from lightning_recsys.strategies.base import RecsysStrategy
from lightning_recsys.strategies.ddp import ForkserverDDPStrategy
from lightning_recsys.strategies.des import DESStrategy
from lightning_recsys.strategies.het import HETStrategy
from lightning_recsys.strategies.shadowsync import ShadowSyncStrategy

__all__ = ["DESStrategy", "ForkserverDDPStrategy", "HETStrategy", "RecsysStrategy", "ShadowSyncStrategy"]
