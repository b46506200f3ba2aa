# SPDX-License-Identifier: Apache-2.0
"""What was measured before serving: Ω_off of Algorithm 1."""

from dataclasses import dataclass

import numpy as np

from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy
from pagedweight_jax.planning.signals import NUM_FEATURES


@dataclass(frozen=True, kw_only=True)
class ResidualHeads:
    """The linear heads that predict a prompt's log residual ρ̂ from its features: eq. 5 and 6.

    One head per kind U and one-bit reduction R (as in ``damage.py``: the r-th leads from max_bits − r to
    max_bits − r − 1 bits), shared by all layers and experts. That is possible because the features enter relative to
    the block's own: x = log(φ / φ of calibration).

    Attributes:
      weight_URX: float64, w, for the features of both blocks of the expert, gate_up's before down's.
      intercept_UR: float64, a.
      confidence_UR: float64, c, in [0, 1]; 0 leaves the global damage as it is.
      low_UR, high_UR: float64, ρ_min <= ρ_max, the bounds to which ρ̂ is clipped.
    """

    weight_URX: np.ndarray
    intercept_UR: np.ndarray
    confidence_UR: np.ndarray
    low_UR: np.ndarray
    high_UR: np.ndarray

    def __post_init__(self):
        shape = self.weight_URX.shape
        if len(shape) != 3 or shape[-1] != len(KINDS) * NUM_FEATURES:
            raise UserError(f"residual heads: need weights [U, R, {len(KINDS) * NUM_FEATURES}], got {list(shape)}")
        for name in ("weight_URX", "intercept_UR", "confidence_UR", "low_UR", "high_UR"):
            array = getattr(self, name)
            if array.shape[:2] != shape[:2] or array.ndim != (3 if name == "weight_URX" else 2):
                raise UserError(f"residual heads: {name} must be {list(shape[:2])}, got {list(array.shape)}")
            if not np.isfinite(array).all():
                raise UserError(f"residual heads: {name} holds values that are not finite")
        if not ((self.confidence_UR >= 0) & (self.confidence_UR <= 1)).all():
            raise UserError(f"residual heads: confidences must lie in [0, 1], got {self.confidence_UR.tolist()}")
        if (self.low_UR > self.high_UR).any():
            raise UserError("residual heads: a lower clipping bound lies above the upper one")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Offline results that the planner works from. Without the optional ones only global damage decides.

    Attributes:
      sensitivity_LEUQ: float64, s_i^b of eq. 2 for b = min_bits .. max_bits along Q; finite and not negative.
      min_bits, max_bits: the supported bitwidths.
      mass_LE: float64, routing mass of the calibration text (eq. 1), sums to 1 in every layer.
      features_LEUX: float64, means of φ over the calibration text per block; positive and finite where the block has a
        mean, NaN where it has none.
      heads: predict the prompt residual.
      policy: how routing mass and residual count.
      pinned_LEU: uint8, bits below which no block is lowered, whatever the policy (``pins.py``); None for min_bits.
    """

    sensitivity_LEUQ: np.ndarray
    min_bits: int
    max_bits: int
    mass_LE: np.ndarray | None = None
    features_LEUX: np.ndarray | None = None
    heads: ResidualHeads | None = None
    policy: Policy = NEUTRAL_POLICY
    pinned_LEU: np.ndarray | None = None

    @property
    def least_LEU(self) -> np.ndarray:
        """uint8, the fewest bits that any block may have."""
        if self.pinned_LEU is not None:
            return self.pinned_LEU
        return np.full(self.sensitivity_LEUQ.shape[:-1], self.min_bits, np.uint8)

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
        self._check_policy()

    def _check_policy(self) -> None:
        L, E, U, Q = self.sensitivity_LEUQ.shape
        for name, array, shape in (
            ("mass_LE", self.mass_LE, (L, E)),
            ("features_LEUX", self.features_LEUX, (L, E, U, NUM_FEATURES)),
            ("heads", self.heads and self.heads.confidence_UR, (U, Q - 1)),
            ("pinned_LEU", self.pinned_LEU, (L, E, U)),
        ):
            if array is not None and array.shape != shape:
                raise UserError(f"calibration: {name} must be {list(shape)}, got {list(array.shape)}")
        mass_LE = self.mass_LE
        if mass_LE is not None and not ((mass_LE >= 0).all() and np.allclose(mass_LE.sum(-1), 1)):
            raise UserError("calibration: the routing masses of a layer must not be negative and sum to 1")
        if self.features_LEUX is not None and not ((self.features_LEUX > 0) | np.isnan(self.features_LEUX)).all():
            raise UserError("calibration: features must be positive, or NaN where a block has none")
        pinned_LEU = self.pinned_LEU
        if pinned_LEU is not None and not ((self.min_bits <= pinned_LEU) & (pinned_LEU <= self.max_bits)).all():
            raise UserError(f"calibration: pinned bits must lie in {self.min_bits}..{self.max_bits}")
        if mass_LE is None and self.policy.edges:
            raise UserError("calibration: routing buckets need the routing mass of the calibration text")
        if self.heads is not None and self.features_LEUX is None:
            raise UserError("calibration: residual heads need the features of the calibration text")
