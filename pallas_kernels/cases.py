# SPDX-License-Identifier: Apache-2.0
"""What a kernel is held to its definition on: the rows of ``pagedweight selftest``, from each kernel's ``cases``."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One kernel on one set of arguments.

    Attributes:
      kernel: the package that holds it.
      name: of the case, unique within its kernel.
      make_args: from a seed to the arguments.
      run: the kernel, compiled for the device at hand; arrays, or a tuple of them.
      reference: the same by the definition.
      tolerance: the largest ``relative_error`` of any result.
    """

    kernel: str
    name: str
    make_args: Callable[[int], tuple]
    run: Callable
    reference: Callable
    tolerance: float


def relative_error(out, ref) -> float:
    """Returns |out - ref| / |ref| in float64: the larger of the whole tensor's and of the worst row's.

    A row is measured by at least the mean row's norm: small ones are differences of large numbers.
    """
    out, ref = (np.asarray(a).astype(np.float64) for a in (out, ref))
    if out.shape != ref.shape:
        raise ValueError(f"shapes differ: {out.shape} and {ref.shape}")
    difference, ref = (a.reshape(-1, a.shape[-1]) if a.ndim > 1 else a.reshape(1, -1) for a in (out - ref, ref))
    norm = max(np.linalg.norm(ref), np.finfo(np.float64).tiny)
    rows = np.linalg.norm(difference, axis=1) / np.maximum(np.linalg.norm(ref, axis=1), norm / len(ref) ** 0.5)
    errors = np.linalg.norm(difference) / norm, *rows
    return float(max(errors)) if np.isfinite(difference).all() else float("inf")
