# SPDX-License-Identifier: Apache-2.0
"""The diagonal Hessian of the routed experts: the importance h_c of every column c of a linear-block.

The damage of an error in a block is taken to be its expected square in the residual stream, relative to the residual
stream: see ``routed``. So h is the second moment E[x_c^2] of the block's inputs, each token weighted by how much of an
error in the block's output it lets through. It is a mean over all tokens, those that are routed elsewhere being zeros:
a block that is used twice as often does twice the damage. Damages of different layers and kinds are in one unit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.routed import error_sums, routed_experts
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.transformer import decoder_layer
from pagedweight_jax.models.weights import MoEWeights, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class InputMoments:
    """Weighted second moments of the experts' inputs; 0 where an expert saw no token.

    Attributes:
      gate_up_LEC: float64[L, E, D], h_c of gate and up: a mean over all tokens of the text.
      down_LEC: float64[L, E, F], the same of down.
      tokens_LE: int64[L, E], how many tokens were routed to the expert.
    """

    gate_up_LEC: np.ndarray
    down_LEC: np.ndarray
    tokens_LE: np.ndarray


@jax.jit
def _batch_sums(weights: Weights, tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns one batch's ``error_sums``, stacked over the sparse layers."""
    config = weights.config
    act = activation(config.hidden_act)
    B, S = tokens_BS.shape

    def attend(routed, layer, *qkv):
        def one_sequence(q_SHM, k_SJM, v_SJM):
            return dense_attention(q_SHM, k_SJM, v_SJM, config.head_dim**-0.5, config.windows[layer])

        o_BSHM = jax.vmap(one_sequence)(*(x.reshape(B, S, *x.shape[1:]) for x in qkv))
        return routed, o_BSHM.reshape(B * S, *o_BSHM.shape[2:])

    positions_T = jnp.tile(jnp.arange(S), B)
    x_TD = weights.embed_VD[tokens_BS.reshape(-1)]
    sums_L = []
    for layer, w in enumerate(weights.layers):

        def experts(_, sparse_layer, *routed, w=w):
            return routed, routed_experts(*routed, w.mlp.experts, act)

        routed, x_TD = decoder_layer(config, layer, w, x_TD, positions_T, None, attend, experts)
        if isinstance(w.mlp, MoEWeights):
            sums_L.append(error_sums(x_TD, *routed, w.mlp.experts, act))
    return tuple(jnp.stack(sums) for sums in zip(*sums_L))


def collect_moments(weights: Weights, batches: Iterable[np.ndarray]) -> InputMoments:
    """Returns every routed expert's weighted second moments over calibration text, all experts in full precision.

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
    tokens_LE, num_tokens = np.zeros((L, E), np.int64), 0
    for i, tokens_BS in enumerate(batches):
        low, high, V = int(np.min(tokens_BS)), int(np.max(tokens_BS)), config.vocab_size
        if low < 0 or high >= V:
            raise UserError(f"calibration batch {i}: token ids {low}..{high} leave the vocabulary 0..{V - 1}")
        batch = jax.device_get(_batch_sums(weights, jnp.asarray(tokens_BS)))
        gate_up_LEC += batch[0]
        down_LEC += batch[1]
        tokens_LE += batch[2]
        num_tokens += tokens_BS.size
    seen = max(num_tokens, 1)
    return InputMoments(gate_up_LEC=gate_up_LEC / seen, down_LEC=down_LEC / seen, tokens_LE=tokens_LE)


def importance(moments: InputMoments, min_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the columns' importance, gate_up float64[L, E, D] and down [L, E, F], and uncalibrated_LE, bool[L, E].

    An expert of fewer than ``min_tokens`` (at least 1) calibration tokens is uncalibrated: it counts as one that saw
    ``min_tokens`` average tokens of its layer. A layer without any token counts all columns alike.
    """
    min_tokens = max(min_tokens, 1)
    uncalibrated_LE = moments.tokens_LE < min_tokens

    def with_fallback(moment_LEC):
        layer_tokens_L11 = moments.tokens_LE.sum(1)[:, None, None]
        share_L1C = moment_LEC.sum(1, keepdims=True) * min_tokens / np.maximum(layer_tokens_L11, 1)
        share_L1C = np.where(layer_tokens_L11 > 0, share_L1C, 1.0)
        return np.where(uncalibrated_LE[..., None], share_L1C, moment_LEC)

    return with_fallback(moments.gate_up_LEC), with_fallback(moments.down_LEC), uncalibrated_LE
