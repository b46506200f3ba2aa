# SPDX-License-Identifier: Apache-2.0
"""The routed experts of one layer over many tokens: what they return, and what an error in their weights does to it.

A token t reaches its expert with the routing weight r, and its residual stream behind the layer is res. An error dW of
a linear-block with the input x changes what joins the residual by

    down        r dW x                              x = h = act(gate m) * (up m)
    gate_up     r down (dh/dz * dW x)               x = m, z = (gate m, up m)

With errors of random signs, the expected square of that over |res|^2 is  sum_nc dW_nc^2 v_n x_c^2 r^2 / |res|^2  with
v_n = 1 for down and v_n = |down_n|^2 (dh/dz_n)^2 for gate_up, down_n being the column that z_n goes through. Averaging
v_n over the rows to v leaves one number per column, the importance  h_c = mean over tokens of v x_c^2 r^2 / |res|^2.
"""

import jax
import jax.numpy as jnp

from pagedweight_jax.models.layers import Activation, matmul
from pagedweight_jax.models.moe import LEAST_SQUARE
from pagedweight_jax.models.weights import ExpertWeights

BLOCK_TOKENS = 64
"""Tokens of one expert that are multiplied at once."""


def _blocks_by_expert(ids_TK: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns blocks of routed pairs (t, k) that share an expert: expert_G int32[G], pairs_GB int32[G, B].

    A pair is the number t K + k; T K stands for none. G = T K // B + E blocks always suffice.
    """
    ids_A = ids_TK.reshape(-1)
    num_pairs = ids_A.size
    num_blocks = num_pairs // BLOCK_TOKENS + num_experts
    pairs_A = jnp.argsort(ids_A)
    tokens_E = jnp.bincount(ids_A, length=num_experts)
    last_block_E = jnp.cumsum(-(-tokens_E // BLOCK_TOKENS))
    first_slot_E = (last_block_E + tokens_E // -BLOCK_TOKENS) * BLOCK_TOKENS
    rank_A = jnp.arange(num_pairs) - (jnp.cumsum(tokens_E) - tokens_E)[ids_A[pairs_A]]
    slots_A = first_slot_E[ids_A[pairs_A]] + rank_A
    pairs_GB = jnp.full(num_blocks * BLOCK_TOKENS, num_pairs, jnp.int32).at[slots_A].set(pairs_A.astype(jnp.int32))
    expert_G = jnp.searchsorted(last_block_E, jnp.arange(num_blocks), side="right")
    return jnp.minimum(expert_G, num_experts - 1), pairs_GB.reshape(num_blocks, BLOCK_TOKENS)


def _take(values_AX: jax.Array, rows_B: jax.Array) -> jax.Array:
    return values_AX.at[rows_B].get(mode="fill", fill_value=0)  # no pair: zeros, which add nothing to any sum


def _gate_and_up(x_BD: jax.Array, gate_up_NC: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate_BF, up_BF = jnp.split(matmul(x_BD, gate_up_NC.T), 2, axis=-1)
    return gate_BF, up_BF


def routed_experts(
    m_TD: jax.Array, ids_TK: jax.Array, weights_TK: jax.Array, experts: ExpertWeights, act: Activation
) -> jax.Array:
    """Returns the routed experts' sum, float32[T, D], as ``dense_experts`` defines it, in the time of K experts."""
    K = ids_TK.shape[1]

    def run_block(y_TD, block):
        e, pairs_B = block
        x_BD = _take(m_TD, pairs_B // K)
        gate_BF, up_BF = _gate_and_up(x_BD, experts.gate_up_ENC[e])
        h_BF = (act(gate_BF) * up_BF).astype(m_TD.dtype)
        y_BD = _take(weights_TK.reshape(-1), pairs_B)[:, None] * matmul(h_BF, experts.down_ENC[e].T)
        return y_TD.at[pairs_B // K].add(y_BD, mode="drop"), None

    zeros_TD = jnp.zeros(m_TD.shape, jnp.float32)
    return jax.lax.scan(run_block, zeros_TD, _blocks_by_expert(ids_TK, len(experts.down_ENC)))[0]


def hidden_squares(m_TD: jax.Array, ids_TK: jax.Array, experts: ExpertWeights, act: Activation) -> jax.Array:
    """Returns |h|^2 of every token in each of its experts, float32[T, K], h = act(gate m) * (up m)."""
    K = ids_TK.shape[1]

    def run_block(square_A, block):
        e, pairs_B = block
        gate_BF, up_BF = _gate_and_up(_take(m_TD, pairs_B // K), experts.gate_up_ENC[e])
        h_square_B = jnp.sum(jnp.square(act(gate_BF) * up_BF), axis=-1)
        return square_A.at[pairs_B].set(h_square_B, mode="drop"), None

    blocks = _blocks_by_expert(ids_TK, len(experts.down_ENC))
    return jax.lax.scan(run_block, jnp.zeros(ids_TK.size), blocks)[0].reshape(ids_TK.shape)


def routed_backward(
    y_gradient_TD: jax.Array,
    m_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts: ExpertWeights,
    act: Activation,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the gradients of m, float32[T, D], and of the routing weights, float32[T, K], and squares' sums.

    Those are the sums over tokens of (d loss / d z_n)^2, float32, of gate_up's outputs z [E, 2F] and of down's [E, D].

    Args:
      y_gradient_TD: d loss / d y of what ``routed_experts`` returns.
      m_TD, ids_TK, weights_TK, experts, act: what it was given.
    """
    num_experts, D, F = experts.down_ENC.shape
    K = ids_TK.shape[1]

    def run_block(sums, block):
        m_gradient_TD, r_gradient_A, gate_up_EN, down_EN = sums
        e, pairs_B = block
        gate_BF, up_BF = _gate_and_up(_take(m_TD, pairs_B // K), experts.gate_up_ENC[e])
        a_BF, slope_BF = jax.jvp(act, (gate_BF,), (jnp.ones_like(gate_BF),))
        r_B1, y_gradient_BD = _take(weights_TK.reshape(-1), pairs_B)[:, None], _take(y_gradient_TD, pairs_B // K)
        out_gradient_BF = matmul(y_gradient_BD, experts.down_ENC[e])  # of h, but for r
        h_gradient_BF = r_B1 * out_gradient_BF
        z_gradient_BN = jnp.concatenate([h_gradient_BF * up_BF * slope_BF, h_gradient_BF * a_BF], axis=-1)
        m_gradient_BD = matmul(z_gradient_BN, experts.gate_up_ENC[e])
        return (
            m_gradient_TD.at[pairs_B // K].add(m_gradient_BD, mode="drop"),
            r_gradient_A.at[pairs_B].set(jnp.sum(a_BF * up_BF * out_gradient_BF, axis=-1), mode="drop"),
            gate_up_EN.at[e].add(jnp.sum(jnp.square(z_gradient_BN), axis=0)),
            down_EN.at[e].add(jnp.sum(jnp.square(r_B1 * y_gradient_BD), axis=0)),
        ), None

    zeros = (
        jnp.zeros(m_TD.shape),
        jnp.zeros(ids_TK.size),
        jnp.zeros((num_experts, 2 * F)),
        jnp.zeros((num_experts, D)),
    )
    (m_gradient_TD, r_gradient_A, *squares), _ = jax.lax.scan(
        run_block, zeros, _blocks_by_expert(ids_TK, num_experts)
    )
    return m_gradient_TD, r_gradient_A.reshape(ids_TK.shape), tuple(squares)


def error_sums(
    x_TD: jax.Array,
    m_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts: ExpertWeights,
    act: Activation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the sums over tokens of v x_c^2 r^2 / |res|^2, of gate_up [E, D] and down [E, F], and of tokens [E].

    Args:
      x_TD: the residual stream behind the layer.
      m_TD: the experts' inputs.
      ids_TK, weights_TK: the tokens' experts, and r.
      experts: their weights.
      act: the activation.
    """
    return sums_and_squares(x_TD, m_TD, ids_TK, weights_TK, experts, act)[0]


def sums_and_squares(
    x_TD: jax.Array,
    m_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    experts: ExpertWeights,
    act: Activation,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], list[jax.Array]]:
    """Returns ``error_sums``, and v |x|^2 of every routed pair, of gate_up and of down, float32[T, K].

    Where an activation is not finite, that is not either. Arguments as of ``error_sums``.
    """
    num_experts, D, F = experts.down_ENC.shape
    K = ids_TK.shape[1]
    residual_T1 = jnp.sum(jnp.square(x_TD.astype(jnp.float32)), axis=-1, keepdims=True)
    share_TK = jnp.square(weights_TK) / jnp.maximum(residual_T1, LEAST_SQUARE)
    column_EF = jnp.sum(jnp.square(experts.down_ENC.astype(jnp.float32)), axis=1)

    def run_block(sums, block):
        gate_up_ED, down_EF, gate_up_A, down_A = sums
        e, pairs_B = block
        x_BD = _take(m_TD, pairs_B // K)
        gate_BF, up_BF = _gate_and_up(x_BD, experts.gate_up_ENC[e])
        a_BF, slope_BF = jax.jvp(act, (gate_BF,), (jnp.ones_like(gate_BF),))
        v_B = (jnp.square(slope_BF * up_BF) + jnp.square(a_BF)) @ column_EF[e] / (2 * F)
        share_B = _take(share_TK.reshape(-1), pairs_B)
        square_BD, h_square_BF = jnp.square(x_BD.astype(jnp.float32)), jnp.square(a_BF * up_BF)
        return (
            gate_up_ED.at[e].add((share_B * v_B) @ square_BD),
            down_EF.at[e].add(share_B @ h_square_BF),
            gate_up_A.at[pairs_B].set(v_B * square_BD.sum(-1), mode="drop"),
            down_A.at[pairs_B].set(h_square_BF.sum(-1), mode="drop"),
        ), None

    zeros = (jnp.zeros((num_experts, D)), jnp.zeros((num_experts, F)), jnp.zeros(ids_TK.size), jnp.zeros(ids_TK.size))
    (gate_up_ED, down_EF, *squares_UA), _ = jax.lax.scan(run_block, zeros, _blocks_by_expert(ids_TK, num_experts))
    sums = gate_up_ED, down_EF, jnp.bincount(ids_TK.reshape(-1), length=num_experts)
    return sums, [square_A.reshape(ids_TK.shape) for square_A in squares_UA]
