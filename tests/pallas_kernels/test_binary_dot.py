# SPDX-License-Identifier: Apache-2.0
"""Products of 0/1 matrices against numpy; what the inline PTX computes, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams
from pallas_kernels.moe_ffn.binary_dot import HALVES, ROWS, WORDS, binary_dot, both, multiply_add, per_row, slice_place

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
WARPS = [1, 2, 4]
SLICES = 16


def random_words(num_warps, seed):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, (ROWS * num_warps, WORDS), dtype=np.int32)


def in_kernel(function, num_warps, *blocks, interpret):
    """Returns the function of whole blocks, in one program."""

    def kernel(*refs):
        refs[-1][...] = function(*(ref[...] for ref in refs[:-1]), interpret=interpret)

    shape = jax.ShapeDtypeStruct(blocks[-1].shape, blocks[-1].dtype)
    params = CompilerParams(num_warps=num_warps, num_stages=1)
    return pl.pallas_call(kernel, out_shape=shape, compiler_params=params, interpret=interpret)(*blocks)


def bits(words):
    """Returns the bits of each row, [rows, 512]."""
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(np.int64)


def placed(slices):
    """Returns [2, 8, 16], both halves of the words of 16 slices as an operand has them."""
    out = np.zeros(SLICES * WORDS, np.int32)
    n, word = np.mgrid[:SLICES, :WORDS]
    out[slice_place(n, word)] = slices[n, word]
    return out.reshape(HALVES, 8, WORDS)


def both_halves(rows, first, second, *, interpret):
    sums = jnp.zeros(rows.shape, jnp.int32)
    for half, slices in enumerate((first, second)):
        sums = binary_dot(sums, rows, slices, half, interpret)
    return sums


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("num_warps", WARPS)
def test_equals_the_product_of_the_bits(num_warps, interpret):
    rows = random_words(num_warps, 0)
    slices = np.random.default_rng(1).integers(-(2**31), 2**31, (num_warps, SLICES, WORDS), dtype=np.int32)
    halves = np.stack([placed(of_warp) for of_warp in slices], axis=1).reshape(HALVES, -1, WORDS)
    sums = in_kernel(both_halves, num_warps, rows, *halves, interpret=interpret)
    expected = np.einsum("wsb,wrb->wsr", bits(slices), bits(rows.reshape(num_warps, ROWS, WORDS)))
    for odd, (low, high) in enumerate(per_row(sums)):
        for group, found in enumerate((low, high)):
            of_slices = expected[:, 8 * group : 8 * group + 8]
            found = np.asarray(found).reshape(num_warps, 8, 4)
            np.testing.assert_array_equal(found, of_slices[:, :, odd::2])
            assert (found != of_slices[:, :, 1 - odd :: 2]).any(), "negative control: the other rows"


def test_sums_are_added_to():
    rows, slices, sums = (random_words(1, seed) for seed in range(3))
    added = binary_dot(jnp.asarray(sums >> 8), jnp.asarray(rows), jnp.asarray(slices), 1, interpret=True)
    alone = binary_dot(jnp.zeros_like(added), jnp.asarray(rows), jnp.asarray(slices), 1, interpret=True)
    np.testing.assert_array_equal(added, alone + (sums >> 8))


def test_every_word_of_every_slice_has_a_place_of_its_own():
    places = [slice_place(n, word) for n in range(SLICES) for word in range(WORDS)]
    assert sorted(places) == list(range(SLICES * WORDS))


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
