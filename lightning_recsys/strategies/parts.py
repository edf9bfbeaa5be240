"""The parts of a strategy, as contracts: who trains the dense part, where rows live, and who waits for whom."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_recsys.launchers import ServerSpec

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from torch.optim import Optimizer

    from lightning_recsys.strategies.common.base import RecsysStrategy


class Part:
    """The base class of a strategy's parts, which are called on all ranks, unless a method says otherwise.

    The object owns whatever a run keeps about its subject, and forgets it in :meth:`stop`.

    Attributes:
        strategy: Who holds it: the plumbing, through which it reaches its servers, the other ranks and the trainer.
    """

    strategy: RecsysStrategy

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Have nothing of a run: at the start, when one is over, and in copies. Subclasses add what they keep of one.

        It is called on an object without anything else as well, to learn what a copy is to have.
        """

    def __getstate__(self) -> dict[str, Any]:
        fresh = type(self).__new__(type(self))
        fresh._reset()
        return vars(self) | vars(fresh)

    def attach(self, strategy: RecsysStrategy) -> None:
        """Belong to a strategy, before anything runs.

        Raises:
            ValueError: this part does not go with another one of the strategy; names both, and the reason. Or it
                belongs to another strategy.
        """
        if vars(self).get("strategy", strategy) is not strategy:
            raise ValueError(f"this {type(self).__name__} belongs to another strategy: make one for each.")
        self.strategy = strategy

    def servers(self) -> list[ServerSpec]:
        """The servers that it needs; the same on all ranks, before anything runs."""
        return []

    def agreed(self) -> dict[str, Any]:
        """Tell a process that joins the run what all ranks agreed on at its start; on the first rank."""
        return {}

    def agree(self, agreed: Mapping[str, Any]) -> None:
        """Have what :meth:`agreed` gave, ahead of everything else, on a process that joins a run.

        It then starts as every rank does, but alone: what it broadcasts it keeps, and it is not the first.
        """

    def begin(self) -> None:
        """Training begins."""

    def state(self) -> dict[str, Any]:
        """The part's entries in a checkpoint that is more than weights, by keys of its own; on the first rank.

        It may be asked for after :meth:`stop`, where a process saves a checkpoint once its run is over.
        """
        return {}

    def own_state(self) -> dict[str, Any]:
        """The entries that this rank adds to a folder checkpoint, by keys of its own."""
        return {}

    def load_own(self, path: Any, loaded: dict[str, Any], *, weights_only: bool) -> None:
        """Keep for :meth:`begin` what ranks have added to the checkpoint that the run goes on from.

        Args:
            path: The checkpoint, which may be a single file.
            loaded: What Lightning takes from it, which may be changed.
            weights_only: Whether only tensors and plain containers are read.
        """

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep for :meth:`begin` what :meth:`state` gave, of the checkpoint that the run goes on from."""

    def telemetry(self) -> dict[str, Any]:
        """The part's numbers on this rank; must not communicate."""
        return {}

    def stop(self) -> None:
        """The run is over, whether it succeeded or not; also called without a start."""
        self._reset()


