"""The processor time of codecs, for plans, which decide whether compression pays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodecCost:
    """Processor time for each megabyte (10**6 bytes) of float32, whatever it takes encoded.

    Args:
        encode_seconds_per_mb: What the sender takes to encode a megabyte.
        decode_seconds_per_mb: What the receiver takes to decode it.
    """

    encode_seconds_per_mb: float
    decode_seconds_per_mb: float


# Measured: medians of 15, of 4 MB in rows of 512 on one thread of an AMD EPYC with AVX-512.
COSTS: dict[str, CodecCost] = {
    "none": CodecCost(0.0, 0.0),
    "bf16": CodecCost(5e-5, 4e-5),
    "int8": CodecCost(1.3e-4, 5e-5),
    "topk": CodecCost(1.4e-3, 8e-4),
}
