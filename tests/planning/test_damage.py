# SPDX-License-Identifier: Apache-2.0
"""Equations 3 to 6 and 8 by hand, and what calibration data are refused."""

import numpy as np
import pytest

from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import Calibration, ResidualHeads
from pagedweight_jax.planning.damage import (
    DAMAGE_FLOOR,
    global_damage,
    predicted_damage,
    predicted_residual,
    prompt_multiplier,
    released_bytes,
    uniform_damage,
)
from pagedweight_jax.planning.policy import Policy

# Two blocks at 3..6 bits; the second gets better from 4 to 3 bits, as measured sensitivities may.
S_LEUQ = np.array([[[[10.0, 4.0, 1.5, 1.0], [2.0, 3.0, 0.5, 0.5]]]])
BYTES_UQ = np.array([[30, 42, 56, 72], [15, 20, 26, 33]])


def test_released_bytes_by_hand():
    np.testing.assert_array_equal(released_bytes(BYTES_UQ), [[16, 14, 12], [7, 6, 5]])


def test_global_damage_by_hand():
    np.testing.assert_array_equal(global_damage(S_LEUQ), [[[[0.5, 2.5, 6.0], [0.0, 2.5, 0.0]]]])


def test_predicted_damage_by_hand():
    g_LEUR, floor = global_damage(S_LEUQ), np.float32(DAMAGE_FLOOR)
    np.testing.assert_array_equal(predicted_damage(g_LEUR), [[[[0.5, 2.5, 6.0], [floor, 2.5, floor]]]])
    eta_LEUR = np.array([[[[1.0, 0.5, 2.0], [7.0, 4.0, 7.0]]]])
    np.testing.assert_array_equal(
        predicted_damage(g_LEUR, mu_LEUR=3.0, eta_LEUR=eta_LEUR),
        [[[[1.5, 3.75, 36.0], [floor, 30.0, floor]]]],
    )


def make_heads(**changes):
    """Of one kind and two reductions."""
    heads = {
        "weight_URX": np.array([[[1.0, 2.0, 0.0, 0.0, 0.0, 8.0], [0.0, 0.0, -4.0, 0.0, 0.0, 0.0]]]),
        "intercept_UR": np.array([[0.5, 1.0]]),
        "confidence_UR": np.array([[0.5, 1.0]]),
        "low_UR": np.array([[-1.0, -2.0]]),
        "high_UR": np.array([[2.0, 2.0]]),
    }
    return ResidualHeads(**{**heads, **changes})


def test_predicted_residual_by_hand():
    """Of two experts; the first head also reads the largest size of the other block of the expert."""
    of_two = [[1.0, 7.0], [0.0, 0.0]], [[0.25, 7.0], [0.0, 0.0]], [[0.5, 0.125], [0.0, 0.25]]
    x_XLEU = np.array(of_two, np.float32)[:, None]
    np.testing.assert_array_equal(predicted_residual(x_XLEU, make_heads()), [[[[3.0, -1.0]], [[2.5, 1.0]]]])


def test_prompt_multiplier_by_hand():
    """Clipped to [-1, 2] and [-2, 2], times α = 0.5, the heads' confidence and how much was seen."""
    rho_LEUR = np.array([[[[3.0, -5.0]], [[-7.0, 1.0]], [[1.0, 1.0]]]], np.float32)
    evidence_LEU = np.array([[[1.0], [0.5], [0.0]]], np.float32)
    eta_LEUR = prompt_multiplier(rho_LEUR, evidence_LEU, make_heads(), alpha=0.5)
    exponents = [[[[2 * 0.25, -2 * 0.5]], [[-1 * 0.125, 1 * 0.25]], [[0.0, 0.0]]]]
    np.testing.assert_allclose(eta_LEUR, np.exp(exponents), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_URX": np.ones((1, 2, 4))}, r"need weights \[U, R, 6\], got \[1, 2, 4\]"),
        ({"intercept_UR": np.ones((1, 3))}, r"intercept_UR must be \[1, 2\], got \[1, 3\]"),
        ({"high_UR": np.array([[np.nan, 1.0]])}, "high_UR holds values that are not finite"),
        ({"confidence_UR": np.array([[0.5, 1.5]])}, r"in \[0, 1\], got \[\[0.5, 1.5\]\]"),
        ({"low_UR": np.array([[-1.0, 3.0]])}, "lower clipping bound lies above"),
    ],
)
def test_heads_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        make_heads(**changes)


def test_uniform_damage_is_equal_per_byte_for_equal_bits():
    released_UR = released_bytes(BYTES_UQ)
    cost_UR = uniform_damage(released_UR) / released_UR
    np.testing.assert_array_equal(cost_UR, [[1, 4, 16], [1, 4, 16]])


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_calibration_refuses_what_is_no_sensitivity(bad):
    s_LEUQ = S_LEUQ.copy()
    s_LEUQ[0, 0, 1, 2] = bad
    with pytest.raises(UserError, match=rf"1 of 8 sensitivities.*{bad} \(layer 0, expert 0, kind 1, 5 bits\)"):
        Calibration(sensitivity_LEUQ=s_LEUQ, min_bits=3, max_bits=6)


def test_calibration_refuses_another_number_of_bitwidths():
    with pytest.raises(UserError, match=r"\[L, E, U, 6\] for 3..8 bits, got \[1, 1, 2, 4\]"):
        Calibration(sensitivity_LEUQ=S_LEUQ, min_bits=3, max_bits=8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mass_LE": np.ones((1, 2)) / 2}, r"mass_LE must be \[1, 1\], got \[1, 2\]"),
        ({"mass_LE": np.full((1, 1), 0.9)}, "sum to 1"),
        ({"features_LEUX": np.ones((1, 1, 2, 2))}, r"features_LEUX must be \[1, 1, 2, 3\]"),
        ({"features_LEUX": np.zeros((1, 1, 2, 3))}, "features must be positive, or NaN"),
        ({"features_LEUX": np.ones((1, 1, 2, 3)), "heads": make_heads()}, r"heads must be \[2, 3\], got \[1, 2\]"),
        (
            {"policy": Policy(edges=(1.0,), multipliers=(1, 2), floors=(0, 0), depth_caps=(None, 1))},
            "need the routing mass",
        ),
    ],
)
def test_calibration_refuses_parts_that_do_not_fit(more, message):
    with pytest.raises(UserError, match=message):
        Calibration(sensitivity_LEUQ=S_LEUQ, min_bits=3, max_bits=6, **more)


def test_calibration_refuses_heads_without_features():
    heads = ResidualHeads(
        weight_URX=np.zeros((2, 3, 6)),
        **dict.fromkeys(("intercept_UR", "confidence_UR", "low_UR", "high_UR"), np.zeros((2, 3))),
    )
    with pytest.raises(UserError, match="residual heads need the features"):
        Calibration(sensitivity_LEUQ=S_LEUQ, min_bits=3, max_bits=6, heads=heads)
