"""The linear part of a model: one weight for each id and each numeric feature."""

# Shape suffixes: B batch, F fields.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_recsys.embeddings import EmbeddingOptions, SparseFeatures
from lightning_recsys.models.layers.inputs import check_dense, check_features
from lightning_recsys.models.layers.tables import first_order_weights
from lightning_recsys.partition.field_layer import FieldLayer
from lightning_recsys.partition.pieces import Sends


class FirstOrder(FieldLayer):
    r"""Weighted sum of all features, categorical and numeric.

    .. math:: y = b + \sum_f w_f[\text{id}_f] + \sum_n u_n\, x_n

    Cut point: :meth:`partial` of the fields is additive. Layers over disjoint sets of fields give partial results
    whose sum is that of one layer over all of them; :meth:`combine` then counts ``b`` and ``x`` once.

    Args:
        num_dense: Numeric features ``N``; 0 is fine.
        fields: Field name -> number of ids.
        bias: Whether ``b`` is there. Without it where another part of the model has one.
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Shape:
        - dense: ``[B, N]``; sparse: ``B`` examples of the fields.
        - output: ``[B]``.

    All weights start at 0: the problem is convex, and a zero says that nothing is known yet.
    """

    dense_weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, num_dense: int, fields: Mapping[str, int], *, bias: bool = True, **options: Unpack[EmbeddingOptions]
    ) -> None:
        super().__init__()
        check_features(num_dense, fields)
        self.num_dense = num_dense
        self.embeddings = first_order_weights(fields, **options)
        self.register_parameter("dense_weight", nn.Parameter(torch.zeros(num_dense)) if num_dense else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(1)) if bias else None)

    def partition(self, fields: Sequence[int], group: ProcessGroup) -> None:
        """Keep the weights of some fields only; see :meth:`FieldLayer.partition`."""
        super().partition(fields, group)
        if self.embeddings is not None:
            self.embeddings.partition(fields)

    @property
    def sends(self) -> Sends:  # noqa: D102 - inherited
        return Sends("all-reduce", 1)

    def partial(self, sparse: SparseFeatures) -> Tensor:
        """The fields' share of the sum, ``[B]``."""
        assert self.embeddings is not None
        weights_BF1: Tensor = self.embeddings(sparse)
        return weights_BF1.sum((1, 2))

    def combine(self, dense: Tensor, partial_B: Tensor) -> Tensor:
        """Add the numeric features and the bias to the sum over all fields: ``[B]``."""
        check_dense(dense, self.num_dense)
        if self.dense_weight is not None:
            partial_B = torch.addmv(partial_B, dense, self.dense_weight)
        return partial_B if self.bias is None else partial_B + self.bias

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """The whole sum; see the class for shapes."""
        if self.embeddings is None:
            return self.combine(dense, dense.new_zeros(dense.shape[0]))
        return self.combine(dense, *self.sum_partials(self.partial(sparse)))
