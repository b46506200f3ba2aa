# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.errors import UserError
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation, matmul, mlp, rms_norm, rope, rope_tables
from pagedweight_jax.models.weights import MLPWeights


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def rotate(x_THM, positions_T, theta):
    return rope(x_THM, *rope_tables(jnp.asarray(positions_T), x_THM.shape[-1], theta))


def test_rms_norm_is_the_definition(relative_error):
    x_TD, w_D = normal(5, 48), normal(48, seed=1)
    ref = x_TD / np.sqrt(np.mean(x_TD.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * w_D
    assert relative_error(rms_norm(jnp.asarray(x_TD), jnp.asarray(w_D), 1e-5), ref) < 1e-6
    assert relative_error(rms_norm(jnp.asarray(x_TD), jnp.asarray(w_D), 1e-1), ref) > 1e-3  # eps matters


def test_rms_norm_statistics_are_float32(relative_error):
    x_TD = jnp.asarray(1 + 0.01 * normal(3, 4096), jnp.bfloat16)  # a bfloat16 sum of squares would stop at 256
    out_TD = rms_norm(x_TD, jnp.ones(4096, jnp.bfloat16), 1e-6)
    assert out_TD.dtype == jnp.bfloat16
    x64_TD = np.asarray(x_TD, np.float64)
    assert relative_error(out_TD, x64_TD / np.sqrt(np.mean(x64_TD**2, -1, keepdims=True))) < 2e-3


def test_rope_turns_pairs_by_position(relative_error):
    x_THM, positions_T, theta = normal(6, 3, 10), np.array([0, 1, 2, 9, 100, 511]), 500.0
    pairs = x_THM[..., :5].astype(np.complex128) + 1j * x_THM[..., 5:]
    angle = positions_T[:, None] * theta ** (-2 * np.arange(5) / 10)
    turned = pairs * np.exp(1j * angle)[:, None, :]
    out_THM = rotate(jnp.asarray(x_THM), positions_T, theta)
    assert relative_error(out_THM, np.concatenate([turned.real, turned.imag], -1)) < 1e-5
    np.testing.assert_array_equal(out_THM[0], x_THM[0])
    assert relative_error(rotate(jnp.asarray(x_THM), positions_T + 1, theta), out_THM) > 0.1


def test_rope_scores_depend_on_distance_only():
    q_THM, k_THM = jnp.asarray(normal(1, 1, 32)), jnp.asarray(normal(1, 1, 32, seed=1))

    def score(i, j):
        return jnp.sum(rotate(q_THM, [i], 1e4) * rotate(k_THM, [j], 1e4))

    np.testing.assert_allclose(score(40, 33), score(7, 0), rtol=1e-4)
    assert abs(score(40, 33) - score(40, 32)) > 1e-2


def test_matmul_adds_bfloat16_products_in_float32():
    x_TC, w_CN = jnp.ones((2, 4096), jnp.bfloat16), jnp.full((4096, 3), 0.1, jnp.bfloat16)
    out_TN = matmul(x_TC, w_CN)
    assert out_TN.dtype == jnp.float32
    np.testing.assert_allclose(out_TN, 4096 * float(w_CN[0, 0]), rtol=1e-6)


def test_mlp_is_the_definition(relative_error):
    x_TD, down_FD = normal(4, 20), normal(28, 20, seed=3)
    gate_DF, up_DF = normal(20, 28, seed=1), normal(20, 28, seed=2)
    g = x_TD.astype(np.float64) @ gate_DF
    ref = (g / (1 + np.exp(-g)) * (x_TD @ up_DF)) @ down_FD
    w = MLPWeights(gate_DF=jnp.asarray(gate_DF), up_DF=jnp.asarray(up_DF), down_FD=jnp.asarray(down_FD))
    assert relative_error(mlp(jnp.asarray(x_TD), w, activation("silu")), ref) < 1e-6
    swapped = MLPWeights(gate_DF=w.up_DF, up_DF=w.gate_DF, down_FD=w.down_FD)
    assert relative_error(mlp(jnp.asarray(x_TD), swapped, activation("silu")), ref) > 0.1


def test_activation_names_what_it_supports():
    with pytest.raises(UserError, match=r"'relu2' is not supported; supported: silu, gelu_pytorch_tanh"):
        activation("relu2")


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_dense_attention_is_the_definition(window, relative_error):
    T, H, J, M, scale = 9, 6, 2, 10, 0.3
    q_THM, k_TJM, v_TJM = normal(T, H, M), normal(T, J, M, seed=1), normal(T, J, M, seed=2)
    ref = np.zeros((T, H, M))
    for i in range(T):
        first = max(0, i - window + 1) if window else 0
        for h in range(H):
            j = h // (H // J)
            scores = np.exp(scale * k_TJM[first : i + 1, j].astype(np.float64) @ q_THM[i, h])
            ref[i, h] = scores / scores.sum() @ v_TJM[first : i + 1, j]
    out_THM = dense_attention(jnp.asarray(q_THM), jnp.asarray(k_TJM), jnp.asarray(v_TJM), scale, window)
    assert relative_error(out_THM, ref) < 1e-5
    if window != 1:
        wrong = dense_attention(jnp.asarray(q_THM), jnp.asarray(k_TJM[:, ::-1]), jnp.asarray(v_TJM), scale, window)
        assert relative_error(wrong, ref) > 0.1


def test_dense_attention_ignores_the_future():
    q_THM, k_TJM, v_TJM = (jnp.asarray(normal(7, 2, 8, seed=s)) for s in range(3))
    out_THM = dense_attention(q_THM, k_TJM, v_TJM, 1.0, 0)
    changed = dense_attention(q_THM, k_TJM.at[5:].set(9), v_TJM.at[5:].set(9), 1.0, 0)
    np.testing.assert_array_equal(out_THM[:5], changed[:5])
    assert not np.array_equal(out_THM[5:], changed[5:])


def test_functions_are_jittable():
    out = jax.jit(lambda x, p: rotate(rms_norm(x, jnp.ones(8), 1e-6), p, 1e4))(jnp.ones((2, 3, 8)), jnp.arange(2))
    assert out.shape == (2, 3, 8)
