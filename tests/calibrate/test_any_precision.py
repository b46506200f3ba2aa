# SPDX-License-Identifier: Apache-2.0
"""What any-precision codes and codebooks promise."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pagedweight_jax.calibrate import any_precision, rows_numpy
from pagedweight_jax.calibrate.any_precision import (
    CHUNK_ROWS,
    dequantize,
    positive_importance,
    quantize,
    quantize_on_device,
    quantize_on_host,
    row_chunks,
)
from pagedweight_jax.calibrate.sensitivity import sensitivity
from pagedweight_jax.errors import UserError
from pallas_kernels.bitplane import BlockLayout, dequantize_pages, pack_page


def random_blocks(E=3, N=8, C=96, seed=0, scale=0.02):
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_t(4, (E, N, C))).astype(np.float32), rng.chisquare(1, (E, C))


def weighted_error(w_ENC, quantized_ENC, h_EC):
    return (h_EC[:, None] * (w_ENC.astype(np.float64) - quantized_ENC) ** 2).sum(-1)


def check_promises(w_ENC, importance_EC, ap, min_bits, max_bits):
    """Everything that holds for any finite input."""
    assert sorted(ap.luts) == list(range(min_bits, max_bits + 1))
    h_EC = positive_importance(importance_EC)
    previous = None
    for bits, lut_ENK in ap.luts.items():
        assert lut_ENK.dtype == np.float16
        assert lut_ENK.shape == (*w_ENC.shape[:2], 2**bits)
        assert np.isfinite(lut_ENK).all()
        assert (np.diff(lut_ENK.astype(np.float32)) >= 0).all(), "sorted codebooks"
        error_EN = weighted_error(w_ENC, dequantize(ap, bits), h_EC)
        # A centroid is a mean, so rounding it by d adds exactly mass d^2.
        rounding = 2.0**-11 * np.abs(w_ENC).max(-1) + 2.0**-25
        slack_EN = h_EC.sum(-1)[:, None] * rounding**2 * (1 + 1e-6) + 1e-9 * error_EN
        if previous is not None:
            assert (error_EN <= previous + slack_EN).all(), "more bits, no more error"
        previous = error_EN
    ascending = np.take_along_axis(ap.codes_ENC, np.argsort(w_ENC, axis=-1), axis=-1).astype(int)
    assert (np.diff(ascending) >= 0).all(), "codes keep the weights' order"
    assert ascending.max() < 2**max_bits
    equal = np.diff(np.sort(w_ENC, axis=-1)) == 0
    assert (np.diff(ascending)[equal] == 0).all(), "equal weights, equal codes"


weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40)),
    elements=st.one_of(st.integers(-3, 3).map(float), st.floats(-60000, 60000, width=32)),
)


@settings(max_examples=80, deadline=None)
@given(w_ENC=weights, bits=st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted), data=st.data())
def test_promises_hold_for_any_weights(w_ENC, bits, data):
    shape = (w_ENC.shape[0], w_ENC.shape[2])
    elements = st.one_of(st.just(0.0), st.floats(0, 1e6, width=32))
    importance_EC = data.draw(hnp.arrays(np.float32, shape, elements=elements))
    check_promises(w_ENC, importance_EC, quantize(w_ENC, importance_EC, *bits), *bits)


@pytest.mark.parametrize("bits", [(3, 8), (4, 6), (1, 8), (8, 8), (2, 2)])
@pytest.mark.parametrize("C", [32, 96, 352])
def test_promises_hold_for_every_range_of_bits(bits, C):
    w_ENC, h_EC = random_blocks(C=C)
    check_promises(w_ENC, h_EC, quantize(w_ENC, h_EC, *bits), *bits)


def test_codes_are_nested_and_each_width_has_the_means_of_its_own_clusters():
    w_ENC, h_EC = random_blocks()
    ap = quantize(w_ENC, h_EC, 3, 6)
    for bits in range(3, 7):
        codes_ENC = ap.codes_ENC >> (6 - bits)
        for k in range(2**bits):
            mass_ENC = h_EC[:, None] * (codes_ENC == k)
            used = mass_ENC.sum(-1) > 0
            means = (mass_ENC * w_ENC).sum(-1)[used] / mass_ENC.sum(-1)[used]
            np.testing.assert_array_equal(ap.luts[bits][..., k][used], means.astype(np.float16))
    narrow = quantize(w_ENC, h_EC, 3, 4)
    np.testing.assert_array_equal(narrow.codes_ENC, ap.codes_ENC >> 2)
    np.testing.assert_array_equal(narrow.luts[4], ap.luts[4])


def test_more_bits_mean_much_less_error():
    w_ENC, h_EC = random_blocks(C=1024)
    ap = quantize(w_ENC, h_EC, 3, 8)
    errors = [weighted_error(w_ENC, dequantize(ap, bits), h_EC).sum() for bits in range(3, 9)]
    assert all(after < before / 2.5 for before, after in pairwise(errors))


def test_the_importance_matters():
    w_ENC, h_EC = random_blocks(C=256)
    weighted, plain = quantize(w_ENC, h_EC, 3, 3), quantize(w_ENC, np.ones_like(h_EC), 3, 3)
    with_h = [weighted_error(w_ENC, dequantize(ap, 3), h_EC).sum() for ap in (weighted, plain)]
    without_h = [weighted_error(w_ENC, dequantize(ap, 3), np.ones_like(h_EC)).sum() for ap in (weighted, plain)]
    assert with_h[0] < 0.95 * with_h[1]
    assert without_h[1] < 0.95 * without_h[0]


@pytest.mark.parametrize("value", [0.0, -0.0, 0.5, -3.0])
def test_a_constant_row_is_exact(value):
    w_ENC = np.full((1, 2, 32), value, np.float32)
    ap = quantize(w_ENC, np.ones((1, 32)), 3, 5)
    assert len(np.unique(ap.codes_ENC)) == 1
    for bits in range(3, 6):
        np.testing.assert_array_equal(ap.luts[bits], np.float16(value))
        np.testing.assert_array_equal(dequantize(ap, bits), w_ENC)


def test_a_row_with_few_distinct_values_is_exact_from_the_seed_on():
    rng = np.random.default_rng(0)
    w_ENC = rng.choice(np.array([-2.0, -0.5, 0.25, 1.0, 8.0], np.float32), (2, 4, 64))
    ap = quantize(w_ENC, rng.random((2, 64)), 3, 6)
    for bits in range(3, 7):
        np.testing.assert_array_equal(dequantize(ap, bits), w_ENC)
    assert len(np.unique(ap.luts[6])) <= 5


def test_columns_without_importance_still_get_near_centroids():
    w_ENC, h_EC = random_blocks(E=1, C=128)
    h_EC[:, ::2] = 0
    ap = quantize(w_ENC, h_EC, 3, 8)
    check_promises(w_ENC, h_EC, ap, 3, 8)
    unseen = np.abs(w_ENC - dequantize(ap, 8))[..., ::2]
    assert unseen.max() < 0.1 * np.abs(w_ENC).max()
    none = quantize(w_ENC, np.zeros_like(h_EC), 3, 8)
    np.testing.assert_array_equal(none.codes_ENC, quantize(w_ENC, np.ones_like(h_EC), 3, 8).codes_ENC)


def test_scaling_weights_or_importance_changes_no_code():
    w_ENC, h_EC = random_blocks(scale=1.0)
    ap = quantize(w_ENC, h_EC, 3, 6)
    for scaled in (quantize(w_ENC, 2.0**-9 * h_EC, 3, 6), quantize(w_ENC, 3.0 * h_EC, 3, 6)):
        np.testing.assert_array_equal(scaled.codes_ENC, ap.codes_ENC)
        for bits in range(3, 7):
            np.testing.assert_array_equal(scaled.luts[bits], ap.luts[bits])
    doubled = quantize(2 * w_ENC, h_EC, 3, 6)
    np.testing.assert_array_equal(doubled.codes_ENC, ap.codes_ENC)
    normal = np.abs(ap.luts[6]) >= 2.0**-14
    np.testing.assert_array_equal(doubled.luts[6][normal], 2 * ap.luts[6][normal])


def test_negated_weights_have_the_same_error():
    w_ENC, h_EC = random_blocks(C=320)
    error = [weighted_error(w, dequantize(quantize(w, h_EC, 3, 3), 3), h_EC).sum() for w in (w_ENC, -w_ENC)]
    assert error[0] == pytest.approx(error[1], rel=5e-3)


def test_blocks_do_not_depend_on_their_neighbours():
    w_ENC, h_EC = random_blocks(E=5, N=CHUNK_ROWS // 2 + 3, C=64)
    w_ENC[1] = np.round(w_ENC[1], 2)  # few distinct values
    w_ENC[3] = 0.5
    ap = quantize(w_ENC, h_EC, 3, 5)
    for e in range(5):
        alone = quantize(w_ENC[e : e + 1], h_EC[e : e + 1], 3, 5)
        np.testing.assert_array_equal(alone.codes_ENC[0], ap.codes_ENC[e])
        for bits in range(3, 6):
            np.testing.assert_array_equal(alone.luts[bits][0], ap.luts[bits][e])


@pytest.mark.parametrize(("columns", "rows"), [(1, 334), (2048, 334), (4096, 167), (14336, 53), (1 << 20, 1)])
def test_wide_blocks_are_clustered_fewer_rows_at_a_time(columns, rows):
    chunks = row_chunks(1000, columns)
    assert chunks[0] == slice(0, rows)
    assert [n for chunk in chunks for n in range(1000)[chunk]] == list(range(1000))


@pytest.mark.parametrize(("module", "limit"), [(any_precision, "CHUNK_WEIGHTS"), (rows_numpy, "PIECE_WEIGHTS")])
def test_rows_clustered_together_do_not_matter(monkeypatch, module, limit):
    w_ENC, h_EC = random_blocks(E=2, N=40, C=96)
    w_ENC[1, 11:30] = np.round(w_ENC[1, 11:30], 1)  # ties, and rows of few distinct values
    together = quantize_on_host(w_ENC, h_EC, 3, 6)[0]
    monkeypatch.setattr(module, limit, 7 * 96)
    apart = quantize_on_host(w_ENC, h_EC, 3, 6)[0]
    np.testing.assert_array_equal(together.codes_ENC, apart.codes_ENC)
    for bits in range(3, 7):
        np.testing.assert_array_equal(together.luts[bits], apart.luts[bits])


@pytest.mark.parametrize(("interleaved", "frame_words"), [(False, 128), (True, 256)])
@pytest.mark.parametrize("bits", [(3, 6), (1, 8)])
def test_pages_hold_exactly_what_dequantize_returns(interleaved, frame_words, bits):
    w_ENC, h_EC = random_blocks(E=2, N=48, C=96)
    ap = quantize(w_ENC, h_EC, *bits)
    tile_words = BlockLayout(48, 96, interleaved, *bits, 1 << 20)
    frame_words = max(frame_words, tile_words.tile_rows * tile_words.tile_words)
    layout = BlockLayout(48, 96, interleaved, *bits, frame_words)
    pages = [pack_page(ap.codes_ENC, ap.luts.get(p + 1), p, layout) for p in range(layout.max_bits)]
    for b in range(bits[0], bits[1] + 1):
        for e in range(2):
            unpacked_NC = dequantize_pages([jnp.asarray(page[e]) for page in pages[:b]], layout)
            np.testing.assert_array_equal(unpacked_NC, dequantize(ap, b)[e])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named(bad):
    w_ENC, h_EC = random_blocks()
    w_ENC[2, 5, 7] = bad
    with pytest.raises(UserError, match=r"^layer 4 down: expert 2, row 5 has a weight that is NaN or infinite$"):
        quantize(w_ENC, h_EC, 3, 4, name="layer 4 down")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_importance_that_is_no_moment_is_named(bad):
    w_ENC, h_EC = random_blocks()
    h_EC[1, 9] = bad
    with pytest.raises(UserError, match=r"expert 1, column 9 has importance (nan|inf|-1.0)"):
        quantize(w_ENC, h_EC, 3, 4)


def test_a_centroid_beyond_float16_is_named():
    w_ENC, h_EC = random_blocks()
    w_ENC[2, 3, 0] = -70000
    with pytest.raises(UserError, match=r"gate_up: expert 2, row 3 has a centroid beyond float16's largest, 65504"):
        quantize(w_ENC, h_EC, 3, 3, name="layer 0 gate_up")
    w_ENC[2, 3, 0] = -65504
    assert np.isfinite(quantize(w_ENC, h_EC, 3, 3).luts[3]).all()


@pytest.mark.parametrize("bits", [(0, 4), (4, 3), (3, 9)])
def test_bitwidths_out_of_range_are_refused(bits):
    with pytest.raises(UserError, match=r"bitwidths must lie in 1..8"):
        quantize(*random_blocks(), *bits)


def check_device(E, N, C, bits):
    """What ``quantize`` does on JAX's default device against numpy."""
    w_ENC, importance_EC = random_blocks(E, N, C)
    w_ENC[1].view(np.uint32)[:] &= 0xFFFF0000
    h_EC = positive_importance(importance_EC)
    host, host_finite_EN = quantize_on_host(w_ENC, h_EC, *bits)
    device, finite_EN = quantize_on_device(w_ENC, h_EC, *bits)
    assert isinstance(device.codes_ENC, jax.Array)
    np.testing.assert_array_equal(device.codes_ENC, host.codes_ENC)
    assert finite_EN.all()
    assert host_finite_EN.all()
    for b, lut_ENK in host.luts.items():
        np.testing.assert_allclose(device.luts[b], lut_ENK, rtol=2**-10, atol=2**-24)
    s_EQ = sensitivity(w_ENC, host, importance_EC, *bits)
    np.testing.assert_allclose(sensitivity(w_ENC, device, importance_EC, *bits), s_EQ, rtol=1e-4)
    w_ENC[1, 2, 3] = np.nan
    assert np.argwhere(~quantize_on_device(w_ENC, h_EC, *bits)[1]).tolist() == [[1, 2]]
    assert np.argwhere(~quantize_on_host(w_ENC, h_EC, *bits)[1])[0].tolist() == [1, 2]


def test_blocks_on_a_device_are_those_of_the_host():
    check_device(2, 6, 64, (2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 256, 2048), (2, 96, 1408)])
def test_blocks_on_a_gpu_are_those_of_the_host(shape):
    assert jax.default_backend() == "gpu"
    check_device(*shape, (3, 8))
