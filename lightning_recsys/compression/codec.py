"""The interface of codecs: a tensor in few contiguous arrays, whose dtypes and sizes follow from its shape alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

Carries: TypeAlias = Literal["activations", "gradients", "rows"]
Shape: TypeAlias = tuple[int, ...]
ArraySpec: TypeAlias = tuple[torch.dtype, Shape]
MAX_ELEMENTS = 2**31 - 1


class FrameError(ValueError):
    """Arrays that are not what the codec makes of a tensor of the shape that was named."""


@dataclass(frozen=True)
class Codec(ABC):
    """Turns float32 tensors into arrays for the network, and back.

    A codec has no state and may be used by any number of threads. What error feedback remembers belongs to a
    :class:`.Sender`, which passes it in.

    Attributes:
        name: As options call it.
        carries: What it is fit for; a codec is refused by name for the rest.
        changes_values: Whether anything is to be done: arrays of a codec that changes nothing are the tensor itself.
    """

    name: ClassVar[str]
    carries: ClassVar[tuple[Carries, ...]] = ("activations", "gradients", "rows")
    changes_values: ClassVar[bool] = True

    @property
    def keeps_residual(self) -> bool:
        """Whether :meth:`encode` is to be given the part of earlier tensors that was not sent."""
        return False

    @abstractmethod
    def layout(self, shape: Shape) -> list[ArraySpec]:
        """Dtype and shape of every array that a tensor of this shape becomes."""

    @abstractmethod
    def encode(self, tensor: Tensor, residual: Tensor | None = None) -> list[Tensor]:
        """The arrays of a float32 tensor, contiguous and as :meth:`layout` says.

        Args:
            tensor: Any shape, on the CPU; not modified.
            residual: For a codec that keeps one: float32, of the same shape. It is added to the tensor first, and
                afterwards holds what was not sent.

        Raises:
            ValueError: a value is not finite, and the codec cannot express that.
        """

    @abstractmethod
    def _decode(self, arrays: Sequence[Tensor], shape: Shape) -> Tensor:
        """The tensor of arrays that are known to follow the layout."""

    def decode(self, arrays: Sequence[Tensor], shape: Shape) -> Tensor:
        """The reverse of :meth:`encode`, as closely as the codec is.

        Nothing is allocated before the arrays are known to follow the layout, so a message never makes its receiver
        allocate more than a fixed multiple of its own size: 32 at most, for ``topk``.

        Args:
            arrays: What was received; not modified. The result may share their memory.
            shape: Shape of the tensor that was encoded.

        Raises:
            FrameError: the arrays do not follow the layout, or hold what no encoder writes.
        """
        check_shape(shape)
        expected = self.layout(shape)
        got = [(array.dtype, tuple(array.shape)) for array in arrays]
        if got != expected or not all(array.is_contiguous() for array in arrays):
            raise FrameError(f"a tensor of shape {list(shape)} in {self.name} is {expected}, got {got!s:.300}")
        return self._decode(arrays, shape)

    def encoded_bytes(self, shape: Shape) -> int:
        """Bytes of the arrays that a tensor of this shape becomes."""
        return sum(dtype.itemsize * math.prod(sizes) for dtype, sizes in self.layout(shape))


def check_shape(shape: Sequence[int]) -> None:
    """Refuse what cannot be the shape of a tensor in a message.

    Raises:
        FrameError: a size is no integer from 0, or the elements are more than 2**31 - 1.
    """
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise FrameError(f"a shape has sizes from 0 and at most {MAX_ELEMENTS} elements, got {list(shape)!s:.200}")


def refuse_not_finite(name: str) -> ValueError:
    """The error of a codec that cannot express infinity and NaN."""
    return ValueError(
        f"A tensor that is to be sent with compression={name} holds a value that is not finite. {name} cannot express"
        " it. Has training diverged? Lower the learning rate, or use compression=bf16, which sends such values as they"
        " are."
    )
