# SPDX-License-Identifier: Apache-2.0
"""Equations 3, 4 and 8 by hand, and what calibration data are refused."""

import numpy as np
import pytest

from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.damage import (
    DAMAGE_FLOOR,
    global_damage,
    predicted_damage,
    released_bytes,
    uniform_damage,
)

# Two blocks at 3..6 bits; the second gets better from 4 to 3 bits, as measured sensitivities may.
S_LEUQ = np.array([[[[10.0, 4.0, 1.5, 1.0], [2.0, 3.0, 0.5, 0.5]]]])
BYTES_UQ = np.array([[30, 42, 56, 72], [15, 20, 26, 33]])


def test_released_bytes_by_hand():
    np.testing.assert_array_equal(released_bytes(BYTES_UQ), [[16, 14, 12], [7, 6, 5]])


def test_global_damage_by_hand():
    np.testing.assert_array_equal(global_damage(S_LEUQ), [[[[0.5, 2.5, 6.0], [0.0, 2.5, 0.0]]]])


def test_predicted_damage_by_hand():
    g_LEUR = global_damage(S_LEUQ)
    np.testing.assert_array_equal(predicted_damage(g_LEUR), [[[[0.5, 2.5, 6.0], [DAMAGE_FLOOR, 2.5, DAMAGE_FLOOR]]]])
    eta_LEUR = np.array([[[[1.0, 0.5, 2.0], [7.0, 4.0, 7.0]]]])
    np.testing.assert_array_equal(
        predicted_damage(g_LEUR, mu_LEUR=3.0, eta_LEUR=eta_LEUR),
        [[[[1.5, 3.75, 36.0], [DAMAGE_FLOOR, 30.0, DAMAGE_FLOOR]]]],
    )


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
