# SPDX-License-Identifier: Apache-2.0
"""Definition of what stands between attention and the routed experts."""

import jax
import jax.numpy as jnp

from pallas_kernels.dense.reference import matmul

NOWHERE = 2**30
"""The id of an expert that there is in no layer."""


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
    first: jax.Array | None = None,
    positions_T: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Args and result: see ``pallas_kernels.routing.api.route``."""
    weights_TK, ids_TK = top_experts(m_TD, router_DE, k, renormalise)
    if first is not None:
        ids_TK += first
    if positions_T is not None:
        ids_TK = jnp.where(positions_T[:, None] < 0, NOWHERE, ids_TK)
    factor_T1 = None if shared_gate_D is None else jax.nn.sigmoid(matmul(m_TD, shared_gate_D[:, None]))
    return weights_TK, ids_TK, factor_T1
