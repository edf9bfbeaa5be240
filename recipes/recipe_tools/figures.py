"""Figures of simulated runs: which runs each takes, how far one is, and what came of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from recipe_tools import pictures
from recipe_tools.build import Config, plain
from recipe_tools.config_types import check_types
from recipe_tools.overrides import CONFIG_DIR, groups_of
from recipe_tools.record import RunRecord, finite
from recipe_tools.report import console, from_here
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from lightning_recsys.simulation import Results

RUN_WIDTH = 15  # of a run's column: its numbers, and the longer words of its label, are whole
PANELS = ["ne", "ne_by_time", "staleness", "utilization"]
# A single run, as a figure.
RUN = {
    **{"title": None, "about": None, "paper": None, "minutes": None, "cache": None, "panels": PANELS, "x": None},
    **{"rates": None, "rows_rate": 1, "seeds": None},
}
JUDGE = "val/ne"  # by which a series' rate is chosen; lower is better


def runs_of(figure: Config) -> dict[str, list[str]]:
    """Overrides by label: each series, at each place of the x axis where there is one (``series @ 10``)."""
    if (axis := figure["x"]) is None:
        return dict(figure["series"])
    return {
        f"{label} @ {value}": [*overrides, *(f"{key}={value}" for key in axis["keys"])]
        for label, overrides in figure["series"].items()
        for value in axis["values"]
    }


_RATE_KEYS = {f"optim.{part}{inner}.lr" for part in ("dense", "rows") for inner in ("", ".inner")}


def is_alone(figure: Config) -> bool:
    """Whether the figure has one run only."""
    return figure["x"] is None and len(figure["series"]) == 1


def check_overrides(figure: Config, overrides: Sequence[str]) -> None:
    """Refuse what the command line sets, where series or the x axis set it: all would be alike under other labels.

    Raises:
        ValueError: the figure sets that key, one above or below it, or chooses leaves of a group that differ in it.
    """
    places = figure["x"]["keys"] if figure["x"] is not None else []
    parse, groups = OverridesParser.create().parse_overrides, groups_of("simulate", CONFIG_DIR)
    series = {label: parse(list(added)) for label, added in figure["series"].items()}
    for override in parse(list(overrides)):
        given = _key(override)
        if figure.get("rates") and (given == "seed" or given in _RATE_KEYS):
            which = "seeds" if given == "seed" else "rates"
            raise ValueError(f"{given}: the figure sets it for each run. Choose figure.{which}=... instead.")
        if places_set := [key for key in places if _concern(given, key, groups)]:
            raise ValueError(
                f"{given}: the x axis of the figure sets {places_set[0]}. Choose its places instead:"
                " figure.x.values=[...]."
            )
        for label, added in series.items():
            if keys := [_key(each) for each in added if _concern(given, _key(each), groups)]:
                raise ValueError(_refusal(given, f"series {label!r} of the figure sets {keys[0]}"))
        group = given.partition(".")[0]
        leaves = sorted({str(each.value()) for added in series.values() for each in added if _key(each) == group})
        if len(leaves) > 1:
            values = [OmegaConf.select(compose("simulate", [f"{group}={leaf}"]), given) for leaf in leaves]
            if any(value != values[0] for value in values):
                differ = ", ".join(f"{x} with {group}={leaf}" for x, leaf in zip(values, leaves, strict=True))
                raise ValueError(_refusal(given, f"series of the figure differ in it ({differ})"))


def _key(override: Override) -> str:
    return override.key_or_group.replace("/", ".")


def _concern(given: str, key: str, groups: Sequence[str]) -> bool:
    """Whether to set one changes what the other sets. What lies in a group is no part of the choice of a leaf."""
    below = given.startswith(f"{key}.") and key not in groups
    return given == key or key.startswith(f"{given}.") or below


def _refusal(given: str, why: str) -> str:
    return (
        f"{given}: {why}, and would no more be what its label says. Leave it out, or add a series of your own in"
        f" figure.series: '++figure.series.NAME=[\"{given}=...\"]'."
    )


def check_panels(figure: Config) -> None:
    """Raise ``ValueError`` if a panel is neither one that can be drawn nor a metric by its name."""
    for panel in figure["panels"]:
        if panel not in pictures.PANELS and "/" not in panel and panel != "eps":
            raise ValueError(
                f"figure.panels has {panel!r}; it takes {', '.join(pictures.PANELS)}, and metrics such as eps, val/ne."
            )


def composed(label: str, overrides: Sequence[str]) -> Config:
    """The configuration of a run of a figure, which is made before the first run begins: its mistakes are told then."""
    try:
        config = plain(compose("simulate", list(overrides)))
        check_types(config)
    except Exception as error:
        error.add_note(f"In the run {label!r} of the figure, with {' '.join(overrides)}.")
        raise
    return config


def rate_overrides(config: Config, rate: float, rows_rate: float) -> list[str]:
    """What gives a configuration's optimizers a rate: the dense part this one, rows so many times as much."""
    optim = config["optim"]
    inner = {part: ".inner" if "inner" in optim[part] else "" for part in ("dense", "rows")}
    return [f"optim.dense{inner['dense']}.lr={rate:.6g}", f"optim.rows{inner['rows']}.lr={rate * rows_rate:.6g}"]


