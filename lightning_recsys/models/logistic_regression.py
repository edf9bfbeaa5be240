"""Logistic regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from torch import Tensor, nn

from lightning_recsys.embeddings import EmbeddingOptions, SparseFeatures
from lightning_recsys.models.layers import FirstOrder, partition_parts


class LogisticRegression(nn.Module):
    r"""One weight for each id and each numeric feature.

    .. math:: \operatorname{logit} = b + \sum_f w_f[\text{id}_f] + \sum_n u_n\, x_n

    Args:
        num_dense: Numeric features ``N``.
        fields: Field name -> number of ids.
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`. The rule of the weights is
            ``first_order_optimizer``, or ``row_optimizer`` where that is not given.

    Shape:
        - dense: ``[B, N]``; sparse: ``B`` examples of the fields.
        - output: logits ``[B]``.

    Raises:
        ValueError: there is neither a field nor a numeric feature.

    Reference: Richardson et al. 2007, Predicting Clicks.

    >>> import torch
    >>> model = LogisticRegression(2, {"user": 10, "movie": 50})
    >>> model(torch.rand(1, 2), SparseFeatures(("user", "movie"), torch.tensor([3, 42])))
    tensor([0.], grad_fn=<AddBackward0>)
    """

    def __init__(self, num_dense: int, fields: Mapping[str, int], **options: Unpack[EmbeddingOptions]) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, fields, **options)

    partition = partition_parts

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """Logits; see the class for shapes."""
        logits: Tensor = self.first_order(dense, sparse)
        return logits
