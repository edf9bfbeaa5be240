"""LightningModules: what is optimised, and what is logged."""

from lightning_recsys.tasks.ctr import CTRTask

__all__ = ["CTRTask"]
