"""Hashes as random numbers: exact values, spread, and the same result by whatever route."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from lightning_recsys.data.hashing import key64, mix64, uniform
from lightning_recsys.data.raw.kernels import hash_values


def splitmix64_outputs(seed: int, count: int) -> list[int]:
    """The reference generator, in Python integers (Vigna's public-domain splitmix64.c)."""
    outputs, state, mask = [], seed, (1 << 64) - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def test_mix64_when_fed_the_weyl_sequence_then_equals_splitmix64():
    states = np.array([(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in (1, 2, 3)], dtype=np.uint64)
    assert mix64(states).tolist() == splitmix64_outputs(1234567, 3)
    # First output of the published test vector for this seed.
    assert splitmix64_outputs(1234567, 1) == [6457827717110365317]


def test_key64_when_coordinates_differ_or_move_then_keys_differ():
    keys = {
        int(key64(*coordinates))
        for coordinates in [
            (0,),
            (1,),
            (-1,),
            (0, 0),
            (0, 1),
            (1, 0),
            ("a",),
            ("b",),
            (0, "train"),
            ("train", 0),
            (2**80,),
        ]
    }
    assert len(keys) == 11
    assert key64("a feature name of more than eight letters") != key64("a feature name of more than eight lettera")


def test_uniform_when_given_mixed_counters_then_is_uniform():
    sample = uniform(mix64(np.arange(100_000, dtype=np.uint64)))
    assert sample.min() >= 0
    assert sample.max() < 1
    counts = np.histogram(sample, bins=50, range=(0, 1))[0]
    # Chi-square with 49 degrees of freedom: mean 49, deviation 9.9; five deviations.
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * 9.9


def hash_list(strings: list[bytes]) -> list[int]:
    return hash_values(pa.array(strings, pa.binary())).tolist()


def test_hash_strings_when_strings_repeat_then_position_and_neighbours_do_not_matter():
    alone = [hash_list([s])[0] for s in (b"movie", b"", b"a", b"\x00", b"\x00\x00")]
    together = hash_list([b"a", b"movie", b"", b"\x00\x00", b"x" * 1000, b"\x00"])
    assert [together[i] for i in (1, 2, 0, 5, 3)] == alone
    assert len(set(together)) == 6


def test_hash_strings_when_given_100_000_numbers_then_no_collision_and_even_buckets():
    hashes = np.array(hash_list([str(i).encode() for i in range(100_000)]), dtype=np.uint64)
    assert len(np.unique(hashes)) == 100_000
    counts = np.bincount((hashes % np.uint64(97)).astype(int), minlength=97)
    expected = 100_000 / 97
    assert ((counts - expected) ** 2 / expected).sum() < 96 + 5 * np.sqrt(2 * 96)
