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

from pagedweight_jax.calibrate.finite import check_activations
from pagedweight_jax.calibrate.routed import routed_experts, sums_and_squares
from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.transformer import Experts, decoder_layer
from pagedweight_jax.models.weights import LayerWeights, MoEWeights


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


NO_HOISTING = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
"""XLA on a CPU multiplies 16-bit weights as float32, and would copy all experts at once, outside the loop over them."""


def through_layer(config: ModelConfig, layer: int, w: LayerWeights, x_BSD: jax.Array, experts: Experts):
    """Returns what ``experts`` carries (see ``transformer.Experts``), and what leaves the layer, [B, S, D].

    Experts are handed, and a dense layer carries, attended_BS: whether a token's query, key and value are finite.
    """
    B, S, D = x_BSD.shape

    def attend(carry, layer, *qkv):
        def one_sequence(q_SHM, k_SJM, v_SJM):
            return dense_attention(q_SHM, k_SJM, v_SJM, config.head_dim**-0.5, config.windows[layer])

        o_BSHM = jax.vmap(one_sequence)(*(x.reshape(B, S, *x.shape[1:]) for x in qkv))
        attended_BS = jnp.stack([jnp.isfinite(x).all((1, 2)) for x in qkv]).all(0).reshape(B, S)
        return attended_BS, o_BSHM.reshape(B * S, *o_BSHM.shape[2:])

    positions_T = jnp.tile(jnp.arange(S), B)
    carry, x_TD = decoder_layer(config, layer, w, x_BSD.reshape(B * S, D), positions_T, None, attend, experts)
    return carry, x_TD.reshape(B, S, D)


def first_alike(config: ModelConfig, layer: int) -> int:
    """Returns the first layer of the same shape and window: layers alike compile once."""
    kinds = list(zip(config.sparse_layers, config.windows))
    return kinds.index(kinds[layer])


@partial(jax.jit, static_argnums=(0, 1), compiler_options=NO_HOISTING)
def _run_batch(config: ModelConfig, layer: int, w: LayerWeights, x_BSD: jax.Array):
    """Returns the batch's ``error_sums`` (None for a dense layer), the layer's output, and what tells if all is finite.

    The last are arguments of ``check_activations``.
    """
    act = activation(config.hidden_act)

    def experts(attended_BS, sparse_layer, *routed):
        return (attended_BS, *routed), routed_experts(*routed, w.mlp.experts, act)

    carried, y_BSD = through_layer(config, layer, w, x_BSD, experts)
    left_BS = jnp.isfinite(y_BSD).all(-1)
    if not isinstance(w.mlp, MoEWeights):
        return None, y_BSD, (carried, left_BS)
    attended_BS, *routed = carried
    sums, squares_UTK = sums_and_squares(y_BSD.reshape(-1, y_BSD.shape[2]), *routed, w.mlp.experts, act)
    return sums, y_BSD, (attended_BS, left_BS, routed[1], squares_UTK)


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

    Raises:
      UserError: an activation is not finite.
    """
    same = first_alike(config, layer)
    w = jax.tree.map(jnp.asarray, w)
    E = config.num_experts
    gate_up_EC, down_EC = np.zeros((E, config.hidden_size)), np.zeros((E, config.moe_intermediate_size))
    tokens_E, num_tokens, num_sequences = np.zeros(E, np.int64), 0, 0
    for x_BSD in batches:
        sums, y_BSD, finite = jax.device_get(_run_batch(config, same, w, jnp.asarray(x_BSD)))
        check_activations(layer, num_sequences, *finite)
        emit(y_BSD)
        if sums is not None:
            gate_up_EC += sums[0]
            down_EC += sums[1]
            tokens_E += sums[2]
        num_sequences += len(x_BSD)
        num_tokens += x_BSD.shape[0] * x_BSD.shape[1]
    if not config.sparse_layers[layer]:
        return None
    seen = max(num_tokens, 1)
    return InputMoments(gate_up_EC=gate_up_EC / seen, down_EC=down_EC / seen, tokens_E=tokens_E)


def importance(moments: InputMoments, min_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the columns' importance, gate_up float64[E, D] and down [E, F], and uncalibrated_E, bool[E].

    An expert of fewer than ``min_tokens`` (at least 1) calibration tokens is uncalibrated: it takes the average
    importance of its layer's other experts, as if the text had used it as often as them. A layer without any
    calibrated expert takes the average of all, one without any token counts all columns alike.
    """
    uncalibrated_E = moments.tokens_E < max(min_tokens, 1)
    measured_E = ~uncalibrated_E if not uncalibrated_E.all() else moments.tokens_E > 0

    def with_fallback(moment_EC):
        average_C = moment_EC[measured_E].mean(axis=0) if measured_E.any() else 1.0
        return np.where(uncalibrated_E[:, None], average_C, moment_EC)

    return with_fallback(moments.gate_up_EC), with_fallback(moments.down_EC), uncalibrated_E
