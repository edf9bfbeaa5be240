"""Stretches of arrays in vector registers, against NumPy."""

import numpy as np
import pytest
from numba.core.errors import TypingError

from lightning_recsys.compiled.loops import compile_loop
from lightning_recsys.compiled.vectors import add_floats, copy_floats, scale_floats, vector_width


@pytest.mark.parametrize("dim", [1, 6, 16, 24, 100])
def test_rows_when_they_are_copied_scaled_and_added_then_only_they_change(dim):
    width = vector_width(dim)

    @compile_loop
    def combine(copied, scaled, source):
        copy_floats(copied, dim, source, 2 * dim, dim)
        for d in range(0, dim, width):
            scale_floats(scaled, dim + d, source, d, np.float32(0.5), width)
            add_floats(scaled, dim + d, source, dim + d, np.float32(-2), width)

    source = np.random.default_rng(0).normal(size=(3, dim)).astype(np.float32)
    copied, scaled = np.full((3, dim), 7, np.float32), np.full((3, dim), 7, np.float32)
    combine(copied, scaled, source)
    np.testing.assert_array_equal(copied[1], source[2])
    np.testing.assert_allclose(scaled[1], 0.5 * source[0] - 2 * source[1], rtol=1e-6, atol=1e-6)
    for result in (copied, scaled):
        assert (result[[0, 2]] == 7).all()


@pytest.mark.parametrize("array", [np.zeros((4, 4), np.float32)[:, ::2], np.zeros(4)])
def test_arrays_when_they_are_not_contiguous_float32_then_no_loop_is_made(array):
    @compile_loop
    def copy(array):
        copy_floats(array, 0, array, 1, 1)

    with pytest.raises(TypingError, match="contiguous arrays of float32"):
        copy(array)
