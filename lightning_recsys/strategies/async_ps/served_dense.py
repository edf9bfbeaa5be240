"""The dense part of asynchronous SGD as a part of a strategy: it is on servers, to which workers push gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from lightning_recsys.stores.versions import StalenessHistogram
from lightning_recsys.strategies.async_ps.pushed_parameters import (
    Kept,
    PushedParameters,
    ServedStep,
    refuse_gradient_scaler,
)
from lightning_recsys.strategies.common.direct_steps import DirectSteps
from lightning_recsys.strategies.common.means import meet_buffers
from lightning_recsys.strategies.common.settings import require_kind
from lightning_recsys.strategies.common.workers.living import made_by_the_first
from lightning_recsys.strategies.parts import DensePart
from lightning_recsys.strategies.rows.served import EMBEDDING
from lightning_recsys.strategies.rows.staleness_of_all import StalenessOfAll, shares
from lightning_recsys.strategies.rows.versioned import VersionedRows
from lightning_recsys.sync import StalenessNormalization, StalenessRule

CHECKPOINT_KEY = "async_ps"
STALENESS = "staleness"


class ServedDense(DensePart):
    """Dense parameters lie on the servers of the rows; each worker pushes gradients and pulls what has become of them.

    Args:
        normalization: What a stale gradient counts: a rule's name, or
            :class:`~lightning_recsys.sync.StalenessNormalization` with its numbers.

    Raises:
        ValueError: the rule is unknown.
        TypeError: ``normalization`` is of another type.

    Reference: Liu & Zhao 2021, "Asynchronous stochastic gradient descent for extreme-scale recommender systems".
    """

    asynchronous = True
    wraps_model = False
    takes_replacements = True

    def __init__(self, normalization: StalenessNormalization | StalenessRule = "relative") -> None:
        kinds = (str, StalenessNormalization)
        require_kind("normalization", normalization, kinds, "a rule's name or a StalenessNormalization(...)")
        self.normalization = StalenessNormalization(normalization) if isinstance(normalization, str) else normalization
        # For the checkpoint that is made next; it outlives the run. Rank 0 has it, and all that may take its place.
        self._saved: list[Kept] = []
        super().__init__()

    def _reset(self) -> None:
        super()._reset()
        self._parameters: PushedParameters | None = None  # while training
        self._direct_steps: DirectSteps | None = None  # the same
        self._loads: Any = None  # the hook that follows what is loaded meanwhile
        self._restored: Sequence[Kept] = ()  # of the checkpoint that the run goes on from
        self._staleness = StalenessOfAll()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_saved": []}

    @property
    def own_rows(self) -> Callable[..., VersionedRows]:
        """Rows whose stale gradients count as those of the dense part do."""
        return partial(VersionedRows, normalization=self.normalization)

    def begin(self) -> None:
        """Bring the dense part to the servers.

        Raises:
            ValueError: a parameter is in two optimizers, or the trainer scales gradients.
            TypeError: stores have no rule such as an optimizer's.
        """
        strategy = self.strategy
        refuse_gradient_scaler(strategy.precision_plugin)
        self._saved = []
        servers = strategy.stores(EMBEDDING)
        self._parameters = PushedParameters(
            strategy.optimizers,
            len(servers),
            num_workers=strategy.world_size,
            names={parameter: name for name, parameter in strategy.task.named_parameters()},
        )
        create = partial(self._parameters.create, servers, self.normalization, self._restored)
        if not made_by_the_first(strategy, create)[1]:
            self._parameters.open(servers)
        self._parameters.pull()
        self._direct_steps = DirectSteps(
            strategy.optimizers,
            consequence="under strategy=async_ps trains a copy alone: the parameters are on servers",
        )
        self._follow_loads()

    def _follow_loads(self) -> None:
        """Bring what is loaded into the model in the middle of the run to the servers, which have its dense part."""

        def bring(loaded: nn.Module, _: object) -> None:  # a function, so that a copied module has no copied strategy
            if self._parameters is not None and loaded is self.strategy.task:
                self._parameters.flush()
                self.strategy.barrier("everybody has loaded the model")
                made_by_the_first(self.strategy, self._parameters.assign)

        task = self.strategy.task
        self._loads = task.register_load_state_dict_post_hook(bring)  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], make: Callable[..., Any]) -> Any:
        """Push the gradients, and pull what the servers have."""
        assert self._parameters is not None
        assert self._direct_steps is not None
        with self._direct_steps.ours():
            return make(cast(Optimizer, ServedStep(optimizer, self._parameters)), closure)

    def settle(self, flush_rows: Callable[[], None], *, goes_on: bool) -> None:
        """Wait until every update of every rank is on the servers, and take the dense part that they have."""
        assert self._parameters is not None  # from the start of training on
        self._parameters.flush()
        super().settle(flush_rows, goes_on=goes_on)
        self._parameters.pull()
        if self.strategy.is_global_zero or self.strategy.run_servers.first_may_die:
            self._saved = self._parameters.kept()
        meet_buffers(self.strategy.task)
        self._staleness.meet({STALENESS: self._observed()}, device=self.strategy.root_device)
        if self.strategy.averages is not None:
            self.strategy.averages.meet()

    def finish(self) -> None:
        """Give rank 0's optimizers the state that the servers have.

        Under a launcher that is not ours the process lives on, and may save a checkpoint when the servers are gone.
        """
        for optimizer in self.strategy.optimizers:
            self.fill(optimizer)

    def fill(self, optimizer: Optimizer) -> None:  # noqa: D102 - inherited
        if self._parameters is not None and self.strategy.is_global_zero:
            self._parameters.pull_state(optimizer)

    def state(self) -> dict[str, Any]:
        """Versions and last changes of dense parameters."""
        if not self._saved:
            return {}
        versions, changes = (list(x) for x in zip(*self._saved, strict=True))
        return {CHECKPOINT_KEY: {"versions": versions, "changes": changes}}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the versions for :meth:`begin`."""
        kept = checkpoint.get(CHECKPOINT_KEY, {})
        versions = kept.get("versions", ())
        self._restored = [Kept(*x) for x in zip(versions, kept.get("changes", [0.0] * len(versions)), strict=True)]

    def telemetry(self) -> dict[str, Any]:
        """The staleness of all workers' pushes; see ``docs/settings/async_ps.md`` for each name."""
        return shares({STALENESS: self._staleness.of_all(STALENESS, self._observed())})

    def _observed(self) -> StalenessHistogram:
        """The staleness of this worker's pushes of the dense part."""
        return StalenessHistogram() if self._parameters is None else self._parameters.observed

    def stop(self) -> None:
        """Follow loads and steps no more."""
        for watched in (self._loads, self._direct_steps):
            if watched is not None:
                watched.remove()
        super().stop()