class DensePart(Part):
    """The parameters that are no rows, while they train. This class leaves them to Lightning: in each process.

    Their gradients are averaged where the strategy wraps the model (``wraps_model``). Beside the methods of
    every part, in their order: it is started ahead of :meth:`begin`, settled whenever one model is asked for, and
    ended.

    Attributes:
        asynchronous: Whether workers may be at different steps.
        wraps_model: Whether ``DistributedDataParallel`` is to average gradients.
        float32_only: Whether it refuses every ``trainer.precision`` but ``32-true``.
        takes_replacements: Whether another process may join in the place of a worker that died, by what is on servers
            and what the first worker has.
    """

    asynchronous: bool = False
    wraps_model: bool = True
    float32_only: bool = False
    takes_replacements: bool = False

    @property
    def own_rows(self) -> Callable[..., Any] | None:
        """The class of the rows that its paper has with it; ``None``: ``ServedRows``."""
        return None

    @property
    def num_replicas(self) -> int:
        """Number of copies of the dense part that may differ; rank 0 trains the first one."""
        return 1

    def take_ranks(self) -> None:
        """Say how many processes there are, where the part says how many it needs; before Lightning counts them.

        Raises:
            ValueError: there are others than it needs, or they train on what it cannot.
        """

    def refuse(self, trainer: pl.Trainer) -> None:
        """Refuse what does not go with it, ahead of a fit; raises ``ValueError`` or ``TypeError`` with what to do."""

    def start(self) -> None:
        """The model is where it is trained, the same on all ranks: put the dense part where it belongs."""

    def prepare(self) -> None:
        """The optimizers are there: refuse a model that cannot be trained so, before any rank begins."""

    def begin_batch(self, batch_idx: int) -> None:
        """A training batch begins."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], make: Callable[..., Any]) -> Any:
        """Make an optimizer's step, which computes the gradients.

        Args:
            optimizer: The optimizer, as Lightning gives it.
            closure: Computes the gradients and returns the loss.
            make: Makes the step of an optimizer with a closure, and the rows' with it.

        Returns:
            What ``make`` returns.
        """
        return make(optimizer, closure)

    def settle(self, flush_rows: Callable[[], None], *, goes_on: bool) -> None:
        """Return when each process has the model of the moment, and every update is in it; all ranks call this.

        Args:
            flush_rows: Returns when every update of a row of this rank's is where all ranks read it.
            goes_on: Whether training goes on behind it.
        """
        flush_rows()
        self.strategy.barrier("every update is on the servers")

    def resume(self) -> None:
        """Everybody has seen the model that was settled: train on."""
        self.strategy.barrier("everybody has validated")

    def show(self) -> None:
        """Bring the dense weights of the moment into this process's model while the others train on; rank 0 alone."""

    def finish(self) -> None:
        """Training is over and settled: leave in this process what callbacks may change and what outlives the run."""

    def end(self) -> None:
        """Callbacks have had the trained model: what rank 0 has of it is everybody's."""

    def keep(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Within a run, from its start to its end, a state dict has taken the settled model: keep what goes beside it.

        Args:
            tensors: The model's tensors by name, without rows in stores.

        Returns:
            The tensors as the checkpoint is to have them.
        """
        return tensors

    @property
    def is_spread(self) -> bool:
        """Whether ranks have parts of their own at the moment, so that a checkpoint is a folder."""
        return False

    @property
    def exchanged_bytes(self) -> int:
        """The bytes that this process has sent for it past its servers' connections, and received as well."""
        return 0

    def fill(self, optimizer: Optimizer) -> None:
        """Bring an optimizer's state into it, where it is kept elsewhere: a checkpoint is about to take it."""


class Rows(Part):
    """The rows of a model's tables while it trains. This class leaves them in the process: each rank has all of them.

    Beside the methods of every part, in their order: the rows are there from :meth:`start` on, ahead of
    :meth:`begin`, and until :meth:`stop`.
    """

    @property
    def maps_stores(self) -> bool:
        """Whether rows may be read and written in files of servers on the same machine, past the servers."""
        return True

    def binds(self) -> bool:
        """Whether the rows of this run are where :meth:`start` brings them: those of a checkpoint then wait for it."""
        return False

    def start(self) -> None:
        """Bring the rows where they live, and have the model's tables look them up there."""

    def start_plain(self, setup_optimizers: Callable[[], None]) -> None:
        """Have Lightning make the optimizers, and bring the rows of plain modules, whose rules these say."""
        setup_optimizers()

    def look_at(self, loader: object) -> object:
        """The loader to train from, in the place of one that Lightning has."""
        return loader

    def foresee(self) -> None:
        """Training is about to begin, and nothing has changed what the trainer says of the batches to come."""

    def step(self, *, waited: bool) -> None:
        """The row gradients of a step are there, of some of the collections.

        Args:
            waited: Those of the collections that wait for an optimizer's step, which has been made; else of the others.
        """

    def settle(self) -> None:
        """Return when every update of this rank's is where all ranks read it."""

    def meet(self) -> None:
        """All ranks are at one place, as they are before a validation: exchange what only all of them know."""


class Pace(ABC):
    """Whether the updates that workers make of a row belong together."""

    name: str

    @abstractmethod
    def row_scale(self, num_workers: int) -> float:
        """How much of a worker's row gradients is applied.

        Args:
            num_workers: Workers that train.
        """


class InStep(Pace):
    """Workers train one batch together: a row's update is by the mean of their gradients, as the dense part's is.

    >>> InStep().row_scale(4)
    0.25
    """

    name = "in_step"

    def row_scale(self, num_workers: int) -> float:  # noqa: D102 - inherited
        return 1.0 / num_workers


class Free(Pace):
    """Each worker makes updates of its own, of which each counts in full.

    >>> Free().row_scale(4)
    1.0
    """

    name = "free"

    def row_scale(self, num_workers: int) -> float:  # noqa: D102 - inherited
        return 1.0
