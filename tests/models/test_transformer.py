# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.moe import dense_experts
from pagedweight_jax.models.transformer import dense_forward, forward, logits, one_addend
from pagedweight_jax.models.weights import MoEWeights, init_weights, without_experts

dense = jax.jit(dense_forward)

MIXED = {"num_layers": 4, "sparse_layers": (True, False, True, True), "windows": (0, 3, 0, 2)}


@pytest.fixture(scope="module")
def weights(tiny_config):
    return init_weights(tiny_config(**MIXED), jax.random.key(1))


def cast(weights, dtype):
    return jax.tree.map(lambda w: w.astype(dtype), weights)


def sparse_experts(weights):
    blocks = [layer.mlp.experts for layer in weights.layers if isinstance(layer.mlp, MoEWeights)]
    return lambda carry, l, m, ids, w: (carry, one_addend(dense_experts(m, ids, w, blocks[l], activation("silu"))[0]))


def decode_step(weights, cache, tokens_B, positions_B):
    """One token of each of B sequences; the cache holds k and v, [layers, B, S, J, M]."""
    config, experts = weights.config, sparse_experts(weights)

    def attend(cache, layer, q_BHM, k_BJM, v_BJM):
        rows = jnp.arange(tokens_B.shape[0])
        k, v = cache
        k, v = k.at[layer, rows, positions_B].set(k_BJM), v.at[layer, rows, positions_B].set(v_BJM)

        def one_row(q_HM, k_SJM, v_SJM, position):
            S, H = k_SJM.shape[0], q_HM.shape[0]
            q_SHM = jnp.zeros((S, *q_HM.shape)).at[position].set(q_HM)
            o_SHM = dense_attention(q_SHM, k_SJM, v_SJM, config.head_dim**-0.5, config.windows[layer])
            return o_SHM[position].reshape(H, -1)

        return (k, v), jax.vmap(one_row)(q_BHM, k[layer], v[layer], positions_B)

    cache, hidden_BD = forward(weights, tokens_B, positions_B, cache, attend, experts)
    return cache, logits(weights, hidden_BD)


def empty_cache(config, rows, length):
    shape = (config.num_layers, rows, length, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape), jnp.zeros(shape)


def test_decoding_rows_at_their_own_positions_equals_the_whole_sequence(weights, relative_error):
    lengths = (9, 5, 7)
    tokens_BS = np.random.default_rng(0).integers(0, weights.config.vocab_size, (3, 9))
    step = jax.jit(decode_step)
    cache = empty_cache(weights.config, 3, 9)
    out = np.zeros((3, 9, weights.config.vocab_size))
    for time in range(9):
        positions_B = np.array([max(0, time - 9 + length) for length in lengths])  # shorter rows start later
        cache, out_BV = step(weights, cache, tokens_BS[np.arange(3), positions_B], positions_B)
        out[np.arange(3), positions_B] = out_BV
    assert step._cache_size() == 1
    ref_BSV = jax.jit(jax.vmap(dense_forward, (None, 0)))(weights, tokens_BS)
    for b, length in enumerate(lengths):
        assert relative_error(out[b, :length], ref_BSV[b, :length]) < 1e-5
    assert relative_error(out[0], ref_BSV[1]) > 0.1


def test_a_row_does_not_depend_on_the_others(weights):
    step = jax.jit(decode_step)
    cache = tuple(jax.random.normal(jax.random.key(1), x.shape) for x in empty_cache(weights.config, 4, 8))
    tokens_B, positions_B = jnp.array([3, 1, 4, 1]), jnp.array([7, 0, 3, 5])
    _, out_BV = step(weights, cache, tokens_B, positions_B)
    others = jax.tree.map(lambda x: x.at[:, 1:].set(-2.5), cache)
    _, changed_BV = step(weights, others, tokens_B.at[1:].set(9), positions_B.at[1:].set(2))
    np.testing.assert_array_equal(out_BV[0], changed_BV[0])
    assert not np.array_equal(out_BV[1:], changed_BV[1:])


