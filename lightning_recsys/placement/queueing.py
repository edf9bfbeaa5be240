"""Waiting in line: how long a cycle takes where several share processors and links, in closed form."""

from __future__ import annotations

from collections.abc import Sequence


def closed_network_seconds(queues: Sequence[tuple[float, int]], wait: float, population: int) -> float:
    r"""Seconds of one cycle of each of ``n`` alike, by mean value analysis of a closed queueing network.

    .. math:: R_k(n) = D_k\,(1 + Q_k(n-1)), \qquad X(n) = \frac{n}{Z + \sum_k R_k(n)}, \qquad Q_k(n) = X(n)\, R_k(n)

    Args:
        queues: For each kind of queue the seconds ``D`` that a cycle needs of one of them, and how many there are that
            a cycle goes through one after the other.
        wait: Seconds ``Z`` of a cycle for which nobody queues.
        population: How many cycle at the same time, ``n``.

    Reference: Reiser and Lavenberg 1980, "Mean-value analysis of closed multichain queueing networks".

    >>> closed_network_seconds([(1.0, 1)], wait=0.0, population=3)
    3.0
    """
    waiting = [0.0] * len(queues)
    seconds = wait
    for number in range(1, population + 1):
        times = [time * (1 + queue) for (time, _), queue in zip(queues, waiting, strict=True)]
        seconds = wait + sum(time * copies for time, (_, copies) in zip(times, queues, strict=True))
        waiting = [number / seconds * time for time in times] if seconds else waiting
    return seconds
