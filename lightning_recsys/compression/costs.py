"""What a codec costs in processor time, for whoever decides whether it pays."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from lightning_recsys.compression.codec import Codec


@dataclass(frozen=True)
class CodecCost:
    """Processor time for each megabyte (10**6 bytes) of float32, whatever it takes encoded.

    Args:
        encode_seconds_per_mb: What the sender takes to encode a megabyte.
        decode_seconds_per_mb: What the receiver takes to decode it.
    """

    encode_seconds_per_mb: float
    decode_seconds_per_mb: float

    def seconds(self, raw_bytes: float) -> float:
        """Of both ends together.

        >>> CodecCost(0.001, 0.002).seconds(2e6)
        0.006
        """
        return (self.encode_seconds_per_mb + self.decode_seconds_per_mb) * raw_bytes / 1e6


# Medians of 15, of 4 MB in rows of 512 on one thread of an AMD EPYC with AVX-512, by `measure_cost`. The default for
# plans; who plans for other machines measures there.
COSTS: dict[str, CodecCost] = {
    "none": CodecCost(0.0, 0.0),
    "bf16": CodecCost(5e-5, 4e-5),
    "int8": CodecCost(1.3e-4, 5e-5),
    "topk": CodecCost(1.4e-3, 8e-4),
}


def measure_cost(codec: Codec, *, rows: int = 2048, width: int = 512, repeats: int = 15) -> CodecCost:
    """The cost on this machine: the median over repeats, on the calling thread and torch's threads for operators.

    Args:
        codec: The codec to measure.
        rows: Rows of the tensor that is encoded, which has normally distributed values.
        width: Number of columns of that tensor.
        repeats: Number of measurements, of which the median is taken.
    """
    tensor = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    residual, shape = torch.zeros_like(tensor), (rows, width)
    arrays = codec.encode(tensor, residual)  # compiles, where there is something to
    codec.decode(arrays, shape)
    encoding, decoding = [], []
    for _ in range(repeats):
        start = time.process_time()
        arrays = codec.encode(tensor, residual)
        middle = time.process_time()
        codec.decode(arrays, shape)
        encoding.append(middle - start)
        decoding.append(time.process_time() - middle)
    megabytes = tensor.nbytes / 1e6
    return CodecCost(_median(encoding) / megabytes, _median(decoding) / megabytes)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
