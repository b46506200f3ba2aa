# SPDX-License-Identifier: Apache-2.0
"""The one forward pass. Attention and routed experts are injected, so that paged and dense models share it."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.attention import dense_attention, project_qkv
from pagedweight_jax.models.layers import activation, matmul, mlp, rms_norm
from pagedweight_jax.models.moe import dense_experts, route, shared_expert
from pagedweight_jax.models.weights import LayerWeights, MoEWeights, Weights

Carry = TypeVar("Carry")

Attend = Callable[[Carry, int, jax.Array, jax.Array, jax.Array], tuple[Carry, jax.Array]]
"""(carry, layer, q_THM, k_TJM, v_TJM) -> (carry, o_THM); q and k are rotated already."""

Experts = Callable[[Carry, int, jax.Array, jax.Array, jax.Array], tuple[Carry, jax.Array]]
"""(carry, sparse_layer, m_TD, ids_TK, weights_TK) -> (carry, y_TD); the routed experts' sum alone."""


def decoder_layer(
    config: ModelConfig,
    layer: int,
    w: LayerWeights,
    x_TD: jax.Array,
    positions_T: jax.Array,
    carry: Carry,
    attend: Attend,
    experts: Experts,
) -> tuple[Carry, jax.Array]:
    """Returns the carry and the hidden states after one layer, [T, D] in x's dtype. Arguments as in ``forward``."""
    act = activation(config.hidden_act)
    with jax.named_scope("attention"):
        a_TD = rms_norm(x_TD, w.input_norm_D, config.rms_norm_eps)
        carry, o_THM = attend(carry, layer, *project_qkv(a_TD, w.attention, positions_T, config))
        o_TN = o_THM.reshape(o_THM.shape[0], -1).astype(x_TD.dtype)
        x_TD = x_TD + matmul(o_TN, w.attention.o_ND).astype(x_TD.dtype)
    m_TD = rms_norm(x_TD, w.post_attention_norm_D, config.rms_norm_eps)
    if isinstance(w.mlp, MoEWeights):
        with jax.named_scope("router"):
            weights_TK, ids_TK = route(m_TD, w.mlp.router_DE, config.num_experts_per_tok, config.norm_topk_prob)
        with jax.named_scope("experts"):
            carry, y_TD = experts(carry, sum(config.sparse_layers[:layer]), m_TD, ids_TK, weights_TK)
        if w.mlp.shared is not None:
            with jax.named_scope("shared_expert"):
                y_TD = y_TD + shared_expert(m_TD, w.mlp, act)
    else:
        with jax.named_scope("mlp"):
            y_TD = mlp(m_TD, w.mlp, act)
    return carry, x_TD + y_TD.astype(x_TD.dtype)


def forward(
    weights: Weights, tokens_T: jax.Array, positions_T: jax.Array, carry: Carry, attend: Attend, experts: Experts
) -> tuple[Carry, jax.Array]:
    """Returns the carry and the hidden states after the final norm, [T, D] in the embedding's dtype.

    The T tokens may be a stretch of one sequence or one token of each of T sequences: only ``attend`` knows. Everything
    else is row-wise. Layers are unrolled and ``carry`` is threaded through them linearly, so it can be donated.

    Args:
      weights: the model; its routed experts may be None.
      tokens_T: int, token ids.
      positions_T: int, each token's position in its own sequence.
      carry: what the two functions read and write (an arena, counters, or None).
      attend: attention of one layer, numbered among all layers.
      experts: routed experts of one layer, numbered among the sparse layers.
    """
    config = weights.config
    x_TD = weights.embed_VD[tokens_T]
    for layer, w in enumerate(weights.layers):
        carry, x_TD = decoder_layer(config, layer, w, x_TD, positions_T, carry, attend, experts)
    return carry, rms_norm(x_TD, weights.norm_D, config.rms_norm_eps)


def logits(weights: Weights, hidden_TD: jax.Array) -> jax.Array:
    """Returns the next token's logits, float32[T, V], of hidden states that ``forward`` returned."""
    head_DV = weights.embed_VD.T if weights.lm_head_DV is None else weights.lm_head_DV
    with jax.named_scope("lm_head"):
        return matmul(hidden_TD, head_DV)


def dense_hidden(weights: Weights, tokens_T: jax.Array) -> jax.Array:
    """Returns one whole sequence's hidden states after the final norm, [T, D], with dense experts and no cache."""
    config = weights.config
    act = activation(config.hidden_act)
    expert_weights = [layer.mlp.experts for layer in weights.layers if isinstance(layer.mlp, MoEWeights)]

    def attend(carry, layer, q_THM, k_TJM, v_TJM):
        return carry, dense_attention(q_THM, k_TJM, v_TJM, config.head_dim**-0.5, config.windows[layer])

    def experts(carry, sparse_layer, m_TD, ids_TK, weights_TK):
        return carry, dense_experts(m_TD, ids_TK, weights_TK, expert_weights[sparse_layer], act)[0]

    positions_T = jnp.arange(tokens_T.shape[0])
    _, hidden_TD = forward(weights, tokens_T, positions_T, None, attend, experts)
    return hidden_TD


def dense_forward(weights: Weights, tokens_T: jax.Array) -> jax.Array:
    """Returns the logits of one whole sequence, float32[T, V], with dense experts and no cache; vmap for a batch."""
    return logits(weights, dense_hidden(weights, tokens_T))
