"""Suite ``single``: one process, one thread, whole training steps, and the bars that they are held against."""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from benchmarks.harness import memory
from benchmarks.harness.apart import Apart
from benchmarks.harness.bars import Bar
from benchmarks.harness.choices import check_choices, check_numbers
from benchmarks.harness.ours import MODELS, Ours, reader_alone
from benchmarks.harness.parts import Measured, measure_parts
from benchmarks.harness.report import Result, Row
from benchmarks.harness.turns import Measurement, Turn, in_turns
from benchmarks.harness.workload import Workload
from benchmarks.peers import dlrm_reference, floor, fuxictr, plain_lightning, torchrec
from benchmarks.suites import kernels
from benchmarks.suites.data.suite import write_rows
from benchmarks.suites.single import roofline, steps, watching

log = logging.getLogger(__name__)

Part = Literal["steps", "profile", "roofline"]

Rows = dict[tuple[str, int], Measurement]


def run(
    *, parts: list[Part], models: list[str], batch_sizes: list[int], rows: int, rounds: int, seconds: float
) -> list[Result]:
    """Measure every model at every batch size, each pair in one interleaved measurement.

    Args:
        parts: ``steps`` beside the peers, and what else has a bar; ``profile``, where the time of ours goes;
            ``roofline``, a step of ours beside this processor's limit.
        models: What is trained.
        batch_sizes: Examples a step.
        rows: Prepared for our reader.
        rounds: Over which medians are taken.
        seconds: Of each variant in each round.

    Raises:
        ValueError: a part or model that there is not, or a number too small to measure anything with.
    """
    check_choices("suite.models", models, MODELS)
    check_numbers("suite.batch_sizes", batch_sizes)
    check_numbers("suite.rounds", rounds)
    check_numbers("suite.rows", rows, least=max(batch_sizes))
    with tempfile.TemporaryDirectory() as folder:
        root = write_rows(Workload(rows=rows), Path(folder), compression="none")
        work = Workload(rows=min(rows, Workload.rows))
        settings = {"rounds": rounds, "seconds": seconds}
        measures: dict[Part, Callable[[], Measured]] = {
            "steps": partial(_measure, root, work, models, batch_sizes, **settings),
            "profile": partial(_profile, root, work, models, batch_sizes, **settings),
            "roofline": partial(roofline.measure, root, work, models, batch_sizes, **settings),
        }
        return measure_parts(parts, measures)


def _profile(
    root: Path, work: Workload, models: list[str], batch_sizes: list[int], *, rounds: int, seconds: float
) -> Measured:
    pairs = product(models, batch_sizes)
    return [part for pair in pairs for part in steps.measure(root, work, *pair, rounds=rounds, seconds=seconds)], []


def variants(root: Path, work: Workload, model: str, batch_size: int) -> dict[str, Callable[[Turn], None]]:
    """What can be measured for this model here; TorchRec and FuxiCTR only where they are installed."""
    makers = {"floor": floor.variant, "ours": Ours(root), "lightning": Apart(plain_lightning.variant)}
    if torch.cpu._is_avx512_bf16_supported():
        makers["ours, bf16"] = Ours(root, precision="bf16-mixed")
    if model == "dlrm":
        makers["dlrm reference"] = Apart(dlrm_reference.variant)
        if torchrec.is_available():
            makers["torchrec"] = Apart(torchrec.variant)
    if fuxictr.is_available():
        makers |= {"fuxictr": Apart(fuxictr.variant), "fuxictr, no reader": Apart(fuxictr.preloaded)}
    return {name: make(work, model, batch_size) for name, make in makers.items()}


