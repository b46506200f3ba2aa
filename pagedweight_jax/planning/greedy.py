# SPDX-License-Identifier: Apache-2.0
"""The greedy that takes one-bit steps, best first, until a number of bytes is met.

Bits change one at a time, along a block's *chain*; a step has a damage d and a size Δ in bytes. The greedy takes the
best step among those that come next in their chains. When a step of cost c is the best there is, the steps behind it
that cost less than c are the best right after it. So a step is taken at the *running maximum* of the costs along its
chain, and the greedy is: sort all steps by that, sum up their sizes, cut. Sensitivities are measured, hence neither
convex nor monotone in the bits: without the running maximum a cheap step could be taken before the one that it builds
on. Ties go by table order. Costs are float32: a step that is dearer by less than 1e-7 of its cost may count as equal.

Axis R holds one-bit steps, as in ``damage.py``.
"""

import math
from dataclasses import dataclass

import numpy as np

SAMPLES = 1024
"""Steps that are looked at to find how many must be sorted."""

SPARE_SHARE, SPARE_SAMPLES = 0.5, 16
"""So much more than the sample says: it may err, and a stage's floors forbid some of the cheapest steps."""

ALL_BYTES = NO_STEP_BYTES = np.iinfo(np.int64).max
"""More than any step's size: stands for the smallest step of a checkpoint of one bitwidth, which has none."""


@dataclass(frozen=True, kw_only=True)
class Actions:
    """R_s: the one-bit steps of all blocks, along R in the order of the chains.

    Attributes:
      cost_LEUR: float32, running maximum along the chain of d/Δ (down) or −d/Δ (up); inf where a step is not legal.
      size_UR: int64, bytes Δ that a step releases (down) or takes (up).
      start_LEU: uint8, the place along R of each block's next step; the steps before it are not legal.
    """

    cost_LEUR: np.ndarray
    size_UR: np.ndarray
    start_LEU: np.ndarray

    def bytes_of(self, steps_LEU: np.ndarray) -> int:
        """Returns the bytes of the next ``steps_LEU`` steps (uint8) of all blocks."""
        U, R = self.size_UR.shape
        passed_UQ = np.zeros((U, R + 1), np.int64)
        np.cumsum(self.size_UR, axis=-1, out=passed_UQ[:, 1:])
        offset_U = np.arange(0, passed_UQ.size, R + 1, dtype=np.uint8)

        def passed_bytes(place_LEU: np.ndarray) -> int:
            return int(
                np.bincount((place_LEU + offset_U).reshape(-1), minlength=passed_UQ.size) @ passed_UQ.reshape(-1)
            )

        return passed_bytes(self.start_LEU + steps_LEU) - passed_bytes(self.start_LEU)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Legal steps in greedy order.

    Attributes:
      block_n: flat index of the step's block in [L, E, U].
      nth_n: how many legal steps lie before it in its chain.
      size_n: int64, bytes.
      shape_LEU: [L, E, U].
      complete: whether these are all legal steps.
    """

    block_n: np.ndarray
    nth_n: np.ndarray
    size_n: np.ndarray
    shape_LEU: tuple[int, ...]
    complete: bool

    def per_block(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Returns how many of the chosen steps belong to each block, uint8 [L, E, U]; they are its first ones."""
        counts = np.zeros(math.prod(self.shape_LEU), np.uint8)
        counts[self.block_n[chosen]] = self.nth_n[chosen] + 1  # of several, the last in greedy order stays
        return counts.reshape(self.shape_LEU)


def score_actions(bits_LEU: np.ndarray, damage_LEUR: np.ndarray, size_UR: np.ndarray, max_bits: int) -> Actions:
    """Returns the one-bit reductions from ``bits_LEU`` down to min_bits.

    Args:
      bits_LEU: uint8, bits that the blocks have now.
      damage_LEUR: d of each reduction (eq. 8).
      size_UR: Δ of each reduction (eq. 3).
      max_bits: the largest supported bitwidth.
    """
    return _actions(damage_LEUR, size_UR, np.subtract(max_bits, bits_LEU, dtype=np.uint8))


def score_raises(
    bits_LEU: np.ndarray, allowed_LEU: np.ndarray, damage_LEUR: np.ndarray, size_UR: np.ndarray, min_bits: int
) -> Actions:
    """Returns the one-bit raises of the blocks in ``allowed_LEU`` from ``bits_LEU`` up to max_bits.

    A raise removes the damage of the reduction that it undoes; the chain goes the other way.

    Args:
      bits_LEU, damage_LEUR, size_UR: as for ``score_actions``.
      allowed_LEU: bool, blocks that may be raised.
      min_bits: the smallest supported bitwidth.
    """
    no_step = size_UR.shape[-1]
    start_LEU = np.where(allowed_LEU, np.subtract(bits_LEU, min_bits, dtype=np.uint8), np.uint8(no_step))
    return _actions(-damage_LEUR[..., ::-1], size_UR[:, ::-1], start_LEU)


def _actions(signed_damage_LEUR: np.ndarray, size_UR: np.ndarray, start_LEU: np.ndarray) -> Actions:
    R = size_UR.shape[-1]
    cost_LEUR = signed_damage_LEUR / size_UR.astype(np.float32)
    passed_RQ = np.where(np.arange(R)[:, None] < np.arange(R + 1), np.float32(np.inf), -np.float32(np.inf))
    passed_LEUR = passed_RQ.take(np.moveaxis(start_LEU, -1, 0), axis=1).transpose(2, 3, 1, 0)
    np.minimum(cost_LEUR, -passed_LEUR, out=cost_LEUR)
    for r in range(1, R):  # on so short an axis 10 times faster than np.maximum.accumulate
        np.maximum(cost_LEUR[..., r - 1], cost_LEUR[..., r], out=cost_LEUR[..., r])
    np.maximum(cost_LEUR, passed_LEUR, out=cost_LEUR)
    return Actions(cost_LEUR=cost_LEUR, size_UR=size_UR, start_LEU=start_LEU)


