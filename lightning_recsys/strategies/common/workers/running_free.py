"""How workers that run free begin: what each of them trains, what is refused, and how all of them end together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lightning_recsys.strategies.common.schedules import clocks_of_steps, refuse_clocks, refuse_different_schedules
from lightning_recsys.strategies.common.workers.dealing import deal_shares
from lightning_recsys.strategies.common.workers.living import among_the_living

if TYPE_CHECKING:
    from lightning_recsys.parameter_server.meetings import ShareDealer
    from lightning_recsys.strategies.common.base import RecsysStrategy


def begin_to_run_free(strategy: RecsysStrategy) -> ShareDealer | None:
    """Prepare what this worker trains in each epoch, as training starts.

    Returns:
        The object that deals the shares; ``None`` where they stay fixed.

    Raises:
        ValueError: something makes workers wait at each batch, or different numbers of times.
    """
    trainer, dealer = strategy.task.trainer, deal_shares(strategy)
    refuse_clocks(trainer)
    refuse_different_schedules(trainer)
    return dealer


def stop_together(strategy: RecsysStrategy) -> None:
    """Let all workers end with the epoch in which ``trainer.should_stop`` is set on any of them.

    Lightning ends the epoch of that worker at once. Where workers lease their batches, nobody is given another lease,
    since the others would wait for the batches of the one that has stopped. A ``Timer`` that looks at each batch
    (``trainer.max_time``) goes by each worker's own clock: Lightning would ask rank 0 at every batch.

    The leases end before this worker waits for anybody, and all agree behind that. Killed in between, it leaves the
    others with an epoch that has ended; those that nobody tells to stop train the next one.

    Where batches are not leased and there is no such timer, workers may be in different epochs, and nothing is changed.

    Args:
        strategy: The strategy of this worker, whose dense part has begun: what that does where epochs end may wait for
            workers that wait for this one's leases, so these end before.
    """
    trainer, changes, dealer = strategy.task.trainer, strategy.changes, strategy.dealer
    clocks = clocks_of_steps(trainer)
    if changes is None or trainer.world_size == 1 or not (clocks or dealer):
        return
    for clock in clocks:
        changes.go_by_own_clock(clock)

    def end_leases() -> None:
        if dealer is not None and trainer.should_stop and trainer.fit_loop._can_stop_early:
            dealer.end_pass()

    def agree() -> None:
        decide = partial(strategy.reduce_boolean_decision, trainer.should_stop, all=False)
        trainer.should_stop = among_the_living(decide)

    # Before anything waits for the others, which is in validation, or else at the end of the epoch.
    changes.before_validation_data(end_leases)
    changes.before_train_epoch_end(end_leases)
    changes.after_train_epoch_end(agree)
