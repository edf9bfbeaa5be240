"""An exchange as the arrays of one request and of its reply; several requests where one would be too large.

The numbers of all its rows travel as one array, those of pushes first, then of checks, then of fetches, and so do the
clocks, of pushes, of checks, then the counts of pushes; numbers take 4 bytes where they fit. What is stale comes back
as one bit for each check. Weights and their updates travel by the codec of the store's connection, states as float32:
what a rule has summed up may not lose what is small beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_recsys.compression import Codec, make_codec
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.parameter_server.messages.wire import Limits, Request
from lightning_recsys.parameter_server.requests.checks import take_arguments, take_array
from lightning_recsys.stores.exchange import RowExchange, RowValues, row_dtype

RowShapes = Mapping[str, tuple[int, ...]]
_ROW_OVERHEAD = 24  # bytes of a row's number, of its clocks, its count and its bits, and some to spare


def pack_request(
    exchange: RowExchange, num_rows: int, row_shapes: RowShapes, codec: Codec
) -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments and arrays of the request for an exchange that was checked."""
    pushes = exchange.push_rows.numel()
    rows = _joined(exchange.push_rows, exchange.check_rows, exchange.fetch_rows).to(row_dtype(num_rows))
    clocks = _joined(exchange.push_clocks, exchange.check_clocks, exchange.push_counts)
    of_pushes = (exchange.updates, exchange.copies) if exchange.copies else (exchange.updates,)
    updates = [x for arrays in of_pushes for x in _pack_rows(arrays, row_shapes, codec)] if pushes else []
    arguments = {
        "pushes": pushes,
        "counted": exchange.push_counts.numel() > 0,
        "copied": bool(exchange.copies),
        "steps": exchange.num_steps,
        "clock": exchange.clock,
        "staleness": exchange.staleness,
        "compression": codec.name,
    }
    return arguments, [rows, clocks, *updates]


def unpack_request(request: Request, num_rows: int, row_shapes: RowShapes, limits: Limits) -> tuple[RowExchange, Codec]:
    """The exchange that a request asks for, checked, and how rows travel.

    Raises:
        ValueError: it is none for this store, or is over a limit.
        IndexError: a row is not in the store.
    """
    pushes, counted, copied, steps, clock, staleness, compression = take_arguments(
        request,
        {"compression": "none"},
        pushes=int,
        counted=bool,
        copied=bool,
        steps=int,
        clock=str,
        staleness=(int, type(None)),
        compression=str,
    )
    codec = make_codec(compression, "rows")
    arrays = list(request.arrays)
    rows = take_array(arrays, "rows", row_dtype(num_rows), 1)
    clocks = take_array(arrays, "clocks", torch.int32, 1)
    named = clocks.numel() - (pushes if counted else 0)  # pushed and checked rows
    if not (0 <= pushes <= named <= rows.numel() <= limits.rows):
        raise ValueError(
            "pushes may not be more than clocks of pushes and checks, these than rows, and rows than "
            f"{limits.rows}; got {pushes} pushes, {clocks.numel()} clocks and {rows.numel()} rows"
        )
    updates = _take_rows(arrays, row_shapes, codec) if pushes else {}
    copies = _take_rows(arrays, row_shapes, codec) if pushes and copied else {}
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
    return exchange, codec


def codec_of_rows(layout: TableLayout, codec: Codec) -> Codec:
    """How rows travel to those who look them up: those of bfloat16 in its two bytes, others by a connection's codec.

    Of a bag of several rows it is the sum that travels, rounded to the nearest bfloat16.

    Args:
        layout: The store's tables, whose dtype decides.
        codec: The connection's, by which gradients and updates travel in any case.
    """
    return make_codec("bf16", "rows") if layout.dtype == torch.bfloat16 else codec


def _pack_rows(values: Mapping[str, Tensor], row_shapes: RowShapes, codec: Codec) -> list[Tensor]:
    packed = {name: values[name].detach().contiguous() for name in row_shapes}
    if codec.changes_values:
        (packed["weight"],) = codec.encode(packed["weight"])
    return list(packed.values())


