# SPDX-License-Identifier: Apache-2.0
"""Projections into heads, and the plain definition of causal attention."""

import jax
import jax.numpy as jnp

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.layers import rope, rope_tables
from pagedweight_jax.models.weights import AttentionWeights
from pallas_kernels.dense.api import project


def project_qkv(
    x_TD: jax.Array,
    w: AttentionWeights,
    positions_T: jax.Array | None,
    config: ModelConfig,
    *,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q[T, H, M], k[T, J, M] and v[T, J, M] in x's dtype.

    Args:
      x_TD: hidden states after the norm.
      w: the layer's projections.
      positions_T: int, by which q and k are rotated; None leaves them as they are.
      config: the model.
      implementation: ``xla`` or ``triton``.
    """
    projected = project(
        x_TD,
        (w.q_DN, w.k_DN, w.v_DN),
        biases=(w.q_bias_N, w.k_bias_N, w.v_bias_N),
        implementation=implementation,
    )
    q_THM, k_TJM, v_TJM = (y_TN.reshape(x_TD.shape[0], -1, config.head_dim) for y_TN in projected)
    if positions_T is not None:
        tables = rope_tables(positions_T, config.head_dim, config.rope_theta)
        q_THM, k_TJM = rope(q_THM, *tables), rope(k_TJM, *tables)
    return q_THM, k_TJM, v_TJM


def dense_attention(q_THM: jax.Array, k_TJM: jax.Array, v_TJM: jax.Array, scale: float, window: int) -> jax.Array:
    """Returns the causal attention of one sequence of T tokens, [T, H, M] in v's dtype.

    Query i sees keys j <= i, and only j > i - window if ``window`` is not 0. Query head h reads KV head h // (H/J).
    Scores and softmax are float32; the probabilities are rounded to v's dtype.
    """
    T, H, M = q_THM.shape
    J = k_TJM.shape[1]
    q_TJGM = q_THM.reshape(T, J, H // J, M)
    precision = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    scores_JGTS = jnp.einsum("tjgm,sjm->jgts", q_TJGM, k_TJM, **precision) * scale
    query, key = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    visible_TS = key <= query
    if window:
        visible_TS &= key > query - window
    p_JGTS = jax.nn.softmax(jnp.where(visible_TS, scores_JGTS, -jnp.inf), axis=-1).astype(v_TJM.dtype)
    o_TJGM = jnp.einsum("jgts,sjm->tjgm", p_JGTS, v_TJM, **precision)
    return o_TJGM.reshape(T, H, M).astype(v_TJM.dtype)
