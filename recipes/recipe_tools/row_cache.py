"""What ``prepare.py cache`` shows and clears: the rows that ``data=tabular`` has prepared."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime

from recipe_tools.report import console
from rich.markup import escape
from rich.table import Table

from lightning_recsys.data.preparation.cache import RowCache


def show_cache(arguments: Sequence[str]) -> None:
    """List the entries of the cache, or remove those that no process uses."""
    parser = argparse.ArgumentParser(
        prog="prepare.py cache", description="Lists the rows that data=tabular has prepared, last used last."
    )
    parser.add_argument("--folder", help="the cache, as data.cache names it; else the usual one")
    parser.add_argument("--clear", action="store_true", help="remove all that no process uses")
    given = parser.parse_args(arguments)
    cache = RowCache(given.folder)
    removed = cache.shrink(0) if given.clear else []
    output, entries = console(), cache.entries()
    if given.clear:
        freed = sum(entry.bytes for entry in removed)
        output.print(f"{escape(str(cache.folder))}: removed {len(removed)} entries, {freed:,} bytes.", soft_wrap=True)
    if not entries:
        output.print(f"{escape(str(cache.folder))} is empty.", soft_wrap=True)
        return
    table = Table("rows", "bytes", "last used", "", "made from", title=escape(str(cache.folder)), title_justify="left")
    for entry in entries:
        state = "in use" if entry.in_use else "" if entry.rows is not None else "unfinished"
        rows = "" if entry.rows is None else f"{entry.rows:,}"
        used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        table.add_row(rows, f"{entry.bytes:,}", used, state, escape(", ".join(entry.files)))
    output.print(table)
