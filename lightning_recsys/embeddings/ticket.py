"""The name of a batch between its lookup and its update."""

# Shape suffix: N ids of the batch.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_recsys.embeddings.sparse_features import SparseFeatures


@dataclass(eq=False)
class Ticket:
    """Names one lookup, until its gradients have been applied.

    A backend's ``lookup`` gives it out and its ``apply_gradients`` takes it back. Only who will bring the gradients
    holds it: once nobody holds a ticket any more, its backend knows that no gradient will come. A backend may give out
    tickets of a subclass, which know more about the lookup. Two lookups of the same ids have two tickets.

    Args:
        sparse: The resolved features that were looked up.
        versions: For each id the version of its row that the lookup saw, int64 ``[N]``; ``None`` where rows have no
            versions.
    """

    sparse: SparseFeatures
    versions: Tensor | None = None

    @classmethod
    def joined(cls, tickets: Sequence[Ticket]) -> Ticket:
        """One ticket for several lookups of the same features, with their examples one behind the other.

        The joined ticket has versions where all of the tickets have some.

        >>> import torch
        >>> first, second = (SparseFeatures.from_ids(("a", "b"), torch.tensor([[n, 10 * n]])) for n in (1, 2))
        >>> tickets = [Ticket(first, torch.tensor([5, 6])), Ticket(second, torch.tensor([7, 8]))]
        >>> both = Ticket.joined(tickets)
        >>> both.sparse.values.tolist(), both.versions.tolist()
        ([1, 2, 10, 20], [5, 7, 6, 8])
        """
        if len(tickets) == 1:
            return tickets[0]
        sparse = SparseFeatures.cat([ticket.sparse for ticket in tickets])
        versions = [ticket.sparse.with_values(x) for ticket in tickets if (x := ticket.versions) is not None]
        # A version is moved to the place that its id is moved to.
        return Ticket(sparse, SparseFeatures.cat(versions).values if len(versions) == len(tickets) else None)
