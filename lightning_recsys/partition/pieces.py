"""Parts of parameters over processes, and the collectives that add up or bring together their partial results."""

# Shape suffixes: B batch, F fields, f own fields, D embedding dim, K inputs.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work


@dataclass(frozen=True)
class Share:
    """This process's part in layers that several processes hold together.

    Args:
        fields: Positions of its own fields, ascending; may be empty.
        group: All processes that see this batch and have the other fields.
    """

    fields: tuple[int, ...]
    group: ProcessGroup

    def sum(self, *partials: Tensor, cut_after: bool = False) -> tuple[Tensor, ...]:
        """Add partial results up over the processes, in one all-reduce of float32; :meth:`start`, and wait."""
        return self.start(*partials, cut_after=cut_after)()

    def start(self, *partials: Tensor, cut_after: bool = False) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to add partial results up; they travel while this process does something else.

        Args:
            partials: This process's; the same shapes on all of them.
            cut_after: Each process goes on with its own part of what follows, so that gradients have to be summed as
                well. Otherwise every process computes the same from the sums, and has their whole gradient already.

        Returns:
            A function that waits for the sums, bit for bit the same on every process, in the partial results' dtypes.
        """
        if self.group.size() == 1:
            return lambda: partials
        flat = _flatten(partials)
        work = self.group.allreduce([flat])

        def finish() -> tuple[Tensor, ...]:
            group = self.group if cut_after else None
            sums: tuple[Tensor, ...] = _Sum.apply(work, flat, group, *partials)  # type: ignore[no-untyped-call]
            return sums

        return finish


@dataclass(frozen=True)
class Cut:
    """Which part of a parameter is here.

    Args:
        dim: The dimension that is cut.
        index: Positions along it that are here, int64.
        shape: Shape of the whole parameter.
    """

    dim: int
    index: Tensor
    shape: torch.Size

    def take(self, whole: Tensor) -> Tensor:
        """A copy of this process's part."""
        return whole.index_select(self.dim, self.index.to(whole.device))

    def put(self, part: Tensor, fill: float = 0.0) -> Tensor:
        """A whole tensor with this process's part where it belongs, and ``fill`` elsewhere."""
        whole = part.new_full(self.shape, fill)
        return whole.index_copy_(self.dim, self.index.to(part.device), part)


@dataclass(frozen=True)
class Sends:
    """The numbers that a partitioned layer exchanges with the other processes.

    Args:
        operation: The collective operation that does the exchange.
        floats: Float32 numbers for each example; of an all-gather, those of all fields together.
        floats_per_batch: Float32 numbers that come on top once for each batch, whatever its size.
        gradients: Whether the same goes once more in the backward pass.
    """

    operation: Literal["all-reduce", "all-gather"]
    floats: int
    floats_per_batch: int = 0
    gradients: bool = False


class _Sum(torch.autograd.Function):
    """All-reduce of several tensors as one, under way since :meth:`Share.start`; backward the identity, or the same."""

    @staticmethod
    def forward(
        ctx: Any, work: Work, flat: Tensor, group: ProcessGroup | None, *partials: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        work.wait()
        return _unflatten(flat, partials)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.group is not None:
            flat = _flatten(grads)
            ctx.group.allreduce([flat]).wait()
            grads = _unflatten(flat, grads)
        return None, None, None, *grads


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])


def _unflatten(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return tuple(part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True))


class _Gather(torch.autograd.Function):
    """All-gather along the fields; every process has the whole gradient, of which its own fields' part goes back."""

    @staticmethod
    def forward(ctx: Any, own_BfD: Tensor, fields_of_all: list[list[int]], share: Share) -> Tensor:
        batch_size, num_own, dim = own_BfD.shape
        ctx.fields = torch.tensor(share.fields, dtype=torch.int64, device=own_BfD.device)
        most = max(map(len, fields_of_all))
        padded = torch.cat([own_BfD, own_BfD.new_zeros(batch_size, most - num_own, dim)], 1)
        parts = [torch.empty_like(padded) for _ in fields_of_all]
        share.group.allgather([parts], [padded]).wait()
        whole = own_BfD.new_empty(batch_size, sum(map(len, fields_of_all)), dim)
        for fields, part in zip(fields_of_all, parts, strict=True):
            whole[:, fields] = part[:, : len(fields)]
        return whole

    @staticmethod
    def backward(ctx: Any, grad_BFD: Tensor) -> tuple[Tensor, None, None]:
        return grad_BFD.index_select(1, ctx.fields), None, None
