"""What ``prepare.py schema`` made of each column, as a table."""

from __future__ import annotations

from recipe_tools.report import console
from rich.markup import escape
from rich.table import Table

from lightning_recsys.data import Schema


def show_guess(schema: Schema) -> None:
    """Print where each column of a guessed schema stands and why, and in how many rows of the sample it fits."""
    table = Table("column", "taken for", "rows with a value", "of these fit", "why", title_justify="left")
    for column, use in schema.uses():
        why = schema.comments.get("schema.label" if use == "label" else column, "")
        present, fitting = schema.present.get(column, 0), schema.fitting.get(column, 1)
        table.add_row(escape(column), use, f"{present:.1%}", f"{fitting:.1%}" if present else "", escape(why))
    console().print(table)
