# SPDX-License-Identifier: Apache-2.0
"""What the engine saw up to a boundary: O_t of Algorithm 1."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class KVPressure:
    """The state of the KV cache's share of the arena.

    Attributes:
      free_blocks: KV blocks that could be handed out now.
      pending_blocks: of those, blocks that growth already promised will take.
      releasing_blocks: blocks' worth of bytes that are released but cannot be handed out yet.
      block_bytes: B_KV, device bytes of one KV block.
    """

    free_blocks: int
    pending_blocks: int
    releasing_blocks: int
    block_bytes: int


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything the planner knows of the run so far.

    Attributes:
      boundary: number of the safe boundary, counted from the start of serving.
      kv: pressure of the KV cache.
      routing: float64 [L, E], routing mass m of eq. 1. It acts through the calibration's bucket policy; without one, or
        when None, the multiplier μ of eq. 8 is 1.
      features: float64 [L, E, U, X], prompt features φ of eq. 5. They act through the calibration's residual heads;
        without them, or when None, the multiplier η of eq. 8 is 1.
    """

    boundary: int
    kv: KVPressure
    routing: np.ndarray | None = None
    features: np.ndarray | None = None