def check_rates(figure: Config) -> None:
    """Raise ``ValueError`` unless each series of a figure that tries rates has some, and there are several seeds."""
    if figure["rates"] is None:
        return
    if figure["x"] is not None:
        raise ValueError("figure.rates: a figure with an x axis tries no rates; leave them out.")
    if missing := [label for label in figure["series"] if not figure["rates"].get(label)]:
        raise ValueError(
            f"figure.rates has none for the series {missing[0]!r}: give it a list, such as [0.001, 0.002]."
        )
    seeds = figure["seeds"] or []
    if len(set(seeds)) < 2 or len(set(seeds)) < len(seeds):
        raise ValueError(f"figure.seeds must be two or more different numbers with figure.rates, got {seeds}.")


def introduce(figure: Config, labels: Sequence[str]) -> None:
    """Say what is drawn, what goes in and what comes out, how many runs that takes, and about how long."""
    if figure["title"] is None:
        return
    console().print(f"{figure['title']}. {figure['about'] or ''}", markup=False)
    minutes = f", about {figure['minutes']} minutes of one core" if figure["minutes"] else ""
    if (rates := figure["rates"]) is None:
        console().print(f"{len(labels)} runs{minutes}: {'; '.join(labels)}", markup=False)
        return
    runs = sum(len(rates[label]) + len(figure["seeds"]) - 1 for label in labels)
    tried = "; ".join(f"{label} ({', '.join(map(str, rates[label]))})" for label in labels)
    console().print(
        f"{runs} runs{minutes}: the rates of each series with seed {figure['seeds'][0]}, and the best of them by"
        f" {JUDGE} with the other seeds: {tried}",
        markup=False,
    )


def warning_of(run: dict[str, Any]) -> str | None:
    """What is wrong with a run's quality at its end, if something is."""
    if (entropy := run["metrics"].get("val/ne")) is None or entropy <= 1:
        return None
    what = f"val/ne is {entropy:.4g}" if math.isfinite(entropy) else "val/ne is no number"
    return f"{what} at the end: worse than predicting the mean. It diverged, or has not learned yet; try lower rates."


class Watch:
    """A bar with the time left, drawn a few times a second; around a run it gives what the run calls after pushes."""

    def __init__(self, label: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console(), refresh_per_second=2)
        self._task = self._bar.add_task(label, total=total, state="")
        self._due = 0.0

    def __enter__(self) -> Callable[[Results], None]:
        self._bar.start()
        return self._watch

    def _watch(self, results: Results) -> None:
        if (now := monotonic()) >= self._due:
            self._due = now + 0.5
            last = results.curve[-1].get("val/ne", float("nan")) if results.curve else float("nan")
            state = f"{results.examples:,} examples  val/ne {last:.4f}"
            self._bar.update(self._task, completed=results.examples, state=state)

    def __exit__(self, *_: object) -> None:
        self._bar.update(self._task, completed=self._bar.tasks[0].total)
        self._bar.stop()


def run_all(
    figure: Config, labels: Sequence[str], make: Callable[[str], dict[str, Any]], record: RunRecord
) -> dict[str, dict[str, Any]]:
    """Make the runs one after the other; after each, what is wrong with it is said, and all so far are written.

    Args:
        figure: The figure that the runs are for.
        labels: Names of the runs.
        make: Makes the run of a label.
        record: The record of all runs, which gets their metrics and warnings.
    """
    runs: dict[str, dict[str, Any]] = {}
    for label in labels:
        runs[label] = run = make(label)
        if (warning := warning_of(run)) is not None:
            console().print(f"Warning: {label}: {warning}", markup=False)
            run["warning"] = warning
            record.details.setdefault("warnings", {})[label] = warning
        keep(figure, runs, record)
    return runs


