"""The model: from numeric features and ids to one logit for each example."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models.layers import DeepTower, FirstOrder, field_embeddings


class MyModel(nn.Module):
    """A linear part and a deep one.

    Args:
        num_dense: Number of numeric features; lightning_recsys fills this in from the data, and ``fields``.
        fields: Number of ids of each categorical feature.
        embedding_dim: Width of the embeddings.
        hidden: Width of each hidden layer.
        options: Row optimizer, kernel and pooling of the embedding tables, which are the configuration's; hand them on.
    """

    def __init__(
        self,
        num_dense: int,
        fields: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        hidden: Sequence[int] = (64, 32),
        **options: Any,
    ) -> None:
        super().__init__()
        self.first_order = FirstOrder(num_dense, fields, **options)
        self.embeddings = field_embeddings(fields, embedding_dim, **options)
        self.deep = DeepTower(num_dense, num_fields=len(fields), embedding_dim=embedding_dim, hidden=hidden)

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        """Logits ``[B]`` from numeric features ``[B, num_dense]`` and the ids of ``B`` examples."""
        embeddings = self.embeddings(sparse)  # [B, number of fields, embedding_dim]
        return self.first_order(dense, sparse) + self.deep(dense, embeddings)

    def partition(self, fields: Sequence[int], group: ProcessGroup) -> None:
        """Keep some fields only, by position: asked for by strategy=des, which cuts a model over processes."""
        self.first_order.partition(fields, group)
        self.embeddings.partition(fields)
        self.deep.partition(fields, group)
