"""Suite ``simulation``: a virtual cluster beside the real one, and the speed at which thousands of workers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.parts import measure_parts
from benchmarks.harness.report import Result
from benchmarks.suites.simulation import speed as of_speed
from benchmarks.suites.simulation import twins as of_twins

Part = Literal["twins", "speed"]


def run(
    *, parts: Sequence[Part], twins: Mapping[str, Any], speed: Mapping[str, Any], cache: str, data: str
) -> list[Result]:
    """Measure the parts that are asked for; see ``conf/suite/simulation.yaml`` for the arguments."""
    return measure_parts(
        parts,
        {
            "twins": lambda: of_twins.measure(**twins, cache=Path(cache), root=data),
            "speed": lambda: of_speed.measure(**speed, root=data),
        },
    )
