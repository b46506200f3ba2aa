# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1: by hand, against the plain loop, against brute force, and the properties that must always hold."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.paging.table import PageTable
from pagedweight_jax.planning.calibration import Calibration, FloorStage
from pagedweight_jax.planning.observation import KVPressure
from pagedweight_jax.planning.planner import (
    greedy_select,
    initial_bits,
    plan_step,
    pressure_triggered,
    score_actions,
    target_bytes_from_kv_pressure,
)
from pagedweight_jax.planning.queue import PlanQueue
from pallas_kernels.bitplane import BlockLayout

CONFIG = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0)
STAGES = (
    FloorStage(floor_bits=5, max_depth=1),
    FloorStage(floor_bits=4, max_depth=1),
    FloorStage(max_depth=2),
)

seeds = st.integers(0, 2**32 - 1)
targets = st.integers(1, 160)  # bytes; a world weighs at most 12 blocks x 3 steps x 8 bytes above its floor


def step(planning, world, target_bytes, config=CONFIG, queue=None, boundary=0):
    """``plan_step`` under a pressure of ``target_bytes``: one KV block is one byte, the threshold is 0."""
    queue = queue or PlanQueue.start(world.table.desired_LEU)
    observation = planning.observe(1 - target_bytes, boundary=boundary)
    return plan_step(world.table, observation, world.calibration, queue, config)


def bits_after(world, plan):
    return world.table.desired_LEU if plan is None else plan.apply(world.table.desired_LEU)


# By hand


@pytest.mark.parametrize(
    ("free", "pending", "releasing", "target_bytes"),
    [(9, 0, 0, 0), (8, 0, 0, 100), (2, 0, 0, 700), (9, 3, 0, 300), (9, 3, 3, 0), (0, 4, 1, 1200)],
)
def test_target_by_hand(free, pending, releasing, target_bytes):
    kv = KVPressure(free_blocks=free, pending_blocks=pending, releasing_blocks=releasing, block_bytes=100)
    config = PlannerConfig(low_watermark_blocks=8, high_watermark_blocks=8)
    assert target_bytes_from_kv_pressure(kv, config) == target_bytes
    assert pressure_triggered(kv, config) == (target_bytes > 0)


NO_LIMITS = FloorStage()


def two_blocks(stages=(NO_LIMITS,)):
    """gate_up and down of one expert at 3..5 bits. d/Δ from the top: gate_up 10/10, 30/10; down 8/4, 4/4."""
    s_LEUQ = np.array([[[[40.0, 10.0, 0.0], [12.0, 8.0, 0.0]]]])
    table = SimpleNamespace(desired_LEU=np.array([[[5, 5]]], np.uint8), bytes_UQ=np.array([[30, 40, 50], [12, 16, 20]]))
    calibration = Calibration(sensitivity_LEUQ=s_LEUQ, min_bits=3, max_bits=5, stages=stages)
    return SimpleNamespace(table=table, calibration=calibration)


@pytest.mark.parametrize(
    ("target_bytes", "bits"),
    [
        (1, [4, 5]),  # 1.0 is cheapest
        (10, [4, 5]),
        (11, [4, 4]),  # then 2.0
        (15, [4, 3]),  # and behind it 1.0, cheaper than gate_up's 3.0
        (19, [3, 3]),
        (29, [3, 3]),  # cannot be met: the largest reduction
    ],
)
def test_plan_by_hand(planning, target_bytes, bits):
    world = two_blocks()
    queue, plan = step(planning, world, target_bytes, boundary=7)
    np.testing.assert_array_equal(bits_after(world, plan), [[bits]])
    changed = [u for u in (0, 1) if bits[u] < 5]
    np.testing.assert_array_equal(plan.blocks, [[0, 0, u] for u in changed])
    np.testing.assert_array_equal(plan.from_bits, [5] * len(changed))
    np.testing.assert_array_equal(plan.to_bits, [bits[u] for u in changed])
    np.testing.assert_array_equal(plan.released_bytes, [(10, 4)[u] * (5 - bits[u]) for u in changed])
    np.testing.assert_array_equal(queue.lowered_at_LEU, [[[7.0 if u in changed else -np.inf for u in (0, 1)]]])


