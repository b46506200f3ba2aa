# SPDX-License-Identifier: Apache-2.0
"""Small random worlds for the planner, and its equations and greedy written as plain loops to hold it against."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from pagedweight_jax.planning.calibration import Calibration, ResidualHeads
from pagedweight_jax.planning.observation import KVPressure, Observation
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy
from pagedweight_jax.planning.signals import RequestSignals

SHAPE = (2, 3, 2)
MIN_BITS, MAX_BITS = 3, 6
RICH_POLICY = Policy(
    edges=(0.7, 1.3),
    multipliers=(0.5, 1.0, 4.0),
    floors=(3, 4, 5),
    depth_caps=(3, 2, 1),
    stages=(0, 1),
    alpha=1.5,
    prior_tokens=100.0,
)


def make_world(
    seed: int, ties=False, convex=False, rich=False, monotone=False, shape=SHAPE, policy=NEUTRAL_POLICY
) -> SimpleNamespace:
    """Sensitivities and bytes drawn from ``seed``: rough, with many ``ties``, ``convex`` or ``monotone``.

    A ``rich`` world has routing masses, features and residual heads too, and requests that showed other ones.
    """
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
    if monotone:  # no reduction is free
        s_LEUQ = np.sort(s_LEUQ, axis=-1)[..., ::-1]
    desired_LEU = rng.integers(MIN_BITS, MAX_BITS + 1, shape).astype(np.uint8)
    more, requests, kv_blocks = {}, (), ()
    if rich:
        mass_LE = rng.gamma(2.0, size=shape[:2])
        more = {
            "mass_LE": mass_LE / mass_LE.sum(-1, keepdims=True),
            "features_LEUX": np.where(rng.random((*shape, 1)) < 0.1, np.nan, rng.lognormal(size=(*shape, 3))),
            "heads": make_heads(rng, shape[-1], widths - 1),
        }
        requests = tuple(make_signals(rng, shape) for _ in range(3))
        kv_blocks = tuple(int(n) for n in rng.integers(0, 6, 3))
    calibration = Calibration(sensitivity_LEUQ=s_LEUQ, min_bits=MIN_BITS, max_bits=MAX_BITS, policy=policy, **more)
    table = SimpleNamespace(desired_LEU=desired_LEU, bytes_UQ=bytes_UQ)
    return SimpleNamespace(calibration=calibration, table=table, requests=requests, kv_blocks=kv_blocks)


def make_heads(rng, kinds: int, reductions: int) -> ResidualHeads:
    shape_UR = (kinds, reductions)
    return ResidualHeads(
        weight_URX=rng.normal(size=(*shape_UR, 6)),
        intercept_UR=rng.normal(size=shape_UR),
        confidence_UR=rng.uniform(0.5, 1.0, shape_UR),
        low_UR=-2 * rng.random(shape_UR),
        high_UR=2 * rng.random(shape_UR),
    )


def make_signals(rng, shape=SHAPE) -> RequestSignals:
    """A third of the experts is not used at all."""
    mass_LE = rng.gamma(1.0, size=shape[:2]) * (rng.random(shape[:2]) > 1 / 3)
    used_LEU = np.broadcast_to(mass_LE[..., None] > 0, shape)
    return RequestSignals(
        mass_LE=mass_LE,
        norm_LEU=rng.lognormal(size=shape) * used_LEU,
        square_LEU=rng.lognormal(size=shape) * used_LEU,
        max_LEU=rng.lognormal(size=shape) * used_LEU,
        tokens=float(rng.integers(0, 300)),
    )


def observe(free_blocks: int, *, pending=0, releasing=0, block_bytes=1, boundary=0, world=None) -> Observation:
    kv = KVPressure(
        free_blocks=free_blocks, pending_blocks=pending, releasing_blocks=releasing, block_bytes=block_bytes
    )
    seen = {} if world is None else {"requests": world.requests, "kv_blocks": world.kv_blocks}
    return Observation(boundary=boundary, kv=kv, **seen)


def weight_bytes(bits_LEU, bytes_UQ) -> int:
    return sum(int(bytes_UQ[u, b - MIN_BITS]) for (_, _, u), b in np.ndenumerate(bits_LEU))


def damage_between(high_LEU, low_LEU, damage_LEUR) -> float:
    """Sum of the damages of the one-bit reductions that lead from ``high`` to ``low``."""
    damage = 0.0
    for at, high in np.ndenumerate(high_LEU):
        damage += sum(float(damage_LEUR[at][MAX_BITS - b]) for b in range(int(low_LEU[at]) + 1, high + 1))
    return damage


# The equations, block by block


def plain_damage(s_LEUQ):
    """Eq. 8 with μ = η = 1."""
    return np.array([plain_block_damage(s_Q) for s_Q in s_LEUQ.reshape(-1, s_LEUQ.shape[-1])]).reshape(
        *s_LEUQ.shape[:-1], -1
    )


def plain_block_damage(s_Q, mu=1.0, eta=(1.0,) * (MAX_BITS - MIN_BITS)):
    return [
        np.float32(max(1e-12, mu * max(0.0, s_Q[b - 1 - MIN_BITS] - s_Q[b - MIN_BITS]) * eta[MAX_BITS - b]))
        for b in range(MAX_BITS, MIN_BITS, -1)
    ]


def plain_weights(world) -> list[float]:
    """What each request counts: its share of KV blocks, times how much it has shown."""
    total, prior = sum(world.kv_blocks), world.calibration.policy.prior_tokens
    return [
        blocks / total * r.tokens / (r.tokens + prior) if total else 0.0
        for r, blocks in zip(world.requests, world.kv_blocks)
    ]


def plain_bucket(world, layer: int, expert: int) -> int:
    """Eq. 1, merged over the requests, smoothed, relative to the calibration text's."""
    mass_LE, prior = world.calibration.mass_LE, 1.0
    mass = 0.0
    for request, weight in zip(world.requests, plain_weights(world)):
        layer_mass = request.mass_LE[layer].sum()
        if layer_mass:
            mass += weight * request.mass_LE[layer, expert] / layer_mass
            prior -= weight
    mass += prior * mass_LE[layer, expert]
    least = 0.01 / mass_LE.shape[-1]
    relative = max(mass, least) / max(mass_LE[layer, expert], least)
    return sum(relative >= edge for edge in world.calibration.policy.edges)


