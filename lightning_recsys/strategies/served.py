"""The base class of strategies that keep embedding rows on servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import pytorch_lightning as pl
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.trainer.states import TrainerFn

from lightning_recsys.launchers import ServerSpec
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.placement import PlacementMethod, PlacementPlan
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.strategies.common.base import RecsysStrategy
from lightning_recsys.strategies.common.settings import refuse_meaningless, require_one_of
from lightning_recsys.strategies.parts import Free, Pace
from lightning_recsys.strategies.rows.served import ServedRows
from lightning_recsys.strategies.rows.tables import ServedTables

RowsName = Literal["plain", "cached"]


class ServedStrategy(RecsysStrategy):
    """A strategy whose tables lie on servers of the kind ``embedding`` while it trains.

    Args:
        rows: How workers read and train the rows: ``plain``, at the servers at each step; ``cached``, mostly in copies
            of their own (:class:`~lightning_recsys.strategies.CachedRows` with its defaults); or an object of such a
            class, which has the following seven arguments itself. Default: as the strategy's paper has them.
        table_placement: How tables are spread over the servers: ``round_robin``, by ``size``, or ``profiled``, by
            the time that lookups and updates of a few training batches take.
        min_rows: Plain ``nn.Embedding`` and ``nn.EmbeddingBag`` of at least so many rows are served, too. Default:
            none.
        embeddings: Plain embedding modules to take whatever their size, by their paths in the model.
        row_optimizer: The update rule of rows of plain modules. Default: that of the optimizer that
            ``configure_optimizers`` gives them to, SGD, Adagrad or Adam, at the learning rate of its parameter group.
        dynamic_rows: For collections made with ``device="meta"``: make their rows when they are first trained, so that
            tables may have any number of ids. Default: all rows are there from the start.
        num_embedding_servers: Number of servers for embedding rows, over which tables are spread.
        prefetch: Ask servers on other machines for the next batch's rows while the present one is trained, at one step
            of staleness more.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.common.base.RecsysStrategy`.

    Attributes:
        rows: Where the rows live, and what a run keeps about them.
        pace: Whether workers' updates of a row belong together, which says how much each of them counts.

    Raises:
        ValueError: an argument is out of range, or the rows do not go with the strategy; as training starts,
            ``dynamic_rows`` that no collection has use for.
        TypeError: an argument is of another type.
    """

    rows: ServedRows
    pace: Pace = Free()

    def __init__(
        self,
        *,
        rows: ServedRows | RowsName | None = None,
        table_placement: PlacementMethod = "profiled",
        min_rows: int | None = None,
        embeddings: Sequence[str] = (),
        row_optimizer: RowOptimizer | None = None,
        dynamic_rows: DynamicRows | None = None,
        num_embedding_servers: int = 1,
        prefetch: bool = False,
        **kwargs: Any,
    ) -> None:
        given: dict[str, Any] = {
            "table_placement": table_placement,
            "min_rows": min_rows,
            "embeddings": embeddings,
            "row_optimizer": row_optimizer,
            "dynamic_rows": dynamic_rows,
            "num_embedding_servers": num_embedding_servers,
            **({"prefetch": prefetch} if prefetch else {}),  # cached rows have a default of their own
        }
        super().__init__(**kwargs)
        self.rows = self._rows_of(rows, given)
        self.rows.attach(self)

    def _rows_of(self, rows: ServedRows | str | None, given: dict[str, Any]) -> ServedRows:
        if isinstance(rows, ServedRows):
            why = f"where strategy.rows is an object: {type(rows).__name__} has its own"
            refuse_meaningless(ServedStrategy, given, why)
            return rows
        if rows is None:
            return self.own_rows(**given)
        if not isinstance(rows, str):
            raise TypeError(
                f"strategy.rows must be one of {', '.join(get_args(RowsName))}, or rows such as"
                f" CachedRows(staleness=100), got {rows!r}."
            )
        require_one_of("rows", rows, get_args(RowsName))
        if rows == "plain":
            return ServedRows(**given)
        own = {"prefetch": given.pop("prefetch", False)}
        refuse_meaningless(ServedStrategy, own, "with strategy.rows=cached, most of which do not travel")
        return _cached_rows(**given)

    def own_rows(self, **settings: Any) -> ServedRows:
        """The rows of a strategy that is not asked for others: those of the dense part's paper."""
        kind = self.dense.own_rows
        rows: ServedRows = ServedRows(**settings) if kind is None else kind(**settings)
        return rows

    def _reset(self) -> None:
        super()._reset()
        self._trains = False  # from on_train_start to finish_training
        self._has_begun = False  # from on_train_start to teardown

    @property
    def tables(self) -> ServedTables | None:
        """The tables on servers, while there are any."""
        return self.rows.tables

    @property
    def plan(self) -> PlacementPlan | None:
        """Which server has what, once training has begun."""
        return self.rows.plan

    @property
    def num_replicas(self) -> int:
        """Number of copies of the dense part that may differ; rank 0 trains the first one."""
        return self.dense.num_replicas

    @property
    def gradient_scale(self) -> float:  # noqa: D102 - inherited
        return self.pace.row_scale(self.world_size)

    def server_specs(self) -> list[ServerSpec]:
        """Servers for rows, and those of the dense part."""
        return self.rows.servers() + self.dense.servers()

    @property
    def maps_stores(self) -> bool:  # noqa: D102 - inherited
        return super().maps_stores and self.rows.maps_stores

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse what the dense part cannot train, around all that the base class does.

        Raises:
            ValueError: a setting of the trainer, a callback, the model or an optimizer does not go with the dense part.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            self.dense.refuse(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.dense.prepare()

    def binds_rows(self) -> bool:
        """Whether the model is trained, or has tables without rows of its own, which only servers can evaluate."""
        return bool(self.server_specs()) and self.rows.binds()

    def bind_backends(self) -> None:
        """Bring the rows to the embedding servers."""
        self.rows.start()

    def unbind_backends(self) -> None:
        """Give the model its own rows again, the trained ones if the run succeeded."""
        self._trains = False
        self.rows.stop()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers, and bring the rows of plain modules to the servers, by the rules that these say.

        Raises:
            TypeError: rows have no rule such as the optimizer of a plain module, and ``row_optimizer`` is not given.
            ValueError: a plain module is not in one optimizer, and ``row_optimizer`` is not given.
        """
        make = super().setup_optimizers
        self.rows.start_plain(lambda: make(trainer))

    # --- One model for all that read it ------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Training begins: from now on what reads the model waits for updates that are under way."""
        super().on_train_start()
        self._trains = self._has_begun = True

    def settle(self) -> None:
        """Wait until every update of every worker is on the servers; all ranks call this.

        It happens before validation, before a checkpoint is made and when training ends. A subclass whose workers
        differ in more than rows brings the model of the moment to all of them here.
        """
        self.dense.settle(self.rows.settle, goes_on=self._trains)
        self.rows.meet()

    def on_validation_start(self) -> None:
        """Let validation see every update, and the same ones on all workers."""
        super().on_validation_start()
        if self._trains and self.succeeded:
            self.settle()

    def on_validation_end(self) -> None:
        """Train on when all have seen what they are to: a worker that runs free would change it under the others."""
        super().on_validation_end()
        if self._trains and self.succeeded:
            self.dense.resume()

    def finish_training(self) -> None:
        """Let the trained model have every update."""
        if self._trains and self.succeeded:
            self._trains = False
            self.settle()
            self.dense.finish()

    def on_train_end(self) -> None:
        """Have one trained model, as callbacks have left it."""
        self.dense.end()
        super().on_train_end()

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's weights, while training with every update of every rank; all ranks call this."""
        if self._trains and self.succeeded:
            self.settle()
        tensors = super().lightning_module_state_dict()
        # Others' are not to be had where a rank has failed.
        return self.dense.keep(tensors) if self._has_begun and self.succeeded else tensors

    def checkpoint_extras(self) -> dict[str, Any] | None:
        """The state that the parts keep of this rank's share."""
        return {**self.dense.own_state(), **self.rows.own_state()} or None

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, and keep what this rank's share had."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING:
            for part in (self.dense, self.rows):
                part.load_own(checkpoint_path, loaded, weights_only=weights_only is not False)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, and what :meth:`save_checkpoint` added, once rows are on the servers."""
        super().load_model_state_dict(checkpoint, strict=strict)
        self.dense.load(checkpoint)
        self.rows.load(checkpoint)

    # --- Telemetry ---------------------------------------------------------------------------------------------------

    def telemetry(self) -> dict[str, Any]:
        """Traffic of this process, and what its parts tell."""
        return {**self.traffic(), **self.rows.telemetry(), **self.dense.telemetry()}

    def traffic(self) -> dict[str, float]:
        """Bytes and requests of this process so far, to servers and other workers; shared memory counts as none.

        ``comm/waiting_seconds`` is the time that it has waited for answers of servers, in all threads.
        """
        traffic = {
            f"{kind}-{index}": stores.connection.traffic
            for kind, servers in self.run_servers.connected.items()
            for index, stores in enumerate(servers)
            if isinstance(stores, RemoteStores)
        }
        beside = self.dense.exchanged_bytes
        return {
            "comm/sent_bytes": float(beside + sum(x.sent_bytes for x in traffic.values())),
            "comm/received_bytes": float(beside + sum(x.received_bytes for x in traffic.values())),
            "comm/waiting_seconds": sum(x.waiting_seconds for x in traffic.values()),
            **{f"load/{server}": float(x.requests) for server, x in traffic.items()},
        }


def _cached_rows(**settings: Any) -> ServedRows:
    from lightning_recsys.strategies.rows.cached import CachedRows  # caches come with their first use

    return CachedRows(**settings)
