# SPDX-License-Identifier: Apache-2.0
"""The plain definition of the experts, and of the relative size of what a token takes from them."""

import jax
import jax.numpy as jnp

from pagedweight_jax.models.layers import Activation, matmul, mlp
from pagedweight_jax.models.weights import ExpertWeights, MoEWeights

LEAST_SQUARE = 1e-30
"""Stands for 0 under a division."""


def dense_experts(
    m_TD: jax.Array, ids_TK: jax.Array, weights_TK: jax.Array, experts: ExpertWeights, act: Activation
) -> tuple[jax.Array, jax.Array]:
    """Returns (y_TD, h_square_TK), float32: ``y_t = sum_k weights_tk * down[e] @ h_tk`` and ``|h_tk|^2``.

    ``h_tk = act(gate[e] @ m_t) * (up[e] @ m_t)`` of e = ids_tk; an id of E or more selects nothing. Runs every expert
    on every token, in the order of their ids: the definition, not a fast path.
    """

    def add_expert(e, sums):
        y_TD, h_square_TK = sums
        chosen_TK = ids_TK == e
        weight_T = jnp.sum(jnp.where(chosen_TK, weights_TK, 0), axis=-1, dtype=jnp.float32)
        gate_TF, up_TF = jnp.split(matmul(m_TD, experts.gate_up_ENC[e].T), 2, axis=-1)
        h_TF = (act(gate_TF) * up_TF).astype(m_TD.dtype)
        h_square_T = jnp.sum(jnp.square(h_TF.astype(jnp.float32)), axis=-1)
        y_TD = y_TD + weight_T[:, None] * matmul(h_TF, experts.down_ENC[e].T)
        return y_TD, jnp.where(chosen_TK, h_square_T[:, None], h_square_TK)

    sums = jnp.zeros(m_TD.shape, jnp.float32), jnp.zeros(ids_TK.shape, jnp.float32)
    return jax.lax.fori_loop(0, experts.down_ENC.shape[0], add_expert, sums)


def relative_sizes(
    weights_TK: jax.Array, residual_square_T: jax.Array, h_square_TK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns s_TK of gate_up, ``r / |res|``, and of down, ``r |h| / |res|`` (``planning.signals`` says why).

    Args:
      weights_TK: r; any axes in front of K.
      residual_square_T: |res|^2 of the residual stream behind the layer.
      h_square_TK: |h|^2.
    """
    share_TK = weights_TK / jnp.sqrt(jnp.maximum(residual_square_T, LEAST_SQUARE))[..., None]
    return share_TK, share_TK * jnp.sqrt(h_square_TK)


def shared_expert(m_TD: jax.Array, w: MoEWeights, act: Activation) -> jax.Array:
    """Returns the shared expert's part, ``sigmoid(m . shared_gate) * mlp(m)``, float32[T, D]."""
    gate_T1 = jax.nn.sigmoid(matmul(m_TD, w.shared_gate_D[:, None]))
    return gate_T1 * mlp(m_TD, w.shared, act)
