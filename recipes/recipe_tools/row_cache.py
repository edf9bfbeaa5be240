"""What ``prepare.py cache`` shows and clears: the rows that ``data=tabular`` has prepared."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime

from recipe_tools.command import command
from recipe_tools.report import console
from rich.markup import escape
from rich.table import Table

from lightning_recsys.data.frames import FRAMES, frame_files, remove_frames
from lightning_recsys.data.preparation.cache import RowCache

_PREPARING_SECONDS = 3600.0  # since a table was given; its rows may be still to be prepared


def show_cache(arguments: Sequence[str]) -> None:
    """List the entries of the cache, or remove those that no process uses."""
    parser = argparse.ArgumentParser(
        prog=f"{command('prepare')} cache", description="Lists the rows that data=tabular has prepared, last used last."
    )
    parser.add_argument("--folder", help="the cache, as data.cache names it; else the usual one")
    parser.add_argument("--clear", action="store_true", help="remove what no process uses")
    given = parser.parse_args(arguments)
    cache = RowCache(given.folder)
    removed = [entry.bytes for entry in cache.shrink(0)] if given.clear else []
    output, entries, frames = console(), cache.entries(), cache.folder / FRAMES
    if given.clear:
        used = {path for entry in entries for path in entry.files}
        copies = remove_frames(frames, unused_seconds=_PREPARING_SECONDS, keep=used)
        what = f"removed {len(removed)} entries and {len(copies)} copies of tables, {sum([*removed, *copies]):,} bytes"
        output.print(f"{escape(str(cache.folder))}: {what}.", soft_wrap=True)
    if tables := frame_files(frames):
        what = f"{len(tables)} copies of tables that from_frame was given, {sum(tables.values()):,} bytes"
        output.print(f"{escape(str(frames))}: {what}.", soft_wrap=True)
    if not entries:
        if not tables:
            output.print(f"{escape(str(cache.folder))} is empty.", soft_wrap=True)
        return
    table = Table("rows", "bytes", "last used", "", "made from", title=escape(str(cache.folder)), title_justify="left")
    for entry in entries:
        state = "in use" if entry.in_use else "" if entry.rows is not None else "unfinished"
        rows = "" if entry.rows is None else f"{entry.rows:,}"
        used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        table.add_row(rows, f"{entry.bytes:,}", used, state, escape(", ".join(entry.files)))
    output.print(table)
