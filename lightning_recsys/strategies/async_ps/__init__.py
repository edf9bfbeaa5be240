"""Asynchronous parameter server: dense parameters and rows on servers, gradients pushed by workers that run free."""

from lightning_recsys.strategies.async_ps.served_dense import ServedDense
from lightning_recsys.strategies.async_ps.strategy import AsyncParameterServerStrategy

__all__ = ["AsyncParameterServerStrategy", "ServedDense"]
