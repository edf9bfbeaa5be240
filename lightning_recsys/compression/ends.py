"""The two ends of a boundary: tensors of a message to arrays and back, with bytes and processor time counted."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.compression.codec import ArraySpec, Codec, FrameError, check_shape
from lightning_recsys.compression.dtypes import CODES, DTYPES


@dataclass(slots=True)
class CodecTraffic:
    """Counts of the tensors that one end has encoded or decoded.

    Args:
        tensors: Number of tensors that went through the end.
        raw_bytes: Their size as they are in memory.
        encoded_bytes: Bytes of the tensors after encoding, as they travel.
        cpu_seconds: Processor time that encoding or decoding took on the calling thread.
    """

    tensors: int = 0
    raw_bytes: int = 0
    encoded_bytes: int = 0
    cpu_seconds: float = 0.0

    def add(self, other: CodecTraffic) -> None:
        """Count what another end did, too."""
        self.tensors += other.tensors
        self.raw_bytes += other.raw_bytes
        self.encoded_bytes += other.encoded_bytes
        self.cpu_seconds += other.cpu_seconds


def describe(tensors: Sequence[Tensor]) -> list[Any]:
    """Dtypes and shapes as plain values, for the header of a message.

    >>> describe([torch.zeros(2, 3)])
    [['f4', [2, 3]]]

    Raises:
        ValueError: a dtype cannot travel.
    """
    for tensor in tensors:
        if tensor.dtype not in CODES:
            raise ValueError(f"A tensor of {tensor.dtype} cannot be sent: allowed are {sorted(map(str, CODES))}.")
    return [[CODES[tensor.dtype], list(tensor.shape)] for tensor in tensors]


def specs(described: object) -> list[ArraySpec]:
    """The reverse of :func:`describe`, of what a stranger may have sent.

    Raises:
        FrameError: the text is not what :func:`describe` makes.
    """
    if type(described) is not list:
        raise FrameError(f"tensors are described by a list, got {described!r:.100}")
    found: list[ArraySpec] = []
    for one in described:
        if type(one) is not list or len(one) != 2 or type(one[0]) is not str or type(one[1]) is not list:
            raise FrameError(f"a tensor is described by [dtype, shape], got {one!r:.100}")
        dtype = DTYPES.get(one[0])
        if dtype is None:
            raise FrameError(f"a tensor's dtype must be one of {list(DTYPES)}, got {one[0]!r:.100}")
        check_shape(one[1])
        found.append((dtype, tuple(one[1])))
    return found


@dataclass
class Sender:
    """Encodes what one net sends over one boundary in one direction; for one thread at a time.

    Float32 tensors go through the codec, others as they are. The residuals of error feedback are kept here, one for
    each place in the message, and each is dropped when the shape at its place changes: with another batch size
    its elements belong to nothing.

    Args:
        codec: Encodes every float32 tensor.

    Attributes:
        traffic: Counts what this sender has encoded so far.

    >>> from lightning_recsys.compression import BFloat16
    >>> sender, receiver = Sender(BFloat16()), Receiver(BFloat16())
    >>> tensors = [torch.ones(2, 2), torch.arange(2)]
    >>> arrays = sender.encode(tensors)
    >>> receiver.decode(arrays, specs(describe(tensors))), sender.traffic.encoded_bytes
    ([tensor([[1., 1.],
            [1., 1.]]), tensor([0, 1])], 24)
    """

    codec: Codec
    traffic: CodecTraffic = field(default_factory=CodecTraffic)
    _residuals: dict[int, Tensor] = field(default_factory=dict, init=False)

    def encode(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The arrays of all tensors, one behind the other.

        Raises:
            ValueError: a value is not finite, and the codec cannot express that.
        """
        started = time.thread_time()
        arrays: list[Tensor] = []
        for place, tensor in enumerate(tensors):
            plain = tensor.detach()
            if tensor.dtype != torch.float32:
                encoded = [plain.contiguous()]
            else:
                encoded = self.codec.encode(plain, self._residual(place, plain))
            self.traffic.encoded_bytes += sum(array.nbytes for array in encoded)
            self.traffic.raw_bytes += plain.nbytes
            arrays += encoded
        self.traffic.tensors += len(tensors)
        self.traffic.cpu_seconds += time.thread_time() - started
        return arrays

    def _residual(self, place: int, tensor: Tensor) -> Tensor | None:
        if not self.codec.keeps_residual:
            return None
        known = self._residuals.get(place)
        if known is None or known.shape != tensor.shape:
            known = self._residuals[place] = torch.zeros(tensor.shape)
        return known

    def forget(self) -> None:
        """Drop what was not sent; for a boundary whose other end has lost what it knew."""
        self._residuals.clear()


@dataclass
class Receiver:
    """Decodes what comes over one boundary in one direction.

    Args:
        codec: The codec that the sender encodes with.

    Attributes:
        traffic: Counts of what was decoded so far.
    """

    codec: Codec
    traffic: CodecTraffic = field(default_factory=CodecTraffic)

    def decode(self, arrays: Sequence[Tensor], expected: Sequence[ArraySpec]) -> list[Tensor]:
        """The tensors of a message.

        Args:
            arrays: What was received; the result may share their memory.
            expected: Dtype and shape of each tensor: known beforehand, or as the message says by :func:`specs`.

        Raises:
            FrameError: the arrays are not those of such tensors.
        """
        started = time.thread_time()
        rest, tensors = list(arrays), []
        for dtype, shape in expected:
            layout = self.codec.layout(shape) if dtype == torch.float32 else [(dtype, shape)]
            if len(rest) < len(layout):
                raise FrameError(f"{len(expected)} tensors in {self.codec.name} are more than {len(arrays)} arrays")
            own, rest = rest[: len(layout)], rest[len(layout) :]
            tensors.append(self._tensor(own, dtype, shape))
        if rest:
            raise FrameError(f"{len(expected)} tensors in {self.codec.name} are fewer than {len(arrays)} arrays")
        self.traffic.encoded_bytes += sum(array.nbytes for array in arrays)
        self.traffic.raw_bytes += sum(dtype.itemsize * math.prod(shape) for dtype, shape in expected)
        self.traffic.tensors += len(tensors)
        self.traffic.cpu_seconds += time.thread_time() - started
        return tensors

    def _tensor(self, arrays: list[Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if dtype == torch.float32:
            return self.codec.decode(arrays, shape)
        if arrays[0].dtype != dtype or tuple(arrays[0].shape) != shape:
            got = f"{arrays[0].dtype} of shape {list(arrays[0].shape)}"
            raise FrameError(f"a tensor of {dtype} of shape {list(shape)} travels as it is, got {got}")
        return arrays[0]
