# SPDX-License-Identifier: Apache-2.0
"""What was measured before serving: Ω_off of Algorithm 1."""

from dataclasses import dataclass

import numpy as np

from pagedweight_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class FloorStage:
    """How far the blocks may be lowered as long as that meets the target. Later stages give up more.

    Attributes:
      floor_bits: no block goes below; 0 leaves it to the smallest supported bitwidth.
      max_depth: no block goes further than this many bits below its initial bits; None for no cap.
    """

    floor_bits: int = 0
    max_depth: int | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Offline results that the planner works from.

    Attributes:
      sensitivity_LEUQ: float64, s_i^b of eq. 2 for b = min_bits .. max_bits along Q; finite and not negative.
      min_bits, max_bits: the supported bitwidths.
      stages: bitwidth-floor stages, strictest first.
    """

    sensitivity_LEUQ: np.ndarray
    min_bits: int
    max_bits: int
    stages: tuple[FloorStage, ...] = (FloorStage(),)

    def __post_init__(self):
        s_LEUQ = self.sensitivity_LEUQ
        widths = self.max_bits - self.min_bits + 1
        if s_LEUQ.ndim != 4 or s_LEUQ.shape[-1] != widths:
            raise UserError(
                f"calibration: need sensitivities [L, E, U, {widths}] for {self.min_bits}..{self.max_bits} bits, "
                f"got {list(s_LEUQ.shape)}"
            )
        bad = np.argwhere(~(np.isfinite(s_LEUQ) & (s_LEUQ >= 0)))
        if len(bad):
            layer, expert, kind, width = bad[0]
            raise UserError(
                f"calibration: {len(bad)} of {s_LEUQ.size} sensitivities are negative or not finite, the first is "
                f"{s_LEUQ[tuple(bad[0])]} (layer {layer}, expert {expert}, kind {kind}, {self.min_bits + width} bits)"
            )
