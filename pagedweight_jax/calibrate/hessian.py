# SPDX-License-Identifier: Apache-2.0
"""The diagonal Hessian of the routed experts: second moments of their inputs over calibration text.

For column c of a linear-block, h_c = E[x_c^2] over the tokens routed to its expert: x is the normed input of the
feed-forward part for gate_up, and act(gate x) * (up x) for down.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.errors import UserError
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import Activation, activation, matmul
from pagedweight_jax.models.transformer import forward
from pagedweight_jax.models.weights import ExpertWeights, MoEWeights, Weights

BLOCK_TOKENS = 64
"""Tokens of one expert that are multiplied at once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class InputMoments:
    """Second moments of the experts' inputs; 0 where an expert saw no token.

    Attributes:
      gate_up_LEC: float64[L, E, D], E[x_c^2] of the inputs of gate and up.
      down_LEC: float64[L, E, F], the same of the inputs of down.
      tokens_LE: int64[L, E], how many tokens they average over.
    """

    gate_up_LEC: np.ndarray
    down_LEC: np.ndarray
    tokens_LE: np.ndarray


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


def _measured_experts(
    m_TD: jax.Array, ids_TK: jax.Array, weights_TK: jax.Array, experts: ExpertWeights, act: Activation
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Returns the routed experts' output, float32[T, D], and sums of x^2 [E, D], of h^2 [E, F] and of tokens [E]."""
    num_experts, D, F = experts.down_ENC.shape
    k = ids_TK.shape[1]

    def run_block(sums, block):
        y_TD, gate_up_ED, down_EF = sums
        e, pairs_B = block
        token_B = pairs_B // k
        x_BD = m_TD.at[token_B].get(mode="fill", fill_value=0)  # none: zeros, which add nothing below
        weight_B = weights_TK.reshape(-1).at[pairs_B].get(mode="fill", fill_value=0)
        gate_BF, up_BF = jnp.split(matmul(x_BD, experts.gate_up_ENC[e].T), 2, axis=-1)
        h_BF = (act(gate_BF) * up_BF).astype(m_TD.dtype)
        y_BD = weight_B[:, None] * matmul(h_BF, experts.down_ENC[e].T)
        y_TD = y_TD.at[token_B].add(y_BD, mode="drop")
        gate_up_ED = gate_up_ED.at[e].add(jnp.sum(jnp.square(x_BD.astype(jnp.float32)), axis=0))
        down_EF = down_EF.at[e].add(jnp.sum(jnp.square(h_BF.astype(jnp.float32)), axis=0))
        return (y_TD, gate_up_ED, down_EF), None

    zeros = (jnp.zeros(m_TD.shape, jnp.float32), jnp.zeros((num_experts, D)), jnp.zeros((num_experts, F)))
    (y_TD, gate_up_ED, down_EF), _ = jax.lax.scan(run_block, zeros, _blocks_by_expert(ids_TK, num_experts))
    return y_TD, (gate_up_ED, down_EF, jnp.bincount(ids_TK.reshape(-1), length=num_experts))


@jax.jit
def _batch_sums(weights: Weights, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns one batch's sums of x^2 [L, E, D], of h^2 [L, E, F] and of tokens [L, E]."""
    config = weights.config
    act = activation(config.hidden_act)
    experts_L = [layer.mlp.experts for layer in weights.layers if isinstance(layer.mlp, MoEWeights)]
    B, S = tokens_BS.shape

    def attend(carry, layer, *qkv):
        def one_sequence(q_SHM, k_SJM, v_SJM):
            return dense_attention(q_SHM, k_SJM, v_SJM, config.head_dim**-0.5, config.windows[layer])

        o_BSHM = jax.vmap(one_sequence)(*(x.reshape(B, S, *x.shape[1:]) for x in qkv))
        return carry, o_BSHM.reshape(B * S, *o_BSHM.shape[2:])

    def experts(carry, sparse_layer, m_TD, ids_TK, weights_TK):
        y_TD, sums = _measured_experts(m_TD, ids_TK, weights_TK, experts_L[sparse_layer], act)
        return (*carry, sums), y_TD

    positions_T = jnp.tile(jnp.arange(S), B)
    sums_L, _ = forward(weights, tokens_BS.reshape(-1), positions_T, (), attend, experts)
    return tuple(jnp.stack(sums) for sums in zip(*sums_L))


def collect_moments(weights: Weights, batches: Iterable[np.ndarray]) -> InputMoments:
    """Returns the second moments of every routed expert's inputs over calibration text, its experts in full precision.

    Sums are float32 within a batch and float64 across batches.

    Args:
      weights: the model with its experts.
      batches: int token ids [B, S], B whole sequences of S tokens each; each new shape compiles once.

    Raises:
      UserError: a token id is outside the model's vocabulary.
    """
    config = weights.config
    L, E, F = config.num_sparse_layers, config.num_experts, config.moe_intermediate_size
    gate_up_LEC, down_LEC = np.zeros((L, E, config.hidden_size)), np.zeros((L, E, F))
    tokens_LE = np.zeros((L, E), np.int64)
    for i, tokens_BS in enumerate(batches):
        low, high, V = int(np.min(tokens_BS)), int(np.max(tokens_BS)), config.vocab_size
        if low < 0 or high >= V:
            raise UserError(f"calibration batch {i}: token ids {low}..{high} leave the vocabulary 0..{V - 1}")
        batch = jax.device_get(_batch_sums(weights, jnp.asarray(tokens_BS)))
        gate_up_LEC += batch[0]
        down_LEC += batch[1]
        tokens_LE += batch[2]
    seen_LE1 = np.maximum(tokens_LE, 1)[..., None]
    return InputMoments(gate_up_LEC=gate_up_LEC / seen_LE1, down_LEC=down_LEC / seen_LE1, tokens_LE=tokens_LE)


def importance(moments: InputMoments, min_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the columns' importance, gate_up float64[L, E, D] and down [L, E, F], and uncalibrated_LE, bool[L, E].

    An expert of fewer than ``min_tokens`` (at least 1) calibration tokens is uncalibrated: it takes the mean over all
    routed tokens of its layer. A layer without any token counts all columns alike.
    """
    tokens_LE1 = moments.tokens_LE[..., None]
    uncalibrated_LE = moments.tokens_LE < max(min_tokens, 1)

    def with_fallback(moment_LEC):
        layer_tokens_L11 = tokens_LE1.sum(1, keepdims=True)
        mean_L1C = (moment_LEC * tokens_LE1).sum(1, keepdims=True) / np.maximum(layer_tokens_L11, 1)
        mean_L1C = np.where(layer_tokens_L11 > 0, mean_L1C, 1.0)
        return np.where(uncalibrated_LE[..., None], mean_L1C, moment_LEC)

    return with_fallback(moments.gate_up_LEC), with_fallback(moments.down_LEC), uncalibrated_LE
