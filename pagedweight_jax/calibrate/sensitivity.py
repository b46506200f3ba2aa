# SPDX-License-Identifier: Apache-2.0
"""How much a linear-block suffers at each bitwidth (equation 2)."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.any_precision import AnyPrecision, positive_importance, row_chunks
from pagedweight_jax.calibrate.clusters import Array


def sensitivity(
    w_ENC: Array,
    ap: AnyPrecision,
    importance_EC: np.ndarray,
    min_bits: int,
    max_bits: int,
    row_weights_EN: np.ndarray | None = None,
) -> np.ndarray:
    """Returns float64[E, Q]: s_i^b = sum_nc f_n h_c (W_nc - W^b_nc)^2 of every block, for b = min_bits .. max_bits.

    Zero only if b bits (with float16 centroids) hold every weight exactly: h has the floor that the quantizer gave it.

    Args:
      w_ENC: the source weights.
      ap: their any-precision form; measured where it lies.
      importance_EC: h, each column's importance (see ``hessian``).
      min_bits, max_bits: the bitwidths, all of them in ``ap``.
      row_weights_EN: f > 0, each row's weight (see ``fisher``); None for ones.
    """
    h_EC = positive_importance(importance_EC)
    f_EN = np.ones(w_ENC.shape[:2]) if row_weights_EN is None else row_weights_EN.astype(np.float64)
    shifts = [ap.max_bits - bits for bits in range(min_bits, max_bits + 1)]
    luts = [ap.luts[bits] for bits in range(min_bits, max_bits + 1)]
    if isinstance(ap.codes_ENC, jax.Array):
        with jax.enable_x64(True):
            return np.asarray(_errors_on_device(w_ENC, h_EC, f_EN, ap.codes_ENC, luts, tuple(shifts)))

    def measure(e: int) -> list[np.ndarray]:
        error_Q = np.zeros(len(luts))
        for chunk in row_chunks(*w_ENC.shape[1:]):
            lut_of = [lut_ENK[e, chunk] for lut_ENK in luts]
            w_RC = np.asarray(w_ENC[e, chunk], np.float32)
            error_Q += _errors(np, w_RC, h_EC[e], f_EN[e, chunk], ap.codes_ENC[e, chunk], lut_of, shifts)
        return error_Q

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.stack(list(pool.map(measure, range(len(w_ENC)))))


def _errors(
    xp: ModuleType, w_RC: Array, h_C: Array, f_R: Array, codes_RC: Array, luts: list[Array], shifts: list[int]
) -> Array:
    errors = []
    for lut_RK, shift in zip(luts, shifts):
        R, K = lut_RK.shape
        index_RC = (codes_RC >> shift).astype(np.int64) + K * np.arange(R)[:, None]
        off_RC = lut_RK.reshape(-1).astype(np.float64)[index_RC] - w_RC
        errors.append(f_R @ (off_RC * off_RC) @ h_C)
    return xp.stack(errors)


@partial(jax.jit, static_argnums=5)
def _errors_on_device(
    w_ENC: jax.Array, h_EC: jax.Array, f_EN: jax.Array, codes_ENC: jax.Array, luts: list[jax.Array], shifts: tuple
):
    def errors(block):
        w_NC, h_C, f_N, codes_NC, lut_of = block
        return _errors(jnp, w_NC.astype(jnp.float64), h_C, f_N, codes_NC, lut_of, shifts)

    return jax.lax.map(errors, (w_ENC, h_EC, f_EN, codes_ENC, luts))
