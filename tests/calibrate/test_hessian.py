# SPDX-License-Identifier: Apache-2.0
"""Weighted second moments against a plain pass that runs every expert on every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.calibrate.hessian import InputMoments, collect_moments, importance
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.transformer import decoder_layer
from pagedweight_jax.models.weights import MoEWeights, init_weights


def layers_on_text(weights, tokens_BS):
    """Every sparse layer's (residual behind it, m_TD, ids_TK, weights_TK), the sequences one after the other."""
    config = weights.config
    act = activation(config.hidden_act)

    def attend(_, layer, q, k, v):
        return None, dense_attention(q, k, v, config.head_dim**-0.5, config.windows[layer])

    def run(tokens_S):
        x_TD, seen = weights.embed_VD[tokens_S], []
        for layer, w in enumerate(weights.layers):

            def experts(_, sparse_layer, *routed, w=w):
                return routed, dense_experts(*routed, w.mlp.experts, act)

            positions_S = jnp.arange(len(tokens_S))
            routed, x_TD = decoder_layer(config, layer, w, x_TD, positions_S, None, attend, experts)
            if isinstance(w.mlp, MoEWeights):
                seen.append((x_TD, *routed))
        return seen

    seen = [jax.jit(run)(jnp.asarray(tokens_S)) for tokens_S in tokens_BS]
    return jax.tree.map(lambda *x: np.concatenate(x), *seen)


def definition(weights, tokens_BS):
    """h token by token in float64, with the whole Jacobian of an expert's output by its gate_up outputs."""
    config = weights.config
    L, E, F = config.num_sparse_layers, config.num_experts, config.moe_intermediate_size
    gate_up, down, tokens = np.zeros((L, E, config.hidden_size)), np.zeros((L, E, F)), np.zeros((L, E), np.int64)
    experts_L = [layer.mlp.experts for layer in weights.layers if isinstance(layer.mlp, MoEWeights)]

    def output(z_N, down_NC):
        return down_NC @ (jax.nn.silu(z_N[:F]) * z_N[F:])

    jacobian = jax.jit(jax.jacobian(output))
    for layer, (seen, experts) in enumerate(zip(layers_on_text(weights, tokens_BS), experts_L)):
        for x_D, m_D, ids_K, weights_K in zip(*(array.astype(np.float64) for array in seen)):
            for e, r in zip(ids_K.astype(int), weights_K):
                z_N = np.asarray(experts.gate_up_ENC[e], np.float64) @ m_D
                h_F = z_N[:F] / (1 + np.exp(-z_N[:F])) * z_N[F:]
                J_DN = np.asarray(jacobian(z_N.astype(np.float32), experts.down_ENC[e]), np.float64)
                share = r**2 / (x_D @ x_D)
                gate_up[layer, e] += share * (J_DN**2).sum(0).mean() * m_D**2
                down[layer, e] += share * h_F**2
                tokens[layer, e] += 1
    return gate_up / tokens_BS.size, down / tokens_BS.size, tokens


def check(moments, expected):
    np.testing.assert_array_equal(moments.tokens_LE, expected[2])
    for measured, wanted in zip((moments.gate_up_LEC, moments.down_LEC), expected):
        np.testing.assert_allclose(measured, wanted, rtol=2e-3, atol=1e-4 * wanted.max())


@pytest.fixture(scope="module")
def sequences():
    return np.random.default_rng(0).integers(0, 128, (4, 40))


def test_moments_are_the_definition(tiny_weights, sequences):
    moments = collect_moments(tiny_weights, [sequences])
    assert moments.gate_up_LEC.dtype == moments.down_LEC.dtype == np.float64
    assert (moments.tokens_LE.sum(1) == 4 * 40 * 2).all()
    expected = definition(tiny_weights, sequences)
    check(moments, expected)
    with pytest.raises(AssertionError):
        check(moments, (expected[0][:, ::-1], *expected[1:]))


def test_batches_add_up(tiny_weights, sequences):
    whole = collect_moments(tiny_weights, [sequences])
    halves = collect_moments(tiny_weights, iter([sequences[:2], sequences[2:]]))
    np.testing.assert_array_equal(whole.tokens_LE, halves.tokens_LE)
    np.testing.assert_allclose(whole.gate_up_LEC, halves.gate_up_LEC, rtol=1e-5)
    np.testing.assert_allclose(whole.down_LEC, halves.down_LEC, rtol=1e-5)


def test_dense_layers_windows_and_idle_experts(tiny_config, sequences):
    config = tiny_config(sparse_layers=(False, True), windows=(4, 0), num_experts=12)
    weights = init_weights(config, jax.random.key(1))
    tokens_BS = sequences[:2, :6]
    moments = collect_moments(weights, [tokens_BS])
    check(moments, definition(weights, tokens_BS))
    idle_LE = moments.tokens_LE == 0
    assert idle_LE.any(), "the case is meant to have an expert without tokens"
    assert not moments.gate_up_LEC[idle_LE].any()
    assert not moments.down_LEC[idle_LE].any()


def test_no_text_leaves_every_expert_uncalibrated(tiny_weights):
    gate_up_LEC, down_LEC, uncalibrated_LE = importance(collect_moments(tiny_weights, []), 1)
    assert uncalibrated_LE.all()
    np.testing.assert_array_equal(gate_up_LEC, 1)
    np.testing.assert_array_equal(down_LEC, 1)


@pytest.mark.parametrize("token", [-1, 128])
def test_tokens_outside_the_vocabulary_are_refused(tiny_weights, sequences, token):
    bad = sequences.copy()
    bad[1, 3] = token
    with pytest.raises(UserError, match=r"calibration batch 1: token ids .* leave the vocabulary 0..127"):
        collect_moments(tiny_weights, [sequences, bad])


def test_text_twice_over_changes_nothing(tiny_weights, sequences):
    """h is a mean over tokens, so that sensitivities do not depend on how much text there was."""
    once, twice = (collect_moments(tiny_weights, batches) for batches in ([sequences], [sequences] * 2))
    np.testing.assert_array_equal(twice.tokens_LE, 2 * once.tokens_LE)
    np.testing.assert_allclose(twice.gate_up_LEC, once.gate_up_LEC, rtol=1e-12)
    np.testing.assert_allclose(twice.down_LEC, once.down_LEC, rtol=1e-12)


def test_rare_experts_count_as_min_tokens_average_tokens_of_their_layer():
    moments = InputMoments(
        gate_up_LEC=np.array([[[4.0, 1.0], [1.0, 3.0], [0.0, 0.0]]]),
        down_LEC=np.array([[[8.0], [2.0], [0.0]]]),
        tokens_LE=np.array([[30, 10, 0]]),
    )
    gate_up_LEC, down_LEC, uncalibrated_LE = importance(moments, 11)
    np.testing.assert_array_equal(uncalibrated_LE, [[False, True, True]])
    mean = [11 * (4 + 1) / 40, 11 * (1 + 3) / 40]
    np.testing.assert_allclose(gate_up_LEC, [[[4, 1], mean, mean]], rtol=1e-15)
    np.testing.assert_allclose(down_LEC, [[[8], [11 * 10 / 40], [11 * 10 / 40]]], rtol=1e-15)
    np.testing.assert_array_equal(importance(moments, 0)[2], [[False, False, True]])
