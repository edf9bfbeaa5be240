"""The undo record of a part, which makes an update whole or none across a kill: its numbers as they were, in a file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

_HEADER_BYTES = _ALIGNMENT = 64


def changed_by(optimizer: Optimizer | None) -> list[Tensor]:
    """The tensors that a step of an optimizer writes to: its parameters, and their states."""
    if optimizer is None:
        return []
    parameters = [x for group in optimizer.param_groups for x in group["params"] if x.requires_grad]
    states = [value for x in parameters for _, value in sorted(optimizer.state.get(x, {}).items())]
    return [x.detach() for x in (*parameters, *states) if isinstance(x, Tensor)]


def undo_bytes(tensors: Sequence[Tensor]) -> int:
    """Size of the record of these tensors."""
    return _HEADER_BYTES + sum(_aligned(x.nbytes) for x in tensors)


class UpdateUndo:
    """The undo record of one part; its memory outlives the process, as that of the tensors does.

    An update goes through four steps, one behind the other:

    1. all that it will change is copied to the record;
    2. the header gets the number of the update, one store of 8 bytes: the update is in progress;
    3. the update is made, in place;
    4. the part's version becomes that number, one store of 8 bytes: the update counts, and the record is void.

    A server killed before step 2 has changed nothing; killed before step 4 its successor puts the copies back; killed
    after it the update is in. What a round of synchronisation has moved between steps 2 and 4 of an update that is put
    back is undone with it, as if that round had come to nothing for these numbers.

    Args:
        tensors: What updates change, as :func:`changed_by` has it.
        version: Updates so far, int64 ``[1]``.
        memory: The record, uint8 ``[undo_bytes(tensors)]``, zeros at first.
    """

    def __init__(self, tensors: Sequence[Tensor], version: Tensor, memory: Tensor) -> None:
        self._tensors, self._version = tensors, version
        self._number = memory[:8].view(torch.int64)
        self._copies: list[Tensor] = []
        start = _HEADER_BYTES
        for x in tensors:
            self._copies.append(memory[start : start + x.nbytes].view(x.dtype).view(x.shape))
            start += _aligned(x.nbytes)

    def begin(self) -> None:
        """Steps 1 and 2 of an update that follows at once."""
        for x, copy in zip(self._tensors, self._copies, strict=True):
            copy.copy_(x)
        self._number.copy_(self._version + 1)

    def recover(self) -> bool:
        """Put back what an update that does not count has changed; says whether there was one."""
        if int(self._number) <= int(self._version):
            return False
        for x, copy in zip(self._tensors, self._copies, strict=True):
            x.copy_(copy)
        self._number.zero_()  # last: killed before it, a server leaves the same to its successor
        return True


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
