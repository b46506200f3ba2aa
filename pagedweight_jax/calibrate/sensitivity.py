# SPDX-License-Identifier: Apache-2.0
"""How much a linear-block suffers at each bitwidth (equation 2)."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pagedweight_jax.calibrate.any_precision import AnyPrecision, positive_importance


def sensitivity(
    w_ENC: np.ndarray, ap: AnyPrecision, importance_EC: np.ndarray, min_bits: int, max_bits: int
) -> np.ndarray:
    """Returns float64[E, Q]: s_i^b = sum_nc h_c (W_nc - W^b_nc)^2 of every block, for b = min_bits .. max_bits.

    Zero only if b bits (with float16 centroids) hold every weight exactly: h has the floor that the quantizer gave it.

    Args:
      w_ENC: the source weights.
      ap: their any-precision form.
      importance_EC: h, each column's importance (see ``hessian``).
      min_bits, max_bits: the bitwidths, all of them in ``ap``.
    """
    h_EC = positive_importance(importance_EC)
    s_EQ = np.empty((len(w_ENC), max_bits - min_bits + 1))

    def measure(e: int) -> None:
        for q, bits in enumerate(range(min_bits, max_bits + 1)):
            codes_NC = (ap.codes_ENC[e] >> (ap.max_bits - bits)).astype(np.intp)
            error_NC = np.take_along_axis(ap.luts[bits][e].astype(np.float64), codes_NC, axis=1) - w_ENC[e]
            s_EQ[e, q] = np.square(error_NC, out=error_NC).sum(0) @ h_EC[e]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(measure, range(len(w_ENC))))
    return s_EQ
