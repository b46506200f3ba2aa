# SPDX-License-Identifier: Apache-2.0
"""The one forward pass. Attention and routed experts are injected, so that paged and dense models share it."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.attention import dense_attention, project_qkv
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.weights import LayerWeights, MoEWeights, Weights
from pallas_kernels.dense import api as dense
from pallas_kernels.dense.reference import add_up, rms_norm
from pallas_kernels.routing.api import route
from pallas_kernels.tokens import api as tokens

Carry = TypeVar("Carry")

Attend = Callable[[Carry, int, jax.Array, jax.Array, jax.Array], tuple[Carry, jax.Array]]
"""(carry, layer, q_THM, k_TJM, v_TJM) -> (carry, o_THM); q and k are rotated already where positions were given."""

Experts = Callable[[Carry, int, jax.Array, jax.Array, jax.Array], tuple[Carry, jax.Array]]
"""(carry, sparse_layer, m_TD, ids_TK, weights_TK) -> (carry, y_TD), float32, the experts' outputs summed by weights."""

Routed = Callable[[Carry, int, jax.Array, jax.Array, jax.Array], tuple[Carry, tuple[jax.Array, jax.Array]]]
"""The same, the sum left to whoever adds it to something: -> (carry, (y_TKD, weights_TK))."""


def one_addend(y_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a sum over experts as ``Routed`` does: as one output of weight 1."""
    return y_TD[:, None], jnp.ones((len(y_TD), 1), y_TD.dtype)


def layer_addends(
    config: ModelConfig,
    layer: int,
    w: LayerWeights,
    x_TD: jax.Array,
    n_TD: jax.Array,
    positions_T: jax.Array | None,
    carry: Carry,
    attend: Attend,
    routed: Routed,
    implementation: str = "xla",
    place: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[Carry, jax.Array, dict]:
    """Returns the carry, the hidden states within one layer, behind attention, and what is still to be added to them.

    The latter are arguments of ``pallas_kernels.dense.api.add_norm``, which norms the sum for the next layer. The
    routed experts and the shared one depend on nothing of each other: their kernels may run side by side.

    Args: as of ``forward``, and
      x_TD, n_TD: hidden states, and the same after the layer's input norm.
      place: (first, positions_T) of ``pallas_kernels.routing.api.route``; None where ids are the layer's own.
    """
    which = {"implementation": implementation}
    with jax.named_scope("attention"):
        carry, o_THM = attend(carry, layer, *project_qkv(n_TD, w.attention, positions_T, config, **which))
        o_TN = o_THM.reshape(o_THM.shape[0], -1).astype(x_TD.dtype)
        parts_STD = dense.project_parts(o_TN, w.attention.o_ND, **which)
        x_TD, m_TD = dense.add_norm(x_TD, w.post_attention_norm_D, config.rms_norm_eps, parts_STD=parts_STD, **which)
    addends, mlp, scope = {}, w.mlp, "mlp"
    if isinstance(w.mlp, MoEWeights):
        with jax.named_scope("router"):
            first, place_T = place or (None, None)
            weights_TK, ids_TK, addends["factor_T1"] = route(
                m_TD, w.mlp.router_DE, config.num_experts_per_tok, config.norm_topk_prob,
                shared_gate_D=w.mlp.shared_gate_D, first=first, positions_T=place_T, **which,
            )  # fmt: skip
        with jax.named_scope("experts"):
            sparse_layer = sum(config.sparse_layers[:layer])
            carry, addends["routed"] = routed(carry, sparse_layer, m_TD, ids_TK, weights_TK)
        mlp, scope = w.mlp.shared, "shared_expert"
    if mlp is not None:
        with jax.named_scope(scope):
            h_TF = dense.gated(m_TD, mlp.gate_DF, mlp.up_DF, activation=config.hidden_act, **which)
            addends["parts_STD"] = dense.project_parts(h_TF, mlp.down_FD, **which)
    return carry, x_TD, addends


def decoder_layer(
    config: ModelConfig,
    layer: int,
    w: LayerWeights,
    x_TD: jax.Array,
    positions_T: jax.Array | None,
    carry: Carry,
    attend: Attend,
    experts: Experts,
) -> tuple[Carry, jax.Array]:
    """Returns the carry and the hidden states after one layer, [T, D] in x's dtype.

    Args: as of ``forward``, and
      experts: routed experts, which sum their outputs.
    """
    n_TD = rms_norm(x_TD, w.input_norm_D, config.rms_norm_eps)

    def routed(*args):
        carry, y_TD = experts(*args)
        return carry, one_addend(y_TD)

    carry, x_TD, addends = layer_addends(config, layer, w, x_TD, n_TD, positions_T, carry, attend, routed)
    return carry, add_up(x_TD, **addends)


def following_norms(weights: Weights) -> list[jax.Array]:
    """Returns the weights of the norm that follows each layer: the next one's, in the end the final one."""
    return [*(w.input_norm_D for w in weights.layers[1:]), weights.norm_D]


def forward(
    weights: Weights,
    tokens_T: jax.Array,
    positions_T: jax.Array | None,
    carry: Carry,
    attend: Attend,
    routed: Routed,
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
      routed: routed experts of one layer, numbered among the sparse layers.
      implementation: of everything else, ``xla`` or ``triton``.
    """
    config = weights.config
    x_TD = weights.embed_VD[tokens_T]
    x_TD, n_TD = dense.add_norm(
        x_TD, weights.layers[0].input_norm_D, config.rms_norm_eps, implementation=implementation
    )
    for layer, (w, next_norm_D) in enumerate(zip(weights.layers, following_norms(weights), strict=True)):
        carry, x_TD, addends = layer_addends(
            config, layer, w, x_TD, n_TD, positions_T, carry, attend, routed, implementation
        )
        with jax.named_scope("next_norm"):
            x_TD, n_TD = dense.add_norm(
                x_TD, next_norm_D, config.rms_norm_eps, **addends, implementation=implementation
            )
    return carry, n_TD


def logits(weights: Weights, hidden_TD: jax.Array, implementation: str = "xla") -> jax.Array:
    """Returns the next token's logits, float32[T, V], of hidden states that ``forward`` returned."""
    with jax.named_scope("lm_head"):
        return dense.logits(hidden_TD, **_head(weights), implementation=implementation)


def _head(weights: Weights) -> dict:
    """Returns the head and how it lies: the embedding, where there is no other."""
    tied = weights.lm_head_DV is None
    return {"head": weights.embed_VD if tied else weights.lm_head_DV, "transposed": tied}


def best_of_blocks(
    weights: Weights,
    hidden_TD: jax.Array,
    temperature_T: jax.Array,
    seed_T: jax.Array,
    position_T: jax.Array,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns what the next tokens are drawn from: see ``pallas_kernels.tokens.api.best_of_blocks``.

    Args: hidden states that ``forward`` returned; temperatures, seeds and positions as there.
    """
    of_rows = {"temperature_T": temperature_T, "seed_T": seed_T, "position_T": position_T}
    with jax.named_scope("lm_head"):
        return tokens.best_of_blocks(hidden_TD, **_head(weights), **of_rows, implementation=implementation)


def dense_hidden(weights: Weights, tokens_T: jax.Array) -> jax.Array:
    """Returns one whole sequence's hidden states after the final norm, [T, D], with dense experts and no cache."""
    config = weights.config
    act = activation(config.hidden_act)
    expert_weights = [layer.mlp.experts for layer in weights.layers if isinstance(layer.mlp, MoEWeights)]

    def attend(carry, layer, q_THM, k_TJM, v_TJM):
        return carry, dense_attention(q_THM, k_TJM, v_TJM, config.head_dim**-0.5, config.windows[layer])

    def routed(carry, sparse_layer, m_TD, ids_TK, weights_TK):
        return carry, one_addend(dense_experts(m_TD, ids_TK, weights_TK, expert_weights[sparse_layer], act)[0])

    positions_T = jnp.arange(tokens_T.shape[0])
    _, hidden_TD = forward(weights, tokens_T, positions_T, None, attend, routed)
    return hidden_TD


def dense_forward(weights: Weights, tokens_T: jax.Array) -> jax.Array:
    """Returns the logits of one whole sequence, float32[T, V], with dense experts and no cache; vmap for a batch."""
    return logits(weights, dense_hidden(weights, tokens_T))
