# SPDX-License-Identifier: Apache-2.0
"""Page-movement plans, Π_t, and what the planner carries from one boundary to the next, Q_t."""

from dataclasses import dataclass, field

import numpy as np

from pagedweight_jax.planning.scoring import Prior
from pagedweight_jax.planning.stages import FloorStage


def resident_bytes(bits_LEU: np.ndarray, bytes_UQ: np.ndarray, min_bits: int) -> int:
    """Returns Σ M_i^q, the device bytes of all blocks at the bits ``bits_LEU``."""
    U, Q = bytes_UQ.shape
    return int(bytes_UQ.reshape(-1)[bits_LEU + (np.arange(0, U * Q, Q) - min_bits)].sum())


@dataclass(frozen=True, kw_only=True)
class MovePlan:
    """Changes of the desired bits of n blocks: {(i, q_i → d_i, Δ_i)}.

    A plan is kept for every stage and carried out for one at most, so the list of its changes is made when asked for.

    Attributes:
      old_LEU, new_LEU: uint8, all desired bits before and after.
      bytes_UQ: int64, M_u^b, Q from min_bits.
      min_bits: the smallest supported bitwidth.
      total_released_bytes: Δ of all changes.
    """

    old_LEU: np.ndarray
    new_LEU: np.ndarray
    bytes_UQ: np.ndarray
    min_bits: int
    total_released_bytes: int

    @classmethod
    def between(cls, old_LEU: np.ndarray, new_LEU: np.ndarray, bytes_UQ: np.ndarray, min_bits: int) -> "MovePlan":
        """Returns the plan that turns the bits ``old_LEU`` into ``new_LEU``."""
        old_bytes, new_bytes = (resident_bytes(bits_LEU, bytes_UQ, min_bits) for bits_LEU in (old_LEU, new_LEU))
        return cls(
            old_LEU=old_LEU,
            new_LEU=new_LEU,
            bytes_UQ=bytes_UQ,
            min_bits=min_bits,
            total_released_bytes=old_bytes - new_bytes,
        )

    @property
    def is_empty(self) -> bool:
        return not (self.old_LEU != self.new_LEU).any()

    @property
    def blocks(self) -> np.ndarray:
        """int64 [n, 3], (layer, expert, kind), each changed block once, in table order."""
        return np.argwhere(self.old_LEU != self.new_LEU)

    @property
    def from_bits(self) -> np.ndarray:
        """int64 [n], desired bits before."""
        return self.old_LEU[self.old_LEU != self.new_LEU].astype(np.int64)

    @property
    def to_bits(self) -> np.ndarray:
        """int64 [n], desired bits after."""
        return self.new_LEU[self.old_LEU != self.new_LEU].astype(np.int64)

    @property
    def released_bytes(self) -> np.ndarray:
        """int64 [n], Δ of eq. 3; negative where bits rise, for bytes that are taken."""
        kind = self.blocks[:, 2]
        return self.bytes_UQ[kind, self.from_bits - self.min_bits] - self.bytes_UQ[kind, self.to_bits - self.min_bits]

    def apply(self, bits_LEU: np.ndarray) -> np.ndarray:
        """Returns a copy of the desired bits with the plan carried out."""
        return np.where(self.old_LEU != self.new_LEU, self.new_LEU, bits_LEU)


@dataclass(frozen=True, kw_only=True)
class PlanQueue:
    """The planner's memory.

    Attributes:
      initial_LEU: bits at the start of serving, from which depth caps count.
      lowered_at_LEU: float64, the last boundary whose plan lowered the block, -inf if none did.
      plans: the newest plan of each stage, strictest first.
      prior: what does not change while serving, None before the first boundary. A queue is of one calibration.
      damage_LEUR: d of every one-bit reduction at the newest boundary, None before the first.
    """

    initial_LEU: np.ndarray
    lowered_at_LEU: np.ndarray
    plans: dict[FloorStage, MovePlan] = field(default_factory=dict)
    prior: Prior | None = None
    damage_LEUR: np.ndarray | None = None

    @classmethod
    def start(cls, initial_LEU: np.ndarray) -> "PlanQueue":
        """Returns the queue of a server that begins with the bits ``initial_LEU``."""
        return cls(initial_LEU=initial_LEU, lowered_at_LEU=np.full(initial_LEU.shape, -np.inf))