def run_at_best_rates(
    figure: Config,
    series: dict[str, list[str]],
    configs: dict[str, Config],
    make: Callable[[str, list[str]], dict[str, Any]],
    record: RunRecord,
) -> dict[str, dict[str, Any]]:
    """Try the rates of each series with the first seed, and repeat the best of them with the others.

    Args:
        figure: The figure that the runs are for.
        series: The overrides of each series, by its label.
        configs: The configuration of each series, which tells where its rates stand.
        make: Makes the run of a label and of overrides.
        record: The record of all runs. It gets the metrics, and warnings of series that diverged or whose best
            rate is the largest or the smallest of those tried.

    Returns:
        By series: what came of the first seed, with the means over seeds of its curve and its metrics; ``rate``, the
        best; ``tried``, what each rate came to, and ``seeds``, the metrics of each.
    """
    first, *others = figure["seeds"]

    def at(label: str, rate: float, seed: int) -> dict[str, Any]:
        chosen = [*rate_overrides(configs[label], rate, figure["rows_rate"]), f"seed={seed}"]
        return make(f"{label}, rate {rate:g}, seed {seed}", [*series[label], *chosen])

    found: dict[str, dict[str, Any]] = {}
    for label in series:
        rates = sorted(figure["rates"][label])
        tried = {rate: at(label, rate, first) for rate in rates}
        judged = {rate: _judged(run) for rate, run in tried.items()}
        best = min(rates, key=judged.__getitem__)
        runs = {first: tried[best], **{seed: at(label, best, seed) for seed in others}}
        found[label] = run = {
            **tried[best],
            "rate": best,
            "tried": judged,
            "seeds": {str(seed): each["metrics"] for seed, each in runs.items()},
            "curve": [_mean(points) for points in zip(*(each["curve"] for each in runs.values()), strict=True)],
            "metrics": _mean([each["metrics"] for each in runs.values()]) | {"rate": best},
        }
        for name in (JUDGE, "val/auc"):
            if name in run["metrics"]:
                run["metrics"][f"{name}_deviation"] = stdev(each["metrics"][name] for each in runs.values())
        warnings = [warning_of(run)]
        if best in (rates[0], rates[-1]):
            warnings.append(f"its best rate, {best:g}, is at an end of those tried; try others in figure.rates.")
        if said := " ".join(filter(None, warnings)):
            console().print(f"Warning: {label}: {said}", markup=False)
            run["warning"] = said
            record.details.setdefault("warnings", {})[label] = said
        keep(figure, found, record)
    return found


def _judged(run: dict[str, Any]) -> float:
    """How good a run is; one that came to no number is the worst."""
    found = float(run["metrics"].get(JUDGE, math.nan))
    return math.inf if math.isnan(found) else found


def _mean(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each number that all of them have."""
    return {name: fmean(part[name] for part in parts) for name in parts[0] if all(name in part for part in parts)}


def keep(figure: Config, runs: dict[str, dict[str, Any]], record: RunRecord) -> Path:
    """Write what came of the runs so far beside the record. Where there are several, its metrics have their labels."""
    for label, run in runs.items():
        own = "" if is_alone(figure) else f"{label}/"
        record.metrics |= {f"{own}{name}": value for name, value in run["metrics"].items()}
    path = record.path.parent / "simulation.json"
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(finite({"figure": figure, "runs": runs}), indent=1) + "\n")
    return temporary.replace(path)


def report(figure: Config, runs: dict[str, dict[str, Any]], record: RunRecord) -> None:
    """Print a column for each run, in as many tables as that takes, and draw them where matplotlib is installed."""
    names = sorted({name for run in runs.values() for name in run["metrics"]})
    title = figure["title"] or "simulation"
    page = console()
    each = max(1, (page.width - max(map(len, names), default=0)) // RUN_WIDTH)
    for first in range(0, len(runs), each):
        some = dict(list(runs.items())[first : first + each])
        table = Table(Column("metric", no_wrap=True), *some, title=title, title_justify="left")
        for name in names:
            table.add_row(name, *(format(run["metrics"].get(name, float("nan")), ",.5g") for run in some.values()))
        page.print(table)
    if figure["paper"]:
        console().print(f"The paper: {figure['paper']}")
    written = keep(figure, runs, record)
    picture = pictures.draw(figure, runs, record.path.parent / "simulation.png")
    and_picture = f" and {from_here(picture)}" if picture else ""
    console().print(f"wrote {from_here(written)}{and_picture}", markup=False, highlight=False)
