# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens against dense experts; error sums against numbers worked out by hand and against real errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.calibrate.routed import BLOCK_TOKENS, error_sums, routed_experts
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.weights import ExpertWeights


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, jnp.float32), (BLOCK_TOKENS, jnp.float32), (150, jnp.bfloat16)])
def test_blocks_of_tokens_give_the_dense_experts_output(tiny_weights, num_tokens, dtype):
    """Also where all tokens pick the same two experts, so that blocks are exactly full."""
    experts = jax.tree.map(lambda w: w.astype(dtype), tiny_weights.layers[0].mlp.experts)
    key_m, key_ids, key_w = jax.random.split(jax.random.key(num_tokens), 3)
    m_TD = jax.random.normal(key_m, (num_tokens, 64), dtype)
    free_TE = jax.random.uniform(key_ids, (num_tokens, 4))
    weights_TK = jax.random.uniform(key_w, (num_tokens, 2))
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for scores_TE in (free_TE, free_TE + jnp.array([0, 9, 0, 8])):
        _, ids_TK = jax.lax.top_k(scores_TE, 2)
        y_TD = jax.jit(routed_experts, static_argnums=4)(m_TD, ids_TK, weights_TK, experts, jax.nn.silu)
        expected_TD, _ = dense_experts(m_TD, ids_TK, weights_TK, experts, jax.nn.silu)
        assert np.linalg.norm(y_TD - expected_TD) <= tolerance * np.linalg.norm(expected_TD)
        sums = jax.jit(error_sums, static_argnums=5)(m_TD, m_TD, ids_TK, weights_TK, experts, jax.nn.silu)
        assert all(array.dtype == jnp.float32 for array in sums[:2])
        routed_TE = (np.asarray(ids_TK)[..., None] == np.arange(4)).any(1)
        np.testing.assert_array_equal(sums[2], routed_TE.sum(0))


def by_hand(x_TD, m_TD, ids_TK, weights_TK):
    """Two experts of D = 2, F = 1, whose activation is the identity: y = down * (gate . m) * (up . m)."""
    experts = ExpertWeights(
        gate_up_ENC=jnp.array([[[1.0, 1.0], [2.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]]),
        down_ENC=jnp.array([[[3.0], [4.0]], [[1.0], [0.0]]]),
    )
    arrays = (jnp.array(x_TD), jnp.array(m_TD), jnp.array(ids_TK), jnp.array(weights_TK))
    return [np.asarray(array) for array in error_sums(*arrays, experts, lambda gate: gate)]


def test_two_tokens_by_hand():
    # Token 0, expert 0: gate 3, up 2, h 6; |down|^2 25; dh/dz = (2, 3), v = 25 (4 + 9) / 2; r^2 / |res|^2 = 0.25 / 5.
    # Token 1, expert 1: gate 3, up 1, h 3; |down|^2 1; dh/dz = (1, 3), v = (1 + 9) / 2; r^2 / |res|^2 = 1 / 4.
    gate_up_ED, down_EF, tokens_E = by_hand(
        [[1.0, 2.0], [0.0, 2.0]], [[1.0, 2.0], [1.0, 3.0]], [[0], [1]], [[0.5], [1.0]]
    )
    np.testing.assert_allclose(gate_up_ED, [[8.125 * 1, 8.125 * 4], [1.25 * 1, 1.25 * 9]], rtol=1e-6)
    np.testing.assert_allclose(down_EF, [[0.05 * 36], [0.25 * 9]], rtol=1e-6)
    np.testing.assert_array_equal(tokens_E, [1, 1])


def test_a_token_twice_counts_twice_and_half_its_weight_a_quarter():
    x, m = [1.0, 2.0], [1.0, 2.0]
    once = by_hand([x], [m], [[0]], [[0.5]])
    for factor, other in (
        (2, by_hand([x, x], [m, m], [[0], [0]], [[0.5], [0.5]])),
        (0.25, by_hand([x], [m], [[0]], [[0.25]])),
        (0.25, by_hand([[2.0, 4.0]], [m], [[0]], [[0.5]])),  # a residual stream of twice the length
    ):
        np.testing.assert_allclose(other[0], factor * once[0], rtol=1e-6)
        np.testing.assert_allclose(other[1], factor * once[1], rtol=1e-6)
        assert once[0][0].all()
        assert not once[0][1].any()


def test_predicts_the_error_of_small_random_changes(tiny_weights):
    """For weight errors of random signs; both kinds of linear-block in one unit."""
    experts = tiny_weights.layers[0].mlp.experts
    key_m, key_x, key_ids, key_w = jax.random.split(jax.random.key(0), 4)
    m_TD, x_TD = jax.random.normal(key_m, (300, 64)), jax.random.normal(key_x, (300, 64))
    _, ids_TK = jax.lax.top_k(jax.random.uniform(key_ids, (300, 4)), 2)
    weights_TK = jax.random.uniform(key_w, (300, 2))
    gate_up_ED, down_EF, _ = error_sums(x_TD, m_TD, ids_TK, weights_TK, experts, jax.nn.silu)

    @jax.jit
    def relative_error(changed):
        change_TD = routed_experts(m_TD, ids_TK, weights_TK, changed, jax.nn.silu) - base_TD
        return jnp.sum(jnp.sum(change_TD**2, -1) / jnp.sum(x_TD**2, -1))

    base_TD = routed_experts(m_TD, ids_TK, weights_TK, experts, jax.nn.silu)
    rng = np.random.default_rng(0)
    for name, h_C in (("gate_up_ENC", gate_up_ED[1]), ("down_ENC", down_EF[1])):
        w_ENC = getattr(experts, name)
        measured = []
        for _ in range(40):
            signs_NC = 1e-2 * rng.choice([-1.0, 1.0], w_ENC.shape[1:]).astype(np.float32)
            arrays = {"gate_up_ENC": experts.gate_up_ENC, "down_ENC": experts.down_ENC}
            measured.append(relative_error(ExpertWeights(**arrays | {name: w_ENC.at[1].add(signs_NC)})))
        predicted = 1e-4 * float(h_C.sum()) * w_ENC.shape[1]
        assert np.mean(measured) == pytest.approx(predicted, rel=0.05)