def plain_rich_damage(world):
    """Eq. 5, 6 and 8 with everything on."""
    calibration, policy, heads = world.calibration, world.calibration.policy, world.calibration.heads
    damage_LEUR = np.empty((*world.table.desired_LEU.shape, MAX_BITS - MIN_BITS))
    for layer, expert, u in np.ndindex(world.table.desired_LEU.shape):
        at = layer, expert, u
        known_UX = calibration.features_LEUX[layer, expert]
        etas = []
        for r in range(MAX_BITS - MIN_BITS):
            evidence, residual = 0.0, 0.0
            for request, weight in zip(world.requests, plain_weights(world)):
                mass = request.mass_LE[layer, expert]
                if mass == 0 or np.isnan(known_UX[u]).any():
                    continue
                logs = []
                for kind, known in enumerate(known_UX):
                    one = layer, expert, kind
                    features = (
                        request.norm_LEU[one] / mass, math.sqrt(request.square_LEU[one] / mass), request.max_LEU[one]
                    )
                    logs += [0.0 if np.isnan(y) else math.log(x / y) for x, y in zip(features, known)]
                residual += weight * (np.dot(heads.weight_URX[u, r], logs) + heads.intercept_UR[u, r])
                evidence += weight
            clipped = min(max(residual / evidence, heads.low_UR[u, r]), heads.high_UR[u, r]) if evidence else 0.0
            etas.append(math.exp(policy.alpha * heads.confidence_UR[u, r] * evidence * clipped))
        mu = policy.multipliers[plain_bucket(world, layer, expert)]
        damage_LEUR[at] = plain_block_damage(calibration.sensitivity_LEUQ[at], mu, etas)
    return damage_LEUR


def plain_floors(world, stage, initial_LEU):
    """Bits below which a stage lowers no block."""
    policy = world.calibration.policy
    floor_LEU = np.zeros(initial_LEU.shape, int)
    for layer, expert, u in np.ndindex(initial_LEU.shape):
        bucket = plain_bucket(world, layer, expert) if policy.edges else 0
        floor = policy.floors[bucket] - stage.relaxed_bits
        if stage.capped and policy.depth_caps[bucket] is not None:
            floor = max(floor, int(initial_LEU[layer, expert, u]) - policy.depth_caps[bucket])
        floor_LEU[layer, expert, u] = floor
    return floor_LEU


# The greedy as it is told


def plain_lower(bits_LEU, damage_LEUR, bytes_UQ, target_bytes: int, floor_LEU=None):
    """Again and again the cheapest legal step, the first of equals."""
    bits_LEU, released = bits_LEU.astype(int), 0
    while released < target_bytes:
        best = None
        for at, b in np.ndenumerate(bits_LEU):
            if b <= (MIN_BITS if floor_LEU is None else max(MIN_BITS, floor_LEU[at])):
                continue
            size = bytes_UQ[at[-1], b - MIN_BITS] - bytes_UQ[at[-1], b - 1 - MIN_BITS]
            cost = np.float32(damage_LEUR[at][MAX_BITS - b]) / np.float32(size)
            if best is None or cost < best[0]:
                best = cost, at, size
        if best is None:
            break
        bits_LEU[best[1]] -= 1
        released += best[2]
    return bits_LEU


def plain_raise(bits_LEU, damage_LEUR, bytes_UQ, available_bytes: int, allowed_LEU):
    """Again and again the raise that removes most damage per byte, until one does not fit."""
    bits_LEU, taken = bits_LEU.astype(int), 0
    while True:
        best = None
        for at, b in np.ndenumerate(bits_LEU):
            if b == MAX_BITS or not allowed_LEU[at]:
                continue
            size = bytes_UQ[at[-1], b + 1 - MIN_BITS] - bytes_UQ[at[-1], b - MIN_BITS]
            gain = np.float32(damage_LEUR[at][MAX_BITS - b - 1]) / np.float32(size)
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
        make_signals=make_signals,
        observe=observe,
        weight_bytes=weight_bytes,
        damage_between=damage_between,
        plain_damage=plain_damage,
        plain_rich_damage=plain_rich_damage,
        plain_bucket=plain_bucket,
        plain_floors=plain_floors,
        plain_lower=plain_lower,
        plain_raise=plain_raise,
        rich_policy=RICH_POLICY,
        shape=SHAPE,
        min_bits=MIN_BITS,
        max_bits=MAX_BITS,
    )
