"""Layers that are cut by fields: each process holds the weights of its own.

All processes see the same batch. A layer with many weights computes a partial result from its own fields; the sum of
all partial results is what the whole layer gives, and everything above it is the same on every process.
"""

# Shape suffixes: B batch, F fields, f own fields, D embedding dim, K inputs.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.partition.pieces import Cut, Sends, Share, _Gather


class FieldLayer(nn.Module):
    """A layer that can be cut by fields.

    Attributes:
        share: This process's part, once the layer is cut.
        cuts: Which part of each cut parameter is here, by name. Other parameters are the same on all processes.
    """

    share: Share | None = None
    cuts: Mapping[str, Cut] = MappingProxyType({})

    def partition(self, fields: Sequence[int], group: ProcessGroup) -> None:
        """Keep the weights of some fields only; in place, until :meth:`make_whole`.

        Args:
            fields: Positions of this process's fields, ascending. Each field belongs to one process of the group.
            group: The processes that have the other fields.

        Raises:
            RuntimeError: the layer is cut already.
            ValueError: a parameter that is to be cut has hooks, which would see a part of its gradient.
        """
        if self.share is not None:
            raise RuntimeError(f"{type(self).__name__} is cut by field already.")
        cuts = {
            name: Cut(dim, index, self.get_parameter(name).shape)
            for name, (dim, index) in self.own_parts(fields).items()
        }
        for name in cuts:
            whole = self.get_parameter(name)
            if whole._backward_hooks or whole._post_accumulate_grad_hooks:
                raise ValueError(
                    f"{type(self).__name__}.{name} has hooks (register_hook), and is cut by field: each process has a"
                    " part of its gradient only. Leave them out, or use strategy=het, shadowsync, async_ps or ddp."
                )
        for name, cut in cuts.items():
            self._replace(name, cut.take(self.get_parameter(name).data))
        self.share, self.cuts = Share(tuple(fields), group), cuts

    def make_whole(self, parameters: Mapping[str, Tensor]) -> None:
        """Undo :meth:`partition`.

        Args:
            parameters: The whole of every cut parameter.
        """
        for name in self.cuts:
            self._replace(name, parameters[name])
        vars(self).pop("share", None)
        vars(self).pop("cuts", None)

    def own_parts(self, fields: Sequence[int]) -> dict[str, tuple[int, Tensor]]:
        """For each parameter that is cut: the dimension, and the positions along it that belong to some fields."""
        return {}

    @property
    def sends(self) -> Sends | None:
        """The exchange of a forward pass of the partitioned layer; nothing by default."""
        return None

    def sum_partials(self, *partials: Tensor, cut_after: bool = False) -> tuple[Tensor, ...]:
        """Sum like :meth:`Share.sum`; if the layer is whole, its partial results are the sums."""
        return partials if self.share is None else self.share.sum(*partials, cut_after=cut_after)

    def own_dense(self, dense: Tensor) -> Tensor:
        """Numeric features ``[B, N]`` that enter the cut side of a layer: whoever has field 0 has them, others none."""
        return dense if self.share is None or 0 in self.share.fields else dense[:, :0]

    def _replace(self, name: str, values: Tensor) -> None:
        old = self.get_parameter(name)
        setattr(self, name, nn.Parameter(values, requires_grad=old.requires_grad))


class FieldGather(FieldLayer):
    """Pooled embeddings of all fields on every process: for layers whose partial results would be larger than those.

    Does nothing until it is cut.

    Args:
        num_fields: Number of fields ``F`` of all processes together.
        embedding_dim: Width ``D``.

    Shape:
        - input: ``[B, f, D]``, own fields; output: ``[B, F, D]``.
    """

    def __init__(self, num_fields: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.embedding_dim = embedding_dim
        self._fields_of_all: list[list[int]] = []

    def partition(self, fields: Sequence[int], group: ProcessGroup) -> None:
        """Learn who has which fields.

        Raises:
            ValueError: a field belongs to no process, or to several.
        """
        super().partition(fields, group)
        # NCCL has no way for tensors that lie in the machine's memory.
        own = torch.zeros(self.num_fields, dtype=torch.int64, device="cuda" if group.name() == "nccl" else "cpu")
        own[list(fields)] = 1
        masks = [torch.empty_like(own) for _ in range(group.size())]
        group.allgather([masks], [own]).wait()
        self._fields_of_all = [mask.nonzero().flatten().tolist() for mask in masks]
        if any(count != 1 for count in torch.stack(masks).sum(0).tolist()):
            raise ValueError(f"each of {self.num_fields} fields needs one process, got {self._fields_of_all}.")

    @property
    def sends(self) -> Sends:  # noqa: D102 - inherited
        return Sends("all-gather", self.num_fields * self.embedding_dim)

    def forward(self, embeddings_BfD: Tensor) -> Tensor:
        """All fields; see the class for shapes."""
        if self.share is None or self.share.group.size() == 1:
            return embeddings_BfD
        gathered: Tensor = _Gather.apply(embeddings_BfD, self._fields_of_all, self.share)  # type: ignore[no-untyped-call]
        return gathered


def partition_parts(model: nn.Module, fields: Sequence[int], group: ProcessGroup) -> None:
    """Cut each part of a model that can be cut: the ``partition`` of a model whose ``forward`` needs no more than that.

    Args:
        model: Its collections, and the layers and towers beside them that have a ``partition``, are cut in their order.
        fields: Numbers of the fields that this process has, as :meth:`FieldLayer.partition` takes them.
        group: The processes that have the other fields, over which partial results are summed.
    """
    for part in model.children():
        if isinstance(part, EmbeddingBagCollection):
            part.partition(fields)
        elif cut := getattr(part, "partition", None):
            cut(fields, group)
