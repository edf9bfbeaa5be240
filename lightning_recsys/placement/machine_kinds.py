"""Which machines there are: kinds with cores, memory, port and price, and what lies between their racks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_recsys.placement.communication import Network
from lightning_recsys.typed_yaml import check_keys, load_yaml, make

GIB = 1 << 30
CARRIED = 1448 / 1514  # of a full packet: the rest are the headers of Ethernet, IP and TCP


@dataclass(frozen=True)
class MachineKind:
    """Machines that are alike.

    Args:
        number: How many there are.
        cores: Cores of one of them that processes may have to themselves.
        memory_gib: Its memory, in GiB.
        port_gbit: Its network port, in 10^9 bits per second and direction.
        latency_us: Microseconds that a message without content takes to another machine.
        price: What an hour of one of them costs, in any currency; 0 where it is not counted.
        gflops: 10^9 float32 operations a second of one core in products, as ``lightning-recsys machine`` prints it.
            ``None``: as many as the machine that measures has.

    Raises:
        ValueError: a number is out of range; the message begins with the key.
    """

    number: int = 1
    cores: int = 1
    memory_gib: float = math.inf
    port_gbit: float = 10.0
    latency_us: float = 50.0
    price: float = 0.0
    gflops: float | None = None

    def __post_init__(self) -> None:
        for name in ("number", "cores"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 8e-9 <= self.port_gbit < math.inf:
            raise ValueError(f"port_gbit must be at least 8e-9, a byte a second, and finite, got {self.port_gbit:g}.")
        for name in ("memory_gib", "gflops"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value:g}.")
        for name in ("latency_us", "price"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {getattr(self, name):g}.")

    @property
    def memory(self) -> float:
        """Bytes of one machine."""
        return self.memory_gib * GIB

    @property
    def port(self) -> Network:
        """The port of one machine, for what packets carry."""
        return Network(self.port_gbit * 1e9 / 8 * CARRIED, self.latency_us * 1e-6)


@dataclass(frozen=True)
class Machines:
    """All machines that a run may have.

    Args:
        kinds: Kinds of machines by their names.
        machines_per_rack: Machines behind one switch; ``None`` where all are behind the same.
        oversubscription: By how much the ports of a rack's machines together exceed the rack's way out; 1 for not at
            all. A kind's machines fill racks one after the other.

    Raises:
        ValueError: there is no kind, or a number is out of range.
    """

    kinds: Mapping[str, MachineKind]
    machines_per_rack: int | None = None
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ValueError("machines must have at least one kind.")
        if self.machines_per_rack is not None and self.machines_per_rack < 1:
            raise ValueError(f"machines_per_rack must be at least 1, got {self.machines_per_rack}.")
        if not 1 <= self.oversubscription < math.inf:
            raise ValueError(f"oversubscription must be a finite number of at least 1, got {self.oversubscription:g}.")

    def port(self, kind: str, number: int) -> Network:
        """The network of one of ``number`` machines, each of which talks to all others evenly.

        Of a machine's bytes the share that leaves its rack passes the rack's way out, which its machines have together.
        """
        port, per_rack = self.kinds[kind].port, self.machines_per_rack
        if per_rack is None or number <= per_rack or self.oversubscription == 1:
            return port
        leaving = (number - per_rack) / (number - 1)
        return Network(port.bandwidth / max(1.0, leaving * self.oversubscription), port.latency)


def machines_from(data: Any, where: str = "machines") -> Machines:
    """Machines as a file describes them: a mapping from names to kinds, with ``racks`` beside them.

    Raises:
        ValueError: a key is unknown, missing or out of range; the message names it.

    >>> machines_from({"cpu": {"number": 4, "cores": 8}}).kinds["cpu"].cores
    8
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a mapping from names of kinds of machines to what they are, got {data!r}.")
    racks = data.get("racks", {})
    check_keys(f"{where}.racks", racks, ["machines_per_rack", "oversubscription"])
    kinds = {str(name): _made(MachineKind, f"{where}.{name}", entry) for name, entry in data.items() if name != "racks"}
    machines: Machines = _made(Machines, where if not racks else f"{where}.racks", racks, kinds=kinds)
    return machines


def read_machines(path: str | Path) -> Machines:
    """Machines from a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no YAML, or a key is unknown, missing or out of range; the message names it.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of machines {path}; docs/planner.md shows one.")
    return machines_from(load_yaml(path, "a list of machines"), str(path))


def _made(kind: Any, where: str, entry: Any, **made: Any) -> Any:
    try:
        return make(kind, where, entry, **made)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(where) else f"{where}.{text}") from None
