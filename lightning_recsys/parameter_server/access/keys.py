"""Who may talk to a server over TCP: keys where other machines can reach it, a token on this machine's own address."""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq
from zmq.utils import z85

log = logging.getLogger(__name__)


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

    def save(self, path: Path) -> None:
        """Write a file that nobody but its owner can read; errors as of :meth:`JobKeys.save`."""
        parts = {"server_public": self.server, "client_public": self.public, "client_secret": self.secret}
        _write_secret(path, _as_json(parts))


@dataclass(frozen=True)
class JobKeys:
    """The keys of one job: one pair for its servers, one for its clients, and the public keys of further clients.

    Args:
        server: The servers' half.
        client: The clients' half, which all may use that have no keys of their own.
        named: Public keys of clients with keys of their own, by name.

    >>> keys = JobKeys.generate()
    >>> JobKeys.from_bytes(keys.to_bytes()) == keys
    True
    """

    server: ServerKeys
    client: ClientKeys
    named: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def generate(cls) -> JobKeys:
        """New keys from the system's random generator."""
        return cls._from_pairs(zmq.curve_keypair(), zmq.curve_keypair(), {})

    @classmethod
    def _from_pairs(
        cls, server: tuple[bytes, bytes], client: tuple[bytes, bytes], named: Mapping[str, bytes]
    ) -> JobKeys:
        known = (client[0], *named.values())
        return cls(ServerKeys(*server, clients=known), ClientKeys(server[0], *client), named)

    def with_clients(self, named: Mapping[str, bytes]) -> JobKeys:
        """The same keys, with these clients of their own and no others."""
        known = (self.client.public, *named.values())
        return replace(self, server=replace(self.server, clients=known), named=dict(named))

    def to_bytes(self) -> bytes:
        """For a key file, or to spread within a job (a c10d store); whoever has them is let in."""
        parts = {
            "server_public": self.server.public,
            "server_secret": self.server.secret,
            "client_public": self.client.public,
            "client_secret": self.client.secret,
        }
        return _as_json(parts, {name: key.decode("ascii") for name, key in self.named.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> JobKeys:
        """The reverse of :meth:`to_bytes`.

        Raises:
            ValueError: these are no keys, or a secret does not belong to its public key.
        """
        try:
            parts = json.loads(data)
            pairs = [(parts[f"{x}_public"].encode(), parts[f"{x}_secret"].encode()) for x in ("server", "client")]
            named = {name: key.encode() for name, key in parts.get("clients", {}).items()}
            valid = all(map(_is_pair, pairs)) and all(map(_is_public, named.values()))
        except (ValueError, TypeError, KeyError, AttributeError, zmq.ZMQError):
            valid = False
        if not valid:
            raise ValueError("these are no keys of a job: `lightning-recsys-server --make-keys FILE` makes some.")
        return cls._from_pairs(pairs[0], pairs[1], named)

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


def add_client(path: Path, name: str) -> Path:
    """Give a client keys of its own, whose public one servers with this key file let in from now on.

    Args:
        path: The key file of a job, to which the public key is added.
        name: The client's name: letters, digits, ``.``, ``_`` and ``-``.

    Returns:
        The file with the client's keys, ``NAME.keys`` beside the job's. It holds nothing of other clients.

    Raises:
        FileNotFoundError: there is no such key file.
        FileExistsError: there is a file of the client's already.
        ValueError: the name is none, or is taken; or errors as of :meth:`JobKeys.load`.
    """
    keys = JobKeys.load(path)
    if not _NAME.fullmatch(name):
        raise ValueError(f"a client's name is 1 to 64 letters, digits, '.', '_' or '-', got {name!r:.100}.")
    if name in keys.named:
        raise ValueError(f"{path} has a client {name!r} already: remove it first (--remove-client {name}).")
    own, (public, secret) = path.with_name(f"{name}.keys"), zmq.curve_keypair()
    # The client's file first: who is killed between the two leaves keys that open nothing.
    ClientKeys(keys.server.public, public, secret).save(own)
    _replace_secret(path, keys.with_clients({**keys.named, name: public}).to_bytes())
    return own


def remove_client(path: Path, name: str) -> None:
    """Let a client in no more: servers with this key file cut its connections within a second or so.

    Raises:
        FileNotFoundError: there is no such key file.
        ValueError: it has no such client; or errors as of :meth:`JobKeys.load`.
    """
    keys = JobKeys.load(path)
    if name not in keys.named:
        raise ValueError(f"{path} has no client {name!r}; it has {sorted(keys.named)}.")
    _replace_secret(path, keys.with_clients({x: key for x, key in keys.named.items() if x != name}).to_bytes())


class KeyFile:
    """A job's key file as a server sees it: whoever is added to it, or removed, is so while the server runs.

    Args:
        path: The file. It stays what it was where it cannot be read any more; the server's own pair never changes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: others can read the file, or it holds no keys of a job.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, _stamp(path)
        self.keys = JobKeys.load(path).server
        self._known = frozenset(self.keys.clients)

    def knows(self, client: bytes) -> bool:
        """Whether a client with this public key is let in."""
        return client in self._known

    def look(self) -> bool:
        """Read it again if it has changed, and say whether other clients are known now."""
        if (stamp := _stamp(self._path)) == self._stamp:
            return False
        self._stamp = stamp
        try:
            found = JobKeys.load(self._path).server
        except (OSError, ValueError) as error:
            log.warning("The key file cannot be read, so the clients stay those that it had: %s", error)
            return False
        if found.public != self.keys.public:
            log.warning("%s has other keys of the server now, which count from its next start on.", self._path)
            return False
        self.keys, before = found, self._known
        self._known = frozenset(found.clients)
        return before != self._known


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


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
    """The keys that a client needs, from its own file, the key file of a job, or a server's token.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: others can read the file, or it holds none of them.
    """
    try:
        content = json.loads(_read_secret(path))
        names = set(content)
    except (TypeError, json.JSONDecodeError, UnicodeDecodeError):
        names = set()
    if "token" in names:
        return Token.load(path)
    if "client_secret" in names and "server_secret" not in names:
        return _own_keys(content, path)
    return JobKeys.load(path).client


def _own_keys(content: Mapping[str, object], path: Path) -> ClientKeys:
    found = [content.get(name) for name in ("server_public", "client_public", "client_secret")]
    server, public, secret = (key.encode() if isinstance(key, str) else b"" for key in found)
    if not _is_public(server) or not _is_pair((public, secret)):
        raise ValueError(f"key file {path}: these are no keys of a client. `--add-client NAME --keys FILE` makes some.")
    return ClientKeys(server, public, secret)


_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _is_public(key: bytes) -> bool:
    try:
        return len(key) == 40 and len(z85.decode(key)) == 32
    except (ValueError, KeyError):
        return False


def _is_pair(pair: tuple[bytes, bytes]) -> bool:
    public, secret = pair
    try:
        return _is_public(public) and zmq.curve_public(secret) == public
    except (ValueError, TypeError, zmq.ZMQError):
        return False


def _as_json(parts: Mapping[str, bytes], clients: Mapping[str, str] | None = None) -> bytes:
    content: dict[str, object] = {name: key.decode("ascii") for name, key in parts.items()}
    return json.dumps(content | ({"clients": dict(clients)} if clients else {}), indent=2).encode()


def _replace_secret(path: Path, content: bytes) -> None:
    """Put other content into a file, whole or not at all."""
    new = path.with_name(f".{path.name}-{os.getpid()}")
    new.unlink(missing_ok=True)
    _write_secret(new, content)
    new.replace(path)


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
