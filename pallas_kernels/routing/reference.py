# SPDX-License-Identifier: Apache-2.0
"""Definition of what stands between attention and the routed experts."""

import jax
import jax.numpy as jnp

from pallas_kernels.dense.reference import gated, matmul, rms_norm


def top_experts(m_TD: jax.Array, router_DE: jax.Array, k: int, renormalise: bool) -> tuple[jax.Array, jax.Array]:
    """Returns (weights float32[T, K], ids int32[T, K]) of normed inputs; see ``pallas_kernels.routing.api.route``."""
    probabilities_TE = jax.nn.softmax(matmul(m_TD, router_DE), axis=-1)
    weights_TK, ids_TK = jax.lax.top_k(probabilities_TE, k)
    if renormalise:
        weights_TK = weights_TK / jnp.sum(weights_TK, axis=-1, keepdims=True)
    return weights_TK, ids_TK.astype(jnp.int32)


def route(
    m_TD: jax.Array,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    shared_gate_D: jax.Array | None = None,
    first_T: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Args and result: see ``pallas_kernels.routing.api.route``."""
    weights_TK, ids_TK = top_experts(m_TD, router_DE, k, renormalise)
    if first_T is not None:
        ids_TK += first_T[:, None]
    factor_T1 = None if shared_gate_D is None else jax.nn.sigmoid(matmul(m_TD, shared_gate_D[:, None]))
    return weights_TK, ids_TK, factor_T1


def norm_and_route(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    first_T: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.routing.api.norm_and_route``."""
    m_TD = rms_norm(x_TD, norm_D, eps)
    weights_TK, ids_TK, _ = route(m_TD, router_DE, k, renormalise, None, first_T)
    return m_TD, weights_TK, ids_TK


def norm_route_and_gate(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    router_DE: jax.Array,
    k: int,
    renormalise: bool,
    shared: tuple[jax.Array, jax.Array, jax.Array],
    activation: str,
    first_T: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.routing.api.norm_route_and_gate``."""
    gate_DF, up_DF, shared_gate_D = shared
    m_TD = rms_norm(x_TD, norm_D, eps)
    weights_TK, ids_TK, factor_T1 = route(m_TD, router_DE, k, renormalise, shared_gate_D, first_T)
    return m_TD, weights_TK, ids_TK, gated(m_TD, gate_DF, up_DF, activation, None, 0.0), factor_T1
