# SPDX-License-Identifier: Apache-2.0
"""What one request's tokens showed of the routed experts: routing mass (eq. 1) and prompt features φ (eq. 5)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RequestSignals:
    """Sums over the tokens of one request, each times its forgetting; over x, the inputs of a block, with weights r.

    Attributes:
      mass_LE: float64, sum of the routing weights r.
      norm_LEU: float64, sum of r |x|; x is the expert's input for gate_up, its activation for down.
      square_LEU: float64, sum of r |x|².
      max_LEU: float64, largest |x|, not forgotten.
      tokens: how many tokens the sums stand for.
    """

    mass_LE: np.ndarray
    norm_LEU: np.ndarray
    square_LEU: np.ndarray
    max_LEU: np.ndarray
    tokens: float = 0.0

    @classmethod
    def empty(cls, num_layers: int, num_experts: int) -> "RequestSignals":
        """Returns the signals of a request that has run no token."""
        shape_LEU = (num_layers, num_experts, 2)
        return cls(
            mass_LE=np.zeros(shape_LEU[:2]),
            norm_LEU=np.zeros(shape_LEU),
            square_LEU=np.zeros(shape_LEU),
            max_LEU=np.zeros(shape_LEU),
        )


def observe(signals: RequestSignals, sums: RequestSignals, tokens: int, half_life_tokens: float) -> RequestSignals:
    """Returns the signals with one call's tokens added, after what was there has been forgotten by as many tokens.

    Args:
      signals: of the request up to here.
      sums: of the request's tokens in the call alone, without forgetting; any object with the four arrays of
        ``RequestSignals``, in any float dtype.
      tokens: how many tokens those were.
      half_life_tokens: a token seen this many tokens ago counts half.
    """
    kept = 0.5 ** (tokens / half_life_tokens)
    return RequestSignals(
        mass_LE=kept * signals.mass_LE + sums.mass_LE,
        norm_LEU=kept * signals.norm_LEU + sums.norm_LEU,
        square_LEU=kept * signals.square_LEU + sums.square_LEU,
        max_LEU=np.maximum(signals.max_LEU, sums.max_LEU),
        tokens=kept * signals.tokens + tokens,
    )


def features(signals: RequestSignals) -> np.ndarray:
    """Returns φ, float64 [L, E, U, X]: routing-weighted mean and RMS norm and the largest norm of each block's inputs.

    NaN where the request routed nothing to the block: it has no feature.
    """
    mass_LE1 = np.where(signals.mass_LE > 0, signals.mass_LE, np.nan)[..., None]
    mean_LEU, rms_LEU = signals.norm_LEU / mass_LE1, np.sqrt(signals.square_LEU / mass_LE1)
    return np.stack([mean_LEU, rms_LEU, np.where(mass_LE1 > 0, signals.max_LEU, np.nan)], axis=-1)