def test_callbacks_are_numbered_and_the_carry_is_threaded(weights):
    def attend(carry, layer, q_THM, k_TJM, v_TJM):
        assert q_THM.shape == (5, 4, 16)
        assert k_TJM.shape == v_TJM.shape == (5, 2, 16)
        return [*carry, ("attend", layer)], jnp.zeros_like(q_THM)

    def experts(carry, sparse_layer, m_TD, ids_TK, weights_TK):
        assert weights_TK.shape == ids_TK.shape == (5, 2)
        return [*carry, ("experts", sparse_layer)], one_addend(jnp.zeros_like(m_TD))

    paged = without_experts(weights)
    assert all(layer.mlp.experts is None for layer in paged.layers if isinstance(layer.mlp, MoEWeights))
    carry, hidden_TD = forward(paged, jnp.arange(5), jnp.arange(5), [], attend, experts)
    assert hidden_TD.shape == (5, 64)
    calls = [("attend", 0), ("experts", 0), ("attend", 1), ("attend", 2), ("experts", 1), ("attend", 3), ("experts", 2)]
    assert carry == calls


def test_experts_may_leave_their_sum_to_the_layer(weights, relative_error):
    summed = sparse_experts(weights)

    def each(carry, sparse_layer, m_TD, ids_TK, weights_TK):
        ones_T1 = jnp.ones((len(m_TD), 1))
        columns = [summed(None, sparse_layer, m_TD, ids_T1, ones_T1)[1][0] for ids_T1 in jnp.split(ids_TK, 2, axis=1)]
        return carry, (jnp.concatenate(columns, axis=1), weights_TK)

    def in_wrong_order(*args):
        _, (y_TKD, weights_TK) = each(*args)
        return None, (y_TKD[:, ::-1], weights_TK)

    def hidden(experts):
        def attend(carry, layer, q_THM, k_TJM, v_TJM):
            return carry, dense_attention(q_THM, k_TJM, v_TJM, 0.25, 0)

        return jax.jit(lambda tokens_T: forward(weights, tokens_T, tokens_T, None, attend, experts)[1])(jnp.arange(6))

    assert relative_error(hidden(each), hidden(summed)) < 1e-6
    assert relative_error(hidden(in_wrong_order), hidden(summed)) > 1e-3  # negative control


def test_blocks_are_named_for_profiles(weights):
    text = jax.jit(dense_forward).lower(weights, jnp.arange(4)).as_text(debug_info=True)
    for scope in ("attention", "router", "experts", "shared_expert", "mlp", "lm_head"):
        assert f"/{scope}/" in text


def test_bfloat16_stays_near_float32_and_gives_float32_logits(weights, relative_error):
    rounded = cast(weights, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype(jnp.bfloat16)}
    tokens_T = jnp.arange(16)
    out_TV = dense(rounded, tokens_T)
    assert out_TV.dtype == jnp.float32
    assert relative_error(out_TV, dense(cast(rounded, jnp.float32), tokens_T)) < 3e-2


def test_random_weights_are_reproducible_and_complete(tiny_config, relative_error):
    config = tiny_config(**MIXED, tie_word_embeddings=True, qkv_bias=False, shared_expert_intermediate_size=0)
    a, b = init_weights(config, jax.random.key(3)), init_weights(config, jax.random.key(3))
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    first, second = a.layers[:2]
    absent = (a.lm_head_DV, first.mlp.shared, first.mlp.shared_gate_D, first.attention.q_bias_N)
    assert absent == (None, None, None, None)
    assert not np.array_equal(first.attention.q_DN, second.attention.q_DN)
    out_TV = dense(a, jnp.arange(6))
    assert 0.3 < np.std(out_TV) < 3
    untied = replace(a, lm_head_DV=a.embed_VD.T)
    assert relative_error(out_TV, dense(untied, jnp.arange(6))) < 1e-6
