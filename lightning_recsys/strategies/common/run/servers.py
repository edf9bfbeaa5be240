"""The servers of a run: who starts them, who may use those that run already, and the connections to them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pytorch_lightning.trainer.states import TrainerFn

from lightning_recsys.errors import RequestRefusedError, ServerUnreachableError
from lightning_recsys.launchers import EngineEnvironment, NodeServers, ServerSpec, Sidecars
from lightning_recsys.monitoring import Monitored
from lightning_recsys.strategies.common.settings import require_whole
from lightning_recsys.strategies.common.workers.ranks import count_ranks

if TYPE_CHECKING:  # importing strategies is quick; stores and their kernels come with the first use
    import pytorch_lightning as pl

    from lightning_recsys.parameter_server.access.keys import ClientKeys
    from lightning_recsys.parameter_server.access.lease import RunLease
    from lightning_recsys.parameter_server.connect import Transport
    from lightning_recsys.parameter_server.meetings import MeetingPlace
    from lightning_recsys.stores.interfaces import Stores
    from lightning_recsys.strategies.common.base import RecsysStrategy

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class RunServers:
    """The servers of a run, as one process of it knows them. It travels to workers without anything of a run.

    Args:
        strategy: The strategy, which has the settings and the endpoints.
    """

    def __init__(self, strategy: RecsysStrategy) -> None:
        self._strategy = strategy
        self._started: NodeServers | None = None  # by the ranks of this node, from `find` to `leave`
        self.connected: dict[str, list[Stores]] = {}  # by kind, from the first use of each to `disconnect`
        self._lease: RunLease | None = None  # on `strategy.servers`, from the first use of a store on
        # Called before each step: they raise where a server is gone for good, or was lent to another run.
        self.checks: list[Callable[[], None]] = []
        self._borrows = False  # this run may use `strategy.servers`; the same on all ranks

    def __getstate__(self) -> dict[str, object]:
        return vars(type(self)(self._strategy))

    @contextmanager
    def beside_workers(self) -> Iterator[Sidecars]:
        """Servers for the workers that the main process of a single machine launches."""
        strategy = self._strategy
        starts = strategy.servers is None and strategy.num_nodes == 1
        specs = self._with_metrics(strategy.server_specs()) if starts else ()
        strategy.run_name = uuid4().hex
        with self.sidecars(specs) as sidecars:
            strategy.endpoints = sidecars.endpoints
            try:
                yield sidecars
            finally:
                strategy.endpoints = {}

    def sidecars(self, specs: Sequence[ServerSpec]) -> Sidecars:
        """The servers of :meth:`beside_workers`, not started yet: where they listen, and for whom."""
        return Sidecars(specs, store_folder=self._strategy.store_folder, max_restarts=self._strategy.max_restarts)

    def find(self, specs: Sequence[ServerSpec]) -> None:
        """Learn where the servers are; start those of this node if no launcher of ours has. All ranks call this."""
        strategy = self._strategy
        if strategy.servers is not None:
            strategy.endpoints = {spec.kind: list(strategy.servers) for spec in specs}
            self._borrows = True
        elif specs and not strategy.endpoints:
            assert strategy.cluster_environment is not None
            self._started = NodeServers(
                self._with_metrics(specs),
                environment=strategy.cluster_environment,
                num_nodes=strategy.num_nodes,
                store_folder=strategy.store_folder,
                max_restarts=strategy.max_restarts,
            )
            strategy.endpoints = self._started.start()
            self.checks.append(self._started.check)

    def _with_metrics(self, specs: Sequence[ServerSpec]) -> list[ServerSpec]:
        """Each server with a port for its metrics, where the strategy has one for the first."""
        first = self._strategy.server_metrics_port
        if first is None:
            return list(specs)
        return [
            replace(spec, options={**spec.options, "metrics_port": first + number}) for number, spec in enumerate(specs)
        ]

    def monitored(self) -> list[Monitored]:
        """Where this run's servers can be asked how they are doing: at their metrics, or as their clients ask."""
        strategy = self._strategy
        first = strategy.server_metrics_port
        if strategy.servers is not None:  # each of them serves every kind
            keys = None if strategy.key_file is None else os.path.abspath(strategy.key_file)
            return [Monitored(f"server-{x}", endpoint, keys) for x, endpoint in enumerate(strategy.servers)]
        found = []
        for number, spec in enumerate(strategy.server_specs()):
            endpoint = strategy.endpoints[spec.kind][spec.index]
            if first is not None:
                host = "127.0.0.1" if endpoint.startswith("ipc://") else endpoint[len("tcp://") :].rpartition(":")[0]
                endpoint = f"http://{host}:{first + number}"
            found.append(Monitored(str(spec), endpoint))
        return found

    def meeting_place(self) -> MeetingPlace | None:
        """Where the workers of an asynchronous run meet, which then do without one that dies.

        ``None`` where whoever has started them, such as torchrun, ends all of them when one dies.
        """
        from lightning_recsys.parameter_server.meetings import MeetingPlace

        strategy = self._strategy
        run = strategy.run_name if strategy.launched is None else strategy.launched.run
        if not (strategy.asynchronous and run and (size := count_ranks(strategy)) > 1):
            return None
        kinds = [spec.kind for spec in strategy.server_specs()]
        servers = strategy.endpoints.get(kinds[0]) if kinds else None
        if strategy.servers is not None and kinds:
            servers = list(strategy.servers)
        if not servers:
            return None
        keys = None if strategy.key_file is None else str(strategy.key_file)
        return MeetingPlace(servers[0], run, size, keys)

    @property
    def first_may_die(self) -> bool:
        """Whether the others go on without the first worker, so that each of them has to be able to take its place."""
        return self.meeting_place() is not None

    def survive(self, trainer: pl.Trainer | None, rank: int, left: int) -> str | None:
        """In the main process: ``None`` where the others go on without a worker that died; else why they cannot."""
        strategy = self._strategy
        if not strategy.asynchronous or trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return ""
        if (place := self.meeting_place()) is None:
            return ""
        if left < strategy.min_workers:
            return f"That leaves {left} workers, fewer than strategy.min_workers={strategy.min_workers}: the run ends."
        try:
            goes_on = place.lose(rank)
        except (ServerUnreachableError, RequestRefusedError) as error:
            return f"The others could not be told: {error}"
        return None if goes_on else "It died before all workers had met: the run could not begin."

    def lost_ranks(self) -> frozenset[int]:
        """The ranks that have died, as the launcher has told the place where ranks meet."""
        place = self.meeting_place()
        return frozenset() if place is None else place.lost()

    @property
    def keys(self) -> ClientKeys | Path | str | None:
        """The clients' half of the keys to the servers."""
        return self._started.keys if self._started is not None else self._strategy.key_file

    def connect(self, kind: str, *, by_messages: bool = False, timeout: float = 10.0) -> list[Stores]:
        """The servers of a kind, in index order, connected on first use and until :meth:`disconnect`.

        Args:
            kind: Kind of the servers, as their :class:`ServerSpec` has it.
            by_messages: Ask them even where their files are this machine's.
            timeout: Seconds without any answer after which they are asked again.
        """
        strategy = self._strategy
        if kind not in strategy.endpoints:
            has = sorted(strategy.endpoints)
            raise KeyError(f"{type(strategy).__name__} has no servers of kind {kind!r}; it has {has}.")
        if kind not in self.connected:
            from lightning_recsys.parameter_server.connect import connect
            from lightning_recsys.parameter_server.remote import RemoteStores

            self._borrow()
            transport: Transport = "auto" if strategy.maps_stores and not by_messages else "tcp"
            options: Any = {"keys": self.keys, "timeout": timeout, "cancelled": self.is_asked_to_end}
            options["compression"] = strategy.compression
            self.connected[kind] = [
                connect(endpoint, transport=transport, **options) for endpoint in strategy.endpoints[kind]
            ]
            if strategy.is_global_zero:
                for endpoint, stores in zip(strategy.endpoints[kind], self.connected[kind], strict=True):
                    log.info("Server for %s at %s: by %s.", kind, endpoint, stores.route)
                    if strategy.compression != "none" and not isinstance(stores, RemoteStores):
                        log.info("Nothing is sent there, so compression=%s has no effect.", strategy.compression)
        return self.connected[kind]

    def _borrow(self) -> None:
        """Take the lease on servers that outlive the run: rank 0, which is the first to change anything there.

        Where rank 0 may die the others hold it as well, behind rank 0, in the name of the same run.
        """
        strategy = self._strategy
        if strategy.servers is None or self._lease is not None:
            return
        if not (strategy.is_global_zero or self.first_may_die):
            return
        from lightning_recsys.parameter_server.access.lease import RunLease
        from lightning_recsys.parameter_server.connect import client_keys
        from lightning_recsys.strategies.common.run.identity import run_id, run_in_words

        environment = strategy.cluster_environment
        job = environment.job if isinstance(environment, EngineEnvironment) else None
        self._lease = RunLease(
            strategy.servers,
            keys=client_keys(strategy.key_file),
            run=strategy.run_name or run_id(launched_by_others=not strategy.launches, job=job),
            holder=run_in_words(),
            cancelled=self.is_asked_to_end,
        )
        self.checks.append(self._lease.check)

    def is_asked_to_end(self) -> bool:
        """Whether this process got a SIGTERM: it does not wait for a server that is gone, then."""
        module, changes = self._strategy.lightning_module, self._strategy.changes
        if changes is not None and changes.asked_to_end:
            return True
        return module is not None and module._trainer is not None and module._trainer.received_sigterm

    def disconnect(self) -> None:
        """Close all connections, whatever one has to say; where the run has failed its own error says it."""
        quiet = () if self._strategy.succeeded else (ServerUnreachableError, RequestRefusedError)
        with ExitStack() as closing:
            for stores in self.connected.values():
                for opened in stores:
                    closing.enter_context(suppress(*quiet))
                    closing.callback(opened.close)
            self.connected = {}

    def leave(self, meet: Callable[[str], None]) -> None:
        """End the servers of this node, and give borrowed ones back, once no rank needs them any more.

        Args:
            meet: The barrier of all ranks; not called after a failed run.
        """
        if not self._strategy.is_global_zero:
            self._close_lease()  # before the first one gives the servers back: a sign of life would take them again
        if self._strategy.succeeded and (self._started is not None or self._borrows):
            meet("servers are needed by nobody")
            self._end_run()
        self._borrows = False
        self.checks.clear()
        if self._started is not None:
            self._started.stop()
            self._started, self._strategy.endpoints = None, {}
        self._close_lease()

    def _end_run(self) -> None:
        """Tell those that come too late that the run is over, where nobody else ends them: the first worker does."""
        strategy = self._strategy
        if strategy.launches or not strategy.is_global_zero or (place := self.meeting_place()) is None:
            return
        from lightning_recsys.strategies.common.workers.joining import forget_state

        place.end_run()
        forget_state(strategy)

    def _close_lease(self) -> None:
        """Renew the lease no more; the first worker gives the servers back, unless others may go on without it."""
        strategy = self._strategy
        if self._lease is not None:
            goes_on = not strategy.succeeded and not strategy.launches and self.first_may_die
            self._lease.close(gives_back=strategy.is_global_zero and not goes_on)
            self._lease = None


