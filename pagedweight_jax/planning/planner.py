# SPDX-License-Identifier: Apache-2.0
"""The runtime planner: which linear-blocks change their bitwidth, and when.

Every decision is the same greedy. Bits change one at a time, along a block's *chain*; a step has a damage d and a size
Δ in bytes. The greedy takes the best step among those that come next in their chains, until a number of bytes is met::

    plan_step       lowest d/Δ first, down from the desired bits      until D bytes are released
    initial_bits    lowest d/Δ first, down from max_bits              until the weights fit
    plan_reload     highest d/Δ first, up from the desired bits       as long as the free bytes last

When a step of cost c is the best there is, the steps behind it that cost less than c are the best right after it. So
a step is taken at the *running maximum* of the costs along its chain, and the greedy is: sort all steps by that, sum up
their sizes, cut. Sensitivities are measured, hence neither convex nor monotone in the bits: without the running maximum
a cheap step could be taken before the one that it builds on. Ties go by table order.

Axis R holds one-bit steps, as in ``damage.py``. All functions are pure.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import Calibration, FloorStage
from pagedweight_jax.planning.damage import global_damage, predicted_damage, released_bytes, uniform_damage
from pagedweight_jax.planning.observation import KVPressure, Observation
from pagedweight_jax.planning.queue import MovePlan, PlanQueue

if TYPE_CHECKING:
    from pagedweight_jax.paging.table import PageTable


NO_STEP_BYTES = np.iinfo(np.int64).max
"""More than any step's size: stands for the smallest step of a checkpoint of one bitwidth, which has none."""


def plan_step(
    table: "PageTable", observation: Observation, calibration: Calibration, queue: PlanQueue, config: PlannerConfig
) -> tuple[PlanQueue, MovePlan | None]:
    """Returns the updated queue and, under pressure, the plan to carry out now: Algorithm 1.

    The plan is None when there is no pressure or nothing is left to release. The caller carries out every plan that it
    is given: the queue remembers the plan's blocks as lowered.

    Args:
      table: only ``desired_LEU`` (what is decided already) and ``bytes_UQ`` (M_u^b) are read.
      observation: what was seen up to this boundary.
      calibration: offline results.
      queue: as returned at the previous boundary.
      config: watermarks and switches.
    """
    if not (config.page_movement and pressure_triggered(observation.kv, config)):
        return replace(queue, plans={}), None  # D is 0: every stage's plan is empty
    target_bytes = target_bytes_from_kv_pressure(observation.kv, config)
    bits_LEU, bytes_UQ = table.desired_LEU, table.bytes_UQ
    damage_LEUR = predicted_damage(prior_damage(calibration, bytes_UQ, config.global_sensitivity))
    actions = score_actions(bits_LEU, damage_LEUR, bytes_UQ, calibration.max_bits)
    for stage in bitwidth_floor_stages(calibration):
        legal = above_floors(actions, stage_floors(stage, queue), calibration.max_bits)
        lowered_LEU = bits_LEU - greedy_select(legal, target_bytes)
        plan = MovePlan.between(bits_LEU, lowered_LEU, bytes_UQ, calibration.min_bits)
        queue = refresh_plan_queue(queue, stage, plan)
    plan = select_best_plan(queue, target_bytes)
    return (queue, None) if plan is None else (remember_lowered(queue, plan, observation.boundary), plan)


