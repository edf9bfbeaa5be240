"""An exchange as the arrays of one request and of its reply.

The numbers of all its rows travel as one array, those of pushes first, then of checks, then of fetches, and so do the
clocks; numbers take 4 bytes where they fit. What is stale comes back as one bit for each check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.parameter_server.checks import take_arguments, take_array
from lightning_recsys.parameter_server.exchange import RowExchange, RowValues, row_dtype
from lightning_recsys.parameter_server.wire import Limits, Request

RowShapes = Mapping[str, tuple[int, ...]]


def pack_request(exchange: RowExchange, num_rows: int, row_shapes: RowShapes) -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments and arrays of the request for an exchange that was checked."""
    pushes = exchange.push_rows.numel()
    rows = torch.cat([exchange.push_rows, exchange.check_rows, exchange.fetch_rows]).to(row_dtype(num_rows))
    clocks = torch.cat([exchange.push_clocks, exchange.check_clocks])
    updates = [exchange.updates[name].detach().contiguous() for name in row_shapes] if pushes else []
    arguments = {
        "pushes": pushes,
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
    pushes, steps, clock, staleness = take_arguments(
        request, pushes=int, steps=int, clock=str, staleness=(int, type(None))
    )
    arrays = list(request.arrays)
    rows = take_array(arrays, "rows", row_dtype(num_rows), 1)
    clocks = take_array(arrays, "clocks", torch.int32, 1)
    if not 0 <= pushes <= clocks.numel() <= rows.numel() <= limits.rows:
        raise ValueError(
            f"pushes may not be more than clocks, clocks than rows, and rows than {limits.rows}; got {pushes} pushes, "
            f"{clocks.numel()} clocks and {rows.numel()} rows"
        )
    names = list(row_shapes) if pushes else []
    updates = {name: take_array(arrays, name, torch.float32, 1 + len(row_shapes[name])) for name in names}
    if arrays:
        raise ValueError(f"this exchange takes {2 + len(names)} arrays, got {len(request.arrays)}")
    push_rows, check_rows, fetch_rows = rows.long().tensor_split((pushes, clocks.numel()))
    push_clocks, check_clocks = clocks.tensor_split((pushes,))
    exchange = RowExchange(
        fetch_rows=fetch_rows,
        push_rows=push_rows,
        push_clocks=push_clocks,
        updates=updates,
        num_steps=steps,
        check_rows=check_rows,
        check_clocks=check_clocks,
        staleness=staleness,
        clock=clock,
    )
    exchange.check(num_rows, row_shapes)
    reply_bytes = fetch_rows.numel() * (4 + 4 * sum(torch.Size(shape).numel() for shape in row_shapes.values()))
    if reply_bytes > limits.message_bytes:
        raise ValueError(f"the reply would have {reply_bytes} bytes and may have {limits.message_bytes}: ask in parts")
    return exchange


def pack_reply(values: RowValues) -> list[Tensor]:
    """Arrays of the reply."""
    return [*values.values.values(), values.clocks, torch.from_numpy(np.packbits(values.stale.numpy()))]


def unpack_reply(arrays: list[Tensor], exchange: RowExchange, row_shapes: RowShapes) -> RowValues:
    """The reverse of :func:`pack_reply`, for the exchange that was sent."""
    *values, clocks, bits = arrays
    stale = np.unpackbits(bits.numpy(), count=exchange.check_rows.numel()).view(np.bool_)
    return RowValues(dict(zip(row_shapes, values, strict=True)), clocks, torch.from_numpy(stale))
