"""Who may talk to a server over TCP: keys where other machines can reach it, a token on this machine's own address."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85


@dataclass(frozen=True)
class ServerKeys:
    """The keys of a server: its own pair, and the public keys of the clients that it lets in.

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
    """The keys of a client: its own pair, and the server's public key, by which it knows the right server.

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
        return cls._from_pairs(zmq.curve_keypair(), zmq.curve_keypair())

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
        _write_secret(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> JobKeys:
        """Read a key file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: others can read the file, or it holds no keys.
        """
        content = _read_secret(path)
        try:
            return cls.from_bytes(content)
        except ValueError as error:
            raise ValueError(f"key file {path}: {error}") from None


TOKEN = ".token"  # noqa: S105 - a file's name, in a server's folder


@dataclass(frozen=True)
class Token:
    """A password to a server on loopback, where nobody listens in, but every user of the machine can connect.

    Args:
        secret: Characters that nobody guesses.
    """

    secret: str = field(repr=False)

    @classmethod
    def of_folder(cls, folder: Path) -> Token:
        """The token of a server's folder, made where there is none: whoever can read the folder's files is let in.

        Raises:
            ValueError: others can read the file, or it holds no token.
        """
        path = folder / TOKEN
        if not path.exists():
            new = path.with_name(f"{TOKEN}-{os.getpid()}")
            new.unlink(missing_ok=True)
            _write_secret(new, json.dumps({"token": secrets.token_hex(32)}).encode())
            new.rename(path)  # whole or not at all
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> Token:
        """Read a token's file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: others can read the file, or it holds no token.
        """
        try:
            secret = json.loads(_read_secret(path))["token"]
        except (TypeError, KeyError, json.JSONDecodeError, UnicodeDecodeError):
            secret = None
        if not isinstance(secret, str) or not 32 <= len(secret) <= 255:
            raise ValueError(f"key file {path}: this is no token of a server. Remove it, and start the server again.")
        return cls(secret)

    def is_equal(self, password: bytes) -> bool:
        """Whether somebody knows it; takes as long for a wrong one."""
        return hmac.compare_digest(self.secret.encode(), password)


def load_client_keys(path: Path) -> ClientKeys | Token:
    """The keys that a client needs, from a key file of a job or a server's token.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: others can read the file, or it holds neither.
    """
    try:
        is_token = "token" in json.loads(_read_secret(path))
    except (TypeError, json.JSONDecodeError, UnicodeDecodeError):
        is_token = False
    return Token.load(path) if is_token else JobKeys.load(path).client


def _write_secret(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)


def _read_secret(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no key file {path}. `lightning-recsys-server --make-keys {path}` makes one; every machine of the"
            " job needs the same."
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"key file {path} can be read or written by others (mode {mode:04o}): chmod 600 {path}")
    return path.read_bytes()
