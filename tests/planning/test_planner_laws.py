# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 with everything on: against plain loops and brute force, and the properties that must always hold."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.planning import greedy
from pagedweight_jax.planning.planner import lowest_bits, plan_reload, plan_step, releasable_bytes
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy
from pagedweight_jax.planning.queue import PlanQueue
from pagedweight_jax.planning.scoring import Prior, effective_policy, expert_buckets, score_damage
from pagedweight_jax.planning.stages import bitwidth_floor_stages

CONFIG = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0)
STAGES = Policy(floors=(5,), depth_caps=(1,), stages=(0, 1, 5))

seeds = st.integers(0, 2**32 - 1)
targets = st.integers(1, 160)  # bytes; a world weighs at most 12 blocks x 3 steps x 8 bytes above its floor
kinds = st.sampled_from(["rough", "ties", "convex", "rich"])


def draw(planning, seed, kind, **more):
    """A world of this kind, and a queue whose initial bits lie above or below those of now."""
    policy = planning.rich_policy if kind == "rich" else STAGES
    kinds = {} if kind == "rough" else {kind: True}
    world = planning.make_world(seed, policy=policy, **kinds, **more)
    initial_LEU = np.random.default_rng(seed + 1).integers(
        planning.min_bits, planning.max_bits + 1, world.table.desired_LEU.shape
    )
    return world, PlanQueue.start(initial_LEU.astype(np.uint8))


def replace_calibration(world, **changes):
    return SimpleNamespace(
        table=SimpleNamespace(**vars(world.table)),
        calibration=replace(world.calibration, **changes),
        requests=world.requests,
        kv_blocks=world.kv_blocks,
    )


def step(planning, world, target_bytes, queue, config=CONFIG):
    """``plan_step`` under a pressure of ``target_bytes``: one KV block is one byte, the threshold is 0."""
    observation = planning.observe(1 - target_bytes, world=world)
    return plan_step(world.table, observation, world.calibration, queue, config)


def bits_after(world, plan):
    return world.table.desired_LEU if plan is None else plan.apply(world.table.desired_LEU)


def damage_of(planning, world, config=CONFIG):
    observation = planning.observe(0, world=world)
    bucket_LE = expert_buckets(observation, world.calibration, effective_policy(world.calibration, config))
    prior = Prior.of(world.calibration, world.table.bytes_UQ, config)
    return score_damage(observation, world.calibration, bucket_LE, prior, config)


# Against the plain loop and brute force


@settings(max_examples=100, deadline=None)
@given(seed=seeds)
def test_damage_and_buckets_equal_the_plain_equations(planning, seed):
    world, _ = draw(planning, seed, "rich")
    np.testing.assert_allclose(damage_of(planning, world), planning.plain_rich_damage(world), rtol=3e-5)
    bucket_LE = expert_buckets(planning.observe(0, world=world), world.calibration, world.calibration.policy)
    for (layer, expert), bucket in np.ndenumerate(bucket_LE):
        assert bucket == planning.plain_bucket(world, layer, expert)


@settings(max_examples=200, deadline=None)
@given(seed=seeds, kind=kinds, target_bytes=targets)
def test_each_stage_equals_the_plain_loop_above_its_floors(planning, seed, kind, target_bytes):
    world, queue = draw(planning, seed, kind)
    queue, plan = step(planning, world, target_bytes, queue)
    assert tuple(queue.plans) == bitwidth_floor_stages(world.calibration.policy)
    damage_LEUR = damage_of(planning, world)
    best, released = None, -1
    for stage, stage_plan in queue.plans.items():
        floor_LEU = planning.plain_floors(world, stage, queue.initial_LEU)
        expected_LEU = planning.plain_lower(
            world.table.desired_LEU, damage_LEUR, world.table.bytes_UQ, target_bytes, floor_LEU
        )
        np.testing.assert_array_equal(bits_after(world, stage_plan), expected_LEU)
        if released < min(target_bytes, stage_plan.total_released_bytes):
            best, released = stage_plan, stage_plan.total_released_bytes
    np.testing.assert_array_equal(bits_after(world, plan), bits_after(world, best))


