"""What to try: with a guessed schema first, and after a run that cannot be good."""

from __future__ import annotations

from collections.abc import Iterator

from recipe_tools.epochs import LEAST_STEPS
from recipe_tools.record import RunRecord
from recipe_tools.report import console
from rich.markup import escape
from rich.table import Table

from lightning_recsys.data import Schema

FEW_STEPS = 50  # of which a run with more nearly always learns more
UNSEEN = 0.9  # share of unknown ids from which on a column tells next to nothing
SMALLEST_BATCH, USUAL_BATCH = 32, 2048


def show_guess(schema: Schema) -> None:
    """Print where each column of a guessed schema stands and why, and in how many rows of the sample it fits."""
    table = Table("column", "taken for", "rows with a value", "of these fit", "why", title_justify="left")
    for column, use in schema.uses():
        why = schema.comments.get("schema.label" if use == "label" else column, "")
        present, fitting = schema.present.get(column, 0), schema.fitting.get(column, 1)
        table.add_row(escape(column), use, f"{present:.1%}", f"{fitting:.1%}" if present else "", escape(why))
    console().print(table)


def first_run(training_rows: float) -> list[str]:
    """The overrides of a run of 200 steps at least; none where the usual batch in one epoch makes as many.

    The batch is smaller else, down to 32 rows, and the validation rows say after how many epochs it ends.

    >>> first_run(1e6), first_run(26_000), first_run(800)
    ([], ['data.batch_size=128', 'trainer.max_epochs=auto'], ['data.batch_size=32', 'trainer.max_epochs=auto'])
    """
    batch_size = USUAL_BATCH
    while batch_size > SMALLEST_BATCH and training_rows < LEAST_STEPS * batch_size:
        batch_size //= 2
    return [f"data.batch_size={batch_size}", "trainer.max_epochs=auto"] if batch_size < USUAL_BATCH else []


def print_advice(record: RunRecord, *, training_rows: int) -> None:
    """Print a sentence on each thing that keeps a run from being good, with what to try.

    Args:
        record: The results of the run.
        training_rows: Number of rows that an epoch has.
    """
    for sentence in advice(record, training_rows=training_rows):
        console().print(sentence, markup=False, highlight=False, soft_wrap=True)


def advice(record: RunRecord, *, training_rows: int) -> Iterator[str]:
    """The sentences of :func:`print_advice`."""
    metrics, steps = record.metrics, record.details["steps"]
    if steps < FEW_STEPS:
        overrides = " ".join(first_run(training_rows)) or "a larger trainer.max_epochs"
        made = "1 step" if steps == 1 else f"{steps} steps"
        yield f"The run made {made}, and more of them would teach it more. Try {overrides}."
    if (ne := metrics.get("test/ne", 0)) > 1:
        yield (
            f"The NE is {ne:.4f}: above 1, the share of positives predicts the test rows better than the model. "
            + _cure(train_ne=metrics.get("train/ne", ne), few_steps=steps < FEW_STEPS)
        )
    for column, share in record.details["unknown_ids"].get("test", {}).items():
        if share >= UNSEEN:
            yield (
                f"{column}: {share:.0%} of the test rows' ids are unknown to training, so it tells next to nothing "
                "about them. Try the schema without it, or with columns that say what its ids have in common."
            )


def _cure(*, train_ne: float, few_steps: bool) -> str:
    """What to try where the NE is above 1."""
    if few_steps:
        return "More steps come first."
    if train_ne < 1:
        return (
            f"On the training rows it is {train_ne:.4f}, so the model knows them by heart. Try fewer epochs, a smaller "
            "model.embedding_dim, or a min_count for ids in the schema."
        )
    return "Try lower learning rates, such as optim.dense.lr, and see whether a number of the schema is an id."