def plan_reload(
    table: "PageTable", observation: Observation, calibration: Calibration, queue: PlanQueue, config: PlannerConfig
) -> MovePlan | None:
    """Returns the plan that raises the blocks with the most damage removed per byte, None if no step fits.

    It takes no more than the bytes that leave the KV cache above the high watermark, nor than ``max_reload_bytes``, so
    it never causes the pressure that ``plan_step`` answers; it leaves alone the blocks lowered within the last
    ``hysteresis_boundaries`` boundaries. Under a steady load both fall silent.

    Args:
      table, observation, calibration, queue, config: as for ``plan_step``.
    """
    bits_LEU, bytes_UQ = table.desired_LEU, table.bytes_UQ
    available_bytes = reload_bytes_from_kv_headroom(observation.kv, config)
    if not config.page_movement or available_bytes < released_bytes(bytes_UQ).min(initial=NO_STEP_BYTES):
        return None
    damage_LEUR = predicted_damage(prior_damage(calibration, bytes_UQ, config.global_sensitivity))
    settled_LEU = observation.boundary - queue.lowered_at_LEU > config.hysteresis_boundaries
    actions = score_raises(bits_LEU, settled_LEU, damage_LEUR, bytes_UQ, calibration.min_bits)
    raised_LEU = bits_LEU + greedy_fill(actions, available_bytes)
    plan = MovePlan.between(bits_LEU, raised_LEU, bytes_UQ, calibration.min_bits)
    return plan if len(plan.blocks) else None


def initial_bits(
    calibration: Calibration, bytes_UQ: np.ndarray, budget_bytes: int, global_sensitivity: bool = True
) -> np.ndarray:
    """Returns the bits to start serving with, uint8 [L, E, U]: lowered from max_bits until the weights fit the budget.

    Args:
      calibration: offline results. Global damage alone decides, and min_bits is the only floor.
      bytes_UQ: int64, M_u^b for b = min_bits .. max_bits.
      budget_bytes: device bytes left for the routed experts.
      global_sensitivity: False lowers all blocks alike.

    Raises:
      UserError: not even min_bits everywhere fits.
    """
    full_LEU = np.full(calibration.sensitivity_LEUQ.shape[:-1], calibration.max_bits, np.uint8)
    floor_bytes, full_bytes = (int(bytes_UQ[:, q].sum()) * full_LEU[..., 0].size for q in (0, -1))
    if floor_bytes > budget_bytes:
        raise UserError(
            f"memory: the routed experts take {floor_bytes} bytes at the floor of {calibration.min_bits} bits, but the "
            f"budget leaves {budget_bytes} bytes: {floor_bytes - budget_bytes} too few"
        )
    damage_LEUR = predicted_damage(prior_damage(calibration, bytes_UQ, global_sensitivity))
    actions = score_actions(full_LEU, damage_LEUR, bytes_UQ, calibration.max_bits)
    return full_LEU - greedy_select(actions, full_bytes - budget_bytes)


def releasable_bytes(
    table: "PageTable", calibration: Calibration, queue: PlanQueue, config: PlannerConfig
) -> int:
    """Returns the bytes that ``plan_step`` could still release at its most relaxed stage, whatever the traffic.

    Args:
      table, calibration, queue, config: as for ``plan_step``.
    """
    if not config.page_movement:
        return 0
    lowest_LEU = np.minimum(table.desired_LEU, lowest_floor(calibration, config))
    return MovePlan.between(
        table.desired_LEU, lowest_LEU, table.bytes_UQ, calibration.min_bits
    ).total_released_bytes


def lowest_floor(calibration: Calibration, config: PlannerConfig) -> int:
    """Returns the bits to which the most relaxed stage can lower every block, whichever bucket it falls into."""
    policy = calibration.policy
    return max(calibration.min_bits, policy.floors[-1] - policy.stages[-1])


# Pressure


def pressure_triggered(kv: KVPressure, config: PlannerConfig) -> bool:
    """Returns whether F_blk has come down to the free-block threshold T_blk, that is, whether D > 0."""
    return _free_blocks(kv) <= config.low_watermark_blocks


def target_bytes_from_kv_pressure(kv: KVPressure, config: PlannerConfig) -> int:
    """Returns D = max(0, T_blk + 1 − F_blk) · B_KV, the bytes to release (eq. 7).

    F_blk leaves out blocks that pending growth will take, and counts bytes that are released already.
    """
    return max(0, config.low_watermark_blocks + 1 - _free_blocks(kv)) * kv.block_bytes


def reload_bytes_from_kv_headroom(kv: KVPressure, config: PlannerConfig) -> int:
    """Returns the bytes that reloads may take now: eq. 7 mirrored at the high watermark, at most ``max_reload_bytes``.

    Bytes that are released but not yet reusable cannot be taken, so they do not count here.
    """
    spare_blocks = kv.free_blocks - kv.pending_blocks - (config.high_watermark_blocks + 1)
    return min(max(0, spare_blocks) * kv.block_bytes, config.max_reload_bytes)


