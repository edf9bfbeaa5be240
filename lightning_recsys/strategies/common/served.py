"""What the strategies have in common that keep embedding rows on servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.trainer.states import TrainerFn

from lightning_recsys.embeddings import EmbeddingBagCollection, TableBackend
from lightning_recsys.launchers import ServerSpec
from lightning_recsys.optim import RowOptimizer, RowWiseAdagrad
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.placement import PlacementMethod, PlacementPlan
from lightning_recsys.renamed import renamed_arguments
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.strategies.common.base import RecsysStrategy
from lightning_recsys.strategies.common.embedding_servers import ServedTables, plan_placement, rooms_of
from lightning_recsys.strategies.common.samples import sample_features
from lightning_recsys.strategies.common.settings import require_kind, require_one_of, require_paths, require_whole
from lightning_recsys.sync import StalenessNormalization

EMBEDDING = "embedding"  # the kind of the servers that have the rows

ROW_STATE = "rows_of_plain_modules"  # in a checkpoint: the state of their optimizer, by path

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class ServedStrategy(RecsysStrategy):
    """A strategy whose tables lie on servers of the kind ``embedding`` while it trains.

    The rows of an :class:`~lightning_recsys.embeddings.EmbeddingBagCollection` always do; without such servers (no
    :class:`ServerSpec` of that kind) the model keeps them.

    Args:
        table_placement: How tables are spread over the servers: ``round_robin``, by ``size``, or ``profiled``, by
            the time that lookups and updates of a few training batches take.
        min_rows: Plain ``nn.Embedding`` and ``nn.EmbeddingBag`` of at least so many rows are served, too. Default:
            none.
        embeddings: Plain embedding modules to take whatever their size, by their paths in the model.
        row_optimizer: The update rule of rows of plain modules; default: rowwise Adagrad.
        dynamic_rows: For collections made with ``device="meta"``: make their rows when they are first trained, so that
            tables may have any number of ids. Default: all rows are there from the start.
        num_embedding_servers: Number of servers for embedding rows, over which tables are spread.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.common.base.RecsysStrategy`.

    Attributes:
        normalization: What stale gradients of rows count; ``None``, unless a subclass says so: rows have no versions.
        plan: Which server has what, once training has begun.

    Raises:
        ValueError: an argument is out of range; as training starts, ``dynamic_rows`` that no collection has use for.
        TypeError: an argument is of another type.
    """

    normalization: StalenessNormalization | None = None

    @renamed_arguments(placement="table_placement")
    def __init__(
        self,
        *,
        table_placement: PlacementMethod = "profiled",
        min_rows: int | None = None,
        embeddings: Sequence[str] = (),
        row_optimizer: RowOptimizer | None = None,
        dynamic_rows: DynamicRows | None = None,
        num_embedding_servers: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_one_of("table_placement", table_placement, get_args(PlacementMethod))
        require_whole("min_rows", min_rows, optional=True)
        require_whole("num_embedding_servers", num_embedding_servers)
        require_paths("embeddings", embeddings)
        example = "a row optimizer, such as lightning_recsys.optim.RowAdagrad(lr=0.05)"
        require_kind("row_optimizer", row_optimizer, RowOptimizer, example, optional=True)
        require_kind("dynamic_rows", dynamic_rows, DynamicRows, "a DynamicRows(...)", optional=True)
        self.table_placement: PlacementMethod = table_placement
        self.min_rows = min_rows
        self.embeddings = tuple(embeddings)
        self.row_optimizer = row_optimizer or RowWiseAdagrad()
        self.dynamic_rows = dynamic_rows
        self.num_embedding_servers = num_embedding_servers
        self.plan: PlacementPlan | None = None

    def _reset(self) -> None:
        super()._reset()
        self.tables: ServedTables | None = None
        self._trains = False  # from on_train_start to finish_training
        self._row_state: Mapping[str, Mapping[str, Any]] | None = None  # of a checkpoint, until its rows are bound

    def server_specs(self) -> list[ServerSpec]:
        """Servers for rows."""
        return [ServerSpec(EMBEDDING, index) for index in range(self.num_embedding_servers)]

    @property
    def gradient_scale(self) -> float:
        """How much of a worker's row gradients is applied; all of it, where workers make updates of their own."""
        return 1.0

    def make_backend(
        self,
        name: str,
        collection: EmbeddingBagCollection,
        *,
        servers: Sequence[Stores],
        plan: PlacementPlan,
        seed: int,
    ) -> StoreBackend:
        """What a collection looks its rows up in."""
        return StoreBackend.create(
            name,
            collection.layout,
            collection.optimizer,
            servers=servers,
            plan=plan,
            seed=seed,
            dynamic=self.dynamic_rows_of(collection),
            normalization=self.normalization,
        )

    def dynamic_rows_of(self, collection: EmbeddingBagCollection) -> DynamicRows | None:
        """How a collection's rows come to be on the servers; ``None`` where it brings them."""
        own = collection.embedding_bags
        return self.dynamic_rows if isinstance(own, TableBackend) and own.is_meta else None

    def binds_rows(self) -> bool:
        """Where the model is trained, or has tables without rows of its own, which only servers can evaluate."""
        backends = [x for x in self.task.modules() if isinstance(x, TableBackend)]
        return super().binds_rows() or (bool(self.server_specs()) and any(backend.is_meta for backend in backends))

    def bind_backends(self) -> None:
        """Bring the rows to the embedding servers; the first rank does, the others find them there."""
        fits = self.task.trainer.state.fn == TrainerFn.FITTING
        if not self.binds_rows() or EMBEDDING not in self.endpoints:
            return  # every rank has all rows
        if not fits and not self._checkpoints.rows_wait:
            return  # nor has the checkpoint any, if there is one: the first lookup says that there are none
        self.tables = tables = ServedTables(
            self.task, optimizer=self.row_optimizer, min_rows=self.min_rows, names=self.embeddings
        )
        self._refuse_needless_dynamic_rows(tables)
        if not tables.collections:
            return
        servers = self.stores(EMBEDDING)
        if self.is_global_zero:
            samples = partial(sample_features, self.task.trainer)
            method = self.table_placement if fits else "size"
            tables.clear(servers)
            self.plan = plan_placement(
                tables.collections,
                len(servers),
                method=method,
                samples=samples,
                rooms=rooms_of(servers),
                growing=[name for name, collection in tables.collections.items() if self.dynamic_rows_of(collection)],
                normalization=self.normalization,
            )
            log.info("Embedding tables on servers:\n%s", self.plan)
            self._bind(tables, servers, self.plan, first=True)
        self.plan = self.broadcast(self.plan)
        assert self.plan is not None
        if not self.is_global_zero:
            self._bind(tables, servers, self.plan, first=False)
        self.barrier("rows are where they belong")
        self._load_row_state()

    def _bind(self, tables: ServedTables, servers: Sequence[Stores], plan: PlacementPlan, *, first: bool) -> None:
        """Look rows up on the servers from now on; the first rank brings them there, which were cleared of them."""
        seed = torch.initial_seed() % 2**31
        for name, collection in tables.collections.items():
            backend = self.make_backend(name, collection, servers=servers, plan=plan, seed=seed)
            collection.bind(backend, copy_rows=first, gradient_scale=self.gradient_scale)
            backend.meet = partial(self.barrier, "rows are replaced")

    def _refuse_needless_dynamic_rows(self, tables: ServedTables) -> None:
        if self.dynamic_rows is not None and not any(map(self.dynamic_rows_of, tables.collections.values())):
            raise ValueError(
                'strategy.dynamic_rows makes the rows of collections that have none (device="meta"), and each one of'
                f' the model has its own: {sorted(tables.collections)}. Make them with device="meta"'
                " (+embeddings.device=meta in the recipes), or leave strategy.dynamic_rows out."
            )

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Let the rows of plain modules follow the steps and schedules of their optimizer, and all rows its toggling.

        It warns of a learning rate or weight decay that a parameter group has for such rows, which nobody takes.
        """
        super().setup_optimizers(trainer)
        if self.tables is not None and self.optimizers:
            if self.is_global_zero:
                for sentence in self.tables.ignored_groups(self.optimizers):
                    log.warning(sentence)
            self.tables.substitution.attach_to(self.optimizers)
            if self.changes is not None:
                self.changes.follow_toggling(tuple(self.tables.collections.values()))

    # --- One model for all that read it ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every update of every worker is on the servers; all ranks call this.

        It happens before validation, before a checkpoint is made and when training ends. A subclass whose workers
        differ in more than rows brings the model of the moment to all of them here.
        """
        if self.tables is not None:
            self.tables.flush()
        self.barrier("every update is on the servers")

    def on_train_start(self) -> None:
        """Training begins: from now on what reads the model waits for updates that are under way."""
        super().on_train_start()
        self._trains = True

    def on_validation_start(self) -> None:
        """Let validation see every update, and the same ones on all workers."""
        super().on_validation_start()
        if self._trains and self.succeeded:
            self.settle()

    def on_validation_end(self) -> None:
        """Train on when all have seen what they are to: a worker that runs free would change it under the others."""
        super().on_validation_end()
        if self._trains and self.succeeded:
            self.barrier("everybody has validated")

    def finish_training(self) -> None:
        """Let the trained model have every update."""
        if self._trains and self.succeeded:
            self._trains = False
            self.settle()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As the base class, while training with every update of every rank; all ranks call this."""
        if self._trains and self.succeeded:
            self.settle()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save, with the state of the optimizer of plain modules' rows unless it is to be weights only."""
        if self.tables is not None and self.succeeded and self.is_global_zero and "optimizer_states" in checkpoint:
            checkpoint[ROW_STATE] = self.tables.substitution.row_state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, and the state of the optimizer of plain modules' rows once they are on the servers."""
        super().load_model_state_dict(checkpoint, strict=strict)
        self._row_state = checkpoint.get(ROW_STATE, {})
        self._load_row_state()

    def _load_row_state(self) -> None:
        if self.tables is None or self._row_state is None:
            return
        afresh = self.tables.substitution.load_row_state(self._row_state, writes=self.is_global_zero)
        self._row_state = None
        if afresh and self.is_global_zero:
            log.warning(
                f"The checkpoint has no state of {type(self.row_optimizer).__name__} for the rows of {afresh}, which"
                " are on servers: it begins afresh. A checkpoint has such a state if it was written while a strategy"
                " with the same row_optimizer served these modules, and is more than weights."
            )

    # --- The end -----------------------------------------------------------------------------------------------------

    def unbind_backends(self) -> None:
        """Give the model its own rows again, the trained ones if the run succeeded."""
        self._trains = False
        if self.tables is not None:
            self.tables.release(copy_rows=self.succeeded)
            self.tables = None

    def telemetry(self) -> dict[str, Any]:
        """Bytes and requests between this process and its servers so far; shared memory counts as none."""
        traffic = {
            f"{kind}-{index}": stores.connection.traffic
            for kind, servers in self.run_servers.connected.items()
            for index, stores in enumerate(servers)
            if isinstance(stores, RemoteStores)
        }
        return {
            "comm/sent_bytes": float(sum(x.sent_bytes for x in traffic.values())),
            "comm/received_bytes": float(sum(x.received_bytes for x in traffic.values())),
            **{f"load/{server}": float(x.requests) for server, x in traffic.items()},
        }