def _take_rows(arrays: list[Tensor], row_shapes: RowShapes, codec: Codec) -> dict[str, Tensor]:
    taken = {}
    for name, shape in row_shapes.items():
        ((dtype, _),) = codec.layout(shape) if name == "weight" else [(torch.float32, shape)]
        array = take_array(arrays, name, dtype, 1 + len(shape))
        taken[name] = codec.decode([array], tuple(array.shape)) if name == "weight" else array
    return taken


def pack_reply(values: RowValues, row_shapes: RowShapes, codec: Codec) -> list[Tensor]:
    """Arrays of the reply."""
    bits = np.packbits(values.stale.numpy())
    return [*_pack_rows(values.values, row_shapes, codec), values.clocks, torch.from_numpy(bits)]


def unpack_reply(arrays: list[Tensor], exchange: RowExchange, row_shapes: RowShapes, codec: Codec) -> RowValues:
    """The reverse of :func:`pack_reply`, for the exchange that was sent."""
    *rest, clocks, bits = arrays
    values = _take_rows(rest, row_shapes, codec) if codec.changes_values else dict(zip(row_shapes, rest, strict=True))
    stale = np.unpackbits(bits.numpy(), count=exchange.check_rows.numel()).view(np.bool_)
    return RowValues(values, clocks, torch.from_numpy(stale))


def cut_exchange(exchange: RowExchange, row_shapes: RowShapes, limits: Limits) -> list[RowExchange]:
    """Parts that say the same one after the other, none of which is over a limit, nor its answer; one where it fits.

    Args:
        exchange: What the message carries: updates, keys to fetch and clocks to check.
        row_shapes: Shape of what one row has of ``weight`` and of each state.
        limits: What one message, and its reply, may take.

    >>> rows = torch.arange(5)
    >>> exchange = RowExchange(fetch_rows=rows, check_rows=rows, check_clocks=rows.int())
    >>> parts = cut_exchange(exchange, {"weight": (2,)}, Limits(message_bytes=100))
    >>> [(part.fetch_rows.tolist(), part.check_rows.tolist()) for part in parts]
    [([0, 1, 2], []), ([3, 4], [0]), ([], [1, 2, 3]), ([], [4])]
    """
    arrays = 2 if exchange.copies else 1  # of what a row has, one behind the other
    row_bytes = _ROW_OVERHEAD + 4 * arrays * sum(torch.Size(shape).numel() for shape in row_shapes.values())
    size = max(min(limits.message_bytes // row_bytes, limits.rows), 1)
    pushed, fetched, checked = (x.numel() for x in (exchange.push_rows, exchange.fetch_rows, exchange.check_rows))
    if pushed + fetched + checked <= size:
        return [exchange]
    parts = []
    for first in range(0, pushed + fetched + checked, size):
        pushes, fetches, checks = (
            slice(max(first - start, 0), max(first + size - start, 0)) for start in (0, pushed, pushed + fetched)
        )
        parts.append(
            replace(
                exchange,
                push_rows=exchange.push_rows[pushes],
                push_clocks=exchange.push_clocks[pushes],
                updates={name: values[pushes] for name, values in exchange.updates.items() if first < pushed},
                push_counts=exchange.push_counts[pushes],
                copies={name: values[pushes] for name, values in exchange.copies.items() if first < pushed},
                num_steps=0 if first else exchange.num_steps,
                fetch_rows=exchange.fetch_rows[fetches],
                check_rows=exchange.check_rows[checks],
                check_clocks=exchange.check_clocks[checks],
            )
        )
    return parts


def join_answers(answers: Sequence[RowValues]) -> RowValues:
    """The answer to an exchange from those to its parts."""
    return RowValues(
        {name: torch.cat([answer.values[name] for answer in answers]) for name in answers[0].values},
        torch.cat([answer.clocks for answer in answers]),
        torch.cat([answer.stale for answer in answers]),
    )


def _joined(*arrays: Tensor) -> Tensor:
    """``torch.cat``, in half the time where there is little to join."""
    return torch.from_numpy(np.concatenate([array.numpy() for array in arrays]))
