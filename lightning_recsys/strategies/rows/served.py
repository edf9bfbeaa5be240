"""Rows on embedding servers, which every worker reads and trains there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import _auto_add_worker_init_fn
from pytorch_lightning.trainer.states import TrainerFn

from lightning_recsys.embeddings import EmbeddingBagCollection, TableBackend
from lightning_recsys.launchers import ServerSpec
from lightning_recsys.optim import RowOptimizer
from lightning_recsys.placement import PlacementMethod, PlacementPlan
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.interfaces import Stores
from lightning_recsys.stores.plain import optimizer_to_plain
from lightning_recsys.strategies.common.look_ahead import LookAhead, peekable
from lightning_recsys.strategies.common.samples import sample_features
from lightning_recsys.strategies.common.settings import require_kind, require_one_of, require_paths, require_whole
from lightning_recsys.strategies.common.workers.living import made_by_the_first
from lightning_recsys.strategies.parts import Rows
from lightning_recsys.strategies.rows.tables import ServedTables, plan_placement, rooms_of
from lightning_recsys.sync import StalenessNormalization

EMBEDDING = "embedding"  # the kind of the servers that have the rows

EARLY = "comm/early_lookups"

ROW_STATE = "rows_of_plain_modules"  # in a checkpoint: the state of their optimizer, by path

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class ServedRows(Rows):
    """The rows of a model's tables lie on servers of the kind ``embedding`` while it trains.

    The rows of an :class:`~lightning_recsys.embeddings.EmbeddingBagCollection` always do; those of plain modules do
    where they are chosen.

    Args:
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
        prefetch: Ask for the next batch's rows while the present one is trained, and its gradients go out: both
            directions of a link are then in use at once. They lack this worker's own last update, one step of staleness
            more. Rows in shared memory do not travel, and are read as ever.

    Attributes:
        normalization: What stale gradients of rows count; ``None`` where rows have no versions.
        plan: Which server has what, once training has begun.
        tables: The tables on servers, from :meth:`start` to :meth:`stop`; ``None`` where there are none.

    Raises:
        ValueError: an argument is out of range; as training starts, ``dynamic_rows`` that no collection has use for.
        TypeError: an argument is of another type.
    """

    normalization: StalenessNormalization | None = None

    def __init__(
        self,
        *,
        table_placement: PlacementMethod = "profiled",
        min_rows: int | None = None,
        embeddings: Sequence[str] = (),
        row_optimizer: RowOptimizer | None = None,
        dynamic_rows: DynamicRows | None = None,
        num_embedding_servers: int = 1,
        prefetch: bool = False,
    ) -> None:
        super().__init__()
        require_kind("prefetch", prefetch, bool, "true or false")
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
        self.row_optimizer = row_optimizer
        self.dynamic_rows = dynamic_rows
        self.num_embedding_servers = num_embedding_servers
        self.prefetch = prefetch
        self.plan: PlacementPlan | None = None

    def _reset(self) -> None:
        super()._reset()
        self.tables: ServedTables | None = None
        self._row_state: Mapping[str, Mapping[str, Any]] | None = None  # of a checkpoint, until its rows are bound
        self._ahead: LookAhead | None = None  # while it trains and looks at coming batches
        self._agreed: PlacementPlan | None = None  # of a run that this process joins

    def servers(self) -> list[ServerSpec]:  # noqa: D102 - inherited
        return [ServerSpec(EMBEDDING, index) for index in range(self.num_embedding_servers)]

    @property
    def collections(self) -> Mapping[str, EmbeddingBagCollection]:
        """The collections whose rows are on servers now, by name."""
        return {} if self.tables is None else self.tables.collections

    # --- What another kind of served rows may say --------------------------------------------------------------------

    def make_backend(
        self,
        name: str,
        collection: EmbeddingBagCollection,
        *,
        servers: Sequence[Stores],
        plan: PlacementPlan,
        seed: int,
    ) -> StoreBackend:
        """The backend in which a collection looks its rows up; rank 0 calls this first, then all others."""
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

    def check_rule(self, rule: RowOptimizer) -> None:
        """Refuse a rule by which rows cannot be trained here.

        Raises:
            TypeError: names the rule, and those that can be used.
        """
        optimizer_to_plain(rule)

    def dynamic_rows_of(self, collection: EmbeddingBagCollection) -> DynamicRows | None:
        """The way in which a collection's rows are made on the servers; ``None`` where it brings them."""
        own = collection.embedding_bags
        return self.dynamic_rows if isinstance(own, TableBackend) and own.is_meta else None

    # --- To the servers ----------------------------------------------------------------------------------------------

    def binds(self) -> bool:
        """Whether the model is trained, or has tables without rows of its own, which only servers can evaluate."""
        task = self.strategy.task
        backends = [x for x in task.modules() if isinstance(x, TableBackend)]
        fits = task.trainer.state.fn == TrainerFn.FITTING
        return fits or any(backend.is_meta for backend in backends)

    def start(self) -> None:
        """Bring the rows to the embedding servers; the first rank does, the others find them there."""
        fits = self.strategy.task.trainer.state.fn == TrainerFn.FITTING
        if not self.binds() or EMBEDDING not in self.strategy.endpoints:
            return  # every rank has all rows
        if not fits and not self.strategy.checkpoints.rows_wait:
            return  # nor has the checkpoint any, if there is one: the first lookup says that there are none
        chosen: Any = {"min_rows": self.min_rows, "names": self.embeddings} if fits else {}
        # Who only evaluates has the rows of plain modules.
        self.tables = tables = ServedTables(self.strategy.task, **chosen)
        self._refuse_needless_dynamic_rows(tables)
        if fits and self.strategy.is_global_zero and not tables.collections and not tables.substitution.collections:
            log.warning(
                "the model has no embedding tables, so servers keep no rows. strategy=single or strategy=ddp trains it "
                "with less."
            )
        self.plan = None
        self._bring(tables.collections)

    def _bring(self, collections: Mapping[str, EmbeddingBagCollection]) -> None:
        """Have servers look the rows of some of the tables up; all ranks call this, with the same ones."""
        assert self.tables is not None
        if not collections:
            return
        strategy = self.strategy
        servers, before = strategy.stores(EMBEDDING), self.plan
        plan, brought = made_by_the_first(strategy, lambda: self._place(collections, servers, beside=before))
        self.plan = self._agreed if plan is None else plan
        assert self.plan is not None
        if not brought:
            self._bind(collections, servers, self.plan, first=False)
        strategy.barrier("rows are where they belong")

    def _place(
        self,
        collections: Mapping[str, EmbeddingBagCollection],
        servers: Sequence[Stores],
        *,
        beside: PlacementPlan | None,
    ) -> PlacementPlan:
        """Bring rows to the servers, beside others that are there, in the place of what an earlier run has left."""
        assert self.tables is not None
        trainer = self.strategy.task.trainer
        fits = trainer.state.fn == TrainerFn.FITTING
        self.tables.clear(servers, collections)
        plan = plan_placement(
            collections,
            len(servers),
            beside=beside,
            method=self.table_placement if fits else "size",
            samples=partial(sample_features, trainer),
            rooms=rooms_of(servers),
            growing=[name for name, collection in collections.items() if self.dynamic_rows_of(collection)],
            normalization=self.normalization,
        )
        log.info("Embedding tables on servers:\n%s", plan)
        self._bind(collections, servers, plan, first=True)
        return plan

    def _bind(
        self,
        collections: Mapping[str, EmbeddingBagCollection],
        servers: Sequence[Stores],
        plan: PlacementPlan,
        *,
        first: bool,
    ) -> None:
        """Look rows up on the servers from now on; the first rank brings them there, which were cleared of them."""
        seed = torch.initial_seed() % 2**31
        for name, collection in collections.items():
            backend = self.make_backend(name, collection, servers=servers, plan=plan, seed=seed)
            collection.bind(backend, copy_rows=first, gradient_scale=self.strategy.gradient_scale)
            backend.meet = partial(self.strategy.barrier, "rows are replaced")

    def _refuse_needless_dynamic_rows(self, tables: ServedTables) -> None:
        own = tables.collections
        if self.dynamic_rows is not None and not any(map(self.dynamic_rows_of, own.values())):
            raise ValueError(
                'strategy.dynamic_rows makes the rows of collections that have none (device="meta"), and each one of'
                f' the model has its own: {sorted(own | tables.substitution.collections)}. Make them with device="meta"'
                " (+embeddings.device=meta in the recipes), or leave strategy.dynamic_rows out."
            )

    def start_plain(self, setup_optimizers: Callable[[], None]) -> None:
        """Bring the rows of plain modules to the servers, by the rules of their optimizers, whose steps they follow.

        All rows follow the toggling of optimizers.

        Raises:
            TypeError: rows have no rule such as the optimizer of a plain module, and ``row_optimizer`` is not given.
            ValueError: a plain module is not in one optimizer, or in one that was made before the run, and
                ``row_optimizer`` is not given; or its weight was replaced.
        """
        if self.tables is None:
            setup_optimizers()
            return
        with self.tables.substitution.shown_as_parameters():
            setup_optimizers()
        strategy = self.strategy
        if plain := self.tables.substitution.collections:
            self.tables.choose_rules(strategy.optimizers, given=self.row_optimizer, check=self.check_rule)
            self._bring(plain)
            self._load_row_state()
            if strategy.is_global_zero:
                unmoved = "Rows that no batch touches neither move nor decay."
                log.info("Rows of plain embedding modules, on servers: %s. %s", self.tables.rules(), unmoved)
                for sentence in self.tables.ignored_groups(strategy.optimizers):
                    log.warning(sentence)
        if strategy.optimizers:
            self.tables.attach_to(strategy.optimizers)
            if strategy.changes is not None:
                strategy.changes.follow_toggling(tuple(self.tables.collections.values()))

    # --- While it trains ---------------------------------------------------------------------------------------------

    @property
    def peeks(self) -> bool:
        """Whether it looks at batches to come."""
        return self.prefetch

    def agreed(self) -> dict[str, Any]:
        """Which server has what."""
        return {"plan": self.plan}

    def agree(self, agreed: Mapping[str, Any]) -> None:
        """Find everything where the others have it."""
        self._agreed = agreed["plan"]

    def look_at(self, loader: object) -> object:
        """Make the training loader one whose coming batches can be seen."""
        if not (self.peeks and self.strategy.task.trainer.training):
            return loader
        _auto_add_worker_init_fn(loader, self.strategy.global_rank)  # which Lightning does to what this returns
        return peekable(loader)

    def begin(self) -> None:
        """Begin to look ahead."""
        if self.peeks and self.tables is not None:
            pairs = [(x, x.embedding_bags) for x in self.tables.collections.values()]
            far = [x for x, backend in pairs if isinstance(backend, StoreBackend) and backend.asks_servers]
            self._ahead = self.look_ahead(self.strategy.task.trainer, far)

    def look_ahead(self, trainer: pl.Trainer, collections: Sequence[EmbeddingBagCollection]) -> LookAhead:
        """The object that tells collections of their coming batches."""
        return LookAhead(trainer, collections)

    def settle(self) -> None:
        """Return when every update of this worker's is on the servers."""
        if self.tables is not None:
            self.tables.flush()

    def state(self) -> dict[str, Any]:
        """The state of the optimizers of plain modules' rows."""
        return {} if self.tables is None else {ROW_STATE: self.tables.substitution.row_state()}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the optimizer of plain modules' rows once they are on the servers."""
        self._row_state = checkpoint.get(ROW_STATE, {})
        self._load_row_state()

    def _load_row_state(self) -> None:
        if self.tables is None or self._row_state is None:
            return
        first = self.strategy.is_global_zero
        afresh = self.tables.substitution.load_row_state(self._row_state, writes=first)
        self._row_state = None
        if afresh and first:
            log.warning(
                f"The checkpoint has no state of the rows' optimizer for {afresh}, which are on servers:"
                f" it begins afresh ({self.tables.rules()}). A checkpoint has such a state if it was written while a"
                " strategy served these modules by the same rules, and is more than weights."
            )

    def telemetry(self) -> dict[str, Any]:
        """The lookups of this process so far whose rows had been asked for one batch early."""
        if not self.prefetch:
            return {}
        backends = [x.embedding_bags for x in self.collections.values()]
        return {EARLY: float(sum(x.num_early_lookups for x in backends if isinstance(x, StoreBackend)))}

    def stop(self) -> None:
        """Give the model its own rows again, the trained ones if the run succeeded; look ahead no more."""
        if self._ahead is not None:
            self._ahead.close()
        if self.tables is not None:
            self.tables.release(copy_rows=self.strategy.succeeded)
        super().stop()
