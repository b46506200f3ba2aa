# SPDX-License-Identifier: Apache-2.0
"""What the requests' tokens showed of the routed experts: routing mass (eq. 1) and prompt features φ (eq. 5).

Sums are kept per request. A batch is the mean over its requests, weighted by their shares of the KV blocks: of their
masses, and of their residuals, which are linear in the logarithms of the features, hence of those. What a request has
shown counts the more the longer it runs: n tokens count n / (n + prior), the calibration text the rest.

An error in a block counts beside the residual stream that it is added to, and goes by the square of what the block is
given. So a token's size is a relative one, s = r |x| / |res|: the norm of the block's input, its routing weight r and
the norm of the residual stream behind the layer in one. For down x is the activation; gate_up's inputs come out of a
norm and are alike, so |x| is left out there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_FEATURES = 3
"""X: φ is Σ s / Σ r, the routing-weighted mean of relative norms, √(Σ s² / Σ r), their RMS, and the largest s."""

TINY = np.float32(1e-30)
"""Stands for 0 under the logarithm."""

CACHED_FLOATS = 1 << 16
"""Requests are merged a few at a time, so that their arrays stay in the processor's cache."""

FORGOTTEN = 1e-6
"""An expert whose mass has decayed to this counts as one that the request never used."""


@dataclass(frozen=True, kw_only=True)
class RequestSignals:
    """Sums over the tokens of one request, each times its forgetting; over their relative sizes s.

    Attributes:
      mass_LE: float64, sum of the routing weights r. Where it is 0, so are the others.
      norm_LEU: float64, sum of s.
      square_LEU: float64, sum of s².
      max_LEU: float64, largest s, forgotten only with the whole expert.
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
    mass_LE = kept * signals.mass_LE + sums.mass_LE
    norm_LEU = kept * signals.norm_LEU + sums.norm_LEU
    square_LEU = kept * signals.square_LEU + sums.square_LEU
    max_LEU = np.maximum(signals.max_LEU, sums.max_LEU)
    forgotten_LE = (mass_LE > 0) & (mass_LE < FORGOTTEN)
    if forgotten_LE.any():
        for array in (mass_LE, norm_LEU, square_LEU, max_LEU):
            array[forgotten_LE] = 0
    return RequestSignals(
        mass_LE=mass_LE,
        norm_LEU=norm_LEU,
        square_LEU=square_LEU,
        max_LEU=max_LEU,
        tokens=kept * signals.tokens + tokens,
    )


def features(signals: RequestSignals) -> np.ndarray:
    """Returns φ, float64 [L, E, U, X]: the mean, the RMS and the largest relative size of each block's inputs.

    NaN where the request routed nothing to the block: it has no feature.
    """
    mass_LE1 = np.where(signals.mass_LE > 0, signals.mass_LE, np.nan)[..., None]
    mean_LEU, rms_LEU = signals.norm_LEU / mass_LE1, np.sqrt(signals.square_LEU / mass_LE1)
    return np.stack([mean_LEU, rms_LEU, np.where(mass_LE1 > 0, signals.max_LEU, np.nan)], axis=-1)


def request_weights(kv_blocks: Sequence[int], tokens: Sequence[float], prior_tokens: float) -> np.ndarray:
    """Returns what each request's own signals count in the batch, float64 [B]; what is left of 1 is the calibration's.

    Args:
      kv_blocks: KV blocks that each request holds.
      tokens: that each request's signals stand for.
      prior_tokens: as in ``Policy``.
    """
    blocks_B, tokens_B = np.array(kv_blocks, np.float64), np.array(tokens, np.float64)
    share_B = blocks_B / max(blocks_B.sum(), 1.0)
    return share_B * np.divide(tokens_B, tokens_B + prior_tokens, out=np.zeros_like(tokens_B), where=tokens_B > 0)


def batch_mass(requests: Sequence[RequestSignals], weight_B: np.ndarray, calibration_mass_LE: np.ndarray) -> np.ndarray:
    """Returns m_ℓe of the batch, float64 [L, E], sums to 1 in every layer (eq. 1).

    Args:
      requests: B of them.
      weight_B: ``request_weights``.
      calibration_mass_LE: m of the calibration text, the prior.
    """
    if not requests:
        return calibration_mass_LE
    mass_BLE = np.stack([request.mass_LE for request in requests])
    total_BL = mass_BLE.sum(axis=-1)
    weight_BL = np.where(total_BL > 0, weight_B[:, None], 0.0)
    scale_BL = weight_BL / np.where(total_BL > 0, total_BL, 1.0)
    prior_L1 = 1.0 - weight_BL.sum(axis=0)[:, None]
    return np.einsum("bl,ble->le", scale_BL, mass_BLE) + prior_L1 * calibration_mass_LE


def log_features(features_LEUX: np.ndarray) -> np.ndarray:
    """Returns log φ, float32 [X, L, E, U], stored with U before L and E; NaN where a block has no feature."""
    features_XULE = np.ascontiguousarray(features_LEUX.transpose(3, 2, 0, 1), np.float32)
    return np.moveaxis(np.log(features_XULE), 1, -1)


def batch_features(
    requests: Sequence[RequestSignals], weight_B: np.ndarray, known_XLEU: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns x = log(φ / φ of calibration) of the batch, float32 [X, L, E, U], and the evidence for it, [L, E, U].

    The evidence is the weight, in [0, 1], of the requests that routed to the block. Where it is 0, x is 0.

    Args:
      requests: B of them, at least one.
      weight_B: ``request_weights``.
      known_XLEU: ``log_features`` of the calibration text.
    """
    weight_B = weight_B.astype(np.float32)
    L, E, U = requests[0].norm_LEU.shape
    x_XLEU, log_mass_LE = np.zeros((NUM_FEATURES, L, E, U), np.float32), np.zeros((L, E), np.float32)
    evidence_LE = np.zeros((L, E), np.float32)
    group = max(1, CACHED_FLOATS // x_XLEU[0].size)
    for first in range(0, len(requests), group):
        some, weight_b = requests[first : first + group], weight_B[first : first + group]
        mass_bLE = _stack([request.mass_LE for request in some])
        evidence_LE += np.einsum("b,ble->le", weight_b, (mass_bLE > 0).astype(np.float32))
        log_mass_LE += np.einsum("b,ble->le", weight_b, _log(mass_bLE))
        for x_LEU, name in zip(x_XLEU, ("norm_LEU", "square_LEU", "max_LEU"), strict=True):
            x_LEU += np.einsum("b,bleu->leu", weight_b, _log(_stack([getattr(request, name) for request in some])))
    # A block that a request did not route to went in as TINY, in all sums: in differences it is 0, else taken out.
    x_XULE = x_XLEU.transpose(0, 3, 1, 2).copy()
    x_XULE[:2] -= log_mass_LE
    x_XULE[1] /= 2
    x_XULE[2] -= (weight_B.sum() - evidence_LE) * np.log(TINY)
    x_XULE /= np.where(evidence_LE > 0, evidence_LE, 1)
    x_XULE -= np.moveaxis(known_XLEU, -1, 1)
    evidence_ULE = np.where(np.isnan(x_XULE.sum(axis=0)), 0, evidence_LE)
    x_XULE = np.where(evidence_ULE > 0, x_XULE, np.float32(0))
    return np.moveaxis(x_XULE, 1, -1), np.moveaxis(evidence_ULE, 0, -1)


def _stack(arrays: list[np.ndarray]) -> np.ndarray:
    return np.stack(arrays, dtype=np.float32, casting="same_kind")


def _log(array: np.ndarray) -> np.ndarray:
    """Overwrites and returns the array."""
    return np.log(np.maximum(array, TINY, out=array), out=array)
