# SPDX-License-Identifier: Apache-2.0
"""Buckets, stages and floors by hand, and which policies are refused."""

import numpy as np
import pytest

from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy
from pagedweight_jax.planning.stages import FloorStage, bitwidth_floor_stages, routing_buckets, stage_floors

POLICY = Policy(
    edges=(0.5, 2.0), multipliers=(0.5, 1.0, 3.0), floors=(0, 4, 5), depth_caps=(None, 2, 1), stages=(0, 1, 8)
)


def test_buckets_by_relative_mass():
    """0.1/0.25 = 0.4, then exactly at both edges, then 0.1/0.05 within the rounding of 2."""
    mass_LE = np.array([[0.1, 0.125, 0.5, 0.275]])
    calibration_mass_LE = np.array([[0.25, 0.25, 0.25, 0.25]])
    np.testing.assert_array_equal(routing_buckets(mass_LE, calibration_mass_LE, POLICY.edges), [[0, 1, 2, 1]])


def test_usage_that_calibration_saw_already_does_not_count():
    mass_LE = np.array([[0.7, 0.2, 0.1, 0.0]])
    np.testing.assert_array_equal(routing_buckets(mass_LE, mass_LE, POLICY.edges), [[1, 1, 1, 1]])


def test_an_expert_that_calibration_hardly_saw_is_no_division_by_nothing():
    """An even share is 0.25, a hundredth of it 0.0025: 0.004 is 1.6 times that, whatever lies below."""
    calibration_mass_LE = np.array([[0.5, 0.5, 0.0, 1e-9]])
    mass_LE = np.array([[0.495, 0.497, 0.004, 0.004]])
    np.testing.assert_array_equal(routing_buckets(mass_LE, calibration_mass_LE, POLICY.edges), [[1, 1, 1, 1]])


def test_one_bucket_without_edges():
    np.testing.assert_array_equal(routing_buckets(np.ones((1, 1)), np.ones((1, 1)), ()), [[0]])


def test_stages_strictest_first_then_without_caps():
    assert bitwidth_floor_stages(POLICY) == tuple(
        FloorStage(relaxed_bits=bits, capped=capped) for capped in (True, False) for bits in (0, 1, 8)
    )
    assert bitwidth_floor_stages(NEUTRAL_POLICY) == (FloorStage(),)


@pytest.mark.parametrize(
    ("stage", "floors"),
    [
        (FloorStage(relaxed_bits=0), [[0, 0], [4, 6], [5, 7]]),  # the caps ask for 0; 2, 6; 3, 7
        (FloorStage(relaxed_bits=1), [[0, 0], [3, 6], [4, 7]]),
        (FloorStage(relaxed_bits=8), [[0, 0], [2, 6], [3, 7]]),
        (FloorStage(relaxed_bits=1, capped=False), [[0, 0], [3, 3], [4, 4]]),
    ],
)
def test_floors_by_hand(stage, floors):
    initial_LEU = np.array([[[3, 8], [4, 8], [4, 8]]], np.uint8)
    [floor_LEU] = stage_floors([stage], POLICY, np.array([[0, 1, 2]]), initial_LEU)
    assert floor_LEU.dtype == np.uint8
    np.testing.assert_array_equal(floor_LEU, [floors])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"edges": (1.0,)}, "1 edges make 2 buckets, got 1 multipliers"),
        ({"floors": (3, 4)}, "0 edges make 1 buckets, got 2 floors"),
        ({"depth_caps": ()}, "got 0 depth_caps"),
        (
            {"edges": (2.0, 1.0), "multipliers": (1,) * 3, "floors": (0,) * 3, "depth_caps": (None,) * 3},
            "edges must ascend",
        ),
        (
            {"edges": (1.0,), "multipliers": (2, 1), "floors": (0, 0), "depth_caps": (None, 1)},
            "multipliers must ascend",
        ),
        ({"edges": (1.0,), "multipliers": (1, 2), "floors": (4, 3), "depth_caps": (None, 1)}, "floors must ascend"),
        ({"stages": (1, 0)}, "stages must ascend"),
        ({"stages": ()}, "at least one stage"),
        ({"floors": (-1,)}, "floors must be whole bits, 0 to 8, got"),
        ({"floors": (300,)}, "floors must be whole bits, 0 to 8, got"),
        ({"floors": (2.5,)}, "floors must be whole bits, 0 to 8, got"),
        ({"depth_caps": (-1,)}, "depth_caps must be whole bits, 0 to 8, got"),
        ({"depth_caps": (1.0,)}, "depth_caps must be whole bits, 0 to 8, got"),
        ({"stages": (0, 9)}, "stages must be whole bits, 0 to 8, got"),
        ({"alpha": float("nan")}, "alpha must be finite"),
        ({"prior_tokens": -1.0}, "prior_tokens must be finite and at least 0"),
        ({"multipliers": (0.0,)}, "finite and positive"),
        ({"half_life_tokens": 0.0}, "half_life_tokens must be positive"),
    ],
)
def test_policies_that_cannot_be_are_refused(policy, message):
    with pytest.raises(UserError, match=message):
        Policy(**policy)