def test_plain_ratios_would_take_a_step_before_the_one_that_it_builds_on():
    """Negative control: without the running maximum, down's cheap second step is dearer than it looks."""
    world = two_blocks()
    damage_LEUR = np.array([[[[15.0, 30.0], [8.0, 4.0]]]])
    actions = score_actions(world.table.desired_LEU, damage_LEUR, world.table.bytes_UQ, 5)
    np.testing.assert_array_equal(actions.cost_LEUR, [[[[1.5, 3.0], [2.0, 2.0]]]])
    np.testing.assert_array_equal(greedy_select(actions, 4), [[[1, 0]]])
    plain = replace(actions, cost_LEUR=damage_LEUR / actions.size_UR)
    np.testing.assert_array_equal(greedy_select(plain, 4), [[[0, 1]]])


def test_strictest_stage_that_meets_the_target_wins(planning):
    world = two_blocks(stages=(FloorStage(floor_bits=4), FloorStage()))
    queue, plan = step(planning, world, 14)
    assert list(queue.plans) == [FloorStage(floor_bits=4), FloorStage()]
    assert plan is queue.plans[FloorStage(floor_bits=4)]
    queue, plan = step(planning, world, 15, queue=queue)
    assert plan is queue.plans[FloorStage()]
    np.testing.assert_array_equal(bits_after(world, plan), [[[4, 3]]])


def test_depth_caps_are_relaxed_only_when_every_stage_falls_short(planning):
    capped = (FloorStage(floor_bits=4, max_depth=0), FloorStage(max_depth=1))
    world = two_blocks(stages=capped)
    queue, plan = step(planning, world, 14)
    assert plan is queue.plans[FloorStage(max_depth=1)]
    np.testing.assert_array_equal(bits_after(world, plan), [[[4, 4]]])
    queue, plan = step(planning, world, 15)
    assert plan is queue.plans[FloorStage()]
    np.testing.assert_array_equal(bits_after(world, plan), [[[4, 3]]])


def test_depth_counts_from_the_initial_bits(planning):
    world = two_blocks(stages=(FloorStage(max_depth=1),))
    queue = PlanQueue.start(np.array([[[5, 4]]], np.uint8))
    queue, _ = step(planning, world, 28, queue=queue)
    np.testing.assert_array_equal(bits_after(world, queue.plans[FloorStage(max_depth=1)]), [[[4, 3]]])


def test_nothing_left_to_release_is_no_plan(planning):
    world = two_blocks()
    world.table.desired_LEU[:] = 3
    queue, plan = step(planning, world, 5)
    assert plan is None
    assert (queue.lowered_at_LEU == -np.inf).all()


def test_without_pressure_there_is_no_plan_and_old_plans_are_dropped(planning):
    world = two_blocks()
    queue, plan = step(planning, world, 1)
    assert plan is not None
    assert queue.plans
    later, plan = step(planning, world, 0, queue=queue)
    assert plan is None
    assert later.plans == {}
    np.testing.assert_array_equal(later.lowered_at_LEU, queue.lowered_at_LEU)


def test_page_movement_off_is_never_a_plan(planning):
    frozen = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0, page_movement=False)
    assert step(planning, two_blocks(), 10, config=frozen)[1] is None


def test_reads_the_page_table(planning):
    shape = (1, 4, 2)
    sizes = {"min_bits": 3, "max_bits": 6, "frame_words": 256}
    layouts = (
        BlockLayout(rows=64, columns=64, interleaved=True, **sizes),
        BlockLayout(rows=64, columns=32, interleaved=False, **sizes),
    )
    table = PageTable(
        committed_LEU=np.full(shape, 6, np.uint8),
        desired_LEU=np.full(shape, 5, np.uint8),
        state_LEUP=np.zeros((*shape, 6), np.uint8),
        host_copy_LEUP=np.ones((*shape, 6), bool),
        frames=(),
        layouts=layouts,
    )
    s_LEUQ = np.random.default_rng(0).lognormal(size=(*shape, 4))
    world = SimpleNamespace(table=table, calibration=Calibration(sensitivity_LEUQ=s_LEUQ, min_bits=3, max_bits=6))
    _, plan = step(planning, world, 10**9)
    released_U = [layout.resident_bytes(5) - layout.resident_bytes(3) for layout in layouts]
    assert (plan.from_bits == 5).all()
    assert (plan.to_bits == 3).all()
    np.testing.assert_array_equal(plan.released_bytes, released_U * 4)


# Against the plain loop and brute force


@settings(max_examples=200, deadline=None)
@given(seed=seeds, ties=st.booleans(), target_bytes=targets)
def test_equals_the_plain_loop(planning, seed, ties, target_bytes):
    world = planning.make_world(seed, ties=ties)
    _, plan = step(planning, world, target_bytes)
    s_LEUQ = world.calibration.sensitivity_LEUQ
    expected = planning.plain_lower(world.table.desired_LEU, s_LEUQ, world.table.bytes_UQ, target_bytes)
    np.testing.assert_array_equal(bits_after(world, plan), expected)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, target_bytes=targets)
