"""Rows in Criteo's documented format, drawn at random: skewed values, some missing, some negative."""

from __future__ import annotations

import random


def criteo_lines(num_rows: int, *, seed: int = 0) -> list[str]:
    rng = random.Random(seed)

    def integer(column: int) -> str:
        low = -3 if column == 1 else 0
        return "" if rng.random() < 0.2 else str(low + int(rng.paretovariate(0.5)) - 1)

    def category(column: int) -> str:
        return "" if rng.random() < 0.1 else f"{hash_of(column, int(rng.paretovariate(0.7))):08x}"

    def hash_of(column: int, number: int) -> int:
        return (number * 2654435761 + column * 40503) % (1 << 32)

    return [
        "\t".join([str(int(rng.random() < 0.25)), *(integer(i) for i in range(13)), *(category(i) for i in range(26))])
        for _ in range(num_rows)
    ]


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
