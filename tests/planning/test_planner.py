# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 by hand: plans, stages, the queue, the switches, what can be released, and the initial bits."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.paging.table import PageTable
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.greedy import greedy_select, score_actions
from pagedweight_jax.planning.observation import KVPressure
from pagedweight_jax.planning.planner import initial_bits, lowest_bits, plan_step, releasable_bytes
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy
from pagedweight_jax.planning.pressure import pressure_triggered, target_bytes_from_kv_pressure
from pagedweight_jax.planning.queue import PlanQueue
from pagedweight_jax.planning.signals import RequestSignals
from pagedweight_jax.planning.stages import FloorStage
from pallas_kernels.bitplane import BlockLayout

CONFIG = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0)
seeds = st.integers(0, 2**32 - 1)


def step(planning, world, target_bytes, config=CONFIG, queue=None, boundary=0):
    """``plan_step`` under a pressure of ``target_bytes``: one KV block is one byte, the threshold is 0."""
    queue = queue or PlanQueue.start(world.table.desired_LEU)
    observation = planning.observe(1 - target_bytes, boundary=boundary, world=world)
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


def two_blocks(policy=NEUTRAL_POLICY):
    """gate_up and down of one expert at 3..5 bits. d/Δ from the top: gate_up 10/10, 30/10; down 8/4, 4/4."""
    s_LEUQ = np.array([[[[40.0, 10.0, 0.0], [12.0, 8.0, 0.0]]]])
    table = SimpleNamespace(desired_LEU=np.array([[[5, 5]]], np.uint8), bytes_UQ=np.array([[30, 40, 50], [12, 16, 20]]))
    calibration = Calibration(sensitivity_LEUQ=s_LEUQ, min_bits=3, max_bits=5, policy=policy)
    return SimpleNamespace(table=table, calibration=calibration, requests=(), kv_blocks=())


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
    damage_LEUR = np.array([[[[15.0, 30.0], [8.0, 4.0]]]], np.float32)
    all_SLEU = np.full((1, 1, 1, 2), 2, np.uint8)
    actions = score_actions(np.full((1, 1, 2), 5, np.uint8), damage_LEUR, np.array([[10, 10], [4, 4]]), 5)
    np.testing.assert_array_equal(actions.cost_LEUR, [[[[1.5, 3.0], [2.0, 2.0]]]])
    [(lost_LEU, released_bytes)] = greedy_select(actions, all_SLEU, 4)
    np.testing.assert_array_equal(lost_LEU, [[[1, 0]]])
    assert released_bytes == 10
    plain = replace(actions, cost_LEUR=damage_LEUR / actions.size_UR.astype(np.float32))
    [(lost_LEU, _)] = greedy_select(plain, all_SLEU, 4)
    np.testing.assert_array_equal(lost_LEU, [[[0, 2]]])


def test_bytes_of_the_next_steps_by_hand():
    bits_LEU = np.array([[[5, 4]]], np.uint8)
    actions = score_actions(bits_LEU, np.ones((1, 1, 2, 2), np.float32), np.array([[10, 20], [3, 4]]), 5)
    assert actions.bytes_of(np.array([[[2, 1]]], np.uint8)) == 10 + 20 + 4
    assert actions.bytes_of(np.array([[[1, 0]]], np.uint8)) == 10


def test_strictest_stage_that_meets_the_target_wins(planning):
    world = two_blocks(Policy(floors=(4,), stages=(0, 4)))
    strict, relaxed = FloorStage(relaxed_bits=0), FloorStage(relaxed_bits=4)
    queue, plan = step(planning, world, 14)
    assert list(queue.plans) == [strict, relaxed]
    assert plan is queue.plans[strict]
    queue, plan = step(planning, world, 15, queue=queue)
    assert plan is queue.plans[relaxed]
    np.testing.assert_array_equal(bits_after(world, plan), [[[4, 3]]])


