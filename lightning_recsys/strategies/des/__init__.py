"""DES: layers cut by fields, of which only partial results are summed."""

from lightning_recsys.strategies.des.strategy import DESStrategy

__all__ = ["DESStrategy"]
