# SPDX-License-Identifier: Apache-2.0
"""Reload: by hand, against the plain loop, its bounds, and that a steady load brings lowering and reload to rest."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.planner import plan_reload, plan_step
from pagedweight_jax.planning.pressure import pressure_triggered
from pagedweight_jax.planning.queue import PlanQueue

CONFIG = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0, hysteresis_boundaries=3)

seeds = st.integers(0, 2**32 - 1)


def reload(planning, world, available_bytes, config=CONFIG, queue=None, boundary=0, **kv):
    """``plan_reload`` with ``available_bytes`` above the high watermark: one KV block is one byte."""
    queue = queue or PlanQueue.start(world.table.desired_LEU)
    observation = planning.observe(config.high_watermark_blocks + 1 + available_bytes, boundary=boundary, **kv)
    return plan_reload(world.table, observation, world.calibration, queue, config)


def two_blocks():
    """gate_up and down of one expert at 3 of 3..5 bits. d/Δ from below: gate_up 30/10, 10/10; down 4/4, 8/4."""
    s_LEUQ = np.array([[[[40.0, 10.0, 0.0], [12.0, 8.0, 0.0]]]])
    table = SimpleNamespace(desired_LEU=np.array([[[3, 3]]], np.uint8), bytes_UQ=np.array([[30, 40, 50], [12, 16, 20]]))
    return SimpleNamespace(table=table, calibration=Calibration(sensitivity_LEUQ=s_LEUQ, min_bits=3, max_bits=5))


@pytest.mark.parametrize(
    ("available_bytes", "bits"),
    [
        (9, [3, 3]),  # the best step does not fit
        (10, [4, 3]),
        (19, [4, 3]),  # then gate_up's next, 1.0 a byte, before down's equal one
        (20, [5, 3]),
        (23, [5, 3]),
        (24, [5, 4]),
        (28, [5, 5]),
        (1000, [5, 5]),
    ],
)
def test_reload_by_hand(planning, available_bytes, bits):
    world = two_blocks()
    plan = reload(planning, world, available_bytes)
    if bits == [3, 3]:
        assert plan is None
        return
    np.testing.assert_array_equal(plan.apply(world.table.desired_LEU), [[bits]])
    assert (plan.to_bits > plan.from_bits).all()
    assert plan.total_released_bytes == -(10 * (bits[0] - 3) + 4 * (bits[1] - 3))


def test_bytes_not_yet_reusable_cannot_be_taken(planning):
    world = two_blocks()
    assert reload(planning, world, 10, releasing=100).to_bits.tolist() == [4]
    assert reload(planning, world, 10, pending=1, releasing=100) is None


def test_high_watermark_and_reload_cap_bound_the_bytes(planning):
    world = two_blocks()
    high = PlannerConfig(low_watermark_blocks=2, high_watermark_blocks=5)
    observation = planning.observe(6, block_bytes=10)
    queue = PlanQueue.start(world.table.desired_LEU)
    assert plan_reload(world.table, observation, world.calibration, queue, high) is None
    observation = planning.observe(7, block_bytes=10)
    plan = plan_reload(world.table, observation, world.calibration, queue, high)
    assert plan.total_released_bytes == -10
    capped = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0, max_reload_bytes=21)
    assert reload(planning, world, 1000, config=capped).total_released_bytes == -20


def test_page_movement_off_is_never_a_reload(planning):
    frozen = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0, page_movement=False)
    assert reload(planning, two_blocks(), 100, config=frozen) is None


def test_everything_at_max_bits_is_no_plan(planning):
    world = two_blocks()
    world.table.desired_LEU[:] = 5
    assert reload(planning, world, 100) is None


def test_hysteresis_ends_after_its_boundaries(planning):
    world = two_blocks()
    world.table.desired_LEU[:] = 4
    queue = PlanQueue.start(world.table.desired_LEU)
    queue, plan = plan_step(world.table, planning.observe(0, boundary=10), world.calibration, queue, CONFIG)
    assert plan.blocks.tolist() == [[0, 0, 1]]
    world.table.desired_LEU = plan.apply(world.table.desired_LEU)
    raised = {boundary: reload(planning, world, 100, queue=queue, boundary=boundary) for boundary in (10, 13, 14)}
    assert raised[10].blocks.tolist() == raised[13].blocks.tolist() == [[0, 0, 0]]
    assert raised[14].blocks.tolist() == [[0, 0, 0], [0, 0, 1]]


def test_bad_switches_are_refused():
    with pytest.raises(UserError, match="low 3, high 2"):
        PlannerConfig(low_watermark_blocks=3, high_watermark_blocks=2)
    with pytest.raises(UserError, match="hysteresis_boundaries must be a whole number, at least 0, got -1"):
        PlannerConfig(hysteresis_boundaries=-1, max_reload_bytes=5)


@settings(max_examples=200, deadline=None)
@given(seed=seeds, ties=st.booleans(), available_bytes=st.integers(0, 160))
def test_equals_the_plain_loop_and_keeps_its_bounds(planning, seed, ties, available_bytes):
    world = planning.make_world(seed, ties=ties)
    before_LEU = world.table.desired_LEU
    lowered_at_LEU = np.random.default_rng(seed).integers(0, 8, before_LEU.shape).astype(float)
    queue = PlanQueue(initial_LEU=before_LEU, lowered_at_LEU=lowered_at_LEU)
    plan = reload(planning, world, available_bytes, queue=queue, boundary=8)
    after_LEU = before_LEU if plan is None else plan.apply(before_LEU)
    settled_LEU = 8 - lowered_at_LEU > CONFIG.hysteresis_boundaries
    np.testing.assert_array_equal(
        after_LEU,
        planning.plain_raise(
            before_LEU,
            planning.plain_damage(world.calibration.sensitivity_LEUQ),
            world.table.bytes_UQ,
            available_bytes,
            settled_LEU,
        ),
    )
    raised_LEU = after_LEU != before_LEU
    assert (after_LEU >= before_LEU).all()
    assert after_LEU.max() <= planning.max_bits
    assert settled_LEU[raised_LEU].all()
    taken_bytes = planning.weight_bytes(after_LEU, world.table.bytes_UQ) - planning.weight_bytes(
        before_LEU, world.table.bytes_UQ
    )
    assert taken_bytes <= available_bytes
    assert not pressure_triggered(planning.observe(1 + available_bytes - taken_bytes).kv, CONFIG)


def run_steady(planning, world, used_bytes, config, block_bytes, boundaries, extra_blocks=0):
    """Alternates lowering and reload in an arena that the weights at max bits and nothing else would fill.

    Returns the desired bits at every boundary and the free blocks at the end. ``extra_blocks`` are free blocks that
    reload believes in although they do not exist.
    """
    table, calibration = world.table, world.calibration
    arena_bytes = planning.weight_bytes(np.full(planning.shape, planning.max_bits), table.bytes_UQ)
    queue, history = PlanQueue.start(table.desired_LEU), []

    def free_blocks(desired_LEU):
        return (arena_bytes - used_bytes - planning.weight_bytes(desired_LEU, table.bytes_UQ)) // block_bytes

    for boundary in range(boundaries):
        for kind in ("lower", "raise"):
            free = free_blocks(table.desired_LEU) + (extra_blocks if kind == "raise" else 0)
            observation = planning.observe(free, block_bytes=block_bytes, boundary=boundary)
            if kind == "lower":
                queue, plan = plan_step(table, observation, calibration, queue, config)
            else:
                plan = plan_reload(table, observation, calibration, queue, config)
            if plan is not None:
                table = SimpleNamespace(desired_LEU=plan.apply(table.desired_LEU), bytes_UQ=table.bytes_UQ)
        history.append(table.desired_LEU)
    return history, free_blocks(table.desired_LEU)


@settings(max_examples=100, deadline=None)
@given(
    seed=seeds,
    ties=st.booleans(),
    share=st.floats(0, 1),
    low=st.integers(0, 3),
    gap=st.integers(0, 3),
    hysteresis=st.integers(0, 3),
    block_bytes=st.integers(1, 6),
    max_reload_bytes=st.sampled_from([10, 1000]),
    sensitive=st.booleans(),
)
def test_steady_load_reaches_a_fixed_point(
    planning, seed, ties, share, low, gap, hysteresis, block_bytes, max_reload_bytes, sensitive
):
    world = planning.make_world(seed, ties=ties)
    config = PlannerConfig(
        low_watermark_blocks=low,
        high_watermark_blocks=low + gap,
        hysteresis_boundaries=hysteresis,
        max_reload_bytes=max_reload_bytes,
        global_sensitivity=sensitive,
    )
    bytes_UQ = world.table.bytes_UQ
    span_bytes = int((bytes_UQ[:, -1] - bytes_UQ[:, 0]).sum()) * 6
    history, free_blocks = run_steady(planning, world, int(share * span_bytes), config, block_bytes, boundaries=60)
    for bits_LEU in history[-10:]:
        np.testing.assert_array_equal(bits_LEU, history[-1])
    assert free_blocks > low or (history[-1] == planning.min_bits).all()


def test_a_reload_that_ignored_the_watermark_would_oscillate(planning):
    """Negative control of the fixed point."""
    world = planning.make_world(1)
    history, _ = run_steady(planning, world, 80, CONFIG, block_bytes=2, boundaries=60, extra_blocks=10)
    assert any((bits_LEU != history[-1]).any() for bits_LEU in history[-10:])