def _free_blocks(kv: KVPressure) -> int:
    return kv.free_blocks - kv.pending_blocks + kv.releasing_blocks


# Stages and the queue


def bitwidth_floor_stages(calibration: Calibration) -> tuple[FloorStage, ...]:
    """Returns the calibration's stages, strictest first, then the same without depth caps.

    Caps are thereby relaxed only when every capped stage falls short of the target.
    """
    relaxed = (replace(stage, max_depth=None) for stage in calibration.stages)
    return tuple(dict.fromkeys((*calibration.stages, *relaxed)))


def stage_floors(stage: FloorStage, queue: PlanQueue) -> np.ndarray:
    """Returns the bits below which ``stage`` lowers no block, int64 [L, E, U]."""
    floor_LEU = np.full(queue.initial_LEU.shape, stage.floor_bits)
    if stage.max_depth is not None:
        floor_LEU = np.maximum(floor_LEU, queue.initial_LEU.astype(np.int64) - stage.max_depth)
    return floor_LEU


def refresh_plan_queue(queue: PlanQueue, stage: FloorStage, plan: MovePlan) -> PlanQueue:
    """Returns the queue with ``plan`` as the newest of its stage."""
    return replace(queue, plans={**queue.plans, stage: plan})


def select_best_plan(queue: PlanQueue, target_bytes: int) -> MovePlan | None:
    """Returns the strictest stage's plan that meets the target, else the largest reduction, None if that is empty."""
    for plan in queue.plans.values():
        if plan.total_released_bytes >= target_bytes:
            return plan
    largest = max(queue.plans.values(), key=lambda plan: plan.total_released_bytes)
    return largest if len(largest.blocks) else None


def remember_lowered(queue: PlanQueue, plan: MovePlan, boundary: int) -> PlanQueue:
    """Returns the queue that knows the plan's blocks as lowered at ``boundary``."""
    lowered_at_LEU = queue.lowered_at_LEU.copy()
    lowered_at_LEU[tuple(plan.blocks.T)] = boundary
    return replace(queue, lowered_at_LEU=lowered_at_LEU)


# The greedy


@dataclass(frozen=True, kw_only=True)
class Actions:
    """R_s: the one-bit steps of all blocks, along R in the order of the chains.

    Attributes:
      cost_LEUR: float64, running maximum along the chain of d/Δ (down) or −d/Δ (up); inf where a step is not legal.
      size_UR: int64, bytes Δ that a step releases (down) or takes (up).
    """

    cost_LEUR: np.ndarray
    size_UR: np.ndarray

    @property
    def smallest_bytes(self) -> int:
        return int(self.size_UR.min(initial=NO_STEP_BYTES))


def prior_damage(calibration: Calibration, bytes_UQ: np.ndarray, global_sensitivity: bool) -> np.ndarray:
    """Returns each reduction's damage as known offline, float64 [L, E, U, R]: g of eq. 4, or its uniform rival."""
    if global_sensitivity:
        return global_damage(calibration.sensitivity_LEUQ)
    g_UR = uniform_damage(released_bytes(bytes_UQ))
    return np.broadcast_to(g_UR, (*calibration.sensitivity_LEUQ.shape[:2], *g_UR.shape))


def score_actions(bits_LEU: np.ndarray, damage_LEUR: np.ndarray, bytes_UQ: np.ndarray, max_bits: int) -> Actions:
    """Returns the one-bit reductions from ``bits_LEU`` down to min_bits.

    Args:
      bits_LEU: bits that the blocks have now.
      damage_LEUR: d of each reduction (eq. 8).
      bytes_UQ: M_u^b.
      max_bits: the largest supported bitwidth.
    """
    size_UR = released_bytes(bytes_UQ)
    from_bits_R = max_bits - np.arange(size_UR.shape[-1])
    legal_LEUR = from_bits_R <= bits_LEU[..., None]
    return Actions(cost_LEUR=_along_chains(damage_LEUR / size_UR, legal_LEUR), size_UR=size_UR)


