# SPDX-License-Identifier: Apache-2.0
"""Second moments, layer by layer, against a plain pass that runs every expert on every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.calibrate import hessian
from pagedweight_jax.calibrate.hessian import InputMoments, importance, run_layer
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.transformer import forward
from pagedweight_jax.models.weights import MoEWeights, init_weights


def inputs_of_experts(weights, tokens_BS):
    """Every sparse layer's (m_TD, ids_TK), the sequences one after the other, with dense experts."""
    config = weights.config
    experts_L = [layer.mlp.experts for layer in weights.layers if isinstance(layer.mlp, MoEWeights)]

    def attend(seen, layer, q, k, v):
        return seen, dense_attention(q, k, v, config.head_dim**-0.5, config.windows[layer])

    def experts(seen, sparse_layer, m_TD, ids_TK, weights_TK):
        y_TD = dense_experts(m_TD, ids_TK, weights_TK, experts_L[sparse_layer], activation(config.hidden_act))
        return (*seen, (m_TD, ids_TK)), y_TD

    run = jax.jit(lambda tokens_S: forward(weights, tokens_S, jnp.arange(len(tokens_S)), (), attend, experts)[0])
    seen = [run(jnp.asarray(tokens_S)) for tokens_S in tokens_BS]
    return jax.tree.map(lambda *x: np.concatenate(x), *seen), experts_L


def definition(weights, tokens_BS):
    """E[x_c^2] token by token, in float64."""
    config = weights.config
    L, E, F = config.num_sparse_layers, config.num_experts, config.moe_intermediate_size
    gate_up, down, tokens = np.zeros((L, E, config.hidden_size)), np.zeros((L, E, F)), np.zeros((L, E), np.int64)
    for layer, ((m_TD, ids_TK), experts) in enumerate(zip(*inputs_of_experts(weights, tokens_BS))):
        gate_up_ENC = np.asarray(experts.gate_up_ENC, np.float64)
        for x_D, ids_K in zip(m_TD.astype(np.float64), ids_TK):
            for e in ids_K:
                gate_F, up_F = np.split(gate_up_ENC[e] @ x_D, 2)
                gate_up[layer, e] += x_D**2
                down[layer, e] += (gate_F / (1 + np.exp(-gate_F)) * up_F) ** 2
                tokens[layer, e] += 1
    seen_LE1 = np.maximum(tokens, 1)[..., None]
    return gate_up / seen_LE1, down / seen_LE1, tokens


def moments_of_layers(weights, batches):
    """Layer after layer on the outputs of the layer before: of the sparse ones gate_up, down and tokens, stacked."""
    hidden, moments_L = [np.asarray(weights.embed_VD)[tokens_BS] for tokens_BS in batches], []
    for layer, w in enumerate(weights.layers):
        entering, hidden = hidden, []
        moments = run_layer(weights.config, layer, w, entering, hidden.append)
        assert (moments is None) == (not weights.config.sparse_layers[layer])
        moments_L += [] if moments is None else [(moments.gate_up_EC, moments.down_EC, moments.tokens_E)]
    return tuple(map(np.stack, zip(*moments_L)))


def check(moments, expected):
    np.testing.assert_array_equal(moments[2], expected[2])
    np.testing.assert_allclose(moments[0], expected[0], rtol=2e-4, atol=1e-9)
    np.testing.assert_allclose(moments[1], expected[1], rtol=2e-3, atol=1e-9)


@pytest.fixture(scope="module")
def sequences():
    return np.random.default_rng(0).integers(0, 128, (4, 40))


def test_moments_are_those_of_the_whole_model(tiny_weights, sequences):
    moments = moments_of_layers(tiny_weights, [sequences])
    assert moments[0].dtype == moments[1].dtype == np.float64
    assert (moments[2].sum(1) == 4 * 40 * 2).all()
    expected = definition(tiny_weights, sequences)
    check(moments, expected)
    with pytest.raises(AssertionError):
        check(moments, (expected[0][:, ::-1], *expected[1:]))


