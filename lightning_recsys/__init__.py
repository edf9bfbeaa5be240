"""Distributed training of click-through-rate models with PyTorch Lightning.

Importing this package registers its strategies with Lightning, and does nothing else.
"""

from pytorch_lightning.strategies import StrategyRegistry

from lightning_recsys.__about__ import __version__
from lightning_recsys.strategies import DESStrategy, ForkserverDDPStrategy, HETStrategy, ShadowSyncStrategy

for _strategy in (DESStrategy, ForkserverDDPStrategy, HETStrategy, ShadowSyncStrategy):
    _strategy.register_strategies(StrategyRegistry)

__all__ = ["__version__"]