def test_each_stage_equals_the_plain_loop_above_its_floors(planning, seed, target_bytes):
    world = planning.make_world(seed, stages=STAGES)
    initial_LEU = np.full(planning.shape, planning.max_bits, np.uint8)
    queue, _ = step(planning, world, target_bytes, queue=PlanQueue.start(initial_LEU))
    assert len(queue.plans) == 6  # three capped stages, then three without caps
    for stage, plan in queue.plans.items():
        depth = 8 if stage.max_depth is None else stage.max_depth
        expected = planning.plain_lower(
            world.table.desired_LEU,
            world.calibration.sensitivity_LEUQ,
            world.table.bytes_UQ,
            target_bytes,
            np.maximum(stage.floor_bits, initial_LEU.astype(int) - depth),
        )
        np.testing.assert_array_equal(bits_after(world, plan), expected)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, convex=st.booleans(), target_bytes=st.integers(1, 60))
def test_brute_force(planning, seed, convex, target_bytes):
    """The target is met whenever any reduction meets it; on convex chains the damage is within one step of the best."""
    world = planning.make_world(seed, convex=convex, shape=(1, 2, 2))
    bits_LEU, bytes_UQ = world.table.desired_LEU, world.table.bytes_UQ
    s_LEUQ = world.calibration.sensitivity_LEUQ
    start_bytes = planning.weight_bytes(bits_LEU, bytes_UQ)
    optimum = np.inf
    for choice in product(*(range(planning.min_bits, b + 1) for b in bits_LEU.ravel())):
        low_LEU = np.reshape(choice, bits_LEU.shape)
        if start_bytes - planning.weight_bytes(low_LEU, bytes_UQ) >= target_bytes:
            optimum = min(optimum, planning.damage_between(bits_LEU, low_LEU, s_LEUQ))
    _, plan = step(planning, world, target_bytes)
    after_LEU = bits_after(world, plan)
    released_bytes = start_bytes - planning.weight_bytes(after_LEU, bytes_UQ)
    assert (released_bytes >= target_bytes) == (optimum < np.inf)
    if plan is not None:
        assert released_bytes == plan.total_released_bytes
    if convex and optimum < np.inf:
        worst_step = np.max(s_LEUQ[..., :-1] - s_LEUQ[..., 1:])
        assert planning.damage_between(bits_LEU, after_LEU, s_LEUQ) <= optimum + worst_step


# What must always hold


@settings(max_examples=100, deadline=None)
@given(seed=seeds, ties=st.booleans(), less=targets, more=targets)
def test_more_pressure_never_releases_less(planning, seed, ties, less, more):
    world = planning.make_world(seed, ties=ties, stages=STAGES)
    less, more = sorted((less, more))
    plans = [step(planning, world, target_bytes)[1] for target_bytes in (less, more)]
    released_bytes = [0 if plan is None else plan.total_released_bytes for plan in plans]
    assert released_bytes[0] <= released_bytes[1]


@settings(max_examples=100, deadline=None)
@given(seed=seeds, ties=st.booleans(), target_bytes=targets)
def test_plans_keep_floors_caps_and_bounds(planning, seed, ties, target_bytes):
    world = planning.make_world(seed, ties=ties, stages=STAGES)
    before_LEU = world.table.desired_LEU.copy()
    queue, chosen = step(planning, world, target_bytes)
    np.testing.assert_array_equal(world.table.desired_LEU, before_LEU)
    for stage, plan in queue.plans.items():
        floor_n = np.full(len(plan.blocks), max(stage.floor_bits, planning.min_bits))
        if stage.max_depth is not None:
            floor_n = np.maximum(floor_n, plan.from_bits - stage.max_depth)
        assert (plan.to_bits >= floor_n).all()
        assert (plan.to_bits < plan.from_bits).all()
        assert (plan.released_bytes > 0).all()
    lowered_LEU = queue.lowered_at_LEU == 0
    np.testing.assert_array_equal(lowered_LEU, bits_after(world, chosen) < before_LEU)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, exponent=st.integers(-8, 8), target_bytes=targets)
