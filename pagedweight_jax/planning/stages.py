# SPDX-License-Identifier: Apache-2.0
"""Routing buckets, and how far each stage of the policy lets their blocks be lowered."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedweight_jax.planning.policy import Policy

LEAST_SHARE = 0.01
"""An expert that the calibration text used less than this share of an even load counts as used that much. Its relative
mass would be noise, and its sensitivity is a fallback."""

NO_CAP_BITS = np.iinfo(np.uint8).max
"""No block can get that many bits lower."""


@dataclass(frozen=True, kw_only=True)
class FloorStage:
    """What one stage of a policy gives up.

    Attributes:
      relaxed_bits: how much lower than the policy's all floors are.
      capped: whether the depth caps hold.
    """

    relaxed_bits: int = 0
    capped: bool = True


def bitwidth_floor_stages(policy: Policy) -> tuple[FloorStage, ...]:
    """Returns the policy's stages, strictest first, then the same without depth caps where it has any.

    Caps are thereby relaxed only when every capped stage falls short of the target.
    """
    has_caps = any(cap is not None for cap in policy.depth_caps)
    return tuple(
        FloorStage(relaxed_bits=bits, capped=capped)
        for capped in ((True, False) if has_caps else (True,))
        for bits in policy.stages
    )


def routing_buckets(mass_LE: np.ndarray, calibration_mass_LE: np.ndarray, edges: tuple[float, ...]) -> np.ndarray:
    """Returns β, the bucket of every expert by its relative mass, int64 [L, E]; 0 is the coldest.

    Args:
      mass_LE: m of the running requests (eq. 1).
      calibration_mass_LE: m of the calibration text.
      edges: as in ``Policy``.
    """
    least_mass = LEAST_SHARE / mass_LE.shape[-1]
    relative_LE = np.maximum(mass_LE, least_mass) / np.maximum(calibration_mass_LE, least_mass)
    return np.searchsorted(edges, relative_LE, side="right")


def stage_floors(
    stages: Sequence[FloorStage], policy: Policy, bucket_LE: np.ndarray, initial_LEU: np.ndarray
) -> np.ndarray:
    """Returns the bits below which each stage lowers no block, uint8 [S, L, E, U]. A block that is lower already stays.

    Args:
      stages: S of ``bitwidth_floor_stages(policy)``.
      policy: floors and depth caps of the buckets.
      bucket_LE: β.
      initial_LEU: uint8, bits at the start of serving, from which the depth counts.
    """
    U = initial_LEU.shape[-1]
    floors = [[max(0, floor - stage.relaxed_bits) for floor in policy.floors] for stage in stages]
    caps = [NO_CAP_BITS if cap is None else min(cap, NO_CAP_BITS) for cap in policy.depth_caps]
    bucket_LEU = np.repeat(bucket_LE, U).reshape(initial_LEU.shape)
    floor_SLEU = np.array(floors, np.uint8).take(bucket_LEU, axis=1)
    deepest_LEU = initial_LEU - np.minimum(initial_LEU, np.array(caps, np.uint8).take(bucket_LEU))
    for stage, floor_LEU in zip(stages, floor_SLEU, strict=True):
        if stage.capped:
            np.maximum(floor_LEU, deepest_LEU, out=floor_LEU)
    return floor_SLEU
