"""Suite ``graph``: building, sampling, the cache of nodes' rows, epochs over a link, quality beside PyG's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from benchmarks.harness.choices import check_choices
from benchmarks.harness.parts import measure_parts
from benchmarks.harness.report import Result
from benchmarks.suites.graph.building import measure as measure_building
from benchmarks.suites.graph.cache import misses as measure_misses
from benchmarks.suites.graph.link import measure as measure_link
from benchmarks.suites.graph.sampling import measure as measure_sampling
from benchmarks.suites.graph.sampling import starving as measure_starving

from lightning_recsys.row_cache import CachePolicy

Part = Literal["building", "sampling", "starving", "misses", "link", "quality"]


def run(
    *,
    parts: list[Part],
    building: Mapping[str, Any],
    sampling: Mapping[str, Any],
    starving: Mapping[str, Any],
    misses: Mapping[str, Any],
    link: Mapping[str, Any],
    quality: Mapping[str, Any],
    data: str,
) -> list[Result]:
    """Measure the parts that are asked for; see ``conf/suite/graph.yaml`` for the arguments.

    Raises:
        ValueError: a part or a policy that there is not.
    """
    check_choices("suite.misses.policies", misses["policies"], get_args(CachePolicy))

    def measure_quality() -> Any:
        from benchmarks.suites.graph.quality import measure  # PyG need not be installed for the others

        return measure(**quality, root=data)

    return measure_parts(
        parts,
        {
            "building": lambda: measure_building(**building),
            "sampling": lambda: measure_sampling(**sampling),
            "starving": lambda: measure_starving(**starving),
            "misses": lambda: measure_misses(**misses),
            "link": lambda: measure_link(**link),
            "quality": measure_quality,
        },
    )
