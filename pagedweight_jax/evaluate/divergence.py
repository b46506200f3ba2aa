# SPDX-License-Identifier: Apache-2.0
"""KL divergence from the unquantized model: far less noisy than perplexity, for the text's own surprises cancel.

A model's next-token distributions are its head applied to its last hidden states, and the head is never quantized. So
the unquantized model is run once and remembered as hidden states, D numbers a token instead of V.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.evaluate.perplexity import TokenProgress, silent
from pagedweight_jax.models import transformer
from pagedweight_jax.models.weights import Weights, without_experts

CHUNK_TOKENS = 128
"""Tokens whose distributions are compared at a time: two [tokens, V] arrays are all that it takes."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The unquantized model's next-token distributions on some windows.

    Attributes:
      weights: its head; the routed experts are not needed any more.
      hidden_WTD: float32, the last hidden states of all tokens of each window but its last one.
    """

    weights: Weights
    hidden_WTD: np.ndarray


@jax.jit
def _window_hidden(weights: Weights, tokens_T: jax.Array) -> jax.Array:
    return transformer.dense_hidden(weights, tokens_T)[:-1].astype(jnp.float32)


def reference(weights: Weights, windows: np.ndarray, progress: TokenProgress = silent) -> Reference:
    """Returns what unquantized ``weights`` predict on the windows, int32 [windows, tokens], run one at a time.

    Args:
      weights: with their routed experts.
      windows: as they will be scored.
      progress: called before each window and at the end.
    """
    hidden, total = [], windows[:, 1:].size
    for tokens_T in windows:
        progress(len(hidden) * (len(tokens_T) - 1), total)
        hidden.append(np.asarray(_window_hidden(weights, jnp.asarray(tokens_T))))
    progress(total, total)
    return Reference(weights=without_experts(weights), hidden_WTD=np.stack(hidden))


@jax.jit
def _divergence(p_weights: Weights, p_TD: jax.Array, q_weights: Weights, q_TD: jax.Array) -> jax.Array:
    def one(hidden):
        logp_CV, logq_CV = (
            jax.nn.log_softmax(transformer.logits(weights, hidden_CD.astype(weights.embed_VD.dtype)), axis=-1)
            for weights, hidden_CD in zip((p_weights, q_weights), hidden)
        )
        return jnp.sum(jnp.exp(logp_CV) * (logp_CV - logq_CV), axis=-1)

    num_tokens, width = p_TD.shape
    pad = -num_tokens % CHUNK_TOKENS
    chunks = [jnp.pad(x_TD, ((0, pad), (0, 0))).reshape(-1, CHUNK_TOKENS, width) for x_TD in (p_TD, q_TD)]
    return jax.lax.map(one, tuple(chunks)).reshape(-1)[:num_tokens]


def divergence(reference: Reference, window: int, weights: Weights, hidden_TD: np.ndarray) -> np.ndarray:
    """Returns KL(unquantized || model) of every predicted token of a window in nats, float32 [tokens - 1].

    Args:
      reference: of the windows.
      window: its number among them.
      weights: the model's own head, in its own dtype.
      hidden_TD: the model's last hidden states of all tokens but the last.
    """
    return np.asarray(_divergence(reference.weights, reference.hidden_WTD[window], weights, hidden_TD))
