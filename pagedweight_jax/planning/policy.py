# SPDX-License-Identifier: Apache-2.0
"""The planner's hyperparameters, found by a search on calibration text."""

import math
from dataclasses import dataclass
from numbers import Integral

from pagedweight_jax.errors import UserError

MOST_BITS = 8
"""No block has more."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How routing mass and prompt residual count, and how far blocks may be lowered. The default changes nothing.

    Experts fall into buckets β by their *relative* mass, m_ℓe over the expert's mass in the calibration text: 1 is an
    expert that is used as much as then. Global damage g is a mean over all calibration tokens, with zeros for those
    routed elsewhere, so it contains that usage already, and a multiplier of the plain mass would count it twice.

    Attributes:
      edges: the relative masses, ascending, between the buckets; n edges make n + 1 buckets, the hottest last. An
        expert at an edge belongs to the hotter bucket.
      multipliers: μ_β of each bucket; positive, ascending.
      floors: bits of each bucket below which no block of it is lowered; ascending, 0 for no floor.
      depth_caps: c_β, how many bits below its initial bits a block of each bucket may get; None for no cap.
      stages: the bits by which each stage lowers all floors, strictest (smallest) first. What is left of a floor at the
        last stage always holds; depth caps are dropped when every stage falls short of the target.
      alpha: α of eq. 6, the strength of the prompt residual.
      half_life_tokens: a token seen this many tokens ago counts half.
      prior_tokens: the calibration text counts as this many tokens seen before a request's first.
    """

    edges: tuple[float, ...] = ()
    multipliers: tuple[float, ...] = (1.0,)
    floors: tuple[int, ...] = (0,)
    depth_caps: tuple[int | None, ...] = (None,)
    stages: tuple[int, ...] = (0,)
    alpha: float = 1.0
    half_life_tokens: float = 2048.0
    prior_tokens: float = 256.0

    def __post_init__(self):
        buckets = len(self.edges) + 1
        for name in ("multipliers", "floors", "depth_caps"):
            if len(getattr(self, name)) != buckets:
                raise UserError(
                    f"policy: {len(self.edges)} edges make {buckets} buckets, got {len(getattr(self, name))} {name}"
                )
        for name in ("edges", "multipliers", "floors", "stages"):
            values = getattr(self, name)
            if list(values) != sorted(values):
                raise UserError(f"policy: {name} must ascend, got {values}")
        for name, values in (
            ("floors", self.floors),
            ("depth_caps", [cap for cap in self.depth_caps if cap is not None]),
            ("stages", self.stages),
        ):
            if not all(isinstance(value, Integral) and 0 <= value <= MOST_BITS for value in values):
                raise UserError(f"policy: {name} must be whole bits, 0 to {MOST_BITS}, got {getattr(self, name)}")
        for name, value in (("alpha", self.alpha), ("prior_tokens", self.prior_tokens)):
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"policy: {name} must be finite and at least 0, got {value}")
        if not all(math.isfinite(value) and value > 0 for value in (*self.edges, *self.multipliers)):
            raise UserError(
                f"policy: edges and multipliers must be finite and positive, got {self.edges} and {self.multipliers}"
            )
        if not self.stages:
            raise UserError("policy: needs at least one stage")
        if not self.half_life_tokens > 0:
            raise UserError(f"policy: half_life_tokens must be positive, got {self.half_life_tokens}")


NEUTRAL_POLICY = Policy()
"""One bucket without floors, caps or multipliers: global damage alone decides."""
