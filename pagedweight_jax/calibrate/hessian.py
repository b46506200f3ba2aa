# SPDX-License-Identifier: Apache-2.0
"""The diagonal Hessian of the routed experts: the importance h_c of every column c of a linear-block.

The damage of an error in a block is taken to be its expected square in the residual stream, relative to the residual
stream: see ``routed``. So h is the second moment E[x_c^2] of the block's inputs, each token weighted by how much of an
error in the block's output it lets through. It is a mean over all tokens, those that are routed elsewhere being zeros:
a block that is used twice as often does twice the damage. Damages of different layers and kinds are in one unit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.routed import error_sums, routed_experts
from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.transformer import decoder_layer
from pagedweight_jax.models.weights import LayerWeights


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class InputMoments:
    """Weighted second moments of the inputs of one layer's experts; 0 where an expert saw no token.

    Attributes:
      gate_up_EC: float64[E, D], h_c of gate and up: a mean over all tokens of the text.
      down_EC: float64[E, F], the same of the inputs of down.
      tokens_E: int64[E], how many tokens were routed to the expert.
    """

    gate_up_EC: np.ndarray
    down_EC: np.ndarray
    tokens_E: np.ndarray


@partial(jax.jit, static_argnums=(0, 1))
def _run_batch(config: ModelConfig, layer: int, w: LayerWeights, x_BSD: jax.Array):
    """Returns the batch's ``error_sums`` (None for a dense layer), and the layer's output."""
    B, S, D = x_BSD.shape
    act = activation(config.hidden_act)

    def attend(routed, layer, *qkv):
        def one_sequence(q_SHM, k_SJM, v_SJM):
            return dense_attention(q_SHM, k_SJM, v_SJM, config.head_dim**-0.5, config.windows[layer])

        o_BSHM = jax.vmap(one_sequence)(*(x.reshape(B, S, *x.shape[1:]) for x in qkv))
        return routed, o_BSHM.reshape(B * S, *o_BSHM.shape[2:])

    def experts(_, sparse_layer, *routed):
        return routed, routed_experts(*routed, w.mlp.experts, act)

    positions_T = jnp.tile(jnp.arange(S), B)
    routed, x_TD = decoder_layer(config, layer, w, x_BSD.reshape(B * S, D), positions_T, None, attend, experts)
    sums = None if routed is None else error_sums(x_TD, *routed, w.mlp.experts, act)
    return sums, x_TD.reshape(B, S, D)


def run_layer(
    config: ModelConfig,
    layer: int,
    w: LayerWeights,
    batches: Iterable[np.ndarray],
    emit: Callable[[np.ndarray], None] = lambda x_BSD: None,
) -> InputMoments | None:
    """Returns the weighted second moments of the routed experts' inputs in one layer; None if it is dense.

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
    tokens_E, num_tokens = np.zeros(E, np.int64), 0
    for x_BSD in batches:
        sums, y_BSD = jax.device_get(_run_batch(config, same, w, jnp.asarray(x_BSD)))
        emit(y_BSD)
        if sums is not None:
            gate_up_EC += sums[0]
            down_EC += sums[1]
            tokens_E += sums[2]
        num_tokens += x_BSD.shape[0] * x_BSD.shape[1]
    if not config.sparse_layers[layer]:
        return None
    seen = max(num_tokens, 1)
    return InputMoments(gate_up_EC=gate_up_EC / seen, down_EC=down_EC / seen, tokens_E=tokens_E)


def importance(moments: InputMoments, min_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the columns' importance, gate_up float64[E, D] and down [E, F], and uncalibrated_E, bool[E].

    An expert of fewer than ``min_tokens`` (at least 1) calibration tokens is uncalibrated: it counts as one that saw
    ``min_tokens`` average tokens of its layer. A layer without any token counts all columns alike.
    """
    min_tokens = max(min_tokens, 1)
    uncalibrated_E = moments.tokens_E < min_tokens

    def with_fallback(moment_EC):
        layer_tokens = moments.tokens_E.sum()
        share_C = moment_EC.sum(0) * min_tokens / layer_tokens if layer_tokens else 1.0
        return np.where(uncalibrated_E[:, None], share_C, moment_EC)

    return with_fallback(moments.gate_up_EC), with_fallback(moments.down_EC), uncalibrated_E
