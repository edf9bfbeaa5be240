"""The staleness of all workers' pushes, of which each worker is told of its own alone."""

# Shape suffixes: H histograms, S stalenesses from 0 to the largest.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_recsys.stores.versions import StalenessHistogram


class StalenessOfAll:
    """Adds what the other workers have pushed to this worker's histograms, each time that all of them meet.

    In between it knows the others' pushes up to the last time. Those of a worker that has died stay counted up to then.

    >>> own = StalenessHistogram()
    >>> own.add(torch.tensor([[1, 3]]))
    >>> StalenessOfAll().of_all("rows", own).counts  # nobody has met
    {1: 3}
    """

    def __init__(self) -> None:
        self._others: dict[str, StalenessHistogram] = {}
        self._told: dict[str, Counter[int]] = {}  # of this worker's pushes, what the others know

    def meet(self, own: Mapping[str, StalenessHistogram], *, device: torch.device) -> None:
        """Tell the others of this worker's new pushes, and learn of theirs; all ranks call this together.

        Whoever dies between the two reductions is missing in the second one: its pushes since the last time are then
        in nobody's counts.

        Args:
            own: This worker's histograms, of the same names on all ranks.
            device: Where ranks can talk.

        Communication: two all-reduces, of one number and of as many for each histogram as the largest new staleness.
        """
        seen = {name: Counter(histogram.counts) for name, histogram in own.items()}
        new = {name: counts - self._told.get(name, Counter()) for name, counts in seen.items()}
        largest = torch.tensor(max((x for counts in new.values() for x in counts), default=0), device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        own_HS = torch.zeros(len(own), int(largest) + 1, dtype=torch.int64)
        for own_S, counts in zip(own_HS, new.values(), strict=True):
            own_S[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.int64)
        all_HS = own_HS.to(device, copy=True)
        dist.all_reduce(all_HS)
        for name, others_S in zip(own, all_HS.cpu() - own_HS, strict=True):
            staleness = others_S.nonzero()
            others = self._others.setdefault(name, StalenessHistogram())
            others.add(torch.cat([staleness, others_S[staleness]], 1))
        self._told = seen

    def of_all(self, name: str, own: StalenessHistogram) -> StalenessHistogram:
        """This worker's pushes, and those that the others had made by the last time."""
        found = StalenessHistogram()
        for seen in (own, self._others.get(name, StalenessHistogram())):
            found.update(seen)
        return found


_BINS = (("1", 1), ("2_to_9", 9), ("10_to_99", 99), ("100_to_999", 999), ("from_1000", None))


def shares(histograms: Mapping[str, StalenessHistogram]) -> dict[str, Any]:
    """Histograms as telemetry has them, each with what part of its observations lies in each of five bins.

    >>> import torch
    >>> seen = StalenessHistogram()
    >>> seen.add(torch.tensor([[1, 6], [12, 3], [2000, 1]]))
    >>> told = shares({"staleness": seen, "staleness/rows": StalenessHistogram()})
    >>> told.pop("staleness") is seen, told
    (True, {'staleness/share_1': 0.6, 'staleness/share_2_to_9': 0.0, 'staleness/share_10_to_99': 0.3, \
'staleness/share_100_to_999': 0.0, 'staleness/share_from_1000': 0.1})
    """
    told: dict[str, Any] = {}
    for name, seen in histograms.items():
        if len(seen):
            told |= {name: seen} | {f"{name}/share_{bin_}": share for bin_, share in _shares(seen).items()}
    return told


def _shares(seen: StalenessHistogram) -> dict[str, float]:
    found, lowest = {}, 1
    for name, highest in _BINS:
        inside = (n for x, n in seen.counts.items() if x >= lowest and (highest is None or x <= highest))
        found[name] = sum(inside) / max(len(seen), 1)
        lowest = (highest or 0) + 1
    return found
