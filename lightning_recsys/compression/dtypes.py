"""The dtypes of tensors that travel, by short names: all those that NumPy has, and bfloat16."""

from __future__ import annotations

import torch

DTYPES = {
    "f4": torch.float32,
    "f8": torch.float64,
    "f2": torch.float16,
    "b2": torch.bfloat16,
    "c8": torch.complex64,
    "c16": torch.complex128,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
    "b1": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