def test_depth_caps_are_relaxed_only_when_every_stage_falls_short(planning):
    world = two_blocks(Policy(floors=(5,), depth_caps=(1,), stages=(0, 2)))
    queue, plan = step(planning, world, 14)
    assert plan is queue.plans[FloorStage(relaxed_bits=2)]
    np.testing.assert_array_equal(bits_after(world, plan), [[[4, 4]]])
    queue, plan = step(planning, world, 15)
    assert plan is queue.plans[FloorStage(relaxed_bits=2, capped=False)]
    np.testing.assert_array_equal(bits_after(world, plan), [[[4, 3]]])


def test_a_policy_keeps_what_is_left_of_its_floors(planning):
    """The largest safe reduction, however great the pressure."""
    world = two_blocks(Policy(floors=(5,), depth_caps=(0,), stages=(0, 1)))
    queue, plan = step(planning, world, 10**6)
    np.testing.assert_array_equal(bits_after(world, plan), [[[4, 4]]])
    assert releasable_bytes(world.table, world.calibration, queue, CONFIG) == 14
    assert (lowest_bits(world.calibration, CONFIG) == 4).all()


def test_a_block_below_its_floor_stays(planning):
    world = two_blocks(Policy(floors=(5,)))
    world.table.desired_LEU = np.array([[[4, 3]]], np.uint8)
    queue, plan = step(planning, world, 1)
    assert plan is None
    assert releasable_bytes(world.table, world.calibration, queue, CONFIG) == 0


def test_depth_counts_from_the_initial_bits(planning):
    world = two_blocks(Policy(depth_caps=(1,)))
    queue = PlanQueue.start(np.array([[[5, 4]]], np.uint8))
    queue, _ = step(planning, world, 28, queue=queue)
    np.testing.assert_array_equal(bits_after(world, queue.plans[FloorStage()]), [[[4, 3]]])


def two_experts(policy):
    """Two experts alike, of which the one request uses the second alone: relative masses 0.5 and 1.5."""
    world = two_blocks()
    s_LEUQ = np.repeat(world.calibration.sensitivity_LEUQ, 2, axis=1)
    world.table.desired_LEU = np.full((1, 2, 2), 5, np.uint8)
    world.calibration = replace(world.calibration, sensitivity_LEUQ=s_LEUQ, mass_LE=np.full((1, 2), 0.5), policy=policy)
    signals = replace(RequestSignals.empty(1, 2), mass_LE=np.array([[0.0, 3.0]]), tokens=100.0)
    world.requests, world.kv_blocks = (signals,), (1,)
    return world


TWO_BUCKETS = {"edges": (1.0,), "prior_tokens": 100.0}


def test_hot_experts_are_dearer(planning):
    world = two_experts(Policy(multipliers=(1.0, 3.0), floors=(0, 0), depth_caps=(None, None), **TWO_BUCKETS))
    # By cost: 1 and 2, 2, 3 of the cold expert, 3 of the hot one (equal, but later in the table), then 6, 6, 9.
    for target, bits in (
        (10, [[4, 5], [5, 5]]),
        (18, [[4, 3], [5, 5]]),
        (19, [[3, 3], [5, 5]]),
        (29, [[3, 3], [4, 5]]),
        (39, [[3, 3], [4, 4]]),
        (47, [[3, 3], [3, 3]]),
    ):
        np.testing.assert_array_equal(bits_after(world, step(planning, world, target)[1]), [bits])


def test_hot_experts_have_higher_floors_and_shallower_caps(planning):
    policy = Policy(multipliers=(1.0, 1.0), floors=(3, 4), depth_caps=(2, 0), **TWO_BUCKETS)
    world = two_experts(policy)
    queue, plan = step(planning, world, 10**6)
    np.testing.assert_array_equal(bits_after(world, queue.plans[FloorStage()]), [[[3, 3], [5, 5]]])
    np.testing.assert_array_equal(bits_after(world, plan), [[[3, 3], [4, 4]]])
    assert releasable_bytes(world.table, world.calibration, queue, CONFIG) == 28  # either expert may be the hot one


