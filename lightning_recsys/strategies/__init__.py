"""Lightning strategies: how the processes of a run divide the work."""

from lightning_recsys.strategies.base import RecsysStrategy
from lightning_recsys.strategies.ddp import ForkserverDDPStrategy

__all__ = ["ForkserverDDPStrategy", "RecsysStrategy"]
