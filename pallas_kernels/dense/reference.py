# SPDX-License-Identifier: Apache-2.0
"""Definition of the products with dense matrices."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels.moe_ffn.pages import ACTIVATIONS


def matmul(x_TC: jax.Array, w_CN: jax.Array) -> jax.Array:
    """Returns ``x @ w``, float32[T, N]: float32 sums of exact products, also on devices that default to TF32."""
    return jnp.matmul(x_TC, w_CN, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def rms_norm(x_TD: jax.Array, w_D: jax.Array, eps: float) -> jax.Array:
    """Returns ``x / sqrt(mean(x^2) + eps) * w``, [T, D] in x's dtype; the statistics are float32."""
    x32_TD = x_TD.astype(jnp.float32)
    scale_T1 = jax.lax.rsqrt(jnp.mean(x32_TD * x32_TD, axis=-1, keepdims=True) + eps)
    return (x32_TD * scale_T1).astype(x_TD.dtype) * w_D.astype(x_TD.dtype)


def project(
    x_TD: jax.Array,
    weights: tuple[jax.Array, ...],
    biases: tuple[jax.Array | None, ...],
) -> tuple[jax.Array, ...]:
    """Args and result: see ``pallas_kernels.dense.api.project``."""

    def one(w_DN, bias_N):
        y_TN = matmul(x_TD, w_DN)
        if bias_N is not None:
            y_TN = y_TN + bias_N
        return y_TN.astype(x_TD.dtype)

    return tuple(one(w_DN, bias_N) for w_DN, bias_N in zip(weights, biases, strict=True))


def project_parts(h_TC: jax.Array, w_CD: jax.Array) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.project_parts``."""
    return matmul(h_TC, w_CD)[None]


def add_up(
    x_TD: jax.Array,
    parts_STD: jax.Array | None = None,
    factor_T1: jax.Array | None = None,
    routed: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Returns x', the first result of ``pallas_kernels.dense.api.add_norm``."""
    addends = []
    if routed is not None:
        y_TKD, weights_TK = routed
        addends.append(jnp.sum(weights_TK[..., None] * y_TKD, axis=1))
    if parts_STD is not None:
        product_TD = ordered_sum(parts_STD)
        addends.append(product_TD if factor_T1 is None else factor_T1 * product_TD)
    return x_TD + ordered_sum(addends).astype(x_TD.dtype) if addends else x_TD


def add_norm(x_TD: jax.Array, norm_D: jax.Array, eps: float, *addends) -> tuple[jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.dense.api.add_norm``."""
    x_TD = add_up(x_TD, *addends)
    return x_TD, rms_norm(x_TD, norm_D, eps)


def ordered_sum(arrays: Iterable[jax.Array]) -> jax.Array:
    """Returns the sum in the order of the arrays."""
    total, *others = arrays
    for array in others:
        total = total + array
    return total


def gated(x_TD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, activation: str) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.gated``."""
    h_TF = ACTIVATIONS[activation](matmul(x_TD, gate_DF)) * matmul(x_TD, up_DF)
    return h_TF.astype(x_TD.dtype)


def logits(x_TD: jax.Array, head: jax.Array, transposed: bool) -> jax.Array:
    """Args and result: see ``pallas_kernels.dense.api.logits``."""
    return matmul(x_TD, head.T if transposed else head)
