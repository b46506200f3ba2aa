# SPDX-License-Identifier: Apache-2.0
"""What keeps a conversion's memory to the layers that it says it holds."""

import ctypes
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.models.weights import LayerWeights, MoEWeights

PIECE_BYTES = 128 << 20
"""Sent to a GPU at once: what is sent waits in page-locked memory, which is kept."""

MAPPED_BYTES = 4 << 20
"""Arrays of this size get pages of their own from the operating system; what the quantizer makes again and again takes
less than half of it."""

KEPT_BYTES = 32 << 20
"""What a thread may have freed at the end of its heap before it goes back: more than the quantizer makes at once."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def map_large_arrays() -> None:
    """Makes glibc hand a large array's memory back when the array is freed; for the whole process, and for good.

    Left alone, it puts arrays of up to 32 MiB on heaps of 64 MiB, several for each thread that ever took one, and keeps
    the free end of each, which ``give_back`` does not reach: with 16 processors some 75 MB more for every layer.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back() -> None:
    """Hands small arrays' freed memory back to the operating system; glibc keeps what each thread had."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def experts_on_device(w: LayerWeights) -> LayerWeights:
    """Returns the layer with its routed experts on the GPU if JAX has one, so that the host's copy may go."""
    if jax.default_backend() != "gpu" or not isinstance(w.mlp, MoEWeights):
        return w
    return replace(w, mlp=replace(w.mlp, experts=jax.tree.map(_send, w.mlp.experts)))


def _send(w_ENC: np.ndarray) -> jax.Array:
    step = max(1, len(w_ENC) * PIECE_BYTES // w_ENC.nbytes)
    pieces = [jax.block_until_ready(jnp.asarray(w_ENC[e : e + step])) for e in range(0, len(w_ENC), step)]
    return jnp.concatenate(pieces)
