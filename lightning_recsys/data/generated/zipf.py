"""Zipf-distributed ids for any number of ids, from uniform numbers, without memory per id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_HEAD = 255  # ids drawn from an exact table; with the slot for all others the alias table has 256 entries


class ZipfSampler:
    r"""Draws ids of several fields at once, where id ``k`` of ``n`` has probability :math:`\propto (k+1)^{-a}`.

    The first ids are drawn from an alias table (Walker 1977: one look-up and one comparison, exactly the given
    probabilities). The others come from the inverse of :math:`\int x^{-a}\,dx`, whose error per id is below
    :math:`a (a+1) / (24 \cdot 255^2)`, under one in 100 000 for the usual exponents.

    Args:
        cardinalities: Number of ids of each field, ``F`` numbers; ``F`` may be 0.
        exponent: ``a``, at least 0; 0 makes all ids equally likely.
    """

    def __init__(self, cardinalities: Sequence[int], *, exponent: float) -> None:
        self._exponent = exponent
        tables = [_alias_table(_head_weights(n, exponent)) for n in cardinalities]
        self._threshold = np.ravel([threshold for threshold, _ in tables])
        self._alias = np.ravel([alias for _, alias in tables]).astype(np.int64)
        self._first_slot = np.arange(len(tables), dtype=np.int64)[:, None] * (_HEAD + 1)
        self.tailed = np.flatnonzero(np.asarray(cardinalities) > _HEAD)
        """Positions of the fields that have more ids than the table."""
        self._last_rank = np.asarray(cardinalities, dtype=np.float64)[self.tailed, None]

    def __call__(self, head_FN: NDArray[np.float64], tail_FN: NDArray[np.float64]) -> NDArray[np.int64]:
        """Turn uniform numbers in ``[0, 1)`` into ids.

        Args:
            head_FN: Chooses the id, or that it is none of the first ones. Overwritten.
            tail_FN: Independent of ``head_FN``; chooses among the other ids, for the fields in :attr:`tailed` only.

        Returns:
            Ids, shape ``[F, N]``.
        """
        head_FN *= _HEAD + 1
        slots = head_FN.astype(np.int64)
        head_FN -= slots
        entries = slots + self._first_slot
        ids: NDArray[np.int64] = np.where(head_FN < self._threshold[entries], slots, self._alias[entries])
        if len(self.tailed):
            drawn = ids[self.tailed]
            ids[self.tailed] = np.where(drawn == _HEAD, self._tail_ids(tail_FN), drawn)
        return ids

    def _tail_ids(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        low = _integral(np.array(_HEAD + 0.5), self._exponent)
        high = _integral(self._last_rank + 0.5, self._exponent)
        ranks = _inverse_integral(low + uniform * (high - low), self._exponent)
        ids: NDArray[np.int64] = np.clip(np.rint(ranks), _HEAD + 1, self._last_rank).astype(np.int64) - 1
        return ids


def _integral(x: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    result: NDArray[np.float64] = np.log(x) if a == 1 else x ** (1 - a) / (1 - a)
    return result


def _inverse_integral(y: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    result: NDArray[np.float64] = np.exp(y) if a == 1 else (y * (1 - a)) ** (1 / (1 - a))
    return result


def _head_weights(cardinality: int, exponent: float) -> NDArray[np.float64]:
    """Probabilities of the first ids; the last entry is that of all others together."""
    weights = np.zeros(_HEAD + 1)
    head = min(cardinality, _HEAD)
    weights[:head] = np.arange(1, head + 1, dtype=np.float64) ** -exponent
    if cardinality > _HEAD:
        ends = _integral(np.array([_HEAD + 0.5, cardinality + 0.5]), exponent)
        weights[_HEAD] = ends[1] - ends[0]
    weights /= weights.sum()
    return weights


def _alias_table(weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Slot ``i`` gives ``i`` with probability ``threshold[i]``, else ``alias[i]`` (Vose 1991)."""
    threshold = weights * len(weights)
    alias = np.arange(len(weights))
    small = [int(i) for i in np.flatnonzero(threshold < 1)]
    large = [int(i) for i in np.flatnonzero(threshold >= 1)]
    while small and large:
        receiver, giver = small.pop(), large[-1]
        alias[receiver] = giver
        threshold[giver] -= 1 - threshold[receiver]
        if threshold[giver] < 1:
            small.append(large.pop())
    threshold[small + large] = 1  # left over by rounding only
    return threshold, alias
