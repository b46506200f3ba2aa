# SPDX-License-Identifier: Apache-2.0
"""Gradients that go backward layer by layer are those of the whole model, and Fisher rows are their squares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.calibrate.fisher import (
    CHUNK_TOKENS,
    gradient_dtype,
    layer_gradient,
    layer_output,
    row_weights,
    top_gradient,
)
from pagedweight_jax.calibrate.hessian import first_alike
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation, rms_norm
from pagedweight_jax.models.transformer import decoder_layer, logits
from pagedweight_jax.models.weights import MoEWeights, init_weights


def whole_model(weights, tokens_BS):
    """By one jax.grad: each sequence's d loss / d embedded tokens, and F's sums [E, N] of every sparse layer and kind.

    Every routed pair's linear-block outputs get a term of their own to differentiate by, whatever expert they are of.
    """
    config, act, T = weights.config, activation(weights.config.hidden_act), tokens_BS.shape[1]
    K, D, F = config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size

    def loss(x_TD, probes, tokens_S):
        ids = []
        for layer, w in enumerate(weights.layers):

            def attend(_, layer, q, k, v):
                return None, dense_attention(q, k, v, config.head_dim**-0.5, config.windows[layer])

            def experts(_, sparse_layer, m_TD, ids_TK, weights_TK, w=w):
                z_TKN = jnp.einsum("tknd,td->tkn", w.mlp.experts.gate_up_ENC[ids_TK], m_TD) + probes[sparse_layer][0]
                h_TKF = act(z_TKN[..., :F]) * z_TKN[..., F:]
                o_TKD = jnp.einsum("tkdf,tkf->tkd", w.mlp.experts.down_ENC[ids_TK], h_TKF) + probes[sparse_layer][1]
                ids.append(ids_TK)
                return None, jnp.einsum("tk,tkd->td", weights_TK, o_TKD)

            x_TD = decoder_layer(config, layer, w, x_TD, jnp.arange(T), None, attend, experts)[1]
        logp_TV = jax.nn.log_softmax(logits(weights, rms_norm(x_TD, weights.norm_D, config.rms_norm_eps)))
        return -jnp.sum(logp_TV[jnp.arange(T - 1), tokens_S[1:]]), ids

    probes = [(jnp.zeros((T, K, 2 * F)), jnp.zeros((T, K, D)))] * config.num_sparse_layers
    with jax.default_matmul_precision("highest"):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        of_sequences = [gradient(weights.embed_VD[tokens_S], probes, tokens_S) for tokens_S in tokens_BS]
    for (x_TD, of_probes), ids in of_sequences:
        rows = []
        for kinds, ids_TK in zip(of_probes, ids):
            sums = [np.zeros((config.num_experts, g_TKN.shape[2])) for g_TKN in kinds]
            for sum_EN, g_TKN in zip(sums, kinds):
                np.add.at(sum_EN, np.asarray(ids_TK), np.square(np.asarray(g_TKN, np.float64)))
            rows.append(sums)
        yield np.asarray(x_TD), rows


def layer_by_layer(weights, tokens_BS):
    """The same of a batch, as a conversion goes about it."""
    config = weights.config
    hidden = [weights.embed_VD[tokens_BS]]
    for layer, w in enumerate(weights.layers):
        hidden.append(layer_output(config, first_alike(config, layer), w, hidden[-1]))
    gradient_BSD = jnp.stack([top_gradient(weights, *pair) for pair in zip(hidden[-1], tokens_BS)])
    rows = []
    for layer in reversed(range(config.num_layers)):
        same, w = first_alike(config, layer), weights.layers[layer]
        gradient_BSD, squares = layer_gradient(config, same, w, hidden[layer], gradient_BSD)
        rows.append(squares)
    return np.asarray(gradient_BSD), [squares for squares in reversed(rows) if squares is not None]


def check(measured, expected):
    difference = np.linalg.norm(np.asarray(measured, np.float64) - expected)
    assert difference <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", ["plain", "tied, a dense layer, windows, renormalised"])
def test_gradients_and_rows_are_those_of_the_whole_model(tiny_weights, tiny_config, kind):
    weights = tiny_weights
    if kind != "plain":
        config = tiny_config(
            sparse_layers=(True, False, True),
            windows=(5, 0, 5),
            num_layers=3,
            tie_word_embeddings=True,
            norm_topk_prob=True,
        )
        weights = init_weights(config, jax.random.key(3))
    tokens_BS = jnp.asarray(np.random.default_rng(0).integers(0, 128, (2, 24)))
    gradient_BSD, rows = layer_by_layer(weights, tokens_BS)
    expected = list(whole_model(weights, tokens_BS))
    check(gradient_BSD, np.stack([gradient_SD for gradient_SD, _ in expected]))
    assert len(rows) == weights.config.num_sparse_layers
    for layer, squares in enumerate(rows):
        for u, measured_EN in enumerate(squares):
            wanted_EN = sum(kinds[layer][u] for _, kinds in expected)
            assert wanted_EN.any(axis=1).sum() > 1
            check(measured_EN, wanted_EN)
            with pytest.raises(AssertionError):
                check(measured_EN, wanted_EN[::-1])
    assert isinstance(weights.layers[0].mlp, MoEWeights)


@pytest.mark.parametrize("length", [2, CHUNK_TOKENS, CHUNK_TOKENS + 3])
def test_the_top_is_cut_into_chunks_and_its_last_token_predicts_nothing(tiny_weights, length):
    rng = np.random.default_rng(1)
    x_SD = jnp.asarray(rng.standard_normal((length, tiny_weights.config.hidden_size)), jnp.float32)
    tokens_S = jnp.asarray(rng.integers(0, 128, length))

    def loss(x_SD):
        hidden_SD = rms_norm(x_SD, tiny_weights.norm_D, tiny_weights.config.rms_norm_eps)
        logp_SV = jax.nn.log_softmax(logits(tiny_weights, hidden_SD))
        return -jnp.sum(logp_SV[jnp.arange(length - 1), tokens_S[1:]])

    gradient_SD = np.asarray(top_gradient(tiny_weights, x_SD, tokens_S))
    check(gradient_SD, np.asarray(jax.grad(loss)(x_SD), np.float64))
    assert not gradient_SD[-1].any()


def test_gradients_are_kept_in_a_range_that_holds_them():
    assert gradient_dtype(np.dtype(np.float16)) == np.float32
    assert gradient_dtype(jnp.dtype(jnp.bfloat16)) == jnp.bfloat16
    assert gradient_dtype(np.dtype(np.float32)) == np.float32


def test_row_weights_have_a_mean_of_one_and_a_fallback():
    fisher_EN = np.array([[1.0, 3.0, 0.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    weights_EN = row_weights(fisher_EN, np.array([False, False, False, True]))
    assert weights_EN.dtype == np.float32
    np.testing.assert_allclose(weights_EN.mean(axis=1), 1, rtol=1e-6)
    assert (weights_EN > 0).all()
    np.testing.assert_allclose(weights_EN[0], [0.75, 2.25, 1e-6 * 0.75 * 4 / 3], rtol=1e-5)
    np.testing.assert_array_equal(weights_EN[1:3], 1)
    np.testing.assert_allclose(weights_EN[3], weights_EN[:3].mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(row_weights(fisher_EN, np.ones(4, bool)), 1)
