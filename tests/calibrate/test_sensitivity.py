# SPDX-License-Identifier: Apache-2.0
"""Equation 2 against its own double sum."""

import numpy as np
import pytest

from pagedweight_jax.calibrate.any_precision import dequantize, quantize
from pagedweight_jax.calibrate.hessian import InputMoments, importance
from pagedweight_jax.calibrate.sensitivity import sensitivity


def random_blocks(E=3, N=4, C=64, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((E, N, C)).astype(np.float32), rng.chisquare(1, (E, C)) + 1e-3


def test_is_the_weighted_squared_error_of_the_float16_codebooks():
    w_ENC, h_EC = random_blocks()
    ap = quantize(w_ENC, h_EC, 3, 6)
    s_EQ = sensitivity(w_ENC, ap, h_EC, 3, 6)
    assert s_EQ.dtype == np.float64
    assert s_EQ.shape == (3, 4)
    for e in range(3):
        for q, bits in enumerate(range(3, 7)):
            total = 0.0
            for n in range(4):
                for c in range(64):
                    centroid = float(ap.luts[bits][e, n, ap.codes_ENC[e, n, c] >> (6 - bits)])
                    total += h_EC[e, c] * (float(w_ENC[e, n, c]) - centroid) ** 2
            assert s_EQ[e, q] == pytest.approx(total, rel=1e-12)
    np.testing.assert_array_equal(sensitivity(w_ENC, ap, h_EC, 4, 5), s_EQ[:, 1:3])


def test_falls_with_every_bit_and_scales_with_importance_and_weights():
    w_ENC, h_EC = random_blocks(C=512)
    s_EQ = sensitivity(w_ENC, quantize(w_ENC, h_EC, 3, 8), h_EC, 3, 8)
    assert (s_EQ[:, 1:] < s_EQ[:, :-1] / 2.5).all()
    more_EQ = sensitivity(w_ENC, quantize(w_ENC, 4 * h_EC, 3, 8), 4 * h_EC, 3, 8)
    np.testing.assert_allclose(more_EQ, 4 * s_EQ, rtol=1e-12)
    doubled_EQ = sensitivity(2 * w_ENC, quantize(2 * w_ENC, h_EC, 3, 8), h_EC, 3, 8)
    np.testing.assert_allclose(doubled_EQ, 4 * s_EQ, rtol=1e-6)  # float16 subnormals near 0 round differently


def test_the_codebook_is_rounded_before_it_is_measured():
    w_ENC = np.full((1, 1, 32), 1 + 2.0**-13, np.float32)
    s_EQ = sensitivity(w_ENC, quantize(w_ENC, np.ones((1, 32)), 3, 3), np.ones((1, 32)), 3, 3)
    assert s_EQ[0, 0] == 32 * 2.0**-26


def test_zero_only_for_exact_weights():
    rng = np.random.default_rng(0)
    w_ENC = rng.choice(np.array([-1.5, -1, 0, 0.25, 2], np.float32), (1, 4, 64))
    h_EC = np.ones((1, 64))
    assert not sensitivity(w_ENC, quantize(w_ENC, h_EC, 3, 5), h_EC, 3, 5).any()
    w_ENC[0, 2, 7] += 2.0**-14
    assert sensitivity(w_ENC, quantize(w_ENC, h_EC, 3, 5), h_EC, 3, 5)[0, 0] > 0


@pytest.mark.parametrize("tokens", [[100, 100, 0], [0, 0, 0]])
def test_an_expert_without_tokens_is_never_free(tokens):
    w_ENC, h_EC = random_blocks()
    tokens_E = np.array(tokens)
    seen_EC = h_EC * (tokens_E > 0)[:, None]
    gate_up_EC, _, uncalibrated_E = importance(InputMoments(gate_up_EC=seen_EC, down_EC=seen_EC, tokens_E=tokens_E), 8)
    assert uncalibrated_E[2]
    s_EQ = sensitivity(w_ENC, quantize(w_ENC, gate_up_EC, 3, 8), gate_up_EC, 3, 8)
    assert (s_EQ > 0).all()
    error = (w_ENC[2].astype(np.float64) - dequantize(quantize(w_ENC, gate_up_EC, 3, 8), 3)[2]) ** 2
    mean_C = h_EC[:2].mean(0) if any(tokens) else np.ones(64)
    assert s_EQ[2, 0] == pytest.approx(float((mean_C * error).sum()), rel=1e-9)


def test_rows_are_weighted_where_weights_are_given():
    w_ENC, h_EC = random_blocks(N=300)
    ap = quantize(w_ENC, h_EC, 3, 5)
    f_EN = np.random.default_rng(1).chisquare(1, w_ENC.shape[:2]).astype(np.float32)
    s_EQ = sensitivity(w_ENC, ap, h_EC, 3, 5, f_EN)
    for q, bits in enumerate((3, 4, 5)):
        square_ENC = (w_ENC.astype(np.float64) - dequantize(ap, bits)) ** 2
        np.testing.assert_allclose(s_EQ[:, q], np.einsum("en,ec,enc->e", f_EN, h_EC, square_ENC), rtol=1e-9)
    assert not np.allclose(s_EQ, sensitivity(w_ENC, ap, h_EC, 3, 5, f_EN[:, ::-1]), rtol=1e-3)
    ones_EQ = sensitivity(w_ENC, ap, h_EC, 3, 5, np.ones_like(f_EN))
    np.testing.assert_array_equal(ones_EQ, sensitivity(w_ENC, ap, h_EC, 3, 5))


def test_columns_without_importance_cannot_make_an_inexact_block_free():
    w_ENC, h_EC = random_blocks(E=1)
    h_EC[:, 1:] = 0
    ap = quantize(w_ENC, h_EC, 3, 3)
    assert sensitivity(w_ENC, ap, h_EC, 3, 3)[0, 0] > 0
