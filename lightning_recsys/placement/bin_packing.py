"""Embedding tables to servers, by bin packing; a dense vector to servers, in even chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.errors import NoRoomError

PlacementMethod = Literal["round_robin", "size", "profiled"]


def rows_in_stripe(num_rows: int, stripe: int, num_stripes: int) -> int:
    """The number of a table's rows in a stripe, to which every ``num_stripes``-th of them belongs.

    >>> [rows_in_stripe(2**64 - 1, stripe, 3) == (2**64 - 1) // 3 for stripe in range(3)]
    [True, True, True]
    """
    return (num_rows - stripe + num_stripes - 1) // num_stripes


@dataclass(frozen=True)
class TableCost:
    """A table, and what it asks of a server.

    Args:
        collection: Name of the table's collection in the model.
        table: Name in the collection.
        num_rows: Number of rows of the table.
        row_bytes: Bytes of a row with its optimizer state.
        cost: Measured cost of looking it up, in any unit that all tables share (seconds per batch, say); only
            ``profiled`` placement reads it.
        seen: Ids that some batches looked up, each as often as they did; int64. They tell ``profiled`` placement which
            share of the cost each stripe of the table has. Without them every row counts the same.
        grows: Rows are made as they are trained, so it is not known how much room they will take.

    Raises:
        ValueError: no row, a row of no bytes, or a cost that is negative or not finite.
    """

    collection: str
    table: str
    num_rows: int
    row_bytes: int
    cost: float | None = None
    seen: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    grows: bool = False

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.row_bytes < 1:
            raise ValueError(f"table {self.table!r}: num_rows and row_bytes must be at least 1, got {self}.")
        if self.cost is not None and not 0 <= self.cost < math.inf:
            raise ValueError(f"table {self.table!r}: cost must be finite and at least 0, got {self.cost}.")

    def share(self, stripe: int, num_stripes: int) -> float:
        """The part of the table's cost that a stripe has."""
        if self.seen is None or not self.seen.size:
            return rows_in_stripe(self.num_rows, stripe, num_stripes) / self.num_rows
        return float(np.count_nonzero(self.seen.view(np.uint64) % np.uint64(num_stripes) == stripe) / self.seen.size)


@dataclass(frozen=True)
class TablePart:
    """A stripe of a table's rows on one server; all of them, where the table is not cut.

    Stripe ``i`` of ``n`` has the rows ``i, i + n, i + 2 n, ...``, in this order. Vocabularies number frequent ids
    first: of stretches of rows, one would have nearly all lookups of the table. Here neighbours in frequency go to
    different stripes. (A hash of the row would spread them as well, and leave holes between the rows of a store.) Ids
    that share a factor with ``n``, and that nobody has hashed, fall into fewer stripes.

    Args:
        collection: Name of the table's collection.
        table: Name in the collection.
        num_rows: Number of rows of the stripe.
        server: Index of the server.
        num_bytes: Bytes of these rows with their optimizer state.
        cost: Its share of the table's cost, in the unit that the method balances.
        stripe: Which one it is, from 0 on.
        num_stripes: How many the table is cut into.
    """

    collection: str
    table: str
    num_rows: int
    server: int
    num_bytes: int = 0
    cost: float = 0.0
    stripe: int = 0
    num_stripes: int = 1


@dataclass(frozen=True)
class Room:
    """The room that a server has for rows.

    Args:
        place: Of the file system that its files are in. What several servers of one place have is one room.
        num_bytes: Bytes that are free there.
    """

    place: str
    num_bytes: int


@dataclass(frozen=True)
class PlacementPlan:
    """The place of every row of every table. ``print`` shows it as a table.

    Args:
        method: The method by which the plan was made.
        num_servers: Number of servers, some of which may have nothing.
        parts: All parts, in the order of the tables and of the stripes of each.
        unit: The unit in which ``cost`` counts.
    """

    method: PlacementMethod
    num_servers: int
    parts: tuple[TablePart, ...]
    unit: str = "bytes"

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

    def __str__(self) -> str:
        total = sum(self.costs) or 1.0
        lines = [f"{'server':>6}  {'parts':>5}  {'rows':>14}  {'bytes':>18}  {'cost':>12}  {'share':>6}"]
        for server, cost in enumerate(self.costs):
            own = [part for part in self.parts if part.server == server]
            rows, size = sum(part.num_rows for part in own), sum(part.num_bytes for part in own)
            lines.append(f"{server:>6}  {len(own):>5}  {rows:>14,}  {size:>18,}  {cost:>12.6g}  {cost / total:>6.1%}")
        end = f"table_placement={self.method}, imbalance (max / mean cost) {self.imbalance:.3f}; cost: {self.unit}"
        return "\n".join([*lines, end])


def place_tables(
    tables: Sequence[TableCost],
    num_servers: int,
    *,
    method: PlacementMethod = "profiled",
    rooms: Sequence[Room] | None = None,
    beside: PlacementPlan | None = None,
) -> PlacementPlan:
    r"""Spread tables over servers.

    ``round_robin`` deals whole tables in their order. ``size`` balances bytes and ``profiled`` measured costs: a table
    that asks for more than a server's fair share, or for more room than a server has, is cut into stripes of rows that
    do not, then the largest part that is
    left goes to the server with the least so far (LPT), among those that have room for it. The busiest server then has
    at most :math:`\tfrac43 - \tfrac{1}{3m}` times what the best placement of the same parts on :math:`m` servers gives
    it, as long as there is room.

    Args:
        tables: The tables to place, with their sizes and costs.
        num_servers: Number of servers.
        method: How to place them: ``round_robin``, ``size`` or ``profiled``.
        rooms: Room that each server has for rows; by default each has enough.
        beside: Where tables are already that are not to move, by the same method; the plan has these as well.

    Raises:
        NoRoomError: a table is larger than what all servers have, or a part of it than what any server has left.
        ValueError: no table, no server, an unknown method, a table twice, or ``profiled`` without costs.

    Reference: Graham 1969, "Bounds on multiprocessing timing anomalies", for LPT; ShadowSync, section 3.1, for
    profiling and packing.
    Differs from the paper: it does not say how it packs, or how a cut table's cost is shared (here: by the rows that
    batches looked up, or evenly over rows).

    >>> tables = [TableCost("emb", "a", 60, 4), TableCost("emb", "b", 30, 4), TableCost("emb", "c", 10, 4)]
    >>> print(place_tables(tables, 2, method="size"))
    server  parts            rows               bytes          cost   share
         0      2              60                 240           240   60.0%
         1      2              40                 160           160   40.0%
    table_placement=size, imbalance (max / mean cost) 1.200; cost: bytes
    """
    _check(tables, num_servers, method)
    free = _Free(rooms, num_servers)
    there = () if beside is None else beside.parts
    if method == "round_robin":
        placed = [_part(table, 0, 1, float(table.num_rows * table.row_bytes)) for table in tables]
        dealt = [
            free.take(table, part, [i % num_servers])
            for i, (table, part) in enumerate(zip(tables, placed, strict=True), start=len(there))
        ]
        return PlacementPlan(method, num_servers, (*there, *dealt))
    weights = [_weight(table, method) for table in tables]
    fair_share = (sum(weights) + sum(part.cost for part in there)) / num_servers
    parts: list[tuple[TableCost, TablePart]] = []
    for table, weight in zip(tables, weights, strict=True):
        num_parts = math.ceil(weight / fair_share * (1 - 1e-9)) if fair_share else 1  # 1e-9: a share of exactly 1
        num_parts = min(max(num_parts, free.fewest_parts(table)), table.num_rows)
        shares = [table.share(i, num_parts) if method == "profiled" else None for i in range(num_parts)]
        parts += [(table, _part(table, i, num_parts, weight, share)) for i, share in enumerate(shares)]
    placed = _merge(_longest_first(parts, free, there))
    return PlacementPlan(method, num_servers, (*there, *placed), _unit(tables, method))


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
        raise ValueError(f"strategy.table_placement must be one of {list(get_args(PlacementMethod))}, got {method!r}.")
    if num_servers < 1 or not tables:
        raise ValueError(f"placement needs at least one table and one server, got {len(tables)} and {num_servers}.")
    names = [(table.collection, table.table) for table in tables]
    if len(set(names)) < len(names):
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        raise ValueError(f"a table may be placed once, got {twice} again.")
    unknown = [table.table for table in tables if table.cost is None]
    if method == "profiled" and unknown:
        raise ValueError(
            f"strategy.table_placement=profiled needs a measured cost of every table; {unknown} have none."
        )


def _weight(table: TableCost, method: PlacementMethod) -> float:
    if method == "size":
        return float(table.num_rows * table.row_bytes)
    assert table.cost is not None
    return table.cost


def _unit(tables: Sequence[TableCost], method: PlacementMethod) -> str:
    if method == "size":
        return "bytes"
    looked_up = sum(0 if table.seen is None else table.seen.size for table in tables)
    return f"measured, by the rows of {looked_up:,} lookups" if looked_up else "measured, evenly over rows"


def _part(table: TableCost, stripe: int, num_stripes: int, cost: float, share: float | None = None) -> TablePart:
    rows = rows_in_stripe(table.num_rows, stripe, num_stripes)
    own_cost = cost * (rows / table.num_rows if share is None else share)
    return TablePart(
        table.collection, table.table, rows, 0, rows * table.row_bytes, own_cost, stripe=stripe, num_stripes=num_stripes
    )


class _Free:
    """The room that servers have left while parts are placed.

    Args:
        rooms: Room of each server; ``None`` if there is enough.
        num_servers: Number of servers.
    """

    def __init__(self, rooms: Sequence[Room] | None, num_servers: int) -> None:
        if rooms is not None and len(rooms) != num_servers:
            raise ValueError(f"there must be one room for each of {num_servers} servers, got {rooms}.")
        self.servers = range(num_servers)
        self._places = [str(server) if rooms is None else rooms[server].place for server in self.servers]
        self._rooms = {} if rooms is None else {room.place: room.num_bytes for room in rooms}
        self._free: dict[str, float] = dict(self._rooms)

    def fewest_parts(self, table: TableCost) -> int:
        """In how many parts a table must be cut for one to fit into a server's share of what there is.

        Raises:
            NoRoomError: it does not fit however it is cut, which would take as many parts as it has rows.
        """
        if not self._rooms or table.grows:
            return 1
        needed, rooms = table.num_rows * table.row_bytes, self._rooms.values()
        if needed > sum(rooms) or table.row_bytes > max(rooms):
            raise self._no_room(table, needed, self.servers)
        largest = max(size // self._places.count(place) for place, size in self._rooms.items())
        return -(-needed // max(largest, 1))

    def take(self, table: TableCost, part: TablePart, servers: Sequence[int]) -> TablePart:
        """The part on the first of these servers that has room for it."""
        needed = 0 if table.grows else part.num_bytes
        for server in servers:
            place = self._places[server]
            left = self._free.get(place, math.inf)
            if needed <= left:
                self._free[place] = left - needed
                return replace(part, server=server)
        raise self._no_room(table, needed, servers)

    def _no_room(self, table: TableCost, needed: int, servers: Sequence[int]) -> NoRoomError:
        available = {server: self._rooms[self._places[server]] for server in servers}
        remaining = {server: int(self._free[self._places[server]]) for server in servers}
        return NoRoomError(f"{table.collection}.{table.table}", needed, remaining, available)


def _longest_first(
    parts: list[tuple[TableCost, TablePart]], free: _Free, there: Sequence[TablePart]
) -> list[TablePart]:
    """LPT; returns the parts in their order. Bytes break ties, for tables that cost nothing weigh something."""
    loads = {server: (0.0, 0, server) for server in free.servers}
    for part in there:
        cost, num_bytes, server = loads[part.server]
        loads[part.server] = (cost + part.cost, num_bytes + part.num_bytes, server)
    placed: list[tuple[int, TablePart]] = []
    for i, (table, part) in sorted(enumerate(parts), key=lambda item: (-item[1][1].cost, -item[1][1].num_bytes)):
        own = free.take(table, part, sorted(free.servers, key=loads.__getitem__))
        cost, num_bytes, server = loads[own.server]
        loads[server] = (cost + own.cost, num_bytes + own.num_bytes, server)
        placed.append((i, own))
    return [part for _, part in sorted(placed, key=lambda item: item[0])]


def _merge(parts: list[TablePart]) -> list[TablePart]:
    """Join the stripes of a table that are all on one server: a cut there would cost and give nothing."""
    merged: list[TablePart] = []
    for _, stripes in groupby(parts, key=lambda part: (part.collection, part.table)):
        same = list(stripes)
        if len({part.server for part in same}) > 1:
            merged += same
            continue
        sums = {name: sum(getattr(part, name) for part in same) for name in ("num_rows", "num_bytes", "cost")}
        merged.append(replace(same[0], **sums, stripe=0, num_stripes=1))
    return merged
