"""Servers of a run whose processes somebody else starts (``torchrun``, SLURM), on one node or several."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_recsys.launchers.sidecars import ServerSpec, Sidecars, Watch

if TYPE_CHECKING:
    from lightning_recsys.parameter_server.access.keys import ClientKeys, JobKeys

_RUNS = itertools.count()  # runs of this process; all ranks of a job count alike


class NodeServers:
    """One rank's view of the servers of all nodes: each node's local rank 0 starts and watches its own.

    Where they listen and the keys to them go through the process group's store. On one node they listen on sockets in a
    folder of the run's own. On several a server listens at the address by which its node reaches the main one, and keys
    are made for the run. Whoever can read the store can read the keys: it is as open to the network as the process
    group is.

    Args:
        specs: The servers of all nodes; each is started on the node that its spec says.
        environment: The job's cluster environment, which knows this process's place in it. The local rank 0 of each
            node starts the servers of its node.
        num_nodes: How many nodes (machines) the job has.
        **options: The ``store_folder`` and ``max_restarts`` of :class:`Sidecars`.

    Attributes:
        keys: The clients' half of the keys; ``None`` on one node. Known after :meth:`start`.
    """

    def __init__(
        self, specs: Sequence[ServerSpec], *, environment: ClusterEnvironment, num_nodes: int, **options: Any
    ) -> None:
        self.specs = tuple(specs)
        self.node, self.num_nodes = environment.node_rank(), num_nodes
        self.address = None if num_nodes == 1 else address_towards(environment.main_address)
        self.keys: ClientKeys | None = None
        self._environment, self._options = environment, options
        self._sidecars: Sidecars | None = None
        self._watch: Watch | None = None

    def start(self) -> dict[str, list[str]]:
        """Start this node's servers and wait for those of the others; all ranks call this.

        Returns:
            The endpoints by kind, in index order.

        Raises:
            RuntimeError: a server of some node did not start.
        """
        store = PrefixStore(f"lightning_recsys/servers/{next(_RUNS)}", _get_default_store())
        keys = self._share_keys(store)
        if self._environment.local_rank() == 0:
            store.set(f"node-{self.node}", json.dumps(self._start_own(keys)))
        ports: dict[str, str] = {}
        for node in range(self.num_nodes):
            told = json.loads(store.get(f"node-{node}"))
            if "error" in told:
                self.stop()
                raise RuntimeError(f"On node {node}: {told['error']}")
            ports |= told["endpoints"]
        endpoints: dict[str, list[str]] = {}
        for spec in sorted(self.specs, key=lambda spec: spec.index):
            endpoints.setdefault(spec.kind, []).append(ports[str(spec)])
        return endpoints

    def check(self) -> None:
        """Raise what happened to a server of this process, if it is gone for good."""
        if self._watch is not None:
            self._watch.check()

    def stop(self) -> None:
        """Stop what this process started."""
        if self._watch is not None:
            self._watch.stop()
        if self._sidecars is not None:
            self._sidecars.stop()
        self._watch = self._sidecars = None

    def _share_keys(self, store: PrefixStore) -> JobKeys | None:
        """The same keys, or none, on all ranks."""
        if self.address is None:
            return None
        if self._environment.local_rank() == 0:
            store.set(f"address-{self.node}", self.address)
        addresses = [store.get(f"address-{node}").decode() for node in range(self.num_nodes)]
        local = {ip_address(address).is_loopback for address in addresses}
        if len(local) > 1:
            raise RuntimeError(
                f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} leads to the nodes' addresses {addresses}, some of which"
                " no other machine can reach. Set it to an address of the main node that all nodes reach it by."
            )
        from lightning_recsys.parameter_server.access.keys import JobKeys

        if self._environment.global_rank() == 0:
            store.set("keys", JobKeys.generate().to_bytes().decode())
        keys = JobKeys.from_bytes(store.get("keys"))
        self.keys = keys.client
        return keys

    def _start_own(self, keys: JobKeys | None) -> dict[str, object]:
        own = [spec for spec in self.specs if spec.node_among(self.num_nodes) == self.node]
        sidecars = Sidecars(own, address=self.address, keys=keys.server if keys else None, **self._options)
        try:
            self._sidecars = sidecars.__enter__()
        except Exception as error:
            return {"error": str(error)}
        self._watch = Watch(sidecars)
        return {"endpoints": sidecars.by_name}


def address_towards(host: str) -> str:
    """This machine's own address on the way to another one.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the system chooses the way
        return str(probe.getsockname()[0])
