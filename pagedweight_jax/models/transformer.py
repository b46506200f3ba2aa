# SPDX-License-Identifier: Apache-2.0
"""The one forward pass. Attention and routed experts are injected, so that paged and dense models share it."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.attention import dense_attention, project_qkv
from pagedweight_jax.models.layers import activation, rms_norm
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.weights import LayerWeights, MoEWeights, Weights
from pallas_kernels.dense import api as dense
from pallas_kernels.routing.api import norm_and_route, norm_route_and_gate

Carry = TypeVar("Carry")

Attend = Callable[[Carry, int, jax.Array, jax.Array, jax.Array], tuple[Carry, jax.Array]]
"""(carry, layer, q_THM, k_TJM, v_TJM) -> (carry, o_THM); q and k are rotated already where positions were given."""

Experts = Callable[[Carry, int, jax.Array, jax.Array, jax.Array], tuple[Carry, jax.Array]]
"""(carry, sparse_layer, m_TD, ids_TK, weights_TK) -> (carry, y_TD); the routed experts' sum alone, float32."""


def decoder_layer(
    config: ModelConfig,
    layer: int,
    w: LayerWeights,
    x_TD: jax.Array,
    positions_T: jax.Array | None,
    carry: Carry,
    attend: Attend,
    experts: Experts,
    implementation: str = "xla",
    first_T: jax.Array | None = None,
) -> tuple[Carry, jax.Array]:
    """Returns the carry and the hidden states after one layer, [T, D] in x's dtype.

    Args: as of ``forward``, and
      first_T: int32, added to the ids of each token's experts.
    """
    which = {"implementation": implementation}
    with jax.named_scope("attention"):
        qkv = project_qkv(x_TD, w.attention, positions_T, config, norm_D=w.input_norm_D, **which)
        carry, o_THM = attend(carry, layer, *qkv)
        o_TN = o_THM.reshape(o_THM.shape[0], -1).astype(x_TD.dtype)
        x_TD = dense.project_add(o_TN, w.attention.o_ND, x_TD, **which)
    if not isinstance(w.mlp, MoEWeights):
        with jax.named_scope("mlp"):
            norm = {"norm_D": w.post_attention_norm_D, "eps": config.rms_norm_eps}
            h_TF = dense.gated(x_TD, w.mlp.gate_DF, w.mlp.up_DF, activation=config.hidden_act, **norm, **which)
            return carry, dense.project_add(h_TF, w.mlp.down_FD, x_TD, **which)
    sparse_layer = sum(config.sparse_layers[:layer])
    routing = w.post_attention_norm_D, config.rms_norm_eps, w.mlp.router_DE
    top = config.num_experts_per_tok, config.norm_topk_prob
    if w.mlp.shared is None:
        with jax.named_scope("router"):
            m_TD, weights_TK, ids_TK = norm_and_route(x_TD, *routing, *top, first_T=first_T, **which)
        with jax.named_scope("experts"):
            carry, y_TD = experts(carry, sparse_layer, m_TD, ids_TK, weights_TK)
        return carry, x_TD + y_TD.astype(x_TD.dtype)
    with jax.named_scope("router"):
        shared = w.mlp.shared.gate_DF, w.mlp.shared.up_DF, w.mlp.shared_gate_D
        m_TD, weights_TK, ids_TK, h_TF, factor_T1 = norm_route_and_gate(
            x_TD, *routing, *top, shared, activation=config.hidden_act, first_T=first_T, **which
        )
    with jax.named_scope("experts"):
        carry, y_TD = experts(carry, sparse_layer, m_TD, ids_TK, weights_TK)
    with jax.named_scope("shared_expert"):
        down_FD = w.mlp.shared.down_FD
        return carry, dense.project_add(h_TF, down_FD, x_TD, factor_T1=factor_T1, addend_TD=y_TD, **which)


def forward(
    weights: Weights,
    tokens_T: jax.Array,
    positions_T: jax.Array | None,
    carry: Carry,
    attend: Attend,
    experts: Experts,
    implementation: str = "xla",
) -> tuple[Carry, jax.Array]:
    """Returns the carry and the hidden states after the final norm, [T, D] in the embedding's dtype.

    The T tokens may be a stretch of one sequence or one token of each of T sequences: only ``attend`` knows. Everything
    else is row-wise. Layers are unrolled and ``carry`` is threaded through them linearly, so it can be donated.

    Args:
      weights: the model; its routed experts may be None.
      tokens_T: int, token ids.
      positions_T: int, each token's position in its own sequence; None where ``attend`` rotates q and k itself.
      carry: what the two functions read and write (an arena, counters, or None).
      attend: attention of one layer, numbered among all layers.
      experts: routed experts of one layer, numbered among the sparse layers.
      implementation: of everything else, ``xla`` or ``triton``.
    """
    config = weights.config
    x_TD = weights.embed_VD[tokens_T]
    for layer, w in enumerate(weights.layers):
        carry, x_TD = decoder_layer(config, layer, w, x_TD, positions_T, carry, attend, experts, implementation)
    return carry, rms_norm(x_TD, weights.norm_D, config.rms_norm_eps)


def logits(weights: Weights, hidden_TD: jax.Array, implementation: str = "xla") -> jax.Array:
    """Returns the next token's logits, float32[T, V], of hidden states that ``forward`` returned."""
    tied = weights.lm_head_DV is None
    head = weights.embed_VD if tied else weights.lm_head_DV
    with jax.named_scope("lm_head"):
        return dense.logits(hidden_TD, head, transposed=tied, implementation=implementation)


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