@settings(max_examples=100, deadline=None)
@given(seed=seeds, kind=kinds, target_bytes=targets)
def test_a_short_head_of_the_order_changes_nothing(planning, seed, kind, target_bytes):
    world, queue = draw(planning, seed, kind)
    expected, _ = step(planning, world, target_bytes, queue)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(greedy, "SPARE_SHARE", 0)
        patch.setattr(greedy, "SPARE_SAMPLES", 0)
        short, _ = step(planning, world, target_bytes, queue)
    for stage, plan in expected.plans.items():
        np.testing.assert_array_equal(bits_after(world, short.plans[stage]), bits_after(world, plan))


@pytest.mark.parametrize("share", [0.001, 0.1, 0.4, 0.9])
@pytest.mark.parametrize("kind", ["rough", "rich"])
def test_many_steps_are_not_all_sorted_and_the_plans_are_the_same(planning, kind, share, monkeypatch):
    world, _ = draw(planning, 5, kind, shape=(12, 50, 2))
    initial_LEU = np.full(world.table.desired_LEU.shape, planning.max_bits, np.uint8)
    queue = PlanQueue.start(initial_LEU)
    target_bytes = int(share * releasable_bytes(world.table, world.calibration, queue, CONFIG))
    orders = []
    order_of = greedy.greedy_order
    monkeypatch.setattr(greedy, "greedy_order", lambda *given: orders.append(order_of(*given)) or orders[-1])
    sampled, _ = step(planning, world, target_bytes, queue)
    assert share > 0.5 or not orders[0].complete
    monkeypatch.setattr(greedy, "SPARE_SAMPLES", 10**9)
    sorted_all, _ = step(planning, world, target_bytes, queue)
    assert orders[-1].complete
    assert list(sampled.plans) == list(sorted_all.plans)
    for stage, plan in sorted_all.plans.items():
        np.testing.assert_array_equal(sampled.plans[stage].new_LEU, plan.new_LEU)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, ties=st.booleans(), num_bytes=st.integers(1, 80))
