"""Asynchronous SGD over parameter servers, with staleness counted and normalised where updates are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.versions import StalenessHistogram
from lightning_recsys.strategies.async_ps import row_tags
from lightning_recsys.strategies.async_ps.dense_part import Kept, ServedDensePart, ServedStep, refuse_gradient_scaler
from lightning_recsys.strategies.async_ps.staleness_of_all import StalenessOfAll
from lightning_recsys.strategies.common.direct_steps import DirectSteps
from lightning_recsys.strategies.common.means import meet_buffers
from lightning_recsys.strategies.common.served import EMBEDDING, ServedStrategy
from lightning_recsys.strategies.common.settings import require_kind, require_whole
from lightning_recsys.sync import StalenessNormalization, StalenessRule

CHECKPOINT_KEY = "async_ps"


class AsyncParameterServerStrategy(ServedStrategy):
    r"""Dense parameters and rows on servers; each worker pulls, computes and pushes gradients, and waits for no other.

    A step looks rows up, computes, pushes the gradients of rows and dense parameters with the versions that they were
    computed at, and pulls the dense parameters as they then are. Each gradient is an update of its own, applied where
    the parameter lies by the LightningModule's own optimizer rule with its present learning rate, and multiplied by
    what its staleness leaves of it.

    Args:
        normalization: What a stale gradient counts: a rule's name, or
            :class:`~lightning_recsys.sync.StalenessNormalization` with its numbers. The default leaves gradients alone
            up to a staleness of 1 000, so that clusters of fewer workers train as plain asynchronous SGD does.
        min_workers: Workers other than the first may die as long as so many are left.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.common.served.ServedStrategy`; dense
            parameters are spread over ``num_embedding_servers`` as well.

    Raises:
        ValueError: an argument is out of range.
        TypeError: as training starts, an optimizer with a rule that stores do not have.

    Communication: per step, the batch's ids to the servers and its rows with their versions back; gradients of rows and
    of all dense parameters to the servers, and all dense parameters back. Nobody waits for another worker. In shared
    memory nothing is sent.
    Reference: Liu & Zhao 2021, "Asynchronous stochastic gradient descent for extreme-scale recommender systems".
    Differs from the paper: the dense part is pulled at the end of a step and not at the start of the next, so that
    callbacks see it as it is.

    >>> from pytorch_lightning import Trainer
    >>> strategy = AsyncParameterServerStrategy(normalization="linear")
    >>> Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False).world_size
    2
    """

    strategy_name = "async_ps"
    asynchronous = True
    wraps_model = False
    normalization: StalenessNormalization

    def __init__(
        self,
        *,
        normalization: StalenessNormalization | StalenessRule = "relative",
        min_workers: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        kinds = (str, StalenessNormalization)
        require_kind("normalization", normalization, kinds, "a rule's name or a StalenessNormalization(...)")
        self.normalization = StalenessNormalization(normalization) if isinstance(normalization, str) else normalization
        require_whole("min_workers", min_workers)
        self.min_workers = min_workers
        self._saved: list[Kept] = []  # rank 0's, for the checkpoint that is made next; it outlives the run

    def _reset(self) -> None:
        super()._reset()
        self._dense: ServedDensePart | None = None  # while training
        self._direct_steps: DirectSteps | None = None  # the same
        self._loads: Any = None  # the hook that follows what is loaded meanwhile
        self._restored: Sequence[Kept] = ()  # of the checkpoint that the run goes on from
        self._restored_rows: list[row_tags.Share] = []  # the same of rows: this worker's part
        self._staleness = StalenessOfAll()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_saved": []}

    # --- Training ----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Bring the dense part to the servers.

        Raises:
            ValueError: a setting of the trainer, or a callback, does not go with workers that run free, or a parameter
                is in two optimizers.
            TypeError: stores have no rule such as an optimizer's.
        """
        super().on_train_start()
        refuse_gradient_scaler(self.precision_plugin)
        self._saved = []
        servers = self.stores(EMBEDDING)
        self._dense = ServedDensePart(
            self.optimizers,
            len(servers),
            num_workers=self.world_size,
            names={parameter: name for name, parameter in self.task.named_parameters()},
        )
        if self.is_global_zero:
            self._dense.create(servers, self.normalization, self._restored)
        if self.tables is not None:
            row_tags.write_shares(self.tables.collections, self.normalization, self._restored_rows)
        self._restored_rows = []
        self.barrier("the dense part is there")
        if not self.is_global_zero:
            self._dense.open(servers)
        self._dense.pull()
        self._direct_steps = DirectSteps(
            self.optimizers, consequence="under strategy=async_ps trains a copy alone: the parameters are on servers"
        )
        self._follow_loads()

    def _follow_loads(self) -> None:
        """Bring what is loaded into the model in the middle of the run to the servers, which have its dense part."""

        def bring(loaded: nn.Module, _: object) -> None:  # a function, so that a copied module has no copied strategy
            if self._dense is not None and loaded is self.task:
                self._dense.flush()
                self.barrier("everybody has loaded the model")
                if self.is_global_zero:
                    self._dense.assign()
                self.barrier("the dense part is loaded")

        self._loads = self.task.register_load_state_dict_post_hook(bring)  # type: ignore[no-untyped-call]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Push the gradients, and pull what the servers have."""
        assert self._dense is not None
        assert self._direct_steps is not None
        served = cast(Optimizer, ServedStep(optimizer, self._dense))
        with self._direct_steps.ours():
            return super().optimizer_step(served, closure, *args, **kwargs)

    def settle(self) -> None:
        """Wait until every update of every rank is on the servers, and take the dense part that they have."""
        assert self._dense is not None  # from on_train_start on
        self._dense.flush()
        super().settle()
        self._dense.pull()
        if self.is_global_zero:
            self._saved = self._dense.kept()
        meet_buffers(self.task)
        self._staleness.meet(self._observed(), device=self.root_device)
        if self.averages is not None:
            self.averages.meet()

    def finish_training(self) -> None:
        """Let the trained model have every update, and rank 0's optimizers the state that the servers have.

        Under a launcher that is not ours the process lives on, and may save a checkpoint when the servers are gone.
        """
        super().finish_training()
        if self._dense is not None and self.is_global_zero:
            for optimizer in self.optimizers:
                self._dense.pull_state(optimizer)

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, from the servers."""
        if self._dense is not None and self.is_global_zero:
            self._dense.pull_state(optimizer)
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save, with versions and last changes of dense parameters and of rows unless it is to be weights only."""
        if self._saved and "optimizer_states" in checkpoint:
            versions, changes = (list(x) for x in zip(*self._saved, strict=True))
            checkpoint[CHECKPOINT_KEY] = {"versions": versions, "changes": changes}
        if "optimizer_states" in checkpoint and self.is_global_zero and self.succeeded and not self.saves_folders:
            checkpoint |= self._row_tags(rank=0, num_ranks=1)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def checkpoint_extras(self) -> dict[str, Any] | None:
        """Versions and last changes of this rank's share of the rows."""
        return self._row_tags(rank=self.living_rank, num_ranks=self.num_living) or None

    def _row_tags(self, *, rank: int, num_ranks: int) -> dict[str, Any]:
        """The entry of a checkpoint with a share of all rows; none outside of training, or without rows."""
        if self.tables is None or self._dense is None:
            return {}
        ranks = {"rank": rank, "num_ranks": num_ranks}
        return {row_tags.KEY: row_tags.read_share(self.tables.collections, self.normalization, **ranks)}

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, and keep what this rank is to bring to the servers for the start of training."""
        ranks = {"rank": self.global_rank, "num_ranks": self.world_size}
        options: Any = {**ranks, "weights_only": weights_only is not False}
        if self.task.trainer.state.fn == TrainerFn.FITTING:
            self._restored_rows = row_tags.load_shares(checkpoint_path, **options)
        loaded = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if row_tags.KEY in loaded and self.is_global_zero:  # a single file
            self._restored_rows = [loaded[row_tags.KEY]]
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, and keep the versions for the start of training."""
        kept = checkpoint.get(CHECKPOINT_KEY, {})
        versions = kept.get("versions", ())
        self._restored = [Kept(*x) for x in zip(versions, kept.get("changes", [0.0] * len(versions)), strict=True)]
        super().load_model_state_dict(checkpoint, strict=strict)

    # --- Telemetry and the end ---------------------------------------------------------------------------------------

    def telemetry(self) -> dict[str, Any]:
        """Staleness of all workers' pushes and traffic of this process; see ``docs/async_ps.md`` for each name."""
        values: dict[str, Any] = super().telemetry()
        for name, own in self._observed().items():
            if len(seen := self._staleness.of_all(name, own)):
                values |= {name: seen} | {f"{name}/share_{bin_}": share for bin_, share in shares(seen).items()}
        return values

    def _observed(self) -> dict[str, StalenessHistogram]:
        """The staleness of this worker's pushes, by what it is called."""
        dense = StalenessHistogram() if self._dense is None else self._dense.observed
        rows = StalenessHistogram()
        for collection in () if self.tables is None else self.tables.collections.values():
            if isinstance(collection.embedding_bags, StoreBackend):
                rows.update(collection.embedding_bags.observed)
        return {"staleness": dense, "staleness/rows": rows}

    def teardown(self) -> None:
        """Follow loads and steps no more; then all that the base class does."""
        for watched in (self._loads, self._direct_steps):
            if watched is not None:
                watched.remove()
        super().teardown()


_BINS = (("1", 1), ("2_to_9", 9), ("10_to_99", 99), ("100_to_999", 999), ("from_1000", None))


def shares(seen: StalenessHistogram) -> dict[str, float]:
    """What part of all observations lies in each of five bins.

    >>> import torch
    >>> seen = StalenessHistogram()
    >>> seen.add(torch.tensor([[1, 6], [12, 3], [2000, 1]]))
    >>> shares(seen)
    {'1': 0.6, '2_to_9': 0.0, '10_to_99': 0.3, '100_to_999': 0.0, 'from_1000': 0.1}
    """
    found, lowest = {}, 1
    for name, highest in _BINS:
        inside = (n for x, n in seen.counts.items() if x >= lowest and (highest is None or x <= highest))
        found[name] = sum(inside) / max(len(seen), 1)
        lowest = (highest or 0) + 1
    return found
