"""An exchange as the arrays of one request and of its reply.

The numbers of all its rows travel as one array, those of pushes first, then of checks, then of fetches, and so do the
clocks, of pushes, of checks, then the counts of pushes; numbers take 4 bytes where they fit. What is stale comes back
as one bit for each check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.parameter_server.requests.checks import take_arguments, take_array
from lightning_recsys.parameter_server.wire import Limits, Request
from lightning_recsys.stores.exchange import RowExchange, RowValues, row_dtype

RowShapes = Mapping[str, tuple[int, ...]]


def pack_request(exchange: RowExchange, num_rows: int, row_shapes: RowShapes) -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments and arrays of the request for an exchange that was checked."""
    pushes = exchange.push_rows.numel()
    rows = _joined(exchange.push_rows, exchange.check_rows, exchange.fetch_rows).to(row_dtype(num_rows))
    clocks = _joined(exchange.push_clocks, exchange.check_clocks, exchange.push_counts)
    of_pushes = (exchange.updates, exchange.copies) if exchange.copies else (exchange.updates,)
    updates = [arrays[name].detach().contiguous() for arrays in of_pushes for name in row_shapes] if pushes else []
    arguments = {
        "pushes": pushes,
        "counted": exchange.push_counts.numel() > 0,
        "copied": bool(exchange.copies),
        "steps": exchange.num_steps,
        "clock": exchange.clock,
        "staleness": exchange.staleness,
    }
    return arguments, [rows, clocks, *updates]


def unpack_request(request: Request, num_rows: int, row_shapes: RowShapes, limits: Limits) -> RowExchange:
    """The exchange that a request asks for, checked.

    Raises:
        ValueError: it is none for this store, or is over a limit.
        IndexError: a row is not in the store.
    """
    pushes, counted, copied, steps, clock, staleness = take_arguments(
        request,
        pushes=int,
        counted=bool,
        copied=bool,
        steps=int,
        clock=str,
        staleness=(int, type(None)),
    )
    arrays = list(request.arrays)
    rows = take_array(arrays, "rows", row_dtype(num_rows), 1)
    clocks = take_array(arrays, "clocks", torch.int32, 1)
    named = clocks.numel() - (pushes if counted else 0)  # pushed and checked rows
    if not (0 <= pushes <= named <= rows.numel() <= limits.rows):
        raise ValueError(
            "pushes may not be more than clocks of pushes and checks, these than rows, and rows than "
            f"{limits.rows}; got {pushes} pushes, {clocks.numel()} clocks and {rows.numel()} rows"
        )
    updates = _take_rows(arrays, row_shapes) if pushes else {}
    copies = _take_rows(arrays, row_shapes) if pushes and copied else {}
    if arrays:
        expected = 2 + len(updates) + len(copies)
        raise ValueError(f"this exchange takes {expected} arrays, got {len(request.arrays)}")
    push_rows, check_rows, fetch_rows = rows.long().tensor_split((pushes, named))
    push_clocks, check_clocks, push_counts = clocks.tensor_split((pushes, named))
    exchange = RowExchange(
        fetch_rows=fetch_rows,
        push_rows=push_rows,
        push_clocks=push_clocks,
        updates=updates,
        push_counts=push_counts,
        copies=copies,
        num_steps=steps,
        check_rows=check_rows,
        check_clocks=check_clocks,
        staleness=staleness,
        clock=clock,
    )
    exchange.check(num_rows, row_shapes)
    row_bytes = 4 + 4 * sum(map(math.prod, row_shapes.values()))
    reply_bytes = fetch_rows.numel() * row_bytes
    if reply_bytes > limits.message_bytes:
        raise ValueError(f"the reply would have {reply_bytes} bytes and may have {limits.message_bytes}: ask in parts")
    return exchange


def _take_rows(arrays: list[Tensor], row_shapes: RowShapes) -> dict[str, Tensor]:
    return {name: take_array(arrays, name, torch.float32, 1 + len(shape)) for name, shape in row_shapes.items()}


def pack_reply(values: RowValues) -> list[Tensor]:
    """Arrays of the reply."""
    bits = np.packbits(values.stale.numpy())
    return [*values.values.values(), values.clocks, torch.from_numpy(bits)]


def unpack_reply(arrays: list[Tensor], exchange: RowExchange, row_shapes: RowShapes) -> RowValues:
    """The reverse of :func:`pack_reply`, for the exchange that was sent."""
    *values, clocks, bits = arrays
    stale = np.unpackbits(bits.numpy(), count=exchange.check_rows.numel()).view(np.bool_)
    return RowValues(dict(zip(row_shapes, values, strict=True)), clocks, torch.from_numpy(stale))


def _joined(*arrays: Tensor) -> Tensor:
    """``torch.cat``, in half the time where there is little to join."""
    return torch.from_numpy(np.concatenate([array.numpy() for array in arrays]))
