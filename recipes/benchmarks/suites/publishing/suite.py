"""Suite ``publishing``: what publishing takes of training, how large and how fresh increments are, and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.parts import measure_parts
from benchmarks.harness.report import Result
from benchmarks.suites.publishing.answers import measure as measure_answers
from benchmarks.suites.publishing.training import measure as measure_training


def run(*, parts: list[str], training: Mapping[str, Any], answers: Mapping[str, Any]) -> list[Result]:
    """Measure the parts that are asked for; see ``conf/suite/publishing.yaml`` for the arguments.

    Raises:
        ValueError: there is no such part.
    """
    return measure_parts(
        parts, {"training": lambda: measure_training(**training), "answers": lambda: measure_answers(**answers)}
    )
