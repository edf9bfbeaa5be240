"""Servers of stores as actors of Ray, which outlive workers and their restarts."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
import ray.util
from ray.exceptions import RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_recsys.parameter_server.access.keys import JobKeys
from lightning_recsys.parameter_server.server import FolderInUseError, serve

_ENDPOINT = "endpoint"  # a file beside the stores, by which a server that starts again finds its port
START_SECONDS = 120.0  # for a cluster to have room for the servers
ENDING_SECONDS = 10.0  # for the server that a folder had before, of a run that is over, to end


class RayServers:
    """Servers on the nodes of a cluster, for the runs of :func:`fit`. A context manager: they live inside.

    Each server is an actor in a placement group of their own, by default on as many nodes as there are. One that dies
    is started again by Ray, on its node, with the same files at the same address; workers ask again meanwhile, and each
    push counts once. Workers that die, and are started again, find the servers as they are, which serve one run at a
    time. All traffic is encrypted with keys that are made here.

    A server whose *node* dies starts anew on another one, without its files and at another address: the run fails, and
    with ``FailureConfig(max_failures=...)`` goes on from its last checkpoint, whose rows come to the new server.

    Args:
        num_servers: How many there are; each has a part of every table.
        store_folder: A folder on a disk of each node, in which each server has one of its own. The files stay when the
            servers end, and the next servers of the same name and folder overwrite them.
        name: What the servers' folders are called, followed by a number.
        num_cpus: CPUs that Ray keeps for each server.
        spread: Ray's strategy of the placement group: ``SPREAD``, ``STRICT_SPREAD`` or ``PACK``.

    Raises:
        ValueError: there is to be no server, or the folder has no absolute path.
        TimeoutError: the cluster has no room for the servers (on entering).
        RuntimeError: servers of another run, which goes on, have the folders (on entering).
    """

    def __init__(
        self,
        num_servers: int,
        *,
        store_folder: str | Path,
        name: str = "server",
        num_cpus: float = 1.0,
        spread: str = "SPREAD",
    ) -> None:
        if num_servers < 1:
            raise ValueError(f"num_servers must be at least 1, got {num_servers}.")
        if not (folder := Path(store_folder)).is_absolute():
            raise ValueError(f"store_folder must be an absolute path, on a disk of each node, got {store_folder}.")
        self._folders = [folder / f"{name}-{index}" for index in range(num_servers)]
        self._num_cpus, self._spread = num_cpus, spread
        self._group: Any = None
        self.actors: list[Any] = []

    def __enter__(self) -> Self:
        self._group = placement_group([{"CPU": self._num_cpus}] * len(self._folders), strategy=self._spread)
        try:
            if not self._group.wait(START_SECONDS):
                raise TimeoutError(
                    f"Ray has found no room for {len(self._folders)} servers of {self._num_cpus:g} CPUs within"
                    f" {START_SECONDS:.0f} s. They need CPUs beside those of the workers."
                )
            keys = JobKeys.generate().to_bytes()
            actor_class: Any = ray.remote(ServerActor)
            for index, folder in enumerate(self._folders):
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
                options = {"num_cpus": self._num_cpus, "max_restarts": -1, "max_task_retries": -1}
                placed = actor_class.options(**options, scheduling_strategy=place)
                self.actors.append(placed.remote(str(folder), keys))
            self.endpoints()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def endpoints(self) -> list[str]:
        """Where the servers listen, in their order; waits for those that start."""
        try:
            endpoints: list[str] = ray.get([actor.endpoint.remote() for actor in self.actors])
        except RayTaskError as error:
            raise RuntimeError(
                f"{error.cause} Servers of a run that goes on have the folder: give these another store_folder"
                " (launcher.store_folder), or another name."
            ) from None
        return endpoints

    def stop(self) -> None:
        """End the servers; their files stay."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


class RunningServers:
    """The servers of a run, as its workers know them. It travels to them.

    Args:
        actors: Handles of the :class:`ServerActor` of each server.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)

    def find(self, folder: Path) -> tuple[list[str], Path]:
        """Where the servers are now, and the file with the keys to them, for ``strategy.servers`` and ``key_file``.

        Args:
            folder: Where this process leaves the key file, which its owner alone can read.
        """
        key_file = folder / f"servers-{os.getpid()}.keys"
        if not key_file.exists():
            keys: bytes = ray.get(self._actors[0].keys.remote())
            JobKeys.from_bytes(keys).save(key_file)
        endpoints: list[str] = ray.get([actor.endpoint.remote() for actor in self._actors])
        return endpoints, key_file


class ServerActor:
    """A process that serves a folder of stores, and ends when that fails.

    Args:
        folder: The stores; made where it is missing.
        keys: All keys of the job, as bytes.
    """

    def __init__(self, folder: str, keys: bytes) -> None:
        self._folder, self._keys = Path(folder), keys
        self._endpoint = ""
        self._refused: FolderInUseError | None = None
        self._listens = threading.Event()
        threading.Thread(target=self._serve, name="server", daemon=True).start()

    def endpoint(self) -> str:
        """Where it listens, as soon as it does.

        Raises:
            FolderInUseError: another server has the folder.
        """
        self._listens.wait()
        if self._refused is not None:
            raise self._refused
        return self._endpoint

    def keys(self) -> bytes:
        """All keys of the job."""
        return self._keys

    def pid(self) -> int:
        """The server's process."""
        return os.getpid()

    def _serve(self) -> None:
        deadline = time.monotonic() + ENDING_SECONDS
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            keys = JobKeys.from_bytes(self._keys).server
            while True:
                try:
                    serve(self._folder, bind=self._address(), keys=keys, ready=self._has_begun)
                    break
                except FolderInUseError as error:
                    if time.monotonic() > deadline:  # it is not one that ends
                        self._refused = error
                        self._listens.set()
                        return
                time.sleep(0.2)
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # so that Ray starts it again

    def _address(self) -> str:
        """The address of before, where the same node has served the folder to this job; else a free port."""
        node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        host = f"[{node}]" if ":" in node else node
        kept = self._endpoint_file.read_text() if self._endpoint_file.exists() else ""
        actor, _, endpoint = kept.partition(" ")
        return endpoint if actor == _own_id() and endpoint.startswith(f"tcp://{host}:") else f"tcp://{host}:0"

    def _has_begun(self, endpoint: str) -> None:
        self._endpoint_file.write_text(f"{_own_id()} {endpoint}")
        self._endpoint = endpoint
        self._listens.set()

    @property
    def _endpoint_file(self) -> Path:
        return self._folder.with_name(f"{self._folder.name}.{_ENDPOINT}")


def _own_id() -> str:
    """The actor's id, which it keeps when it is started again."""
    return str(ray.get_runtime_context().get_actor_id())