def test_batches_add_up(tiny_weights, sequences):
    whole = moments_of_layers(tiny_weights, [sequences])
    halves = moments_of_layers(tiny_weights, [sequences[:2], sequences[2:]])
    np.testing.assert_array_equal(whole[2], halves[2])
    np.testing.assert_allclose(whole[0], halves[0], rtol=1e-5)
    np.testing.assert_allclose(whole[1], halves[1], rtol=1e-5)


def test_dense_layers_windows_and_idle_experts(tiny_config, sequences):
    config = tiny_config(sparse_layers=(False, True, True), windows=(4, 0, 3), num_layers=3, num_experts=12)
    weights = init_weights(config, jax.random.key(1))
    tokens_BS = sequences[:2, :6]
    moments = moments_of_layers(weights, [tokens_BS])
    check(moments, definition(weights, tokens_BS))
    idle_LE = moments[2] == 0
    assert idle_LE.any(), "the case is meant to have an expert without tokens"
    assert not moments[0][idle_LE].any()
    assert not moments[1][idle_LE].any()


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [(1, jnp.float32), (hessian.BLOCK_TOKENS, jnp.float32), (150, jnp.bfloat16)]
)
def test_blocks_of_tokens_give_the_dense_experts_output(tiny_weights, num_tokens, dtype):
    """Also where all tokens pick the same two experts, so that blocks are exactly full; sums are float32 always."""
    experts = jax.tree.map(lambda w: w.astype(dtype), tiny_weights.layers[0].mlp.experts)
    key_m, key_ids, key_w = jax.random.split(jax.random.key(num_tokens), 3)
    m_TD = jax.random.normal(key_m, (num_tokens, 64), dtype)
    free_TE = jax.random.uniform(key_ids, (num_tokens, 4))
    weights_TK = jax.random.uniform(key_w, (num_tokens, 2))
    measure = jax.jit(hessian._measured_experts, static_argnums=4)
    for scores_TE in (free_TE, free_TE + jnp.array([0, 9, 0, 8])):
        _, ids_TK = jax.lax.top_k(scores_TE, 2)
        y_TD, (gate_up_ED, _, tokens_E) = measure(m_TD, ids_TK, weights_TK, experts, jax.nn.silu)
        expected_TD = dense_experts(m_TD, ids_TK, weights_TK, experts, jax.nn.silu)
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        assert np.linalg.norm(y_TD - expected_TD) <= tolerance * np.linalg.norm(expected_TD)
        routed_TE = (np.asarray(ids_TK)[..., None] == np.arange(4)).any(1)
        np.testing.assert_allclose(gate_up_ED, routed_TE.T @ np.asarray(m_TD, np.float64) ** 2, rtol=1e-5, atol=1e-9)
        np.testing.assert_array_equal(tokens_E, routed_TE.sum(0))


def test_no_text_leaves_every_expert_uncalibrated(tiny_weights):
    gate_up_EC, down_EC, uncalibrated_E = importance(run_layer(tiny_weights.config, 0, tiny_weights.layers[0], []), 1)
    assert uncalibrated_E.all()
    np.testing.assert_array_equal(gate_up_EC, 1)
    np.testing.assert_array_equal(down_EC, 1)


def test_rare_experts_take_the_mean_over_their_layers_tokens():
    moments = InputMoments(
        gate_up_EC=np.array([[4.0, 1.0], [1.0, 3.0], [0.0, 0.0]]),
        down_EC=np.array([[8.0], [2.0], [0.0]]),
        tokens_E=np.array([30, 10, 0]),
    )
    gate_up_EC, down_EC, uncalibrated_E = importance(moments, 11)
    np.testing.assert_array_equal(uncalibrated_E, [False, True, True])
    mean = [(30 * 4 + 10 * 1) / 40, (30 * 1 + 10 * 3) / 40]
    np.testing.assert_allclose(gate_up_EC, [[4, 1], mean, mean], rtol=1e-15)
    np.testing.assert_allclose(down_EC, [[8], [6.5], [6.5]], rtol=1e-15)
    np.testing.assert_array_equal(importance(moments, 0)[2], [False, False, True])
