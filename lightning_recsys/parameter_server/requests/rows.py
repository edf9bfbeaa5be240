"""Requests to embedding stores: lookups, gradients, and whole runs of rows for checkpoints."""

# Shape suffixes: U distinct rows of a request, D embedding dim.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_recsys.compression import make_codec
from lightning_recsys.parameter_server.messages.wire import Request
from lightning_recsys.parameter_server.requests.checks import take_arguments, take_array, take_arrays, take_plain
from lightning_recsys.parameter_server.requests.operations import Operations, Push
from lightning_recsys.parameter_server.requests.served import ServedEmbedding
from lightning_recsys.parameter_server.requests.stores import OpenStores
from lightning_recsys.stores.checks import check_rate
from lightning_recsys.stores.interfaces import Rows
from lightning_recsys.stores.versions import check_versions

_UNCOMPRESSED = {"compression": "none"}
_DEFAULTS = {"versioned": False, **_UNCOMPRESSED}


class RowRequests:
    """The operations of every embedding store.

    Args:
        stores: The stores of the server.

    Attributes:
        operations: The operations that a client may ask for, by name.
    """

    def __init__(self, stores: OpenStores) -> None:
        self._stores = stores
        self.operations = Operations(
            reads={"lookup": self._lookup, "pooled_lookup": self._pooled_lookup, "read": self._read},
            pushes={
                "apply_gradients": self._apply_gradients,
                "apply_row_gradients": self._apply_row_gradients,
                "write": self._write,
                "set_step": self._set_step,
            },
        )

    def _lookup(self, request: Request) -> object:
        served = self._stores.embedding(request)
        (compression,) = take_arguments(request, _UNCOMPRESSED, compression=str)
        codec = make_codec(compression, "rows")
        (rows_U,) = take_arrays(request, ("rows", torch.int64, 1))
        self._stores.check_rows(served, rows_U)
        self._stores.check_reply(rows_U.numel() * served.dim)
        (values,) = codec.encode(served.store.lookup(rows_U))
        return values

    def _pooled_lookup(self, request: Request) -> object:
        served = self._stores.embedding(request)
        kinds = {"bags": bool, "weighted": bool, "versioned": bool, "compression": str}
        _, _, versioned, compression = take_arguments(request, _DEFAULTS, **kinds)
        codec = make_codec(compression, "rows")
        sparse, rest = served.sparse(request, self._stores.limits)
        if rest:
            raise ValueError(f"a pooled lookup takes ids, offsets and weights, got {len(rest)} more arrays")
        num_versions = sparse.values.numel() if versioned else 0
        self._stores.check_reply(sparse.batch_size * len(sparse.keys) * served.dim + 2 * num_versions)
        if not versioned:
            return codec.encode(served.store.pooled_lookup(sparse))[0]
        pooled_BFD, versions_N = served.store.begin_versioned_lookup(sparse)()
        return codec.encode(pooled_BFD)[0], versions_N

    def _apply_gradients(self, request: Request) -> Push:
        served = self._stores.embedding(request)
        kinds = {"bags": bool, "weighted": bool, "versioned": bool, "lr": float, "compression": str}
        _, _, versioned, lr, compression = take_arguments(request, _DEFAULTS, **kinds)
        sparse, rest = served.sparse(request, self._stores.limits)
        versions = self._versions(served, rest, sparse.values.numel()) if versioned else None
        grad_BFD = _gradients(rest, (sparse.batch_size, len(sparse.keys), served.dim), compression)
        check_rate(lr)
        return Push(*served.update(sparse, grad_BFD, lr=lr, versions=versions))

    def _apply_row_gradients(self, request: Request) -> Push:
        served = self._stores.embedding(request)
        kinds = {"versioned": bool, "lr": float, "compression": str}
        versioned, lr, compression = take_arguments(request, _DEFAULTS, **kinds)
        arrays = list(request.arrays)
        rows_U = take_array(arrays, "rows", torch.int64, 1)
        versions = self._versions(served, arrays, rows_U.numel()) if versioned else None
        self._stores.check_rows(served, rows_U)
        grads_UD = _gradients(arrays, (rows_U.numel(), served.dim), compression)
        check_rate(lr)
        apply = partial(served.store.apply_row_gradients, rows_U, grads_UD, lr=lr, versions=versions)
        return Push(apply, served.undo(rows_U))

    def _versions(self, served: ServedEmbedding, arrays: list[Tensor], size: int) -> Tensor:
        versions = take_array(arrays, "versions", torch.int64, 1)
        check_versions(served.store.normalization, versions, size)
        return versions

    def _read(self, request: Request) -> object:
        served = self._stores.embedding(request)
        name, rows, rest = self._named_rows(request, served)
        if rest:
            raise ValueError(f"read takes at most 1 array, got {len(request.arrays)}")
        size = rows.stop - rows.start if isinstance(rows, slice) else rows.numel()
        self._stores.check_reply(size * max(served.dim, 2))
        return served.store.read_rows(name, rows)

    def _write(self, request: Request) -> Push:
        served = self._stores.embedding(request)
        name, rows, rest = self._named_rows(request, served)
        if len(rest) != 1:
            raise ValueError("write takes one array of values")
        # No undo, here and for the step: the same values, written a second time, leave what the first time left.
        return Push(partial(served.store.write_rows, name, rows, rest[0]))

    def _named_rows(self, request: Request, served: ServedEmbedding) -> tuple[str, Rows, list[Tensor]]:
        """The name of what is read or written, of which rows, and the arrays behind these."""
        kinds: dict[str, Any] = {"array": str, "first_row": int, "num_rows": (int, type(None))}
        name, first, size = take_arguments(request, {"first_row": 0, "num_rows": None}, **kinds)
        arrays = list(request.arrays)
        if size is not None:
            return name, slice(first, first + size), arrays
        rows_U = take_array(arrays, "rows", torch.int64, 1)
        self._stores.check_rows(served, rows_U)
        return name, rows_U, arrays

    def _set_step(self, request: Request) -> Push:
        served = self._stores.embedding(request)
        (step,) = take_plain(request, step=int)
        if not 0 <= step < 2**62:
            raise ValueError(f"step must be in [0, 2**62), got {step}")
        return Push(partial(setattr, served.store, "step", step))


def _gradients(arrays: Sequence[Tensor], shape: tuple[int, ...], compression: str) -> Tensor:
    """The gradients that end a request, as float32."""
    codec = make_codec(compression, "rows")
    ((dtype, _),) = codec.layout(shape)
    if len(arrays) != 1 or arrays[0].dtype != dtype or tuple(arrays[0].shape) != shape:
        name = str(dtype).removeprefix("torch.")
        got = " and ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in arrays) or "none"
        raise ValueError(
            f"gradients, behind what names their rows, must be one {name} array of shape {list(shape)}, got {got}"
        )
    return codec.decode(arrays, shape)