def _measure(
    root: Path, work: Workload, models: list[str], batch_sizes: list[int], *, rounds: int, seconds: float
) -> Measured:
    for name, peer in (("TorchRec", torchrec), ("FuxiCTR", fuxictr)):
        if not peer.is_available():
            log.info("%s is not installed, so it is left out; recipes/benchmarks says how to add it.", name)
    measured: Rows = {
        (model, batch_size): in_turns(variants(root, work, model, batch_size), rounds=rounds, seconds=seconds)
        for batch_size in batch_sizes
        for model in models
    }
    results: list[Result] = [Row(f"{model}, B={b}", each, base="floor") for (model, b), each in measured.items()]
    bars = [bar for (model, b), each in measured.items() for bar in _bars_of_steps(model, b, each)]

    for batch_size in batch_sizes:
        fastest = max(models, key=lambda model: measured[model, batch_size].median("ours"))
        pair = {"ours": Ours(root)(work, fastest, batch_size), "reader": reader_alone(root, batch_size)}
        row = Row(f"{fastest}, B={batch_size}", in_turns(pair, rounds=rounds, seconds=seconds), base="ours")
        results.append(row)
        bars.append(Bar(f"reader alone / {row.workload}", row.measured.ratio("reader", "ours"), "at least", 5, " x"))
    for model, batch_size in product(models, batch_sizes):
        watched = watching.measure(
            root, model, batch_size, most_seconds=60 * seconds, quadruples=32 if rounds > 1 else 2
        )
        by_clock = [watching.rates(watched, clock) for clock in (watching.WALL, watching.PROCESSOR)]
        results.append(row := Row(f"{model}, B={batch_size}", by_clock[0], base="ours"))
        wall, processor = map(watching.cost, by_clock)
        told = f"processor time: {processor.value:.2f} ± {processor.standard_error:.2f} %"
        name = f"metrics and callbacks, {row.workload} ({told})"
        bars.append(Bar(name, wall.value, "at most", 3, " %", standard_error=wall.standard_error))
    results += (
        kernel_rows := kernels.run(dims=[work.dim], batch_sizes=[2048], rounds=rounds, seconds=min(seconds, 0.3))
    )
    for rule in ("Adam", "FTRL"):
        value = kernel_rows[0].measured.ratio(f"numba {rule}", "fbgemm module")
        bars.append(Bar(f"numba {rule} / FBGEMM rowwise Adagrad, {kernel_rows[0].workload}", value, "at least", 0.5))
    for (model, batch_size), each in measured.items():
        if batch_size == 2048:
            value = _share_of_weight_decay(kernel_rows[0].measured, each)
            bars.append(
                Bar(f"weight decay of rows, {model}, B={batch_size}", 100 * value, "at most", 5, " % of a step")
            )
    largest = max(batch_sizes)
    for model in models:
        value = memory.beyond_rows_mib(root, model, largest)
        name = f"memory beyond rows and their state, {model}, B={largest}"
        bars.append(Bar(name, value, "at most", 600, " MiB"))
    return results, bars


def _share_of_weight_decay(kernels: Measurement, steps: Measurement) -> float:
    """What the kernel takes longer with weight decay, as a share of a whole step."""
    decaying, plain = (kernels.rates[name] for name in ("numba, weight decay", "numba"))
    extra = statistics.median(1 / a - 1 / b for a, b in zip(decaying, plain, strict=True))  # seconds per example
    return extra * steps.median("ours")


def _bars_of_steps(model: str, batch_size: int, measured: Measurement) -> list[Bar]:
    """The bars for one model at one batch size: the other side, and how many times its rate is asked for."""
    asked: dict[str, float] = {}
    if batch_size == 2048:
        asked = {"floor": 0.9, "fuxictr": 3.5}
        if model == "dlrm":
            asked |= {"torchrec": 1.05, "dlrm reference": 1.3}
    elif (model, batch_size) == ("deepfm", 128):
        asked = {"floor": 0.7, "lightning": 20.0}
    return [
        Bar(
            f"ours / {other}, {model}, B={batch_size}",
            measured.ratio("ours", other) if other in measured.rates else None,
            "at least",
            limit,
        )
        for other, limit in asked.items()
    ]
