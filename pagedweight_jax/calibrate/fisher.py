# SPDX-License-Identifier: Apache-2.0
"""The loss's gradient at the experts' outputs: a factor for every row of a linear-block, beside each column's h.

A linear-block returns z = W x for every token that is routed to it. How much the next tokens' loss (cross entropy,
summed over a sequence) feels an error in row n is, to second order, the Fisher diagonal's row factor

    F_n = E[(d loss / d z_n)^2],                 a mean over all tokens, those that are routed elsewhere being zeros

The gradient comes from the top, one layer at a time: ``top_gradient`` goes backward through head and final norm, then
``layer_gradient`` through a layer, which asks for nothing but the layer's weights and what entered it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.any_precision import positive_importance
from pagedweight_jax.calibrate.hessian import NO_HOISTING, through_layer
from pagedweight_jax.calibrate.routed import routed_backward, routed_experts
from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.layers import activation, rms_norm
from pagedweight_jax.models.transformer import logits
from pagedweight_jax.models.weights import LayerWeights, MoEWeights, Weights

CHUNK_TOKENS = 128
"""Tokens whose logits are held at once."""


def gradient_dtype(dtype: np.dtype) -> np.dtype:
    """Returns what gradients are computed and kept in: the activations' dtype, but float16's range is too small."""
    return np.dtype(np.float32) if dtype == np.float16 else np.dtype(dtype)


@partial(jax.jit, compiler_options=NO_HOISTING)
def top_gradient(outer: Weights, x_SD: jax.Array, tokens_S: jax.Array) -> jax.Array:
    """Returns d loss / d x of one sequence, [S, D] in x's dtype; the last token predicts nothing: zeros.

    Args:
      outer: final norm and head (and embedding, if they are tied).
      x_SD: the hidden states behind the last layer.
      tokens_S: int32, the sequence.
    """
    S, D = x_SD.shape
    padding = -S % CHUNK_TOKENS
    target_S, counts_S = jnp.roll(tokens_S, -1), jnp.arange(S) < S - 1

    def chunks(x):
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, CHUNK_TOKENS, *x.shape[1:])

    def loss(x_TD, target_T, counts_T):
        hidden_TD = rms_norm(x_TD, outer.norm_D, outer.config.rms_norm_eps)
        logp_TV = jax.nn.log_softmax(logits(outer, hidden_TD), axis=-1)
        return -jnp.sum(jnp.take_along_axis(logp_TV, target_T[:, None], axis=-1)[:, 0] * counts_T)

    gradient = jax.lax.map(lambda chunk: jax.grad(loss)(*chunk), tuple(map(chunks, (x_SD, target_S, counts_S))))
    return gradient.reshape(-1, D)[:S]


def _gradient_experts(config: ModelConfig, experts):
    """Returns the routed experts' sum as a function of (m, weights, ids, probes), to be differentiated.

    The probes' gradients are defined as sums over tokens of (d loss / d z)^2, the linear-blocks' outputs z: so one
    backward pass gives them beside the gradients of m and weights.
    """
    act = activation(config.hidden_act)

    @jax.custom_vjp
    def run(m_TD, weights_TK, ids_TK, probes):
        return routed_experts(m_TD, ids_TK, weights_TK, experts, act)

    def forward(m_TD, weights_TK, ids_TK, probes):
        return run(m_TD, weights_TK, ids_TK, probes), (m_TD, weights_TK, ids_TK)

    def backward(kept, y_gradient_TD):
        m_TD, weights_TK, ids_TK = kept
        m_gradient_TD, weights_gradient_TK, squares = routed_backward(
            y_gradient_TD, m_TD, ids_TK, weights_TK, experts, act
        )
        return m_gradient_TD.astype(m_TD.dtype), weights_gradient_TK, None, squares

    run.defvjp(forward, backward)
    return run


@partial(jax.jit, static_argnums=(0, 1), compiler_options=NO_HOISTING)
def layer_gradient(config: ModelConfig, layer: int, w: LayerWeights, x_BSD: jax.Array, y_gradient_BSD: jax.Array):
    """Returns d loss / d x, [B, S, D], and the sums over tokens of (d loss / d z)^2, gate_up [E, 2F] and down [E, D].

    The sums are float32; None for a dense layer.

    Args:
      config: the model.
      layer: among all layers.
      w: its weights, with the experts.
      x_BSD: what enters it, B whole sequences.
      y_gradient_BSD: d loss / d output, in x's dtype.
    """
    sparse = isinstance(w.mlp, MoEWeights)
    experts = _gradient_experts(config, w.mlp.experts) if sparse else None

    def run(x_BSD, probes):
        def routed(_, sparse_layer, m_TD, ids_TK, weights_TK):
            return None, experts(m_TD, weights_TK, ids_TK, probes)

        return through_layer(config, layer, w, x_BSD, routed)[1]

    E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
    probes = (jnp.zeros((E, 2 * F)), jnp.zeros((E, D))) if sparse else None
    return jax.vjp(run, x_BSD, probes)[1](y_gradient_BSD)


@partial(jax.jit, static_argnums=(0, 1), compiler_options=NO_HOISTING)
def layer_output(config: ModelConfig, layer: int, w: LayerWeights, x_BSD: jax.Array) -> jax.Array:
    """Returns what leaves a layer, [B, S, D]. Arguments as in ``layer_gradient``."""
    act = activation(config.hidden_act)

    def routed(_, sparse_layer, *of_tokens):
        return None, routed_experts(*of_tokens, w.mlp.experts, act)

    return through_layer(config, layer, w, x_BSD, routed)[1]


def row_weights(fisher_EN: np.ndarray, uncalibrated_E: np.ndarray) -> np.ndarray:
    """Returns float32[E, N]: F of every row over the mean of its block's rows, so that h keeps the sensitivities' unit.

    No weight is 0. An uncalibrated expert takes the mean of the others, ones if there are none.
    """
    positive_EN = positive_importance(fisher_EN)
    weights_EN = positive_EN / positive_EN.mean(axis=1, keepdims=True)
    if uncalibrated_E.any():
        weights_EN[uncalibrated_E] = 1 if uncalibrated_E.all() else weights_EN[~uncalibrated_E].mean(axis=0)
    return weights_EN.astype(np.float32)
