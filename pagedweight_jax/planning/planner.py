# SPDX-License-Identifier: Apache-2.0
"""The runtime planner: which linear-blocks change their bitwidth, and when.

Every decision is the same greedy (see ``greedy.py``)::

    plan_step       lowest d/Δ first, down from the desired bits      until D bytes are released
    initial_bits    lowest d/Δ first, down from max_bits              until the weights fit
    plan_reload     highest d/Δ first, up from the desired bits       as long as the free bytes last

All functions are pure.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.damage import predicted_damage, released_bytes
from pagedweight_jax.planning.greedy import NO_STEP_BYTES, greedy_fill, greedy_select, score_actions, score_raises
from pagedweight_jax.planning.observation import Observation
from pagedweight_jax.planning.pressure import (
    pressure_triggered,
    reload_bytes_from_kv_headroom,
    target_bytes_from_kv_pressure,
)
from pagedweight_jax.planning.queue import MovePlan, PlanQueue, resident_bytes
from pagedweight_jax.planning.scoring import Prior, effective_policy, expert_buckets, prior_damage, score_damage
from pagedweight_jax.planning.stages import FloorStage, bitwidth_floor_stages, stage_floors

if TYPE_CHECKING:
    from pagedweight_jax.paging.table import PageTable


def plan_step(
    table: "PageTable", observation: Observation, calibration: Calibration, queue: PlanQueue, config: PlannerConfig
) -> tuple[PlanQueue, MovePlan | None]:
    """Returns the updated queue and, under pressure, the plan to carry out now: Algorithm 1.

    The plan is None when there is no pressure or nothing is left to release. The caller carries out every plan that it
    is given: the queue remembers the plan's blocks as lowered. Without pressure the stages' plans are made for the
    least that there can be, one KV block: the queue always holds what would go next.

    Args:
      table: only ``desired_LEU`` (what is decided already) and ``bytes_UQ`` (M_u^b) are read.
      observation: what was seen up to this boundary.
      calibration: offline results.
      queue: as returned at the previous boundary.
      config: watermarks and switches.
    """
    if not config.page_movement:
        return queue, None
    target_bytes = target_bytes_from_kv_pressure(observation.kv, config)
    bits_LEU, bytes_UQ = table.desired_LEU, table.bytes_UQ
    policy = effective_policy(calibration, config)
    bucket_LE = expert_buckets(observation, calibration, policy)
    prior = queue.prior or Prior.of(calibration, bytes_UQ, config)
    damage_LEUR = score_damage(observation, calibration, bucket_LE, prior, config)
    stages = bitwidth_floor_stages(policy)
    floor_SLEU = stage_floors(stages, policy, bucket_LE, queue.initial_LEU)
    np.maximum(floor_SLEU, calibration.least_LEU, out=floor_SLEU)
    most_SLEU = bits_LEU - np.minimum(bits_LEU, floor_SLEU)
    actions = score_actions(bits_LEU, damage_LEUR, released_bytes(bytes_UQ), calibration.max_bits)
    selected = greedy_select(actions, most_SLEU, max(target_bytes, observation.kv.block_bytes))
    plans = [
        MovePlan(
            old_LEU=bits_LEU,
            new_LEU=bits_LEU - lost_LEU,
            bytes_UQ=bytes_UQ,
            min_bits=calibration.min_bits,
            total_released_bytes=stage_bytes,
        )
        for lost_LEU, stage_bytes in selected
    ]
    queue = replace(queue, prior=prior, damage_LEUR=damage_LEUR)
    queue = refresh_plan_queue(queue, dict(zip(stages, plans, strict=True)))
    plan = select_best_plan(queue, target_bytes) if pressure_triggered(observation.kv, config) else None
    return (queue, None) if plan is None else (remember_lowered(queue, plan, observation.boundary), plan)


def plan_reload(
    table: "PageTable", observation: Observation, calibration: Calibration, queue: PlanQueue, config: PlannerConfig
) -> MovePlan | None:
    """Returns the plan that raises the blocks with the most damage removed per byte, None if no step fits.

    It takes no more than the bytes that leave the KV cache above the high watermark, nor than ``max_reload_bytes``, so
    it never causes the pressure that ``plan_step`` answers; it leaves alone the blocks lowered within the last
    ``hysteresis_boundaries`` boundaries. Under a steady load both fall silent. Damage is what ``plan_step`` goes by.

    Args:
      table, observation, calibration, config: as for ``plan_step``.
      queue: as ``plan_step`` returned it at this boundary.
    """
    bits_LEU, bytes_UQ = table.desired_LEU, table.bytes_UQ
    size_UR = released_bytes(bytes_UQ)
    available_bytes = reload_bytes_from_kv_headroom(observation.kv, config)
    if not config.page_movement or available_bytes < size_UR.min(initial=NO_STEP_BYTES):
        return None
    settled_LEU = observation.boundary - queue.lowered_at_LEU > config.hysteresis_boundaries
    if not (settled_LEU & (bits_LEU < calibration.max_bits)).any():
        return None
    damage_LEUR = queue.damage_LEUR
    if damage_LEUR is None:
        bucket_LE = expert_buckets(observation, calibration, effective_policy(calibration, config))
        prior = queue.prior or Prior.of(calibration, bytes_UQ, config)
        damage_LEUR = score_damage(observation, calibration, bucket_LE, prior, config)
    actions = score_raises(bits_LEU, settled_LEU, damage_LEUR, size_UR, calibration.min_bits)
    raised_LEU = bits_LEU + greedy_fill(actions, available_bytes)
    plan = MovePlan.between(bits_LEU, raised_LEU, bytes_UQ, calibration.min_bits)
    return None if plan.is_empty else plan


def initial_bits(
    calibration: Calibration, bytes_UQ: np.ndarray, budget_bytes: int, global_sensitivity: bool = True
) -> np.ndarray:
    """Returns the bits to start serving with, uint8 [L, E, U]: lowered from max_bits until the weights fit the budget.

    Args:
      calibration: offline results. Global damage alone decides, and min_bits and pins are the only floors.
      bytes_UQ: int64, M_u^b for b = min_bits .. max_bits.
      budget_bytes: device bytes left for the routed experts.
      global_sensitivity: False lowers all blocks alike.

    Raises:
      UserError: not even the floor fits.
    """
    least_LEU = calibration.least_LEU
    full_LEU = np.full_like(least_LEU, calibration.max_bits)
    floor_bytes, full_bytes = (resident_bytes(b_LEU, bytes_UQ, calibration.min_bits) for b_LEU in (least_LEU, full_LEU))
    if floor_bytes > budget_bytes:
        raise UserError(
            f"memory: the routed experts take {floor_bytes} bytes at the floor of {bits_range(least_LEU)} bits, but "
            f"the budget leaves {budget_bytes} bytes: {floor_bytes - budget_bytes} too few"
        )
    damage_LEUR = predicted_damage(prior_damage(calibration, bytes_UQ, global_sensitivity))
    actions = score_actions(full_LEU, damage_LEUR, released_bytes(bytes_UQ), calibration.max_bits)
    [(lost_LEU, _)] = greedy_select(actions, (full_LEU - least_LEU)[None], full_bytes - budget_bytes)
    return full_LEU - lost_LEU


def releasable_bytes(table: "PageTable", calibration: Calibration, queue: PlanQueue, config: PlannerConfig) -> int:
    """Returns the bytes that ``plan_step`` could still release at its most relaxed stage, whatever the traffic is.

    Args:
      table, calibration, queue, config: as for ``plan_step``.
    """
    if not config.page_movement:
        return 0
    bits_LEU = table.desired_LEU
    lowest_LEU = np.minimum(bits_LEU, lowest_bits(calibration, config))
    return MovePlan.between(bits_LEU, lowest_LEU, table.bytes_UQ, calibration.min_bits).total_released_bytes


def lowest_bits(calibration: Calibration, config: PlannerConfig) -> np.ndarray:
    """Returns the bits to which the most relaxed stage can lower every block, even of the hottest bucket, [L, E, U]."""
    policy = effective_policy(calibration, config)
    floor_bits = min(max(0, policy.floors[-1] - policy.stages[-1]), calibration.max_bits)
    return np.maximum(calibration.least_LEU, np.uint8(floor_bits))


def bits_range(bits_LEU: np.ndarray) -> str:
    """Returns the bits in words: "3", or "3 to 5" where blocks differ."""
    low, high = int(bits_LEU.min()), int(bits_LEU.max())
    return str(low) if low == high else f"{low} to {high}"


# The queue


def refresh_plan_queue(queue: PlanQueue, plans: dict[FloorStage, MovePlan]) -> PlanQueue:
    """Returns the queue with ``plans`` as the newest of their stages."""
    return replace(queue, plans={**queue.plans, **plans})


def select_best_plan(queue: PlanQueue, target_bytes: int) -> MovePlan | None:
    """Returns the strictest stage's plan that meets the target, else the largest reduction, None if that is empty."""
    largest, most_bytes = None, 0
    for plan in queue.plans.values():
        released_bytes = plan.total_released_bytes
        if released_bytes >= target_bytes:
            return plan
        if released_bytes > most_bytes:
            largest, most_bytes = plan, released_bytes
    return largest


def remember_lowered(queue: PlanQueue, plan: MovePlan, boundary: int) -> PlanQueue:
    """Returns the queue that knows the plan's blocks as lowered at ``boundary``."""
    lowered_LEU = plan.new_LEU < plan.old_LEU
    return replace(queue, lowered_at_LEU=np.where(lowered_LEU, float(boundary), queue.lowered_at_LEU))
