"""Distributed training of click-through-rate models with PyTorch Lightning."""

from lightning_recsys.__about__ import __version__

__all__ = ["__version__"]
