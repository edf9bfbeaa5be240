"""Distributed training of click-through-rate models with PyTorch Lightning.

Importing this package makes its strategies known to Lightning by name, and does nothing else.
"""

from pytorch_lightning.strategies import StrategyRegistry

from lightning_recsys import strategies
from lightning_recsys.__about__ import __version__

strategies.register(StrategyRegistry)

__all__ = ["__version__"]
