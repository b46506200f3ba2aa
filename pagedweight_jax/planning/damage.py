# SPDX-License-Identifier: Apache-2.0
"""How much a one-bit reduction is expected to hurt.

Along axis R lie the one-bit reductions of a block, in the order in which it goes down: the r-th leads from max_bits − r
to max_bits − r − 1 bits.
"""

import numpy as np

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


def predicted_damage(
    g_LEUR: np.ndarray, mu_LEUR: np.ndarray | float = 1.0, eta_LEUR: np.ndarray | float = 1.0
) -> np.ndarray:
    """Returns d_i^{b→b′} = max(ε, μ_β(i) · g_i^{b→b′} · η_i^{b→b′}), shaped like ``g_LEUR`` (eq. 8).

    Args:
      g_LEUR: global damage.
      mu_LEUR: multipliers of the experts' routing buckets, broadcast against g.
      eta_LEUR: multipliers of the prompt residual, broadcast against g.
    """
    return np.maximum(DAMAGE_FLOOR, mu_LEUR * g_LEUR * eta_LEUR)