def score_raises(
    bits_LEU: np.ndarray, allowed_LEU: np.ndarray, damage_LEUR: np.ndarray, bytes_UQ: np.ndarray, min_bits: int
) -> Actions:
    """Returns the one-bit raises of the blocks in ``allowed_LEU`` from ``bits_LEU`` up to max_bits.

    A raise removes the damage of the reduction that it undoes; the chain goes the other way.

    Args:
      bits_LEU, damage_LEUR, bytes_UQ: as for ``score_actions``.
      allowed_LEU: bool, blocks that may be raised.
      min_bits: the smallest supported bitwidth.
    """
    size_UR = released_bytes(bytes_UQ)[:, ::-1]
    from_bits_R = min_bits + np.arange(size_UR.shape[-1])
    legal_LEUR = (from_bits_R >= bits_LEU[..., None]) & allowed_LEU[..., None]
    return Actions(cost_LEUR=_along_chains(-damage_LEUR[..., ::-1] / size_UR, legal_LEUR), size_UR=size_UR)


def above_floors(actions: Actions, floor_LEU: np.ndarray, max_bits: int) -> Actions:
    """Returns the reductions that leave every block at its floor or above."""
    to_bits_R = max_bits - 1 - np.arange(actions.size_UR.shape[-1])
    return replace(actions, cost_LEUR=np.where(to_bits_R >= floor_LEU[..., None], actions.cost_LEUR, np.inf))


def greedy_select(actions: Actions, target_bytes: int) -> np.ndarray:
    """Returns how many bits each block loses, uint8 [L, E, U]: the cheapest steps that release the target, or all."""
    most_steps = -(-target_bytes // actions.smallest_bytes)
    order, cumulative_bytes = _greedy_order(actions, most_steps)
    return _steps_per_block(actions, order[: np.searchsorted(cumulative_bytes, target_bytes) + 1])


def greedy_fill(actions: Actions, available_bytes: int) -> np.ndarray:
    """Returns how many bits each block gains, uint8 [L, E, U]: the best steps up to the first that does not fit."""
    most_steps = available_bytes // actions.smallest_bytes
    order, cumulative_bytes = _greedy_order(actions, most_steps)
    return _steps_per_block(actions, order[: np.searchsorted(cumulative_bytes, available_bytes, side="right")])


def _along_chains(cost_LEUR: np.ndarray, legal_LEUR: np.ndarray) -> np.ndarray:
    """Returns the running maximum of the legal steps' costs along R, inf elsewhere."""
    running_LEUR = np.where(legal_LEUR, cost_LEUR, -np.inf)
    for r in range(1, running_LEUR.shape[-1]):  # on so short an axis 10 times faster than np.maximum.accumulate
        np.maximum(running_LEUR[..., r - 1], running_LEUR[..., r], out=running_LEUR[..., r])
    return np.where(legal_LEUR, running_LEUR, np.inf)


def _greedy_order(actions: Actions, most_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first ``most_steps`` legal steps or more (flat indices) in greedy order, and their summed sizes."""
    cost = actions.cost_LEUR.reshape(-1)
    if most_steps <= 0:
        head = np.empty(0, np.int64)
    elif most_steps >= cost.size:
        head = np.flatnonzero(cost < np.inf)
    else:  # a target is mostly small against the weights: sort no more than it can need
        head = np.flatnonzero((cost <= np.partition(cost, most_steps - 1)[most_steps - 1]) & (cost < np.inf))
    order = head[np.argsort(cost[head], kind="stable")]
    return order, np.cumsum(actions.size_UR.reshape(-1)[order % actions.size_UR.size])


def _steps_per_block(actions: Actions, steps: np.ndarray) -> np.ndarray:
    """Returns how many of ``steps`` belong to each block, uint8 [L, E, U]."""
    *shape, chain_steps = actions.cost_LEUR.shape
    return np.bincount(steps // chain_steps, minlength=np.prod(shape)).astype(np.uint8).reshape(shape)