def test_the_head_is_the_first_steps_of_the_order(planning, seed, ties, num_bytes):
    world = planning.make_world(seed, ties=ties)
    damage_LEUR, sizes_UR = damage_of(planning, world), np.diff(world.table.bytes_UQ)[:, ::-1]
    actions = greedy.score_actions(world.table.desired_LEU, damage_LEUR, sizes_UR, planning.max_bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(greedy, "SPARE_SHARE", 0)
        patch.setattr(greedy, "SPARE_SAMPLES", 0)
        head, full = (greedy.greedy_order(actions, n) for n in (num_bytes, 10**6))
    assert full.complete
    assert len(full.block_n) == (world.table.desired_LEU - planning.min_bits).sum()
    assert min(num_bytes, full.size_n.sum()) <= head.size_n.sum()
    for name in ("block_n", "nth_n", "size_n"):
        np.testing.assert_array_equal(getattr(head, name), getattr(full, name)[: len(head.block_n)])


@settings(max_examples=60, deadline=None)
@given(seed=seeds, kind=kinds, target_bytes=st.integers(1, 60))
def test_brute_force(planning, seed, kind, target_bytes):
    """A stage meets the target whenever any reduction above its floors does; a block below its floor may stay.

    On convex chains its damage is within one step of the best.
    """
    world, queue = draw(planning, seed, kind, shape=(1, 2, 2))
    bits_LEU, bytes_UQ = world.table.desired_LEU, world.table.bytes_UQ
    damage_LEUR = damage_of(planning, world)
    start_bytes = planning.weight_bytes(bits_LEU, bytes_UQ)
    queue, chosen = step(planning, world, target_bytes, queue)
    can_meet = {}
    for stage, plan in queue.plans.items():
        floor_LEU = planning.plain_floors(world, stage, queue.initial_LEU)
        optimum = np.inf
        for choice in product(*(range(planning.min_bits, b + 1) for b in bits_LEU.ravel())):
            low_LEU = np.reshape(choice, bits_LEU.shape)
            if ((low_LEU < bits_LEU) & (low_LEU < floor_LEU)).any():
                continue
            if start_bytes - planning.weight_bytes(low_LEU, bytes_UQ) >= target_bytes:
                optimum = min(optimum, planning.damage_between(bits_LEU, low_LEU, damage_LEUR))
        after_LEU = bits_after(world, plan)
        released = start_bytes - planning.weight_bytes(after_LEU, bytes_UQ)
        assert released == plan.total_released_bytes
        can_meet[stage] = optimum < np.inf
        assert (released >= target_bytes) == can_meet[stage]
        if kind == "convex" and can_meet[stage]:
            worst_step = damage_LEUR.max()
            assert planning.damage_between(bits_LEU, after_LEU, damage_LEUR) <= (optimum + worst_step) * (1 + 1e-6)
    if any(can_meet.values()):
        assert chosen is queue.plans[next(stage for stage in queue.plans if can_meet[stage])]


@settings(max_examples=100, deadline=None)
@given(seed=seeds, planned=st.booleans(), available_bytes=st.integers(0, 160))
def test_reload_goes_by_the_same_damage(planning, seed, planned, available_bytes):
    world, queue = draw(planning, seed, "rich")
    observation = planning.observe(1 + available_bytes, world=world)
    if planned:
        queue, _ = plan_step(world.table, observation, world.calibration, queue, CONFIG)
        np.testing.assert_array_equal(queue.damage_LEUR, damage_of(planning, world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(greedy, "SPARE_SHARE", 0)
        patch.setattr(greedy, "SPARE_SAMPLES", 0)
        plan = plan_reload(world.table, observation, world.calibration, queue, CONFIG)
    expected_LEU = planning.plain_raise(
        world.table.desired_LEU,
        damage_of(planning, world),
        world.table.bytes_UQ,
        available_bytes,
        np.ones(planning.shape, bool),
    )
    np.testing.assert_array_equal(bits_after(world, plan), expected_LEU)


# What must always hold


@settings(max_examples=150, deadline=None)
@given(seed=seeds, kind=kinds, less=targets, more=targets)
def test_more_pressure_never_releases_less(planning, seed, kind, less, more):
    world, queue = draw(planning, seed, kind)
    less, more = sorted((less, more))
    plans = [step(planning, world, target_bytes, queue)[1] for target_bytes in (less, more)]
    released = [0 if plan is None else plan.total_released_bytes for plan in plans]
    assert released[0] <= released[1]


@settings(max_examples=150, deadline=None)
@given(seed=seeds, kind=kinds, target_bytes=targets)
def test_plans_keep_floors_caps_and_bounds(planning, seed, kind, target_bytes):
    world, queue = draw(planning, seed, kind)
    before_LEU = world.table.desired_LEU.copy()
    queue, chosen = step(planning, world, target_bytes, queue)
    np.testing.assert_array_equal(world.table.desired_LEU, before_LEU)
    for stage, plan in queue.plans.items():
        floor_n = planning.plain_floors(world, stage, queue.initial_LEU)[tuple(plan.blocks.T)]
        assert (plan.to_bits >= np.maximum(floor_n, planning.min_bits)).all()
        assert (plan.to_bits < plan.from_bits).all()
        assert (plan.released_bytes > 0).all()
    lowered_LEU = queue.lowered_at_LEU == 0
    np.testing.assert_array_equal(lowered_LEU, bits_after(world, chosen) < before_LEU)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, kind=kinds)
def test_what_is_called_releasable_can_be_released(planning, seed, kind):
    """Whatever the traffic; and no more where all experts are in one bucket."""
    world, queue = draw(planning, seed, kind)
    promised = releasable_bytes(world.table, world.calibration, queue, CONFIG)
    queue, plan = step(planning, world, 10**6, queue)
    released = 0 if plan is None else plan.total_released_bytes
    assert promised <= released
    if kind != "rich":
        assert promised == released
    above_LEU = np.maximum(world.table.desired_LEU, lowest_bits(world.calibration, CONFIG))
    assert (bits_after(world, plan) <= above_LEU).all()


@settings(max_examples=100, deadline=None)
@given(seed=seeds, exponent=st.integers(-8, 8), target_bytes=targets)
def test_scaling_all_damages_changes_nothing(planning, seed, exponent, target_bytes):
    world, queue = draw(planning, seed, "rich", monotone=True)  # ε does not scale
    _, plan = step(planning, world, target_bytes, queue)
    s_LEUQ, policy = world.calibration.sensitivity_LEUQ * 2.0**exponent, world.calibration.policy
    multipliers = tuple(mu * 2.0**exponent for mu in policy.multipliers)
    for more in ({"sensitivity_LEUQ": s_LEUQ}, {"policy": replace(policy, multipliers=multipliers)}):
        scaled = replace_calibration(world, **more)
        _, scaled_plan = step(planning, scaled, target_bytes, queue)
        np.testing.assert_array_equal(bits_after(scaled, scaled_plan), bits_after(world, plan))


@settings(max_examples=100, deadline=None)
@given(seed=seeds, factor=st.integers(2, 9))
def test_only_shares_of_kv_blocks_count(planning, seed, factor):
    world, _ = draw(planning, seed, "rich")
    damage_LEUR = damage_of(planning, world)
    world.kv_blocks = tuple(factor * n for n in world.kv_blocks)
    np.testing.assert_allclose(damage_of(planning, world), damage_LEUR, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, order=st.permutations(range(3)), target_bytes=targets)
def test_permuting_experts_permutes_the_plan(planning, seed, order, target_bytes):
    world, queue = draw(planning, seed, "rich", monotone=True)
    _, plan = step(planning, world, target_bytes, queue)
    calibration = world.calibration
    permuted = replace_calibration(
        world,
        sensitivity_LEUQ=calibration.sensitivity_LEUQ[:, order],
        mass_LE=calibration.mass_LE[:, order],
        features_LEUX=calibration.features_LEUX[:, order],
    )
    permuted.table.desired_LEU = world.table.desired_LEU[:, order]
    permuted.requests = tuple(
        replace(
            r,
            mass_LE=r.mass_LE[:, order],
            norm_LEU=r.norm_LEU[:, order],
            square_LEU=r.square_LEU[:, order],
            max_LEU=r.max_LEU[:, order],
        )
        for r in world.requests
    )
    damage_LEUR = damage_of(planning, world)
    np.testing.assert_allclose(damage_of(planning, permuted), damage_LEUR[:, order], rtol=1e-5)
    cost_LEUR = damage_LEUR / np.diff(world.table.bytes_UQ)[:, ::-1]
    assume(np.diff(np.sort(np.log(cost_LEUR), axis=None)).min() > 1e-5)  # ties go by table order
    _, permuted_plan = step(planning, permuted, target_bytes, PlanQueue.start(queue.initial_LEU[:, order]))
    np.testing.assert_array_equal(bits_after(permuted, permuted_plan), bits_after(world, plan)[:, order])


# The switches


@settings(max_examples=100, deadline=None)
@given(seed=seeds, target_bytes=targets)
def test_each_switch_takes_out_its_part_and_nothing_else(planning, seed, target_bytes):
    world, queue = draw(planning, seed, "rich")
    calibration = world.calibration

    def same(switches, **without):
        _, switched = step(planning, world, target_bytes, queue, replace(CONFIG, **switches))
        _, expected = step(planning, replace_calibration(world, **without), target_bytes, queue)
        np.testing.assert_array_equal(bits_after(world, switched), bits_after(world, expected))

    same({"prompt_residual": False}, heads=None)
    neutral = replace(NEUTRAL_POLICY, alpha=calibration.policy.alpha, prior_tokens=calibration.policy.prior_tokens)
    same({"routing_statistics": False}, policy=neutral)
    same({"routing_statistics": False, "prompt_residual": False}, policy=neutral, heads=None)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, target_bytes=targets)
def test_without_global_sensitivity_the_highest_bits_go_first(planning, seed, target_bytes):
    world, queue = draw(planning, seed, "rich")
    uniform = replace(CONFIG, global_sensitivity=False)
    _, plan = step(planning, world, target_bytes, queue, uniform)
    after_LEU = bits_after(world, plan)
    np.testing.assert_array_equal(
        damage_of(planning, world, uniform), damage_of(planning, replace_calibration(world, heads=None), uniform)
    )
    if plan is not None:
        assert after_LEU.max() <= plan.to_bits.min() + 1
        level_LEU = np.minimum(world.table.desired_LEU, after_LEU.max())
        assert (level_LEU - after_LEU <= 1).all()


def test_every_switch_matters(planning):
    """Negative control: the rich worlds are such that each part of the damage changes plans."""
    changed = {"routing_statistics": 0, "prompt_residual": 0, "global_sensitivity": 0}
    no_floors = replace(planning.rich_policy, floors=(0, 0, 0), depth_caps=(None, None, None))
    for seed in range(20):
        world = planning.make_world(seed, rich=True, monotone=True, policy=no_floors)
        queue = PlanQueue.start(world.table.desired_LEU)
        _, plan = step(planning, world, 30, queue)
        for switch in changed:
            _, other = step(planning, world, 30, queue, replace(CONFIG, **{switch: False}))
            changed[switch] += (bits_after(world, other) != bits_after(world, plan)).any()
    assert min(changed.values()) >= 5, changed
