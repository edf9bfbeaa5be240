"""Servers that offer the stores of a folder to other machines, and connections to them."""

from lightning_recsys.parameter_server.access.keys import ClientKeys, JobKeys, KeyFile, ServerKeys
from lightning_recsys.parameter_server.connect import connect
from lightning_recsys.parameter_server.server import serve

__all__ = [
    "ClientKeys",
    "JobKeys",
    "KeyFile",
    "ServerKeys",
    "connect",
    "serve",
]
