"""Checkpoints of a run whose rows, or a part of them, are not in rank 0's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning_fabric.utilities.types import _PATH
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_recsys.checkpoints import (
    StoredRows,
    Version,
    is_folder,
    read_checkpoint,
    read_stored,
    save_folder,
    version_of,
)
from lightning_recsys.launchers import ForkserverLauncher
from lightning_recsys.strategies.common.averaged_copies import copies_without_rows
from lightning_recsys.strategies.common.stored_rows import at_every_path, row_keys, rows_replaced
from lightning_recsys.strategies.common.workers.living import among_the_living

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy


class RunCheckpoints:
    """Saves folders, and loads them in two parts: the dense part at once, rows when the stores are there.

    Args:
        strategy: The strategy that trains the model.
    """

    def __init__(self, strategy: RecsysStrategy) -> None:
        self._strategy = strategy
        # A checkpoint as it was when it was read, until the stores are there for its rows: its run may go on saving.
        self._rows_to_load: Version | None = None
        self._waiting = ExitStack()  # while they wait, the model and its averaged copies are loaded without them

    def __getstate__(self) -> dict[str, object]:
        return vars(type(self)(self._strategy))

    @property
    def rows_wait(self) -> bool:
        """Whether a folder was loaded whose rows are not in the stores yet."""
        return self._rows_to_load is not None

    def save(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None) -> bool:
        """Save a folder where the strategy's :attr:`saves_folders`, each rank a share of the rows.

        A checkpoint of more than weights gets what the parts of the strategy keep beside weights and rows.

        Returns:
            Whether that is all; otherwise a file is to be saved.

        Raises:
            TypeError: ``storage_options`` for a folder.
        """
        strategy = self._strategy
        had_all = strategy.is_global_zero  # what the first worker has, and no other
        if strategy.succeeded and had_all and "optimizer_states" in checkpoint:
            checkpoint |= self._of_parts()
        if isinstance(strategy.launcher, ForkserverLauncher):
            # Lightning runs `on_exception` of the callbacks in the main process, and some of them save checkpoints.
            if strategy.launcher.failed:
                _warn_of_failure(path, "in its workers, and the main process has the weights from before it only")
                return True
            self.warn_of_lost_optimizers(checkpoint, path)
        if not strategy.saves_folders:
            return False
        if not strategy.succeeded:
            _warn_of_failure(path, "on a rank at least, and all ranks would have to take part in a checkpoint")
            return True
        if storage_options is not None:
            raise TypeError(f"{path} becomes a folder, which takes no storage_options, got {storage_options}.")

        def save() -> None:  # each time by those who live then, of whom each writes a share of the rows
            rows = at_every_path(strategy.task, strategy.stored_tensors())
            whole = checkpoint | {"state_dict": checkpoint["state_dict"] | rows}
            extras = None
            if "optimizer_states" in checkpoint:  # not of weights only
                extras = strategy.checkpoint_extras()
                if strategy.is_global_zero and not had_all:  # the first has died since
                    whole |= self._of_first()
            save_folder(strategy.broadcast(str(path)), whole, extras=extras)

        among_the_living(save)
        return True

    def write(self, checkpoint: dict[str, Any], write: Callable[[], None]) -> None:
        """Save a single file, which the first worker writes; where that dies over it, the next one writes it anew.

        Args:
            checkpoint: Lightning's dict.
            write: Writes that dict, on the first worker alone.
        """
        strategy = self._strategy
        had_all = strategy.is_global_zero
        write()
        if not strategy.run_servers.first_may_die:
            return
        strategy.barrier("a checkpoint is written")
        if strategy.is_global_zero and not had_all:
            checkpoint |= self._of_first() if "optimizer_states" in checkpoint else {}
            write()

    def _of_first(self) -> dict[str, Any]:
        """The entries of a checkpoint that the first worker alone has, on one that has become the first."""
        strategy = self._strategy
        states = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
        return {"optimizer_states": states, **self._of_parts()}

    def _of_parts(self) -> dict[str, Any]:
        return {**self._strategy.dense.state(), **self._strategy.rows.state()}

    def warn_of_lost_optimizers(self, checkpoint: Mapping[str, Any], path: _PATH) -> None:
        """After a run the main process has weights and progress; optimizers and schedulers were the workers'."""
        has_stepped = bool(checkpoint.get("global_step"))  # steps of optimizers: none before a run, or without any
        if checkpoint.get("optimizer_states") == [] and has_stepped:
            rank_zero_warn(
                f"{path} has no state of optimizers and schedulers: it ended with the worker processes of the run."
                " To go on with training take a checkpoint that was written in the run, by a `ModelCheckpoint`;"
                " `trainer.save_checkpoint(path, weights_only=True)` leaves out the state without this warning."
            )

    def load(self, path: _PATH, *, weights_only: bool | None) -> dict[str, Any] | None:
        """Load a folder whose rows wait for the stores; ``None`` where the whole is to be loaded at once."""
        task = self._strategy.task
        keys = row_keys(task)
        if not (keys and self._strategy.binds_rows() and is_folder(path)):
            return None
        self._rows_to_load = version_of(path)
        self._waiting.close()
        self._waiting.enter_context(copies_without_rows(task.trainer))
        return read_checkpoint(self._rows_to_load, without=keys, weights_only=weights_only is not False)

    def load_rows(self) -> None:
        """Bring the rows that wait to the stores, each rank its share; every rank calls this."""
        if self._rows_to_load is None:
            return
        self._waiting.close()
        with rows_replaced(self._strategy.task):
            targets = self._strategy.stored_tensors()
            for rows in targets.values():
                if isinstance(rows, StoredRows):
                    rows.clear()
            self._strategy.barrier("the rows from before are gone")
            read_stored(self._rows_to_load, targets)
            self._rows_to_load = None
            self._strategy.barrier("all rows are loaded")

    def close(self) -> None:
        """Keep nothing of a run that is over."""
        self._rows_to_load = None
        self._waiting.close()


def _warn_of_failure(path: _PATH, how: str) -> None:
    rank_zero_warn(
        f"{path} was not written: the run failed {how}. `ModelCheckpoint(every_n_train_steps=...)` saves while the"
        " workers run."
    )
