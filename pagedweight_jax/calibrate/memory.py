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


def give_back() -> None:
    """Hands memory that was freed back to the operating system; glibc keeps what each thread had."""
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
