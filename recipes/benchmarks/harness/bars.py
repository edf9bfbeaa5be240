"""What a measurement is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table


@dataclass(frozen=True)
class Bar:
    """A value and the limit that it must keep.

    Args:
        name: What was measured.
        value: ``None`` where it could not be measured here; infinite where what it counts steps to never came.
        side: Of the limit on which the value must be.
        limit: The bar.
        unit: Of both.
        standard_error: Of the value, where it is known.
    """

    name: str
    value: float | None
    side: Literal["at least", "at most"]
    limit: float
    unit: str = ""
    standard_error: float | None = None

    @property
    def verdict(self) -> str:
        """``pass``, ``FAIL`` or ``not measured``."""
        if self.value is None:
            return "not measured"
        return "pass" if (self.value >= self.limit if self.side == "at least" else self.value <= self.limit) else "FAIL"


@dataclass(frozen=True)
class Bars:
    """All bars of a suite, as one of its results."""

    bars: tuple[Bar, ...]

    def table(self) -> Table:
        """One line for each."""
        table = Table("bar", "value", "limit", "", title="bars", title_justify="left")
        for bar in self.bars:
            error = "" if bar.standard_error is None else f" ± {_digits(bar.standard_error)}"
            value = "" if bar.value is None else f"{_digits(bar.value)}{error}{bar.unit}"
            table.add_row(bar.name, value, f"{bar.side} {_digits(bar.limit)}{bar.unit}", bar.verdict)
        return table

    def to_dict(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "bars": [
                {
                    "name": bar.name,
                    # JSON has no infinity; the verdict tells it from what was not measured.
                    "value": None if bar.value is None or math.isinf(bar.value) else round(bar.value, 4),
                    **({} if bar.standard_error is None else {"standard_error": round(bar.standard_error, 4)}),
                    bar.side.replace(" ", "_"): bar.limit,
                    "unit": bar.unit.strip(),
                    "verdict": bar.verdict,
                }
                for bar in self.bars
            ]
        }


def _digits(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"