def test_without_routing_statistics_all_experts_are_alike(planning):
    policy = Policy(multipliers=(1.0, 3.0), floors=(3, 5), depth_caps=(2, 0), **TWO_BUCKETS)
    world = two_experts(policy)
    blind = replace(CONFIG, routing_statistics=False)
    queue, plan = step(planning, world, 28, config=blind)
    np.testing.assert_array_equal(bits_after(world, plan), [[[4, 3], [4, 5]]])
    assert list(queue.plans) == [FloorStage()]
    assert (lowest_bits(world.calibration, CONFIG) == 5).all()
    assert (lowest_bits(world.calibration, blind) == 3).all()


def test_nothing_left_to_release_is_no_plan(planning):
    world = two_blocks()
    world.table.desired_LEU[:] = 3
    queue, plan = step(planning, world, 5)
    assert plan is None
    assert (queue.lowered_at_LEU == -np.inf).all()
    assert releasable_bytes(world.table, world.calibration, queue, CONFIG) == 0


def test_without_pressure_the_next_plan_is_ready_but_not_returned(planning):
    world = two_blocks(Policy(floors=(5,), stages=(0, 2)))
    queue, plan = step(planning, world, 0)
    assert plan is None
    assert [len(ready.blocks) for ready in queue.plans.values()] == [0, 1]
    np.testing.assert_array_equal(bits_after(world, queue.plans[FloorStage(relaxed_bits=2)]), [[[4, 5]]])
    assert (queue.lowered_at_LEU == -np.inf).all()


def test_the_queue_holds_the_newest_plan_of_every_stage(planning):
    world = two_blocks()
    queue, plan = step(planning, world, 1)
    world.table.desired_LEU = bits_after(world, plan)
    later, plan = step(planning, world, 0, queue=queue, boundary=1)
    assert plan is None
    assert len(later.plans) == 1
    np.testing.assert_array_equal(bits_after(world, later.plans[FloorStage()]), [[[4, 4]]])
    np.testing.assert_array_equal(later.lowered_at_LEU, queue.lowered_at_LEU)


def test_page_movement_off_is_never_a_plan(planning):
    frozen, world = replace(CONFIG, page_movement=False), two_blocks()
    queue, plan = step(planning, world, 10, config=frozen)
    assert plan is None
    assert releasable_bytes(world.table, world.calibration, queue, frozen) == 0
    assert releasable_bytes(world.table, world.calibration, queue, CONFIG) == 28


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
    calibration = Calibration(sensitivity_LEUQ=s_LEUQ, min_bits=3, max_bits=6)
    world = SimpleNamespace(table=table, calibration=calibration, requests=(), kv_blocks=())
    _, plan = step(planning, world, 10**9)
    released_U = [layout.resident_bytes(5) - layout.resident_bytes(3) for layout in layouts]
    assert (plan.from_bits == 5).all()
    assert (plan.to_bits == 3).all()
    np.testing.assert_array_equal(plan.released_bytes, released_U * 4)


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
    damage_LEUR = planning.plain_damage(s_LEUQ)
    np.testing.assert_array_equal(
        bits_LEU, planning.plain_lower(full_LEU, damage_LEUR, bytes_UQ, full_bytes - budget_bytes)
    )
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


def test_initial_bits_go_by_global_damage_alone(planning):
    rich = planning.make_world(3, rich=True, policy=planning.rich_policy)
    plain = replace(rich.calibration, mass_LE=None, features_LEUX=None, heads=None, policy=NEUTRAL_POLICY)
    bytes_UQ = rich.table.bytes_UQ
    budget_bytes = planning.weight_bytes(np.full(planning.shape, 4), bytes_UQ)
    bits_LEU = initial_bits(rich.calibration, bytes_UQ, budget_bytes)
    assert bits_LEU.min() < 4
    np.testing.assert_array_equal(bits_LEU, initial_bits(plain, bytes_UQ, budget_bytes))
