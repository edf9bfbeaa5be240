"""Who lives of the workers of a run, as of their last meeting, and what all of them do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy

T = TypeVar("T")


def living_ranks() -> tuple[int, ...]:
    """The workers that live, as of the last collective, by the ranks that they began with; all ranks know the same."""
    members: tuple[int, ...] = getattr(dist.group.WORLD, "members", tuple(range(dist.get_world_size())))
    return members


def has_met() -> bool:
    """Whether the process group knows this worker's place among those that live: not before it has joined them."""
    return dist.is_initialized() and not getattr(dist.group.WORLD, "is_alone", False)


def among_the_living(together: Callable[[], T]) -> T:
    """Do what all workers do together, and do it again without a worker that has died meanwhile.

    Within it no collective misses anybody, so all values that belong to one result come from the same workers. Where
    workers cannot die, or within another call of this, it is a plain call.

    Args:
        together: What all workers call at the same time; it may be called again, and be left in the middle.
    """
    group: Any = dist.group.WORLD if dist.is_initialized() else None  # a MeetingGroup, where workers may die
    return group.among_the_living(together) if hasattr(group, "among_the_living") else together()


def made_by_the_first(strategy: RecsysStrategy, make: Callable[[], T]) -> tuple[T | None, bool]:
    """Have the first worker make what all others find once this returns; all workers call it together.

    Where the first one dies before the others know that it is there, the next one makes it, and all of them go on with
    that. A process that joins the others finds what they have made.

    Args:
        strategy: The strategy of this process.
        make: Makes it, in the place of what a worker has left that died within.

    Returns:
        What ``make`` gave, which can be pickled, and whether this worker made it; ``None`` in a process that joins.
    """
    made, result = False, None
    if dist.is_initialized() and not has_met():
        return result, made
    # All hear the same in one broadcast, which is made again where its source dies within it: either everybody goes on
    # with what is there, or nobody does, and whoever is the first by then makes it.
    while True:
        if strategy.is_global_zero and not made:
            result, made = make(), True
        is_there, told = strategy.broadcast((made, result))
        if is_there or not strategy.succeeded:
            return told, made
