# SPDX-License-Identifier: Apache-2.0
"""Small random worlds for the planner, and the greedy written as a plain loop to hold it against."""

from types import SimpleNamespace

import numpy as np
import pytest

from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.observation import KVPressure, Observation

SHAPE = (2, 3, 2)
MIN_BITS, MAX_BITS = 3, 6


def make_world(seed: int, ties: bool = False, convex: bool = False, shape=SHAPE, stages=None) -> SimpleNamespace:
    """Sensitivities and bytes drawn from ``seed``: rough and not monotone, with many ``ties``, or ``convex``."""
    rng = np.random.default_rng(seed)
    widths = MAX_BITS - MIN_BITS + 1
    bytes_UQ = np.cumsum(rng.integers(3, 9, (shape[-1], widths)), axis=-1)
    if ties:
        s_LEUQ = rng.integers(0, 4, (*shape, widths)).astype(np.float64)
    elif convex:  # damage per byte grows on the way down
        cost_LEUR = np.cumsum(rng.uniform(0.1, 1.0, (*shape, widths - 1)), axis=-1)
        damage_LEUR = cost_LEUR * np.diff(bytes_UQ)[:, ::-1]
        s_LEUQ = np.concatenate([np.zeros((*shape, 1)), np.cumsum(damage_LEUR, axis=-1)], axis=-1)[..., ::-1]
    else:
        s_LEUQ = rng.lognormal(size=(*shape, widths)) * 2.0 ** -np.arange(widths)
    more = {} if stages is None else {"stages": stages}
    return SimpleNamespace(
        calibration=Calibration(sensitivity_LEUQ=s_LEUQ, min_bits=MIN_BITS, max_bits=MAX_BITS, **more),
        table=SimpleNamespace(
            desired_LEU=rng.integers(MIN_BITS, MAX_BITS + 1, shape).astype(np.uint8), bytes_UQ=bytes_UQ
        ),
    )


def observe(free_blocks: int, *, pending=0, releasing=0, block_bytes=1, boundary=0) -> Observation:
    kv = KVPressure(
        free_blocks=free_blocks, pending_blocks=pending, releasing_blocks=releasing, block_bytes=block_bytes
    )
    return Observation(boundary=boundary, kv=kv)


def weight_bytes(bits_LEU, bytes_UQ) -> int:
    return sum(int(bytes_UQ[u, b - MIN_BITS]) for (_, _, u), b in np.ndenumerate(bits_LEU))


def damage_between(high_LEU, low_LEU, s_LEUQ) -> float:
    """Sum of eq. 8 (μ = η = 1) over the one-bit reductions that lead from ``high`` to ``low``."""
    damage = 0.0
    for at, high in np.ndenumerate(high_LEU):
        damage += sum(step_damage(s_LEUQ[at], b) for b in range(int(low_LEU[at]) + 1, high + 1))
    return damage


def step_damage(s_Q, from_bits: int) -> float:
    return max(1e-12, s_Q[from_bits - 1 - MIN_BITS] - s_Q[from_bits - MIN_BITS])


def plain_lower(bits_LEU, s_LEUQ, bytes_UQ, target_bytes: int, floor_LEU=None):
    """The greedy of section 3.2 as it is told: again and again the cheapest legal step, the first of equals."""
    bits_LEU, released = bits_LEU.astype(int), 0
    while released < target_bytes:
        best = None
        for at, b in np.ndenumerate(bits_LEU):
            if b <= (MIN_BITS if floor_LEU is None else max(MIN_BITS, floor_LEU[at])):
                continue
            size = bytes_UQ[at[-1], b - MIN_BITS] - bytes_UQ[at[-1], b - 1 - MIN_BITS]
            cost = step_damage(s_LEUQ[at], b) / size
            if best is None or cost < best[0]:
                best = cost, at, size
        if best is None:
            break
        bits_LEU[best[1]] -= 1
        released += best[2]
    return bits_LEU


def plain_raise(bits_LEU, s_LEUQ, bytes_UQ, available_bytes: int, allowed_LEU):
    """Again and again the raise that removes most damage per byte, until one does not fit."""
    bits_LEU, taken = bits_LEU.astype(int), 0
    while True:
        best = None
        for at, b in np.ndenumerate(bits_LEU):
            if b == MAX_BITS or not allowed_LEU[at]:
                continue
            size = bytes_UQ[at[-1], b + 1 - MIN_BITS] - bytes_UQ[at[-1], b - MIN_BITS]
            gain = step_damage(s_LEUQ[at], b + 1) / size
            if best is None or gain > best[0]:
                best = gain, at, size
        if best is None or taken + best[2] > available_bytes:
            return bits_LEU
        bits_LEU[best[1]] += 1
        taken += best[2]


@pytest.fixture(scope="session")
def planning():
    """Functions and constants of this file."""
    return SimpleNamespace(
        make_world=make_world,
        observe=observe,
        weight_bytes=weight_bytes,
        damage_between=damage_between,
        plain_lower=plain_lower,
        plain_raise=plain_raise,
        shape=SHAPE,
        min_bits=MIN_BITS,
        max_bits=MAX_BITS,
    )
