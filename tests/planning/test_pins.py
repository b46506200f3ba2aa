# SPDX-License-Identifier: Apache-2.0
"""Pins by hand, and the law that no plan and no start lowers a pinned block."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.pins import Pin, parse_pin, pinned_bits
from pagedweight_jax.planning.planner import initial_bits, lowest_bits, plan_step, releasable_bytes
from pagedweight_jax.planning.policy import Policy
from pagedweight_jax.planning.queue import PlanQueue, resident_bytes

CONFIG = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0)
FLOORS = Policy(floors=(5,), depth_caps=(1,), stages=(0, 1, 5))

seeds = st.integers(0, 2**32 - 1)


def draw(planning, seed, kind):
    """A world whose blocks are pinned at random, and the same without pins."""
    policy = planning.rich_policy if kind == "rich" else FLOORS
    free = planning.make_world(seed, policy=policy, rich=kind == "rich")
    rng = np.random.default_rng(seed + 1)
    pinned_LEU = rng.integers(planning.min_bits, planning.max_bits + 1, planning.shape).astype(np.uint8)
    world = SimpleNamespace(**vars(free))
    world.calibration = replace(free.calibration, pinned_LEU=pinned_LEU)
    return world, free


def step(planning, world, target_bytes, config=CONFIG):
    queue = PlanQueue.start(world.table.desired_LEU)
    observation = planning.observe(1 - target_bytes, world=world)
    return plan_step(world.table, observation, world.calibration, queue, config)


def test_by_hand():
    assert parse_pin("2.*=5") == Pin(layer=2, bits=5)
    assert parse_pin("*.13=4") == Pin(expert=13, bits=4)
    pins = [parse_pin(text) for text in ("1.*=4", "*.2=5", "1.0=3")]
    least_LE = [[3, 3, 5], [4, 4, 5]]  # where pins meet the highest counts
    np.testing.assert_array_equal(pinned_bits(pins, (2, 3, 2), 3, 6), np.stack([least_LE, least_LE], axis=-1))
    np.testing.assert_array_equal(pinned_bits([], (2, 3, 2), 3, 6), np.full((2, 3, 2), 3))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3=5", "write LAYER.EXPERT=BITS"),
        ("0.0=5.5", "write LAYER.EXPERT=BITS"),
        ("2.*=5", "layer 2 is not one of 0..1"),
        ("*.3=5", "expert 3 is not one of 0..2"),
        ("0.0=7", "7 bits are not among 3..6"),
        ("0.0=2", "2 bits are not among 3..6"),
    ],
)
def test_what_makes_no_sense_is_refused(text, says):
    with pytest.raises(UserError, match=says):
        pinned_bits([parse_pin(text)], (2, 3, 2), 3, 6)


def test_a_calibration_refuses_pins_outside_its_bits(planning):
    calibration = planning.make_world(0).calibration
    for pinned_LEU in (np.full(planning.shape, 7, np.uint8), np.full(planning.shape, 2, np.uint8)):
        with pytest.raises(UserError, match="pinned bits must lie in"):
            replace(calibration, pinned_LEU=pinned_LEU)
    with pytest.raises(UserError, match="pinned_LEU must be"):
        replace(calibration, pinned_LEU=np.full((1, 1, 2), 4, np.uint8))


@settings(max_examples=150, deadline=None)
@given(seed=seeds, kind=st.sampled_from(["rough", "rich"]), target_bytes=st.integers(1, 400))
def test_no_stage_lowers_a_pinned_block(planning, seed, kind, target_bytes):
    world, _ = draw(planning, seed, kind)
    desired_LEU, pinned_LEU = world.table.desired_LEU, world.calibration.pinned_LEU
    for switches in ({}, {"routing_statistics": False}, {"global_sensitivity": False}):
        queue, plan = step(planning, world, target_bytes, replace(CONFIG, **switches))
        for one in (*queue.plans.values(), *([plan] if plan else [])):
            assert (one.apply(desired_LEU) >= np.minimum(desired_LEU, pinned_LEU)).all()


def test_without_its_pins_a_block_is_lowered(planning):
    """The negative control of the law above."""
    world, free = draw(planning, 1, "rough")
    _, plan = step(planning, free, 10**6)
    lowest_LEU = np.minimum(world.table.desired_LEU, world.calibration.pinned_LEU)
    assert (plan.apply(world.table.desired_LEU) < lowest_LEU).any()


@settings(max_examples=100, deadline=None)
@given(seed=seeds, kind=st.sampled_from(["rough", "rich"]))
def test_all_that_pins_leave_can_be_released(planning, seed, kind):
    world, free = draw(planning, seed, kind)
    queue, plan = step(planning, world, 10**6)
    released = 0 if plan is None else plan.total_released_bytes
    promised = releasable_bytes(world.table, world.calibration, queue, CONFIG)
    assert promised <= released
    assert promised <= releasable_bytes(free.table, free.calibration, queue, CONFIG)
    assert (lowest_bits(world.calibration, CONFIG) >= world.calibration.pinned_LEU).all()
    if kind == "rough":
        assert promised == released


@settings(max_examples=100, deadline=None)
@given(seed=seeds, target_bytes=st.integers(1, 160))
def test_pins_at_the_smallest_width_change_nothing(planning, seed, target_bytes):
    world, free = draw(planning, seed, "rich")
    world.calibration = replace(free.calibration, pinned_LEU=np.full(planning.shape, planning.min_bits, np.uint8))
    plans = [step(planning, one, target_bytes)[1] for one in (world, free)]
    assert (plans[0] is None) == (plans[1] is None)
    if plans[0] is not None:
        np.testing.assert_array_equal(plans[0].new_LEU, plans[1].new_LEU)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, share=st.floats(0, 1), sensitive=st.booleans())
def test_a_server_starts_at_its_pins_at_least(planning, seed, share, sensitive):
    world, _ = draw(planning, seed, "rough")
    calibration, bytes_UQ = world.calibration, world.table.bytes_UQ
    full_LEU = np.full(planning.shape, planning.max_bits)
    floor_bytes, full_bytes = (
        resident_bytes(bits_LEU, bytes_UQ, planning.min_bits) for bits_LEU in (calibration.pinned_LEU, full_LEU)
    )
    budget_bytes = floor_bytes + int(share * (full_bytes - floor_bytes))
    bits_LEU = initial_bits(calibration, bytes_UQ, budget_bytes, sensitive)
    assert (bits_LEU >= calibration.pinned_LEU).all()
    assert resident_bytes(bits_LEU, bytes_UQ, planning.min_bits) <= budget_bytes
    with pytest.raises(UserError, match=f"take {floor_bytes} bytes at the floor"):
        initial_bits(calibration, bytes_UQ, floor_bytes - 1)
