# SPDX-License-Identifier: Apache-2.0
"""Products of 0/1 matrices against numpy; what the inline PTX computes, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams
from pallas_kernels.moe_ffn.binary_dot import binary_dot, both, column, multiply_add, warp_and_row

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
WARPS = [1, 2, 4]


def random_words(num_warps, seed):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, (16 * num_warps, 16), dtype=np.int32)


def in_kernel(function, num_warps, *blocks, interpret):
    """Returns the function of whole blocks, in one program."""

    def kernel(*refs):
        refs[-1][...] = function(*(ref[...] for ref in refs[:-1]), interpret=interpret)

    shape = jax.ShapeDtypeStruct(blocks[-1].shape, blocks[-1].dtype)
    params = CompilerParams(num_warps=num_warps, num_stages=1)
    return pl.pallas_call(kernel, out_shape=shape, compiler_params=params, interpret=interpret)(*blocks)


def bits(words):
    """Returns the bits of each row, [rows, 512]."""
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(np.int64)


def expected(sums, rows, columns, num_warps):
    """Entry by entry from the definition."""
    out = sums.astype(np.int64)
    warp, row = (np.asarray(a) for a in warp_and_row(np.arange(16 * num_warps), num_warps))
    at = {(w, r): i for i, (w, r) in enumerate(zip(warp, row, strict=True))}
    row_bits, column_bits = bits(rows), bits(columns)
    for i in range(16 * num_warps):
        for s in range(16):
            out[i, s] += row_bits[i] @ column_bits[at[warp[i], column(s)]]
    return out


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("num_warps", WARPS)
def test_equals_the_product_of_the_bits(num_warps, interpret):
    sums, rows, columns = (random_words(num_warps, seed) for seed in range(3))
    sums = sums >> 8  # no overflow
    out = in_kernel(binary_dot, num_warps, sums, rows, columns, interpret=interpret)
    np.testing.assert_array_equal(out, expected(sums, rows, columns, num_warps))
    assert (np.asarray(out) != expected(sums, columns, rows, num_warps)).any(), "negative control: operands swapped"


def test_every_slice_has_one_column():
    assert sorted(column(s) for s in range(16)) == list(range(16))
    for num_warps in WARPS:
        warp, row = warp_and_row(np.arange(16 * num_warps), num_warps)
        assert len(set(zip(warp, row, strict=True))) == 16 * num_warps
        assert set(warp) == set(range(num_warps))
        assert set(row) == set(range(16))


@pytest.mark.parametrize("interpret", MODES)
def test_both_is_an_and_of_three(interpret):
    a, b, c = (random_words(2, seed) for seed in range(3))
    np.testing.assert_array_equal(in_kernel(both, 2, a, b, c, interpret=interpret), a & b & c)


@pytest.mark.parametrize("interpret", MODES)
def test_multiply_add(interpret):
    rng = np.random.default_rng(0)
    a, b, c = (jnp.asarray(rng.standard_normal((32, 4)), jnp.float32) for _ in range(3))
    out = in_kernel(multiply_add, 2, a, b, c, interpret=interpret)
    np.testing.assert_allclose(out, np.float64(a) * np.float64(b) + np.float64(c), rtol=1e-5, atol=1e-6)
