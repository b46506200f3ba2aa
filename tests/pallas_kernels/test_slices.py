# SPDX-License-Identifier: Apache-2.0
"""Bit-slices of activations, put together again."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.binary_dot import slice_place
from pallas_kernels.moe_ffn.slices import SLICES, WORDS, num_chunks, num_slices, runs, slice_columns

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
COLUMNS = [2048, 1408, 2816, 704, 160, 96, 4096 + 2048]  # bands of 64; 32, 8, 4; 64, 16, 8; 16, 4, 2; 4, 1; 2, 1; 64
DTYPES = [jnp.bfloat16, jnp.float32]


def layout_of(columns):
    return BlockLayout(16, columns, False, 2, 8, 1024)


def sliced(x, layout, interpret, *ids):
    words = num_chunks(layout) * WORDS
    return slice_columns(x, layout, words, *ids, interpret=interpret)


def join(slices, layout):
    """Returns the rows that the slices stand for, float64."""
    placed = np.asarray(slices.words)
    num = placed.shape[1] * SLICES
    n, word = np.mgrid[:num, : placed.shape[2] // SLICES]
    words = placed[:, n // SLICES, word // WORDS * (SLICES * WORDS) + slice_place(n % SLICES, word % WORDS)]
    rows = len(words)
    worth = 2.0 ** np.arange(num)
    worth[-1] *= -1
    bit = (words[:, :, None, :] >> np.arange(32)[:, None]) & 1  # [X, B, 32, W]
    q = np.einsum("xbjw,b->xjw", bit.astype(np.float64), worth)
    out, position = np.zeros((rows, layout.columns)), 0
    column = 0
    for tile_words, tiles in layout.bands:  # words of a row are its bands one after another
        for _ in range(tiles):
            out[:, column : column + 32 * tile_words] = q[:, :, position : position + tile_words].reshape(rows, -1)
            position, column = position + tile_words, column + 32 * tile_words
    return out * np.asarray(slices.unit_X, np.float64)[:, None]


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_slices_are_the_rows(columns, dtype, interpret):
    layout, rng = layout_of(columns), np.random.default_rng(columns)
    x = jnp.asarray(rng.standard_normal((3, columns)) * [[1e-3], [1.0], [1e3]], dtype)
    exact = np.asarray(x, np.float64)
    slices = sliced(x, layout, interpret)
    unit = np.asarray(slices.unit_X, np.float64)
    np.testing.assert_array_equal(np.frexp(unit)[0], 0.5)  # powers of two
    largest = np.abs(exact).max(axis=1)
    bits = num_slices(dtype)
    assert (largest / unit < 2.0 ** (bits - 1)).all()
    assert (largest / unit >= 2.0 ** (bits - 2)).all()
    error = np.abs(join(slices, layout) - exact)
    assert (error <= 0.5 * unit[:, None] + 1e-7 * np.abs(exact)).all()
    np.testing.assert_allclose(slices.square_X, np.sum(exact**2, axis=1), rtol=1e-5)
    wrong = np.abs(join(slices, layout) - np.roll(exact, 1, axis=1))
    assert not (wrong <= 0.5 * unit[:, None] + 1e-7 * np.abs(exact)).all(), "negative control: columns shifted"


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_do_not_overflow(dtype, interpret):
    layout = layout_of(160)
    largest = float(jnp.finfo(dtype).max)
    signs = np.resize([1.0, -1.0], 160)
    x = jnp.asarray(np.stack([largest * signs, np.full(160, np.nextafter(np.float32(2), 0))]), dtype)
    np.testing.assert_allclose(join(sliced(x, layout, interpret), layout), np.asarray(x, np.float64), rtol=2**-15)


@pytest.mark.parametrize("interpret", MODES)
def test_zeros_stay_zeros(interpret):
    layout = layout_of(160)
    x = jnp.stack([jnp.zeros(160), jnp.ones(160)])
    slices = sliced(x, layout, interpret)
    np.testing.assert_array_equal(join(slices, layout), x)
    np.testing.assert_array_equal(slices.square_X, [0.0, 160.0])


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_says_so_and_no_other_does(odd, dtype, interpret):
    layout = layout_of(160)
    x = np.ones((3, 160), np.float32)
    x[1, 77] = odd
    slices = sliced(jnp.asarray(x, dtype), layout, interpret)
    np.testing.assert_array_equal(np.isnan(slices.unit_X), [False, True, False])
    np.testing.assert_array_equal(join(slices, layout)[[0, 2]], np.ones((2, 160)))


@pytest.mark.parametrize("columns", COLUMNS)
def test_runs_cover_every_word_once(columns):
    layout = layout_of(columns)
    words = np.zeros((num_chunks(layout), WORDS), int)
    for run in runs(layout):
        words[run.chunk : run.chunk + run.chunks, run.position : run.position + run.width] += 1
        tiles = {tuple(int(v) for v in run.tile_and_word(c)) for c in range(run.chunk, run.chunk + run.chunks)}
        assert len(tiles) == run.chunks
    assert words.max() == 1
    assert words.sum() == columns // 32
