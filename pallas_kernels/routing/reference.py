# SPDX-License-Identifier: Apache-2.0
"""Definition of the choice of experts."""

import jax
import jax.numpy as jnp

from pallas_kernels.dense.reference import matmul, rms_norm


def route(m_TD: jax.Array, router_DE: jax.Array, k: int, renormalise: bool) -> tuple[jax.Array, jax.Array]:
    """Returns (weights float32[T, K], ids int32[T, K]) of normed inputs; see ``norm_and_route`` of the api."""
    probabilities_TE = jax.nn.softmax(matmul(m_TD, router_DE), axis=-1)
    weights_TK, ids_TK = jax.lax.top_k(probabilities_TE, k)
    if renormalise:
        weights_TK = weights_TK / jnp.sum(weights_TK, axis=-1, keepdims=True)
    return weights_TK, ids_TK.astype(jnp.int32)


def norm_and_route(
    x_TD: jax.Array, norm_D: jax.Array, eps: float, router_DE: jax.Array, k: int, renormalise: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.routing.api.norm_and_route``."""
    m_TD = rms_norm(x_TD, norm_D, eps)
    return m_TD, *route(m_TD, router_DE, k, renormalise)
