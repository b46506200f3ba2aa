# SPDX-License-Identifier: Apache-2.0
"""Weighted second moments, layer by layer, against a plain pass that runs every expert on every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.calibrate import hessian
from pagedweight_jax.calibrate.hessian import InputMoments, importance, run_layer
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.transformer import decoder_layer
from pagedweight_jax.models.weights import MoEWeights, init_layer, init_weights


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
                return routed, dense_experts(*routed, w.mlp.experts, act)[0]

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
    for measured, wanted in zip(moments[:2], expected):
        np.testing.assert_allclose(measured, wanted, rtol=2e-3, atol=1e-4 * wanted.max())


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


def test_no_text_leaves_every_expert_uncalibrated(tiny_weights):
    gate_up_EC, down_EC, uncalibrated_E = importance(run_layer(tiny_weights.config, 0, tiny_weights.layers[0], []), 1)
    assert uncalibrated_E.all()
    np.testing.assert_array_equal(gate_up_EC, 1)
    np.testing.assert_array_equal(down_EC, 1)


def test_text_twice_over_changes_nothing(tiny_weights, sequences):
    """h is a mean over tokens, so that sensitivities do not depend on how much text there was."""
    once, twice = (moments_of_layers(tiny_weights, batches) for batches in ([sequences], [sequences] * 2))
    np.testing.assert_array_equal(twice[2], 2 * once[2])
    for again, first in zip(twice[:2], once):
        np.testing.assert_allclose(again, first, rtol=1e-12)


def test_rare_experts_take_their_layers_average():
    moments = InputMoments(
        gate_up_EC=np.array([[4.0, 1.0], [6.0, 3.0], [1.0, 9.0], [0.0, 0.0]]),
        down_EC=np.array([[8.0], [2.0], [1.0], [0.0]]),
        tokens_E=np.array([30, 30, 10, 0]),
    )
    gate_up_EC, down_EC, uncalibrated_E = importance(moments, 11)
    np.testing.assert_array_equal(uncalibrated_E, [False, False, True, True])
    np.testing.assert_array_equal(gate_up_EC, [[4, 1], [6, 3], [5, 2], [5, 2]])
    np.testing.assert_array_equal(down_EC, [[8], [2], [5], [5]])
    np.testing.assert_array_equal(importance(moments, 0)[2], [False, False, False, True])
    np.testing.assert_array_equal(importance(moments, 31)[1], np.full((4, 1), 11 / 3))


def test_experts_in_sixteen_bits_are_not_copied_to_float32(tiny_config):
    """XLA on a CPU would: it multiplies them as float32, and takes that out of the loop over experts."""
    config = tiny_config(num_experts=64, hidden_size=256, moe_intermediate_size=256, num_layers=1)
    w = jax.eval_shape(lambda key: init_layer(config, 0, key, jnp.bfloat16), jax.random.key(0))
    x_BSD = jax.ShapeDtypeStruct((2, 16, 256), jnp.bfloat16)
    float32_bytes = 4 * 64 * 3 * 256 * 256
    lowered = hessian._run_batch.lower(config, 0, w, x_BSD)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < float32_bytes / 8
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11):  # later ones leave it in the loop anyway
        hoisted = lowered.compile(compiler_options={"xla_disable_hlo_passes": ""})
        assert hoisted.memory_analysis().temp_size_in_bytes > float32_bytes
