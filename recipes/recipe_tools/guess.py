"""What ``prepare.py schema`` made of each column, as a table."""

from __future__ import annotations

from recipe_tools.report import console
from rich.markup import escape
from rich.table import Table

from lightning_recsys.data import Schema


def show_guess(schema: Schema) -> None:
    """Print where each column stands in a guessed schema, why, and in how many rows of the sample it has a value."""
    table = Table("column", "taken for", "rows with a value", "why", title_justify="left")
    for column, use in schema.uses():
        why = schema.comments.get("label" if use == "label" else column, "")
        table.add_row(escape(column), use, f"{schema.present.get(column, 0):.1%}", escape(why))
    console().print(table)
