"""Dropout on pooled embeddings, the same whether fields are cut over processes or not."""

# Shape suffixes: B batch, F fields of all processes, f own fields, D embedding dim.

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_recsys.partition.field_layer import FieldLayer


class EmbeddingDropout(FieldLayer):
    """Zeroes numbers of pooled embeddings in training, and scales the others up.

    Processes that hold different fields draw what one process would draw for all of them, and take their own part: the
    masks are those of training in one process, and the generators of all processes go on from one state, as layers
    that all of them have need it.

    Args:
        p: Probability that a number is zeroed, in ``[0, 1)``.
        num_fields: Fields ``F``.

    Shape:
        - input and output: ``[B, f, D]``.

    Raises:
        ValueError: ``p`` is out of range.
    """

    def __init__(self, p: float, num_fields: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"model.embedding_dropout must be in [0, 1), got {p}. 0 switches it off.")
        self.p, self.num_fields = p, num_fields

    def forward(self, embeddings_BfD: Tensor) -> Tensor:
        """Drop; see the class for shapes."""
        if not self.training or not self.p:
            return embeddings_BfD
        if self.share is None:
            return F.dropout(embeddings_BfD, self.p)
        batch_size, _, dim = embeddings_BfD.shape
        scales_BFD = F.dropout(embeddings_BfD.new_ones(batch_size, self.num_fields, dim), self.p)
        return embeddings_BfD * scales_BFD[:, list(self.share.fields)]

    def extra_repr(self) -> str:
        """Names the probability."""
        return f"p={self.p}"
