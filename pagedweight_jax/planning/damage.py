# SPDX-License-Identifier: Apache-2.0
"""How much a one-bit reduction is expected to hurt: global damage, times routing bucket, times prompt residual.

Along axis R lie the one-bit reductions of a block, in the order in which it goes down: the r-th leads from max_bits − r
to max_bits − r − 1 bits.
"""

import numpy as np

from pagedweight_jax.planning.calibration import ResidualHeads

DAMAGE_FLOOR = 1e-12
"""ε of eq. 8: even a reduction that looks free costs something, so the one that releases more is preferred."""


def released_bytes(bytes_UQ: np.ndarray) -> np.ndarray:
    """Returns Δ_u^{b→b−1} = M_u^b − M_u^{b−1}, int64 [U, R] with R = Q − 1 (eq. 3).

    Args:
      bytes_UQ: M_u^b, device bytes of a block at b = min_bits .. max_bits bits.
    """
    return np.diff(bytes_UQ)[:, ::-1]


def global_damage(sensitivity_LEUQ: np.ndarray) -> np.ndarray:
    """Returns g_i^{b→b−1} = max(s_i^{b−1} − s_i^b, 0), float64 [L, E, U, R] with R = Q − 1 (eq. 4).

    Args:
      sensitivity_LEUQ: s_i^b for b = min_bits .. max_bits.
    """
    return np.maximum(sensitivity_LEUQ[..., :-1] - sensitivity_LEUQ[..., 1:], 0)[..., ::-1]


def uniform_damage(released_UR: np.ndarray) -> np.ndarray:
    """Returns a damage, float64 [U, R], that knows no block from another: each bit less makes a byte 4 times dearer.

    By damage per byte all blocks then lose their highest bit first. It replaces ``global_damage`` in the ablation
    without global sensitivity.

    Args:
      released_UR: Δ of each reduction.
    """
    return released_UR * 4.0 ** np.arange(released_UR.shape[-1])


def predicted_residual(x_XLEU: np.ndarray, heads: ResidualHeads) -> np.ndarray:
    """Returns ρ̂_i^{b→b−1} = w_u · x_i + a_u, the predicted log residual, float32 [L, E, U, R] (eq. 5).

    Args:
      x_XLEU: float32, log features relative to the calibration text's.
      heads: the linear heads.
    """
    X, L, E, U = x_XLEU.shape
    x_UNX = np.ascontiguousarray(x_XLEU.reshape(X, L * E, U).T)
    rho_UNR = x_UNX @ heads.weight_URX.astype(np.float32).mT + heads.intercept_UR.astype(np.float32)[:, None]
    return np.swapaxes(rho_UNR, 0, 1).reshape(L, E, U, -1)


def prompt_multiplier(rho_LEUR: np.ndarray, evidence_LEU: np.ndarray, heads: ResidualHeads, alpha: float) -> np.ndarray:
    """Returns η_i^{b→b−1} = exp(α · c · clip(ρ̂, ρ_min, ρ_max)), float32 [L, E, U, R] (eq. 6).

    Args:
      rho_LEUR: ρ̂ of the batch.
      evidence_LEU: how much the batch's requests have shown of each block, in [0, 1]: their mean confidence is the
        heads' times this.
      heads: confidences and clipping bounds. They are the same for every request, hence for the batch.
      alpha: α, the strength.
    """
    low_UR, high_UR = heads.low_UR.astype(np.float32), heads.high_UR.astype(np.float32)
    exponent_LEUR = np.maximum(rho_LEUR, low_UR)
    np.minimum(exponent_LEUR, high_UR, out=exponent_LEUR)
    exponent_LEUR *= (alpha * heads.confidence_UR).astype(np.float32)
    exponent_LEUR *= evidence_LEU[..., None]
    return np.exp(exponent_LEUR, out=exponent_LEUR)


def predicted_damage(
    g_LEUR: np.ndarray, mu_LEUR: np.ndarray | float = 1.0, eta_LEUR: np.ndarray | float = 1.0
) -> np.ndarray:
    """Returns d_i^{b→b−1} = max(ε, μ_β(i) · g_i^{b→b−1} · η_i^{b→b−1}), float32, shaped like ``g_LEUR`` (eq. 8).

    Args:
      g_LEUR: global damage.
      mu_LEUR: multipliers of the experts' routing buckets, broadcast against g.
      eta_LEUR: multipliers of the prompt residual, broadcast against g.
    """
    d_LEUR = g_LEUR.astype(np.float32, order="C")
    d_LEUR *= np.asarray(mu_LEUR, np.float32)
    d_LEUR *= eta_LEUR
    return np.maximum(d_LEUR, DAMAGE_FLOOR, out=d_LEUR)
