# SPDX-License-Identifier: Apache-2.0
"""The diagonal Hessian of the routed experts: second moments of their inputs over calibration text.

For column c of a linear-block, h_c = E[x_c^2] over the tokens routed to its expert: x is the normed input of the
feed-forward part for gate_up, and act(gate x) * (up x) for down.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import Activation, activation, matmul
from pagedweight_jax.models.transformer import decoder_layer
from pagedweight_jax.models.weights import ExpertWeights, LayerWeights

BLOCK_TOKENS = 64
"""Tokens of one expert that are multiplied at once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class InputMoments:
    """Second moments of the inputs of one layer's experts; 0 where an expert saw no token.

    Attributes:
      gate_up_EC: float64[E, D], E[x_c^2] of the inputs of gate and up.
      down_EC: float64[E, F], the same of the inputs of down.
      tokens_E: int64[E], how many tokens they average over.
    """

    gate_up_EC: np.ndarray
    down_EC: np.ndarray
    tokens_E: np.ndarray


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


@partial(jax.jit, static_argnums=(0, 1))
def _run_batch(config: ModelConfig, layer: int, w: LayerWeights, x_BSD: jax.Array):
    """Returns sums of x^2 [E, D], of h^2 [E, F] and of tokens [E] (None for a dense layer), and the layer's output."""
    B, S, D = x_BSD.shape

    def attend(sums, layer, *qkv):
        def one_sequence(q_SHM, k_SJM, v_SJM):
            return dense_attention(q_SHM, k_SJM, v_SJM, config.head_dim**-0.5, config.windows[layer])

        o_BSHM = jax.vmap(one_sequence)(*(x.reshape(B, S, *x.shape[1:]) for x in qkv))
        return sums, o_BSHM.reshape(B * S, *o_BSHM.shape[2:])

    def experts(_, sparse_layer, m_TD, ids_TK, weights_TK):
        y_TD, sums = _measured_experts(m_TD, ids_TK, weights_TK, w.mlp.experts, activation(config.hidden_act))
        return sums, y_TD

    positions_T = jnp.tile(jnp.arange(S), B)
    sums, x_TD = decoder_layer(config, layer, w, x_BSD.reshape(B * S, D), positions_T, None, attend, experts)
    return sums, x_TD.reshape(B, S, D)


def run_layer(
    config: ModelConfig,
    layer: int,
    w: LayerWeights,
    batches: Iterable[np.ndarray],
    emit: Callable[[np.ndarray], None] = lambda x_BSD: None,
) -> InputMoments | None:
    """Returns the second moments of the routed experts' inputs in one layer; None if it is dense.

    Run layer after layer on the outputs of the layer before, all in full precision, this calibrates a model of which
    one layer is in memory. Sums are float32 within a batch and float64 across batches.

    Args:
      config: the model.
      layer: among all layers.
      w: its weights, with the experts.
      batches: the hidden states that enter it, [B, S, D], B whole sequences of S tokens; each new shape compiles once.
      emit: gets those that leave it, batch by batch.
    """
    kinds = list(zip(config.sparse_layers, config.windows))
    same = kinds.index(kinds[layer])  # layers alike compile once
    w = jax.tree.map(jnp.asarray, w)
    E = config.num_experts
    gate_up_EC, down_EC = np.zeros((E, config.hidden_size)), np.zeros((E, config.moe_intermediate_size))
    tokens_E = np.zeros(E, np.int64)
    for x_BSD in batches:
        sums, y_BSD = jax.device_get(_run_batch(config, same, w, jnp.asarray(x_BSD)))
        emit(y_BSD)
        if sums is not None:
            gate_up_EC += sums[0]
            down_EC += sums[1]
            tokens_E += sums[2]
    if not config.sparse_layers[layer]:
        return None
    seen_E1 = np.maximum(tokens_E, 1)[:, None]
    return InputMoments(gate_up_EC=gate_up_EC / seen_E1, down_EC=down_EC / seen_E1, tokens_E=tokens_E)


def importance(moments: InputMoments, min_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the columns' importance, gate_up float64[E, D] and down [E, F], and uncalibrated_E, bool[E].

    An expert of fewer than ``min_tokens`` (at least 1) calibration tokens is uncalibrated: it takes the mean over all
    routed tokens of its layer. A layer without any token counts all columns alike.
    """
    tokens_E1 = moments.tokens_E[:, None]
    uncalibrated_E = moments.tokens_E < max(min_tokens, 1)

    def with_fallback(moment_EC):
        layer_tokens = tokens_E1.sum()
        mean_C = (moment_EC * tokens_E1).sum(0) / layer_tokens if layer_tokens else 1.0
        return np.where(uncalibrated_E[:, None], mean_C, moment_EC)

    return with_fallback(moments.gate_up_EC), with_fallback(moments.down_EC), uncalibrated_E
