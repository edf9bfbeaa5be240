"""CURVE keys: who may talk to a server that other machines can reach, and in secret."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85


def _new_pair() -> tuple[bytes, bytes]:
    public, secret = zmq.curve_keypair()
    return public, secret


@dataclass(frozen=True)
class ServerKeys:
    """What a server needs: its own pair, and whom it lets in.

    Args:
        public: Public key, 40 characters of Z85.
        secret: Secret key.
        clients: Public keys of the clients that it answers.
    """

    public: bytes
    secret: bytes = field(repr=False)
    clients: tuple[bytes, ...]


@dataclass(frozen=True)
class ClientKeys:
    """What a client needs: its own pair, and the server's public key, by which it knows the right server.

    Args:
        server: The server's public key, 40 characters of Z85.
        public: Public key.
        secret: Secret key.
    """

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class JobKeys:
    """The keys of one job: one pair for its servers, one for its clients.

    Args:
        server: The servers' half.
        client: The clients' half.

    >>> keys = JobKeys.generate()
    >>> JobKeys.from_bytes(keys.to_bytes()) == keys
    True
    """

    server: ServerKeys
    client: ClientKeys

    @classmethod
    def generate(cls) -> JobKeys:
        """New keys from the system's random generator."""
        return cls._from_pairs(_new_pair(), _new_pair())

    @classmethod
    def _from_pairs(cls, server: tuple[bytes, bytes], client: tuple[bytes, bytes]) -> JobKeys:
        return cls(ServerKeys(*server, clients=(client[0],)), ClientKeys(server[0], *client))

    def to_bytes(self) -> bytes:
        """For a key file, or to spread within a job (a c10d store); whoever has them is let in."""
        parts = {
            "server_public": self.server.public,
            "server_secret": self.server.secret,
            "client_public": self.client.public,
            "client_secret": self.client.secret,
        }
        return json.dumps({name: key.decode("ascii") for name, key in parts.items()}, indent=2).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobKeys:
        """The reverse of :meth:`to_bytes`.

        Raises:
            ValueError: these are no keys, or a secret does not belong to its public key.
        """
        try:
            parts = json.loads(data)
            keys = [
                parts[f"{owner}_{half}"].encode() for owner in ("server", "client") for half in ("public", "secret")
            ]
            pairs = (keys[0], keys[1]), (keys[2], keys[3])
            valid = all(
                zmq.curve_public(secret) == public and len(z85.decode(public)) == 32 for public, secret in pairs
            )
        except (ValueError, TypeError, KeyError, AttributeError, zmq.ZMQError):
            valid = False
        if not valid:
            raise ValueError("these are no keys of a job: `lightning-recsys-server --make-keys FILE` makes some.")
        return cls._from_pairs(*pairs)

    def save(self, path: Path) -> None:
        """Write a key file that nobody but its owner can read.

        Raises:
            FileExistsError: there is a file of that name already; keys in use are not overwritten.
        """
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> JobKeys:
        """Read a key file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: others can read the file, or it holds no keys.
        """
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no key file {path}. `lightning-recsys-server --make-keys {path}` makes one; every machine of"
                " the job needs the same."
            )
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ValueError(f"key file {path} can be read or written by others (mode {mode:04o}): chmod 600 {path}")
        try:
            return cls.from_bytes(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"key file {path}: {error}") from None
