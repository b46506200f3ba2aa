# SPDX-License-Identifier: Apache-2.0
"""Any-precision quantization: one code per weight whose b most significant bits are its b-bit code.

Every output row has a codebook (LUT) per bitwidth. The codebook of ``min_bits`` is a weighted k-means of the row; each
further bit cuts every cluster in two at its best place, so borders never move and b-bit codes are nested::

    3 bits      [        2        ][         3          ]
    4 bits      [    4   ][   5   ][   6   ][     7     ]       children 2c and 2c + 1

LUT entries are weighted means, rounded to float16. The weights of the mean are the columns' importances, so the
quantizer minimises  sum_j h_j (W_j - W^b_j)^2, the sensitivity of equation 2.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pagedweight_jax.calibrate import clusters
from pagedweight_jax.errors import UserError

CHUNK_ROWS = 128
"""Rows clustered at once: their tables stay in a core's cache."""

FLOOR = 1e-6
"""Least importance of a column, as a share of its expert's mean."""


@dataclass(frozen=True)
class AnyPrecision:
    """E quantized linear-blocks.

    Attributes:
      codes_ENC: uint8, the ``max_bits``-bit codes; the b-bit codes are ``codes_ENC >> (max_bits - b)``.
      luts: bitwidth b -> float16[E, N, 2^b], ascending along the last axis.
    """

    codes_ENC: np.ndarray
    luts: dict[int, np.ndarray]

    @property
    def max_bits(self) -> int:
        return max(self.luts)


def positive_importance(importance_EC: np.ndarray) -> np.ndarray:
    """Returns float64[E, C]: the importance raised to at least 1e-6 of its expert's mean; ones if an expert has none.

    So the weights of columns that calibration never reached get sensible codes, and no inexact block has an error of 0.
    """
    mean_E1 = np.mean(importance_EC, axis=1, keepdims=True, dtype=np.float64)
    return np.where(mean_E1 > 0, np.maximum(importance_EC, FLOOR * mean_E1), 1.0)


def check_weights(w_ENC: np.ndarray, name: str) -> None:
    """Raises UserError, with the expert and the row, if a weight is NaN or infinite."""
    for e in range(len(w_ENC)):  # one expert at a time bounds the temporaries
        bad_N = ~np.isfinite(w_ENC[e]).all(axis=1)
        if bad_N.any():
            raise UserError(f"{name}: expert {e}, row {bad_N.argmax()} has a weight that is NaN or infinite")


def _check(w_ENC: np.ndarray, importance_EC: np.ndarray, min_bits: int, max_bits: int, name: str) -> None:
    if not 1 <= min_bits <= max_bits <= 8:
        raise UserError(f"{name}: bitwidths must lie in 1..8 with min <= max, got {min_bits}..{max_bits}")
    if w_ENC.ndim != 3 or importance_EC.shape != (w_ENC.shape[0], w_ENC.shape[2]):
        raise ValueError(f"{name}: need w [E, N, C] and importance [E, C], got {w_ENC.shape}, {importance_EC.shape}")
    check_weights(w_ENC, name)
    bad_EC = ~(np.isfinite(importance_EC) & (importance_EC >= 0))
    if bad_EC.any():
        e, c = np.argwhere(bad_EC)[0]
        raise UserError(f"{name}: expert {e}, column {c} has importance {importance_EC[e, c]}, need finite and >= 0")


def quantize(
    w_ENC: np.ndarray, importance_EC: np.ndarray, min_bits: int, max_bits: int, *, name: str = "experts"
) -> AnyPrecision:
    """Returns the any-precision form of E linear-blocks.

    The seed is near the optimum (see ``clusters.seed``) and each further cut is the best one. Equal weights of a row
    get equal codes; a row with fewer distinct values than a codebook has entries repeats entries. The result depends
    neither on the number of processors nor on the other rows. About 0.3-0.5 us of one processor per weight.

    Args:
      w_ENC: float32 weights, E blocks of N rows and C columns.
      importance_EC: h >= 0, each column's importance (see ``hessian``); only ratios within an expert matter.
      min_bits, max_bits: the bitwidths, 1 <= min <= max <= 8.
      name: what the blocks are called in error messages.

    Raises:
      UserError: a weight or an importance is not finite, an importance is negative, a centroid overflows float16, or
        the bitwidths are out of range.
    """
    w_ENC, importance_EC = np.asarray(w_ENC, np.float32), np.asarray(importance_EC)
    _check(w_ENC, importance_EC, min_bits, max_bits, name)
    E, N, C = w_ENC.shape
    h_EC = positive_importance(importance_EC)
    w_RC = w_ENC.reshape(E * N, C)
    codes_RC = np.empty((E * N, C), np.uint8)
    luts = {bits: np.empty((E * N, 2**bits), np.float16) for bits in range(min_bits, max_bits + 1)}

    def quantize_rows(start: int) -> None:
        chunk = slice(start, min(start + CHUNK_ROWS, E * N))
        rows = clusters.sort_rows(w_RC[chunk], h_EC[np.arange(chunk.start, chunk.stop) // N])
        borders = clusters.seed(rows, 2**min_bits)
        for bits in range(min_bits, max_bits + 1):
            if bits > min_bits:
                borders = clusters.split(rows, borders)
            luts[bits][chunk] = _to_float16(clusters.centroids(rows, borders), start, N, name)
        codes_RC[chunk] = clusters.codes(rows, borders)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(quantize_rows, range(0, E * N, CHUNK_ROWS)))
    return AnyPrecision(codes_RC.reshape(E, N, C), {bits: lut.reshape(E, N, -1) for bits, lut in luts.items()})


def _to_float16(lut_RK: np.ndarray, first_row: int, rows_per_block: int, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded_RK = lut_RK.astype(np.float16)
    if not np.isfinite(rounded_RK).all():
        r, k = np.argwhere(~np.isfinite(rounded_RK))[0]
        expert, row = divmod(first_row + int(r), rows_per_block)
        raise UserError(
            f"{name}: expert {expert}, row {row} has the centroid {lut_RK[r, k]:.6g}, beyond float16's largest 65504"
        )
    return rounded_RK


def dequantize(ap: AnyPrecision, bits: int) -> np.ndarray:
    """Returns the weights at ``bits`` bits, float32[E, N, C]: W[n, c] = LUT_b[n, code_b[n, c]]."""
    codes_ENC = ap.codes_ENC >> (ap.max_bits - bits)
    return np.take_along_axis(ap.luts[bits].astype(np.float32), codes_ENC.astype(np.intp), axis=2)
