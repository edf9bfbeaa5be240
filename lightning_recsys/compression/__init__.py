"""Codecs for tensors on the network: bfloat16, 8 bits with scales, the largest values with error feedback."""

from lightning_recsys.compression.bfloat16 import BFloat16
from lightning_recsys.compression.codec import Codec, FrameError
from lightning_recsys.compression.costs import COSTS
from lightning_recsys.compression.ends import CodecTraffic, Receiver, Sender, describe, specs
from lightning_recsys.compression.int8 import Int8
from lightning_recsys.compression.options import Compression, make_codec
from lightning_recsys.compression.top_k import TopK
from lightning_recsys.compression.uncompressed import Uncompressed

__all__ = [
    "COSTS",
    "BFloat16",
    "Codec",
    "CodecTraffic",
    "Compression",
    "FrameError",
    "Int8",
    "Receiver",
    "Sender",
    "TopK",
    "Uncompressed",
    "describe",
    "make_codec",
    "specs",
]