def greedy_select(actions: Actions, most_SLEU: np.ndarray, target_bytes: int) -> list[tuple[np.ndarray, int]]:
    """Returns, for every stage, how many bits each block loses and the bytes: the cheapest steps to the target, or all.

    All stages share one order of the steps and differ in what they may take of it.

    Args:
      actions: reductions.
      most_SLEU: uint8, how many bits each block may lose in every stage.
      target_bytes: D.
    """
    order = greedy_order(actions, target_bytes)
    selected = []
    for most_LEU in most_SLEU:
        lost_LEU, released_bytes = _cheapest(order, most_LEU, target_bytes)
        if released_bytes < target_bytes and not order.complete:
            all_bytes = actions.bytes_of(most_LEU)
            if all_bytes <= target_bytes:
                lost_LEU, released_bytes = most_LEU, all_bytes
            else:  # the head of the order held too little that this stage may take
                order = greedy_order(actions, ALL_BYTES)
                lost_LEU, released_bytes = _cheapest(order, most_LEU, target_bytes)
        selected.append((lost_LEU, released_bytes))
    return selected


def greedy_fill(actions: Actions, available_bytes: int) -> np.ndarray:
    """Returns how many bits each block gains, uint8 [L, E, U]: the best steps up to the first that does not fit."""
    order = greedy_order(actions, available_bytes)
    return order.per_block(slice(np.searchsorted(np.cumsum(order.size_n), available_bytes, side="right")))


def greedy_order(actions: Actions, num_bytes: int) -> Steps:
    """Returns the first legal steps in greedy order, ``num_bytes`` of them or more; all if there are no more."""
    # A target is mostly small against the weights: no more steps need be sorted than hold its bytes.
    limit = _cost_limit(actions, num_bytes)
    steps = _steps_up_to(actions, limit)
    if np.isfinite(limit) and steps.size_n.sum() < num_bytes:
        return _steps_up_to(actions, np.float32(np.inf))
    return steps


def _cost_limit(actions: Actions, num_bytes: int) -> np.float32:
    """Returns a cost up to which, by a sample, steps hold more than ``num_bytes``; inf if not even all may."""
    L, E, *_ = actions.cost_LEUR.shape
    stride = actions.cost_LEUR.size // SAMPLES | 1
    cost = _reductions_outermost(actions.cost_LEUR).reshape(-1)[::stride]
    size = actions.size_UR.T.reshape(-1).take(np.arange(0, actions.cost_LEUR.size, stride) // (L * E))
    order = np.argsort(cost)
    sampled_bytes = stride * np.cumsum(size[order])
    place = SPARE_SAMPLES + int(np.searchsorted(sampled_bytes, (1 + SPARE_SHARE) * num_bytes))
    return cost[order[place]] if place < len(order) else np.float32(np.inf)


def _steps_up_to(actions: Actions, limit: np.float32) -> Steps:
    """Returns the legal steps whose cost is no more than ``limit``, in greedy order."""
    L, E, U, R = actions.cost_LEUR.shape
    cost = _reductions_outermost(actions.cost_LEUR).reshape(-1)
    head = np.flatnonzero(cost < limit if np.isinf(limit) else cost <= limit)
    # One integer holds a step's cost and place: no two are equal, ties go by table order, and the sort is a fast one.
    bits = cost.take(head).view(np.int32)
    rank = (bits ^ (bits >> 31 | np.int32(-(2**31)))).view(np.uint32)  # ascends as the float does
    reduction, expert = np.divmod(head.astype(np.uint32), np.uint32(L * E))
    place = (expert * np.uint32(U) + reduction % np.uint32(U)) * np.uint32(R) + reduction // np.uint32(U)
    order = rank.astype(np.uint64)
    order <<= 32
    order |= place
    order.sort()
    step_n = order.astype(np.uint32)
    block_n = step_n // np.uint32(R)
    place_n = (step_n - block_n * np.uint32(R)).astype(np.uint8)
    block_n = block_n.astype(np.intp)
    size_n = actions.size_UR.reshape(-1).take(step_n % np.uint32(actions.size_UR.size))
    return Steps(
        block_n=block_n,
        nth_n=place_n - actions.start_LEU.reshape(-1).take(block_n),
        size_n=size_n,
        shape_LEU=(L, E, U),
        complete=bool(np.isinf(limit)),
    )


def _reductions_outermost(array_LEUR: np.ndarray) -> np.ndarray:
    """Returns [R, U, L, E], without a copy of what is stored so (see ``damage.py``)."""
    return np.ascontiguousarray(array_LEUR.transpose(3, 2, 0, 1))


def _cheapest(order: Steps, most_LEU: np.ndarray, target_bytes: int) -> tuple[np.ndarray, int]:
    """Returns how many bits each block loses by the first allowed steps that meet the target, or all, and the bytes."""
    allowed_n = np.flatnonzero(order.nth_n < most_LEU.reshape(-1).take(order.block_n))
    cumulative_bytes = np.cumsum(order.size_n.take(allowed_n))
    if target_bytes <= 0 or not len(allowed_n):
        return np.zeros(order.shape_LEU, np.uint8), 0
    last = min(np.searchsorted(cumulative_bytes, target_bytes), len(allowed_n) - 1)
    return order.per_block(allowed_n[: last + 1]), int(cumulative_bytes[last])
