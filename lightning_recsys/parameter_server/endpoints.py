"""Where servers listen, as users write it: an endpoint, or a range of ports on one machine."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"(tcp://[^/]+):([1-9][0-9]*)-([1-9][0-9]*)")


def is_endpoint(text: str) -> bool:
    """Whether a server may listen there.

    >>> is_endpoint("tcp://10.0.0.7:5790"), is_endpoint("ipc:///dev/shm/tables/.socket"), is_endpoint("tcp://host")
    (True, True, False)
    """
    return re.fullmatch(r"tcp://[^/]+:[1-9][0-9]*|ipc:///.+", text) is not None


def endpoints_of(text: str) -> list[str]:
    """The endpoint of each server that a text names; a text that is no range of ports is taken for one endpoint.

    Raises:
        ValueError: the range has no port in it, or ports that there are not.

    >>> endpoints_of("tcp://10.0.0.7:5790-5792")
    ['tcp://10.0.0.7:5790', 'tcp://10.0.0.7:5791', 'tcp://10.0.0.7:5792']
    >>> endpoints_of("tcp://10.0.0.7:5790")
    ['tcp://10.0.0.7:5790']
    """
    found = _RANGE.fullmatch(text)
    if found is None:
        return [text]
    first, last = int(found[2]), int(found[3])
    if not first <= last <= 65535:
        raise ValueError(f"{text!r} is no range of ports, which rise to 65535 at most: tcp://10.0.0.7:5790-5797.")
    return [f"{found[1]}:{port}" for port in range(first, last + 1)]


def all_endpoints(texts: Iterable[str]) -> list[str]:
    """The endpoints of several texts, in their order.

    Raises:
        ValueError: one of them is a range that is none, or an endpoint is named twice.
    """
    endpoints = [endpoint for text in texts for endpoint in endpoints_of(text)]
    if twice := sorted({endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1}):
        raise ValueError(f"{', '.join(twice)} is named twice: rows would be cut into pieces for one server too many.")
    return endpoints


def as_range(endpoints: list[str]) -> str:
    """The range that names these endpoints of one machine, whose ports follow each other.

    >>> as_range(["tcp://10.0.0.7:5790", "tcp://10.0.0.7:5791"]), as_range(["tcp://10.0.0.7:5790"])
    ('tcp://10.0.0.7:5790-5791', 'tcp://10.0.0.7:5790')
    """
    return endpoints[0] if len(endpoints) == 1 else f"{endpoints[0]}-{endpoints[-1].rpartition(':')[2]}"
