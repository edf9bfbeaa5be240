"""One hash function for all compiled loops: SplitMix64's finaliser."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from lightning_recsys.compiled.loops import compile_rule

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2 ** 64 over the golden ratio: what a stream of numbers steps by
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


@compile_rule
def mix(bits):  # noqa: ANN001, ANN201
    """A bijection of 64 bits in which every bit of the result depends on every bit given."""
    bits = (bits ^ (bits >> _30)) * _MIX_1
    bits = (bits ^ (bits >> _27)) * _MIX_2
    return bits ^ (bits >> _31)
