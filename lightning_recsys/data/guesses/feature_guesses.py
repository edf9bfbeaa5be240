"""The features of a table without clicks, as one of nodes is: by the values of each column alone."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_recsys.data.guesses.column_guesses import MISSING, Guess, Sample, guess_column
from lightning_recsys.data.guesses.sniffing import sniff
from lightning_recsys.data.tables.schema import FEATURES
from lightning_recsys.data.tables.schema_parts import TableFormat

_ROWS = 20_000  # that a guess looks at: each column by itself needs no more

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuessedFeatures:
    """The features that the columns of a table could be.

    Args:
        table: How its file is written.
        features: The features by kind and name, as :class:`~lightning_recsys.data.tables.schema.Schema` has them.
        reasons: By column why it was taken for that, or left out.
    """

    table: TableFormat
    features: Mapping[str, Mapping[str, Any]]
    reasons: Mapping[str, str]


def guess_features(path: Path, *, known: Collection[str], told: str = "") -> GuessedFeatures:
    """Guess the features of a table from a sample of its rows, and log them in a line.

    Args:
        path: The first of the table's files, of any format that a schema reads.
        known: Columns that are no features: ids, labels, times.
        told: What the line calls the table.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, or no table.
    """
    sniffed = sniff(path, _ROWS)
    columns = {name: column for name, column in sniffed.columns.items() if name not in known}
    there = {word for column in columns.values() for word in set(MISSING).intersection(column)}
    samples = {name: Sample(name, column, sniffed.kinds.get(name)) for name, column in columns.items()}
    guesses = {name: guess_column(sample) for name, sample in samples.items()}
    features: dict[str, dict[str, Any]] = {key: {} for key in FEATURES}
    for name, guess in guesses.items():
        if guess.key in features:
            features[guess.key][name] = guess.options
    strays = [word for name, guess in guesses.items() if guess.key == "dense" for word in samples[name].strays]
    missing = tuple(dict.fromkeys(["", *(word for word in MISSING if word in there), *strays]))
    rank_zero_only(log.info)("%s: %s", f"{told} {path.name}".strip(), _told(guesses))
    reasons = {name: guess.reason for name, guess in guesses.items()}
    return GuessedFeatures(replace(sniffed.table, missing=missing), features, reasons)


def _told(guesses: Mapping[str, Guess]) -> str:
    parts = []
    for key in FEATURES:
        if names := [name for name, guess in guesses.items() if guess.key == key]:
            parts.append(f"{key} {', '.join(names)}")
    left_out = [f"{name} ({guess.reason})" for name, guess in guesses.items() if guess.key not in FEATURES]
    parts += [f"left out {', '.join(left_out)}"] if left_out else []
    return "; ".join(parts) or "no column is a feature"
