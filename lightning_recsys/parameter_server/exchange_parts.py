"""An exchange that is too large for one message, as several that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from lightning_recsys.parameter_server.wire import Limits
from lightning_recsys.stores.exchange import RowExchange, RowValues

_ROW_OVERHEAD = 24  # bytes of a row's number, of its clocks, its count and its bits, and some to spare


def cut_exchange(exchange: RowExchange, row_shapes: Mapping[str, tuple[int, ...]], limits: Limits) -> list[RowExchange]:
    """Parts that say the same one after the other, none of which is over a limit, nor its answer; one where it fits.

    Args:
        exchange: It.
        row_shapes: Shape of what one row has of ``weight`` and of each state.
        limits: Of a message.

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
