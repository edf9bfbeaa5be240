"""Suite ``async``: the speed of asynchronous parameter servers, and the quality of thousands of simulated workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.jobs.job import ran_in_turns
from benchmarks.harness.parts import Measured, measure_parts
from benchmarks.harness.processes import python
from benchmarks.harness.report import Result, Row
from benchmarks.harness.turns import Measurement
from benchmarks.suites.async_ps.quality import measure as measure_quality
from benchmarks.suites.shadowsync.suite import TRAINING

Part = Literal["speed", "quality"]

BASE = "ddp"
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    BASE: ("ddp_forkserver", {}),
    "async_ps": ("async_ps", {}),
    "async_ps, over TCP": ("async_ps", {"transport": "tcp"}),
    "shadowsync": ("shadowsync", {"num_trainers": 2, "rounds": "background"}),
}


def run(
    *,
    parts: Sequence[Part],
    batch_size: int,
    rounds: int,
    seconds: float,
    quality: Mapping[str, Any],
    cache: str,
    data: str,
) -> list[Result]:
    """Measure the parts that are asked for; see ``conf/suite/async.yaml`` for the arguments."""
    return measure_parts(
        parts,
        {
            "speed": lambda: speed(batch_size=batch_size, rounds=rounds, seconds=seconds),
            "quality": lambda: measure_quality(**quality, cache=Path(cache), root=data),
        },
    )


def speed(*, batch_size: int, rounds: int, seconds: float) -> Measured:
    """Two workers of each strategy, in turns: DLRM with a million dense parameters. There is no bar for it."""
    variants = {
        name: {"settings": [{"batch_size": batch_size, "name": strategy, "strategy": dict(options)}]}
        for name, (strategy, options) in VARIANTS.items()
    }
    common = {"launchers": [python()], "training": TRAINING, "workers": 2}
    with ran_in_turns(variants, rounds=rounds, seconds=seconds, **common) as jobs:
        measured = Measurement({name: job.rates(batch_size) for name, job in jobs.items()})
    return [Row(f"two workers, B={batch_size}", measured, base=BASE)], []
