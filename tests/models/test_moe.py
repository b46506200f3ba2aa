# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.weights import ExpertWeights
from pallas_kernels.routing.reference import top_experts

D, F, E, K, T = 24, 12, 5, 3, 7


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def experts():
    return ExpertWeights(gate_up_ENC=jnp.asarray(normal(E, 2 * F, D, seed=1)), down_ENC=jnp.asarray(normal(E, D, F)))


@pytest.mark.parametrize("renormalise", [False, True])
def test_route_is_a_softmax_over_all_experts(renormalise):
    m_TD, router_DE = normal(T, D), normal(D, E, seed=1)
    weights_TK, ids_TK = top_experts(jnp.asarray(m_TD), jnp.asarray(router_DE), K, renormalise)
    assert weights_TK.dtype == jnp.float32
    assert ids_TK.dtype == jnp.int32
    z_TE = m_TD.astype(np.float64) @ router_DE
    p_TE = np.exp(z_TE) / np.exp(z_TE).sum(-1, keepdims=True)
    order_TK = np.argsort(-p_TE, axis=-1)[:, :K]
    ref_TK = np.take_along_axis(p_TE, order_TK, -1)
    if renormalise:
        ref_TK /= ref_TK.sum(-1, keepdims=True)
    np.testing.assert_array_equal(ids_TK, order_TK)
    np.testing.assert_allclose(weights_TK, ref_TK, rtol=2e-5)


def test_route_gives_ties_to_the_lower_id():
    m_TD = jnp.ones((2, D))
    router_DE = jnp.zeros((D, E)).at[0, 3].set(1)
    weights_TK, ids_TK = top_experts(m_TD, router_DE, K, False)
    np.testing.assert_array_equal(ids_TK, [[3, 0, 1]] * 2)
    assert weights_TK[0, 1] == weights_TK[0, 2]


def test_route_of_bfloat16_inputs_is_a_float32_softmax():
    m_TD, router_DE = jnp.asarray(normal(T, D), jnp.bfloat16), jnp.asarray(normal(D, E, seed=1), jnp.bfloat16)
    out = top_experts(m_TD, router_DE, K, False)
    ref = top_experts(m_TD.astype(jnp.float32), router_DE.astype(jnp.float32), K, False)
    np.testing.assert_allclose(out[0], ref[0], rtol=1e-6)
    np.testing.assert_array_equal(out[1], ref[1])


def test_dense_experts_is_the_definition(experts):
    m_TD = normal(T, D, seed=2)
    weights_TK, ids_TK = top_experts(jnp.asarray(m_TD), jnp.asarray(normal(D, E, seed=3)), K, False)
    gate_up_ENC, down_ENC = np.asarray(experts.gate_up_ENC, np.float64), np.asarray(experts.down_ENC, np.float64)

    def reference(gate_up_ENC):
        y_TD, h_square_TK = np.zeros((T, D)), np.zeros((T, K))
        for t in range(T):
            for k, e in enumerate(np.asarray(ids_TK[t])):
                gate, up = gate_up_ENC[e, :F] @ m_TD[t], gate_up_ENC[e, F:] @ m_TD[t]
                h = gate / (1 + np.exp(-gate)) * up
                y_TD[t] += float(weights_TK[t, k]) * (down_ENC[e] @ h)
                h_square_TK[t, k] = h @ h
        return y_TD, h_square_TK

    outs = dense_experts(jnp.asarray(m_TD), ids_TK, weights_TK, experts, activation("silu"))
    for out, ref, swapped in zip(outs, reference(gate_up_ENC), reference(np.roll(gate_up_ENC, F, axis=1))):
        norm = np.linalg.norm(ref)
        assert np.linalg.norm(out - ref) / norm < 1e-6
        assert np.linalg.norm(out - swapped) / norm > 0.1  # gate and up rows are told apart


def test_a_token_depends_on_itself_alone_and_not_on_the_order_of_its_experts(experts):
    run = jax.jit(lambda m, ids, w: dense_experts(m, ids, w, experts, activation("silu"))[0])
    m_TD = jnp.asarray(normal(T, D, seed=2))
    weights_TK, ids_TK = top_experts(m_TD, jnp.asarray(normal(D, E, seed=3)), K, False)
    out_TD = run(m_TD, ids_TK, weights_TK)
    others_TD = run(m_TD.at[1:].set(7), ids_TK.at[1:].set(jnp.arange(K)), weights_TK.at[1:].set(0.5))
    np.testing.assert_array_equal(out_TD[0], others_TD[0])
    assert not np.array_equal(out_TD[1:], others_TD[1:])
    np.testing.assert_array_equal(out_TD, run(m_TD, ids_TK[:, ::-1], weights_TK[:, ::-1]))