def test_scaling_all_damages_changes_nothing(planning, seed, exponent, target_bytes):
    world = planning.make_world(seed)
    _, plan = step(planning, world, target_bytes)
    scaled = SimpleNamespace(
        table=world.table,
        calibration=Calibration(
            sensitivity_LEUQ=world.calibration.sensitivity_LEUQ * 2.0**exponent,
            min_bits=planning.min_bits,
            max_bits=planning.max_bits,
        ),
    )
    _, scaled_plan = step(planning, scaled, target_bytes)
    np.testing.assert_array_equal(bits_after(scaled, scaled_plan), bits_after(world, plan))


@settings(max_examples=50, deadline=None)
@given(seed=seeds, order=st.permutations(range(3)), target_bytes=targets)
def test_permuting_experts_permutes_the_plan(planning, seed, order, target_bytes):
    world = planning.make_world(seed, convex=True)  # no two costs are equal
    _, plan = step(planning, world, target_bytes)
    permuted = SimpleNamespace(
        table=SimpleNamespace(desired_LEU=world.table.desired_LEU[:, order], bytes_UQ=world.table.bytes_UQ),
        calibration=Calibration(
            sensitivity_LEUQ=world.calibration.sensitivity_LEUQ[:, order],
            min_bits=planning.min_bits,
            max_bits=planning.max_bits,
        ),
    )
    _, permuted_plan = step(planning, permuted, target_bytes)
    np.testing.assert_array_equal(bits_after(permuted, permuted_plan), bits_after(world, plan)[:, order])


@settings(max_examples=50, deadline=None)
@given(seed=seeds, target_bytes=targets)
def test_without_global_sensitivity_the_highest_bits_go_first(planning, seed, target_bytes):
    world = planning.make_world(seed)
    uniform = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0, global_sensitivity=False)
    _, plan = step(planning, world, target_bytes, config=uniform)
    after_LEU = bits_after(world, plan)
    if plan is not None:
        assert after_LEU.max() <= plan.to_bits.min() + 1
        level_LEU = np.minimum(world.table.desired_LEU, after_LEU.max())
        assert (level_LEU - after_LEU <= 1).all()


# Initial bits


@settings(max_examples=100, deadline=None)
@given(seed=seeds, ties=st.booleans(), share=st.floats(0, 1.2))
def test_initial_bits_equal_the_plain_loop_and_fill_the_budget(planning, seed, ties, share):
    world = planning.make_world(seed, ties=ties)
    s_LEUQ, bytes_UQ = world.calibration.sensitivity_LEUQ, world.table.bytes_UQ
    full_LEU = np.full(planning.shape, planning.max_bits)
    full_bytes = planning.weight_bytes(full_LEU, bytes_UQ)
    floor_bytes = planning.weight_bytes(np.full(planning.shape, planning.min_bits), bytes_UQ)
    budget_bytes = floor_bytes + int(share * (full_bytes - floor_bytes))
    bits_LEU = initial_bits(world.calibration, bytes_UQ, budget_bytes)
    assert bits_LEU.dtype == np.uint8
    np.testing.assert_array_equal(bits_LEU, planning.plain_lower(full_LEU, s_LEUQ, bytes_UQ, full_bytes - budget_bytes))
    used_bytes = planning.weight_bytes(bits_LEU, bytes_UQ)
    assert used_bytes <= budget_bytes
    assert budget_bytes >= full_bytes or budget_bytes - used_bytes < np.diff(bytes_UQ).max()


def test_initial_bits_at_both_ends(planning):
    world = two_blocks()
    bytes_UQ = world.table.bytes_UQ
    np.testing.assert_array_equal(initial_bits(world.calibration, bytes_UQ, 70), [[[5, 5]]])
    np.testing.assert_array_equal(initial_bits(world.calibration, bytes_UQ, 69), [[[4, 5]]])
    np.testing.assert_array_equal(initial_bits(world.calibration, bytes_UQ, 42), [[[3, 3]]])
    with pytest.raises(UserError, match=r"take 42 bytes at the floor of 3 bits.*leaves 41 bytes: 1 too few"):
        initial_bits(world.calibration, bytes_UQ, 41)


def test_initial_bits_without_global_sensitivity_are_uniform(planning):
    world = planning.make_world(0)
    full_bytes = planning.weight_bytes(np.full(planning.shape, planning.max_bits), world.table.bytes_UQ)
    bits_LEU = initial_bits(world.calibration, world.table.bytes_UQ, int(0.7 * full_bytes), global_sensitivity=False)
    assert np.ptp(bits_LEU) <= 1
    assert np.ptp(initial_bits(world.calibration, world.table.bytes_UQ, int(0.7 * full_bytes))) > 1
