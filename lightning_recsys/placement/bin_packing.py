"""Embedding tables to servers, by bin packing; a dense vector to servers, in even chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

PlacementMethod = Literal["round_robin", "size", "profiled"]


@dataclass(frozen=True)
class TableCost:
    """A table, and what it asks of a server.

    Args:
        collection: Name of the table's collection in the model.
        table: Name in the collection.
        num_rows: Rows.
        row_bytes: Bytes of a row with its optimizer state.
        cost: Measured cost of looking it up, in any unit that all tables share (seconds per batch, say); only
            ``profiled`` placement reads it.

    Raises:
        ValueError: no row, a row of no bytes, or a cost that is negative or not finite.
    """

    collection: str
    table: str
    num_rows: int
    row_bytes: int
    cost: float | None = None

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.row_bytes < 1:
            raise ValueError(f"table {self.table!r}: num_rows and row_bytes must be at least 1, got {self}.")
        if self.cost is not None and not 0 <= self.cost < math.inf:
            raise ValueError(f"table {self.table!r}: cost must be finite and at least 0, got {self.cost}.")


@dataclass(frozen=True)
class TablePart:
    """A stretch of a table's rows on one server; all of them, where the table is not cut.

    Args:
        collection: Name of the table's collection.
        table: Name in the collection.
        first_row: Where the stretch starts.
        num_rows: How long it is.
        server: Index of the server.
        num_bytes: Bytes of these rows with their optimizer state.
        cost: Its share of the table's cost, in the unit that the method balances.
    """

    collection: str
    table: str
    first_row: int
    num_rows: int
    server: int
    num_bytes: int
    cost: float


@dataclass(frozen=True)
class PlacementPlan:
    """Where every row of every table is. ``print`` shows it as a table.

    Args:
        method: How it was made.
        num_servers: Servers; some may have nothing.
        parts: In the order of the tables, and of the rows of each.
    """

    method: PlacementMethod
    num_servers: int
    parts: tuple[TablePart, ...]

    def parts_of(self, collection: str) -> tuple[TablePart, ...]:
        """The parts of one collection's tables."""
        return tuple(part for part in self.parts if part.collection == collection)

    @property
    def costs(self) -> list[float]:
        """Cost of each server."""
        return [sum(part.cost for part in self.parts if part.server == server) for server in range(self.num_servers)]

    @property
    def imbalance(self) -> float:
        """The largest server's cost over the mean: 1 is perfect."""
        mean = sum(self.costs) / self.num_servers
        return max(self.costs) / mean if mean else 1.0

    def to_plain(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers."""
        return asdict(self) | {"parts": [asdict(part) for part in self.parts]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PlacementPlan:
        """The reverse of :meth:`to_plain`."""
        parts = tuple(TablePart(**part) for part in plain["parts"])
        return cls(plain["method"], plain["num_servers"], parts)

    def __str__(self) -> str:
        total = sum(self.costs) or 1.0
        lines = [f"{'server':>6}  {'parts':>5}  {'rows':>14}  {'bytes':>18}  {'cost':>12}  {'share':>6}"]
        for server, cost in enumerate(self.costs):
            own = [part for part in self.parts if part.server == server]
            rows, size = sum(part.num_rows for part in own), sum(part.num_bytes for part in own)
            lines.append(f"{server:>6}  {len(own):>5}  {rows:>14,}  {size:>18,}  {cost:>12.6g}  {cost / total:>6.1%}")
        return "\n".join([*lines, f"placement={self.method}, imbalance (max / mean cost) {self.imbalance:.3f}"])


def place_tables(
    tables: Sequence[TableCost], num_servers: int, *, method: PlacementMethod = "profiled"
) -> PlacementPlan:
    r"""Spread tables over servers.

    ``round_robin`` deals whole tables in their order. ``size`` balances bytes and ``profiled`` measured costs: a table
    that asks for more than a server's fair share is cut by rows into equal parts that do not, then the largest part
    that is left goes to the server with the least so far (LPT). The busiest server then has at most
    :math:`\tfrac43 - \tfrac{1}{3m}` times what the best placement of the same parts on :math:`m` servers gives it.

    Raises:
        ValueError: no table, no server, an unknown method, a table twice, or ``profiled`` without costs.

    Reference: Graham 1969, "Bounds on multiprocessing timing anomalies", for LPT; ShadowSync, section 3.1, for
    profiling and packing.
    Differs from the paper: it does not say how it packs, or how a cut table's cost is shared (here: evenly over rows).

    >>> tables = [TableCost("emb", "a", 60, 4), TableCost("emb", "b", 30, 4), TableCost("emb", "c", 10, 4)]
    >>> print(place_tables(tables, 2, method="size"))
    server  parts            rows               bytes          cost   share
         0      2              60                 240           240   60.0%
         1      2              40                 160           160   40.0%
    placement=size, imbalance (max / mean cost) 1.200
    """
    _check(tables, num_servers, method)
    if method == "round_robin":
        placed = [
            _part(table, 0, table.num_rows, server=i % num_servers, cost=float(table.num_rows * table.row_bytes))
            for i, table in enumerate(tables)
        ]
        return PlacementPlan(method, num_servers, tuple(placed))
    weights = [_weight(table, method) for table in tables]
    fair_share = sum(weights) / num_servers
    parts: list[tuple[int, TablePart]] = []
    for i, (table, weight) in enumerate(zip(tables, weights, strict=True)):
        num_parts = math.ceil(weight / fair_share * (1 - 1e-9)) if fair_share else 1  # 1e-9: a share of exactly 1
        for first, stop in chunk_evenly(table.num_rows, max(num_parts, 1)):
            parts.append((i, _part(table, first, stop, server=0, cost=weight * (stop - first) / table.num_rows)))
    return PlacementPlan(method, num_servers, tuple(_merge(_longest_first(parts, num_servers))))


def chunk_evenly(size: int, num_chunks: int) -> list[tuple[int, int]]:
    """Cut ``0 .. size - 1`` into contiguous chunks whose lengths differ by one at most; none is empty.

    Returns:
        First element and the one after the last, of ``min(size, num_chunks)`` chunks.

    Raises:
        ValueError: a number is below 1.

    >>> chunk_evenly(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    if size < 1 or num_chunks < 1:
        raise ValueError(f"size and num_chunks must be at least 1, got {size} and {num_chunks}.")
    count = min(size, num_chunks)
    return list(pairwise(i * size // count for i in range(count + 1)))


def _check(tables: Sequence[TableCost], num_servers: int, method: str) -> None:
    if method not in get_args(PlacementMethod):
        raise ValueError(f"strategy.placement must be one of {list(get_args(PlacementMethod))}, got {method!r}.")
    if num_servers < 1 or not tables:
        raise ValueError(f"placement needs at least one table and one server, got {len(tables)} and {num_servers}.")
    names = [(table.collection, table.table) for table in tables]
    if len(set(names)) < len(names):
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        raise ValueError(f"a table may be placed once, got {twice} again.")
    unknown = [table.table for table in tables if table.cost is None]
    if method == "profiled" and unknown:
        raise ValueError(f"strategy.placement=profiled needs a measured cost of every table; {unknown} have none.")


def _weight(table: TableCost, method: PlacementMethod) -> float:
    if method == "size":
        return float(table.num_rows * table.row_bytes)
    assert table.cost is not None
    return table.cost


def _part(table: TableCost, first: int, stop: int, *, server: int, cost: float) -> TablePart:
    rows = stop - first
    return TablePart(table.collection, table.table, first, rows, server, rows * table.row_bytes, cost)


def _longest_first(parts: list[tuple[int, TablePart]], num_servers: int) -> list[TablePart]:
    """LPT; returns the parts in table and row order. Bytes break ties, for tables that cost nothing weigh something."""
    loads = [(0.0, 0, server) for server in range(num_servers)]
    placed = []
    for i, part in sorted(parts, key=lambda item: (-item[1].cost, -item[1].num_bytes)):
        cost, num_bytes, server = min(loads)
        loads[server] = (cost + part.cost, num_bytes + part.num_bytes, server)
        placed.append((i, part.first_row, TablePart(**asdict(part) | {"server": server})))
    return [part for _, _, part in sorted(placed, key=lambda item: item[:2])]


def _merge(parts: list[TablePart]) -> list[TablePart]:
    """Join stretches of a table that follow each other on one server: a cut there would cost and give nothing."""
    merged: list[TablePart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last and (last.collection, last.table, last.server) == (part.collection, part.table, part.server):
            joined = {name: getattr(last, name) + getattr(part, name) for name in ("num_rows", "num_bytes", "cost")}
            part = TablePart(**asdict(last) | joined)
            merged.pop()
        merged.append(part)
    return merged