def check_servers(
    servers: Sequence[str] | None, key_file: str | os.PathLike[str] | None, metrics_port: int | None
) -> tuple[str, ...] | None:
    """The endpoint of each server, ranges written out.

    Before workers start: each of them would say what is wrong with one endpoint at a time.
    """
    if metrics_port is not None:
        hint = "9100 is a usual choice; further servers have those above."
        require_whole("server_metrics_port", metrics_port, hint=hint)
        if servers is not None:
            raise ValueError(
                f"strategy.server_metrics_port={metrics_port} is for servers that are started here, and"
                " strategy.servers are not: start them with --metrics-port."
            )
    if servers is None and key_file is not None:
        raise ValueError(
            f"strategy.key_file={key_file} is for strategy.servers, of which there are none. Servers that are started"
            " here get keys of their own: leave it out, or name the servers that it belongs to."
        )
    if servers is None:
        return None
    from lightning_recsys.parameter_server.endpoints import all_endpoints, is_endpoint

    endpoints = () if isinstance(servers, str) else tuple(all_endpoints(servers))
    if not endpoints or not all(map(is_endpoint, endpoints)):
        raise ValueError(
            "strategy.servers must be a list of endpoints such as [tcp://10.0.0.7:5790], or ranges of ports such as"
            f" [tcp://10.0.0.7:5790-5797], got {servers!r}. Leave it out to have servers started."
        )
    return endpoints
