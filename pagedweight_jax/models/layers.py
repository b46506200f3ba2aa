# SPDX-License-Identifier: Apache-2.0
"""Norm, rotary embedding and gated MLP. Every function is row-wise: a token's result does not depend on other rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import MLPWeights
from pallas_kernels.dense.reference import matmul, rms_norm
from pallas_kernels.moe_ffn.pages import ACTIVATIONS

__all__ = ["Activation", "activation", "matmul", "mlp", "rms_norm", "rope", "rope_frequencies", "rope_tables"]

Activation = Callable[[jax.Array], jax.Array]


def activation(name: str) -> Activation:
    """Returns the activation that Hugging Face calls ``name``; UserError unless the kernels have it, too."""
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Returns ``theta^(-2i/M)`` of each pair i of a head, float32[M/2]."""
    half = head_dim // 2
    return np.asarray(theta ** (-np.arange(half) / half), np.float32)


def rope_tables(positions_T: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Returns (cos_TR, sin_TR), float32, of the angle ``position * theta^(-2i/M)`` of each pair i of a head."""
    angle_TR = positions_T[:, None].astype(jnp.float32) * rope_frequencies(head_dim, theta)
    return jnp.cos(angle_TR), jnp.sin(angle_TR)


def rope(x_THM: jax.Array, cos_TR: jax.Array, sin_TR: jax.Array) -> jax.Array:
    """Returns x turned by the angles of ``rope_tables``, [T, H, M] in x's dtype.

    Pair i is (dimension i, dimension i + M/2). It is turned in float32 and rounded once, as the kernels do; a model in
    PyTorch rounds angles and products to x's dtype, too.
    """
    low, high = jnp.split(x_THM.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_THM.dtype)


def mlp(x_TD: jax.Array, w: MLPWeights, act: Activation) -> jax.Array:
    """Returns ``(act(x @ gate) * (x @ up)) @ down``, float32[T, D]; the hidden row is rounded to x's dtype."""
    h_TF = act(matmul(x_TD, w.gate_DF)) * matmul(x_TD, w.up_DF)
    return matmul(h_TF.astype(x_TD.dtype), w.down_FD)
