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
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate import clusters
from pagedweight_jax.calibrate.clusters import Array
from pagedweight_jax.calibrate.rows_jax import JaxRows
from pagedweight_jax.calibrate.rows_numpy import NumpyRows, even_slices
from pagedweight_jax.errors import UserError

CHUNK_ROWS, CHUNK_WEIGHTS = 384, 3 << 18
"""What a processor clusters at once, at most: passes few and long, and tables of some 35 MB."""

FLOOR = 1e-6
"""Least importance of a column, as a share of its expert's mean."""

NOT_FINITE = "has a weight that is NaN or infinite"
TOO_LARGE = "has a centroid beyond float16's largest, 65504"


@dataclass(frozen=True)
class AnyPrecision:
    """E quantized linear-blocks.

    Attributes:
      codes_ENC: uint8, the ``max_bits``-bit codes; the b-bit codes are ``codes_ENC >> (max_bits - b)``.
      luts: bitwidth b -> float16[E, N, 2^b], ascending along the last axis.

    All arrays are numpy's, or, quantized on a GPU, JAX's on it.
    """

    codes_ENC: Array
    luts: dict[int, Array]

    @property
    def max_bits(self) -> int:
        return max(self.luts)


def row_chunks(num_rows: int, num_columns: int) -> list[slice]:
    """Returns a linear-block's rows in chunks of like size, as a processor takes them."""
    return even_slices(num_rows, min(CHUNK_ROWS, CHUNK_WEIGHTS // num_columns))


def positive_importance(importance_EC: np.ndarray) -> np.ndarray:
    """Returns float64[E, C]: the importance raised to at least 1e-6 of its expert's mean; ones if an expert has none.

    So the weights of columns that calibration never reached get sensible codes, and no inexact block has an error of 0.
    """
    mean_E1 = np.mean(importance_EC, axis=1, keepdims=True, dtype=np.float64)
    return np.where(mean_E1 > 0, np.maximum(importance_EC, FLOOR * mean_E1), 1.0)


def _refuse(bad_EN: np.ndarray, name: str, why: str) -> None:
    """Raises UserError naming the first bad row, if there is one."""
    if bad_EN.any():
        e, n = np.argwhere(bad_EN)[0]
        raise UserError(f"{name}: expert {e}, row {n} {why}")


def _check(w_ENC: Array, importance_EC: np.ndarray, min_bits: int, max_bits: int, name: str) -> None:
    if not 1 <= min_bits <= max_bits <= 8:
        raise UserError(f"{name}: bitwidths must lie in 1..8 with min <= max, got {min_bits}..{max_bits}")
    if w_ENC.ndim != 3 or importance_EC.shape != (w_ENC.shape[0], w_ENC.shape[2]):
        raise ValueError(f"{name}: need w [E, N, C] and importance [E, C], got {w_ENC.shape}, {importance_EC.shape}")
    bad_EC = ~(np.isfinite(importance_EC) & (importance_EC >= 0))
    if bad_EC.any():
        e, c = np.argwhere(bad_EC)[0]
        raise UserError(f"{name}: expert {e}, column {c} has importance {importance_EC[e, c]}, need finite and >= 0")


def quantize(
    w_ENC: Array, importance_EC: np.ndarray, min_bits: int, max_bits: int, *, name: str = "experts"
) -> AnyPrecision:
    """Returns the any-precision form of E linear-blocks, made on a GPU if JAX has one.

    The seed is near the optimum (see ``clusters.seed``) and each further cut is the best one. Equal weights of a row
    get equal codes; a row with fewer distinct values than a codebook has entries repeats entries. The result depends
    neither on the number of processors nor on the other rows; a GPU takes the same cuts unless two are equal but for
    rounding. About 0.1 us of one processor per weight.

    Args:
      w_ENC: float weights, E blocks of N rows and C columns, of numpy or JAX.
      importance_EC: h >= 0, each column's importance (see ``hessian``); only ratios within an expert matter.
      min_bits, max_bits: the bitwidths, 1 <= min <= max <= 8.
      name: what the blocks are called in error messages.

    Raises:
      UserError: a weight or an importance is not finite, an importance is negative, a centroid overflows float16, or
        the bitwidths are out of range.
    """
    importance_EC = np.asarray(importance_EC)
    _check(w_ENC, importance_EC, min_bits, max_bits, name)
    h_EC = positive_importance(importance_EC)
    on_device = quantize_on_device if jax.default_backend() == "gpu" else quantize_on_host
    quantized, finite_EN = on_device(w_ENC, h_EC, min_bits, max_bits)
    _refuse(~finite_EN, name, NOT_FINITE)
    for lut_ENK in quantized.luts.values():  # sorted: the ends tell
        _refuse(~np.isfinite(np.asarray(lut_ENK[..., [0, -1]])).all(2), name, TOO_LARGE)
    return quantized


def quantize_on_host(
    w_ENC: Array, h_EC: np.ndarray, min_bits: int, max_bits: int
) -> tuple[AnyPrecision, np.ndarray]:
    """Returns what ``quantize`` does, by all processors, and finite_EN, bool; rows that are not finite are left out."""
    E, N, C = w_ENC.shape
    codes_ENC, finite_EN = np.zeros((E, N, C), np.uint8), np.ones((E, N), bool)
    luts = {bits: np.zeros((E, N, 2**bits), np.float16) for bits in range(min_bits, max_bits + 1)}
    chunks = iter([(e, chunk) for e in range(E) for chunk in row_chunks(N, C)])

    @np.errstate(over="ignore")
    def work() -> None:
        rows = NumpyRows()
        for e, chunk in chunks:  # whoever is free takes the next one
            w_RC = np.asarray(w_ENC[e, chunk], np.float32)
            finite_EN[e, chunk] = np.isfinite(w_RC).all(1)
            if not finite_EN[e, chunk].all():
                continue
            codes_ENC[e, chunk], lut_of = clusters.quantize_rows(rows, w_RC, h_EC[e], min_bits, max_bits)
            for bits, lut_RK in zip(luts, lut_of):
                luts[bits][e, chunk] = lut_RK

    with ThreadPoolExecutor() as pool:
        for worker in [pool.submit(work) for _ in range(os.cpu_count())]:
            worker.result()
    return AnyPrecision(codes_ENC, luts), finite_EN


@partial(jax.jit, static_argnums=(2, 3))
def _quantize_blocks(w_ENC: jax.Array, h_EC: jax.Array, min_bits: int, max_bits: int):
    def quantize_block(block):
        w_NC, h_C = block
        codes_NC, luts = clusters.quantize_rows(JaxRows(), w_NC.astype(jnp.float32), h_C, min_bits, max_bits)
        return codes_NC, luts, jnp.isfinite(w_NC).all(1)

    return jax.lax.map(quantize_block, (w_ENC, h_EC))


def quantize_on_device(
    w_ENC: Array, h_EC: np.ndarray, min_bits: int, max_bits: int
) -> tuple[AnyPrecision, np.ndarray]:
    """Returns what ``quantize`` does, by JAX's default device block after block, and finite_EN, bool."""
    with jax.enable_x64(True):
        codes_ENC, luts, finite_EN = _quantize_blocks(w_ENC, h_EC, min_bits, max_bits)
    return AnyPrecision(codes_ENC, dict(zip(range(min_bits, max_bits + 1), luts))), np.asarray(finite_EN)


def dequantize(ap: AnyPrecision, bits: int) -> np.ndarray:
    """Returns the weights at ``bits`` bits, float32[E, N, C]: W[n, c] = LUT_b[n, code_b[n, c]]."""
    codes_ENC = np.asarray(ap.codes_ENC) >> (ap.max_bits - bits)
    return np.take_along_axis(np.asarray(ap.luts[bits], np.float32), codes_ENC.astype(np.intp), axis=2)
