# SPDX-License-Identifier: Apache-2.0
"""Norm, rotary embedding and gated MLP. Every function is row-wise: a token's result does not depend on other rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import MLPWeights
from pallas_kernels.moe_ffn.pages import ACTIVATIONS

Activation = Callable[[jax.Array], jax.Array]


def activation(name: str) -> Activation:
    """Returns the activation that Hugging Face calls ``name``; UserError unless the kernels have it, too."""
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def matmul(x_TC: jax.Array, w_CN: jax.Array) -> jax.Array:
    """Returns ``x @ w``, float32[T, N]: float32 sums of exact products, also on devices that default to TF32."""
    return jnp.matmul(x_TC, w_CN, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def rms_norm(x_TD: jax.Array, w_D: jax.Array, eps: float) -> jax.Array:
    """Returns ``x / sqrt(mean(x^2) + eps) * w``, [T, D] in x's dtype; the statistics are float32."""
    x32_TD = x_TD.astype(jnp.float32)
    scale_T1 = jax.lax.rsqrt(jnp.mean(x32_TD * x32_TD, axis=-1, keepdims=True) + eps)
    return (x32_TD * scale_T1).astype(x_TD.dtype) * w_D.astype(x_TD.dtype)


def rope(x_THM: jax.Array, positions_T: jax.Array, theta: float) -> jax.Array:
    """Returns x rotated by position, [T, H, M] in x's dtype.

    Pair i is (dimension i, dimension i + M/2) and turns by ``position * theta^(-2i/M)``; angles are float32.
    """
    half = x_THM.shape[-1] // 2
    frequency = np.asarray(theta ** (-np.arange(half) / half), np.float32)
    angle = positions_T[:, None, None].astype(jnp.float32) * frequency  # [T, 1, M/2]
    cos, sin = jnp.cos(angle).astype(x_THM.dtype), jnp.sin(angle).astype(x_THM.dtype)
    low, high = x_THM[..., :half], x_THM[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def mlp(x_TD: jax.Array, w: MLPWeights, act: Activation) -> jax.Array:
    """Returns ``(act(x @ gate) * (x @ up)) @ down``, float32[T, D]; the hidden row is rounded to x's dtype."""
    h_TF = act(matmul(x_TD, w.gate_DF)) * matmul(x_TD, w.up_DF)
    return matmul(h_TF.astype(x_TD.dtype), w.down_FD)
