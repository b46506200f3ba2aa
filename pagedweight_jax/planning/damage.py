# SPDX-License-Identifier: Apache-2.0
"""How much a one-bit reduction is expected to hurt: global damage, times routing bucket, times prompt residual.

Along axis R lie the one-bit reductions of a block, in the order in which it goes down: the r-th leads from max_bits − r
to max_bits − r − 1 bits. Arrays [L, E, U, R] are stored with R and U outermost, so that numpy's inner loops run over
all experts and not over a few reductions.
"""

import numpy as np

from pagedweight_jax.planning.calibration import ResidualHeads

DAMAGE_FLOOR = np.float32(1e-12)
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

    What gate_up's output becomes depends on how far the activation lets it through, which down's features tell: both
    blocks of an expert see the features of both.

    Args:
      x_XLEU: float32, log features relative to the calibration text's.
      heads: the linear heads.
    """
    x_XLE = np.concatenate(np.moveaxis(x_XLEU, -1, 0))
    weight_XRU11 = heads.weight_URX.T.astype(np.float32)[..., None, None]
    rho_RULE = weight_XRU11[0] * x_XLE[0]
    for weight_RU11, x_LE in zip(weight_XRU11[1:], x_XLE[1:], strict=True):
        rho_RULE += weight_RU11 * x_LE
    rho_RULE += heads.intercept_UR.T.astype(np.float32)[..., None, None]
    return rho_RULE.transpose(2, 3, 1, 0)


def reductions_outermost(array_LEUR: np.ndarray) -> np.ndarray:
    """Returns the array as float32, stored with R and U outermost."""
    array_RULE = np.ascontiguousarray(array_LEUR.transpose(3, 2, 0, 1), np.float32)
    return array_RULE.transpose(2, 3, 1, 0)


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
    d_LEUR = g_LEUR.astype(np.float32)
    d_LEUR *= np.asarray(mu_LEUR, np.float32)
    d_LEUR *= eta_LEUR
    return np.maximum(d_LEUR, DAMAGE_FLOOR, out=d_LEUR)
