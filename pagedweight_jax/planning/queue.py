# SPDX-License-Identifier: Apache-2.0
"""Page-movement plans, Π_t, and what the planner carries from one boundary to the next, Q_t."""

from dataclasses import dataclass, field

import numpy as np

from pagedweight_jax.planning.stages import FloorStage


@dataclass(frozen=True, kw_only=True)
class MovePlan:
    """Changes of the desired bits of n blocks: {(i, q_i → d_i, Δ_i)}.

    Attributes:
      blocks: int64 [n, 3], (layer, expert, kind), each block once, in table order.
      from_bits, to_bits: int64 [n], desired bits before and after.
      released_bytes: int64 [n], Δ of eq. 3; negative where bits rise, for bytes that are taken.
    """

    blocks: np.ndarray
    from_bits: np.ndarray
    to_bits: np.ndarray
    released_bytes: np.ndarray

    @classmethod
    def between(cls, old_LEU: np.ndarray, new_LEU: np.ndarray, bytes_UQ: np.ndarray, min_bits: int) -> "MovePlan":
        """Returns the plan that turns the bits ``old_LEU`` into ``new_LEU``; ``bytes_UQ`` is M_i^b, Q from min_bits."""
        index = np.unravel_index(np.flatnonzero(old_LEU != new_LEU), old_LEU.shape)
        blocks = np.stack(index, axis=-1)
        from_bits, to_bits = old_LEU[index].astype(np.int64), new_LEU[index].astype(np.int64)
        kind = index[2]
        released_bytes = bytes_UQ[kind, from_bits - min_bits] - bytes_UQ[kind, to_bits - min_bits]
        return cls(blocks=blocks, from_bits=from_bits, to_bits=to_bits, released_bytes=released_bytes)

    @property
    def total_released_bytes(self) -> int:
        return int(self.released_bytes.sum())

    def apply(self, bits_LEU: np.ndarray) -> np.ndarray:
        """Returns a copy of the desired bits with the plan carried out."""
        bits_LEU = bits_LEU.copy()
        bits_LEU[tuple(self.blocks.T)] = self.to_bits
        return bits_LEU


@dataclass(frozen=True, kw_only=True)
class PlanQueue:
    """The planner's memory.

    Attributes:
      initial_LEU: bits at the start of serving, from which depth caps count.
      lowered_at_LEU: float64, the last boundary whose plan lowered the block, -inf if none did.
      plans: the newest plan of each stage, strictest first.
    """

    initial_LEU: np.ndarray
    lowered_at_LEU: np.ndarray
    plans: dict[FloorStage, MovePlan] = field(default_factory=dict)

    @classmethod
    def start(cls, initial_LEU: np.ndarray) -> "PlanQueue":
        """Returns the queue of a server that begins with the bits ``initial_LEU``."""
        return cls(initial_LEU=initial_LEU, lowered_at_LEU=np.full(initial_LEU.shape, -np.inf))
