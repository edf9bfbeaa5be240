"""Distributed training of click-through-rate models with PyTorch Lightning.

Importing this package makes its strategies known to Lightning by name, and does nothing else. Lightning itself is not
imported: servers do without it. Where it comes later, the strategies are made known then.
"""

from lightning_recsys.__about__ import __version__
from lightning_recsys.strategies.registration import register_with_lightning

register_with_lightning()

__all__ = ["__version__"]
